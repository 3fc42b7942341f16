"""Servers that tests run: message servers, Prometheus, servers of weights and traces."""
