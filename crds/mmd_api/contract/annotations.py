"""The annotations of pods by which one process asks another for something."""

from __future__ import annotations

DRAIN_ANNOTATION = "serving.multimodal.dev/drain"
"""On a worker's pod: finish what is held, accept nothing more, and stay until removed. Its value is the time of the request."""
