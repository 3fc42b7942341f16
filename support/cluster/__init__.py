"""API servers, operators and other parts of a cluster, for tests that play its controllers."""
