"""Builders of Kubernetes objects, one noun per file. Pure: independent of the cluster and of clients."""
