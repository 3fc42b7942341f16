"""Access to the API server and the operator's presence in a cluster: client, Events, Lease, sweeps, metrics.

Knows nothing of what a deployment means.
"""
