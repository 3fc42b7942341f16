"""Builders of Kubernetes objects, one noun a file. Pure: independent of the cluster and of clients."""
