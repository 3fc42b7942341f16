"""The version of what pods send to each other."""

from __future__ import annotations

WIRE_VERSION = 1
"""Version of the messages and tensors between pods.

Raise it when pods of before and after must not exchange them. Pods of different releases link and hand over
nothing in any case: each release has its own `identity.code_fingerprint`.
"""
