"""Short pauses of the operator, for tests where waiting proves nothing."""

from __future__ import annotations

from dataclasses import asdict

from mmd_operator.kube.pauses import PRODUCTION, Pauses

FRACTION = 0.2
AS_IN_PRODUCTION = frozenset(
    {"gather_seconds", "namespace_seconds", "sweep_seconds", "sweep_settle_seconds", "lease_seconds"}
)
"""Pauses that no test waits for. Shorter ones would only cost calls."""

QUICK_PAUSES = Pauses(
    **{
        name: seconds if name in AS_IN_PRODUCTION else seconds * FRACTION
        for name, seconds in asdict(PRODUCTION).items()
    }
)
