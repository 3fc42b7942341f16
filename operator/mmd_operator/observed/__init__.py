"""The observed state of a deployment's objects and pods, and their problems. Pure."""
