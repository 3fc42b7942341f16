"""The API server and what the operator is in a cluster: client, Events, Lease, sweeps, metrics. Knows nothing of a deployment's meaning."""
