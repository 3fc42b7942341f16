"""The autoscaler's tick on a cluster: collects reports, has `autoscaling` decide, acts, keeps a record. Knows no rollout's steps."""
