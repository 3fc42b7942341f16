"""The operator: from a MultimodalDeployment to objects in a cluster. Never imports the workers."""
