"""A whole deployment as processes on this machine: planned by the operator, run by the workers, without Kubernetes."""
