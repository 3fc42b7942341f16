"""The autoscaler's tick on a cluster: collects reports, lets `autoscaling` decide, acts, keeps a record. Independent of rollout steps."""
