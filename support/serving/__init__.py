"""Deployments and pods that serve, clients that ask them, and what they hold."""
