"""A real one-node Kubernetes on this machine without docker; `cluster.py` has its life, the other modules what it consists of."""
