"""What the operator has seen of a deployment's objects and pods, and what is wrong with them. Pure."""
