"""Access to the API server and the operator's presence in a cluster: client, Events, Lease, sweeps, metrics.

Decides nothing about a deployment.
"""
