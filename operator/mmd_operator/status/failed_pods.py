"""Remembers pods that failed as a whole: evicted, refused by their node's kubelet, ended by its shutdown.

A StatefulSet replaces such a pod at once, for ever and without a word, and its status is lost with it a moment later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mmd_operator.observed.observed import Observed, PodView
from mmd_operator.observed.problems import Problem
from mmd_operator.resources.naming import WEIGHTS

MANY_FAILURES = 3
"""So many pods of one name that failed in the window are a problem. One or two may have met a node that was just being emptied."""
WINDOW_SECONDS = 900.0
_KEPT_FAILURES = 50


@dataclass(slots=True)
class _Failures:
    """Of the pods of one name: when they failed, by UID of the last one, and that one."""

    last: PodView
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_FAILURES))


class FailedPods:
    """Tracks the failed pods of one deployment, by name."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}

    def note(self, pod: PodView, now: float) -> None:
        """Take a pod as a watch shows it, also when it was deleted. `now`: Unix seconds."""
        if not pod.failure or pod.component in ("gateway", WEIGHTS):
            return  # pods of Deployments and Jobs have names of their own, and stay
        known = self._failures.get(pod.name)
        if known is not None and known.last.uid == pod.uid:
            return
        failures = self._failures.setdefault(pod.name, _Failures(pod))
        failures.last = pod
        failures.times.append(now)

    def problems(self, observed: Observed, now: float) -> list[Problem]:
        """One problem for each name whose pods keep failing and whose present pod is not Ready. `now`: Unix seconds."""
        for name, failures in list(self._failures.items()):
            while failures.times and now - failures.times[0] > WINDOW_SECONDS:
                failures.times.popleft()
            if not failures.times:
                del self._failures[name]
        ready = {pod.name for pod in observed.pods if pod.ready and not pod.deleting}
        return [
            Problem(
                "PodsFail",
                failures.last.component,
                f"{len(failures.times)} pods named {name} failed within {WINDOW_SECONDS / 60:.0f} min, the last one with "
                f"{failures.last.failure}",
                _remedy(failures.last.failure),
                revision=failures.last.revision,
            )
            for name, failures in self._failures.items()
            if len(failures.times) >= MANY_FAILURES and name not in ready
        ]


def _remedy(failure: str) -> str:
    if failure.startswith("Evicted"):
        return "free what the node ran out of, or request it in the pool's resources; downloads need spec.model.storage with a volume"
    return "check that node with `kubectl describe node`: its devices, their plugin and its free resources; or keep pods off it"
