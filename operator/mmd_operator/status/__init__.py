"""Reports on a deployment: conditions, status, and problems visible nowhere else. It changes no object of the deployment."""
