"""The HTTP paths of pods: those that other processes of a deployment ask for, and those that Kubernetes probes."""

from __future__ import annotations

LIVEZ = "/livez"
READYZ = "/readyz"
METRICS = "/metrics"
WORKER_STATE = "/state"
"""Of a worker: `load.WorkerStatus`, among other things."""
GATEWAY_DEMAND = "/demand"
"""Of a gateway: `load.GatewayStatus`."""
GATEWAY_STATE = "/debug/state"
"""Of a gateway: its heartbeat and those of all pods that it knows."""
GATEWAY_REQUESTS = "/debug/requests"
"""Of a gateway: timelines of the newest requests; of one request, below it by its id."""
GATEWAY_TARGETS = "/debug/targets"
"""Of a gateway: all pods that it knows, for Prometheus's HTTP service discovery."""
