"""Runs a whole deployment as processes on this machine, without Kubernetes.

The operator plans it, and the workers run it.
"""
