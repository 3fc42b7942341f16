"""The HTTP paths of pods: those that other processes of a deployment ask for, and those that Kubernetes probes."""

from __future__ import annotations

LIVEZ = "/livez"
READYZ = "/readyz"
METRICS = "/metrics"
WORKER_STATE = "/state"
"""A worker's `load.WorkerStatus`, among other things."""
GATEWAY_DEMAND = "/demand"
"""A gateway's `load.GatewayStatus`."""
GATEWAY_STATE = "/debug/state"
"""A gateway's heartbeat, and those of all pods that it knows."""
GATEWAY_REQUESTS = "/debug/requests"
"""A gateway's timelines of the newest requests. That of one request is below it, by its id."""
GATEWAY_TARGETS = "/debug/targets"
"""All pods that a gateway knows, for Prometheus's HTTP service discovery."""
