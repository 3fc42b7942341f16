"""The endpoint picker of a gateway: what the spec must leave to it."""

from __future__ import annotations

MIN_MEMORY_MEBIBYTES = 384
"""Minimum memory that the picker may take, out of the gateway's."""
