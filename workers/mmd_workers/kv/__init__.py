"""The KV data plane: links between pairs of workers, pieces that travel on them, leases on granted blocks."""
