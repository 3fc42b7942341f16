"""Builders of Kubernetes objects, one noun a file. Pure: they know no cluster and no client."""
