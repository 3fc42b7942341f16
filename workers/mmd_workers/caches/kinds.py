"""The two kinds of caches that pods report, each with subjects and a number of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmd_api.contract.subjects import Subjects
from mmd_workers.wire.messages.every_pod import Heartbeat


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Where reports of a kind are published and asked for, by pod, and the number of the newest one by a pod's heartbeat. `label`: in metrics."""

    name: str
    label: str
    report: Callable[[Subjects, str], str]
    wanted: Callable[[Subjects, str], str]
    number: Callable[[Heartbeat], int]


PREFIXES = CacheKind(
    "prefix cache", "blocks", Subjects.prefix_report, Subjects.prefix_wanted, lambda beat: beat.prefix_number
)
FEATURES = CacheKind(
    "features", "features", Subjects.feature_report, Subjects.feature_wanted, lambda beat: beat.feature_number
)
