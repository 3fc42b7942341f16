"""The command line `mmd`, the only package that knows both the operator and the workers.

No pod's work depends on it.
"""
