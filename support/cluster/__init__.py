"""API servers, operators and what else a cluster has, for tests that play its controllers."""
