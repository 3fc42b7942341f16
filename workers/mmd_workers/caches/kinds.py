"""The two kinds of caches that pods report, each with its own subjects and report numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmd_api.contract.subjects import Subjects
from mmd_workers.wire.messages.every_pod import Heartbeat


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A kind of cache: the subjects of its reports and requests, by pod, and the newest report's number in a heartbeat.

    `label`: its label in metrics.
    """

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
