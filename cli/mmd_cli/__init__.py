"""The command line `mmd`: the only package that knows both the operator and the workers; no pod's work depends on it."""
