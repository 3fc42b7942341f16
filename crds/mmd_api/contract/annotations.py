"""Annotations of pods, by which one process makes a request to another."""

from __future__ import annotations

DRAIN_ANNOTATION = "serving.multimodal.dev/drain"
"""On a worker's pod: the request to finish its work, accept nothing more, and stay until removed.

Its value is the time of the request.
"""
