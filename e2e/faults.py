"""The faults of the storm: which, when and to whom, drawn from a seed that is printed, so that a run can be repeated.

Faults strike at random times, also while the deployment still recovers from others.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from e2e.shell import AlreadyEndedError

Kubectl = Callable[..., str]
Kill = Callable[[str, str], bool]
"""SIGKILL the container of a pod in a namespace; False where the nodes are out of reach.

Raises:
    AlreadyEndedError: it does not run any more, though its pod is still listed as Running.
"""
Way = Literal["killed", "deleted"]

MEAN_PAUSE_SECONDS = 11.0
LONGEST_PAUSE_SECONDS = 30.0
EXTRA_FAULTS = 3
"""Drawn in addition to one of each kind."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A kind of pod that may die."""

    component: str
    namespace: str
    selector: str


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that happened. `killed`: the process had no chance to finish what it held."""

    began: float
    ended: float
    component: str
    pod: str
    killed: bool

    def __str__(self) -> str:
        return f"{self.component} pod {self.pod} {'killed (SIGKILL)' if self.killed else 'deleted'}"


class Faults:
    """One of each kind in random order, and some more; `strike` does the next."""

    def __init__(
        self,
        seed: int,
        kubectl: Kubectl,
        kill: Kill,
        victims: list[Victim],
        roll_out: Callable[[], None],
        kills: Sequence[str] = (),
    ) -> None:
        """`kills`: components of which one pod each is killed, instead of every kind of fault."""
        self.seed = seed
        self.struck: list[Struck] = []
        self._random = random.Random(seed)
        self._kubectl, self._kill, self._roll_out = kubectl, kill, roll_out
        every: list[tuple[Victim | None, Way]] = [
            (victim, way) for victim in victims for way in ("killed", "deleted")
        ]
        extra = self._random.choices(every, k=EXTRA_FAULTS)
        self._left = [*every, (None, "deleted"), *extra]
        if kills:
            self._left = [(victim, "killed") for victim in victims if victim.component in kills]
        self._random.shuffle(self._left)

    def __len__(self) -> int:
        return len(self._left)

    def pause_seconds(self) -> float:
        """How long to wait before the next fault: exponential, so that some come close together."""
        return min(LONGEST_PAUSE_SECONDS, self._random.expovariate(1 / MEAN_PAUSE_SECONDS))

    def strike(self) -> str:
        """Do the first fault that finds a victim; returns what happened, empty where none can be hit now."""
        for position, (victim, way) in enumerate(self._left):
            if victim is None:
                del self._left[position]
                began = time.time()
                self._roll_out()
                self.struck.append(Struck(began, time.time(), "rollout", "", killed=False))
                return "a new pipeline revision rolls out"
            pods = self._pods(victim)
            if not pods:
                continue
            try:
                struck = self._end(victim, self._random.choice(pods), way)
            except AlreadyEndedError:
                continue  # an earlier fault ended it, and kubelet waits before it starts it again
            del self._left[position]
            self.struck.append(struck)
            return str(struck)
        return ""

    def _end(self, victim: Victim, pod: str, way: Way) -> Struck:
        began = time.time()
        if way == "deleted":
            self._kubectl(
                *("delete", "pod", pod, "--wait=false", "--ignore-not-found"), namespace=victim.namespace
            )
            return Struck(began, time.time(), victim.component, pod, killed=False)
        killed = self._kill(pod, victim.namespace)
        if not killed:  # kubectl prints nothing about a pod that was gone already
            command = ("delete", "pod", pod, "--grace-period=0", "--force", "--ignore-not-found")
            killed = bool(self._kubectl(*command, namespace=victim.namespace).strip())
        return Struck(began, time.time(), victim.component, pod, killed=killed)

    def _pods(self, victim: Victim) -> list[str]:
        """Running pods, without those that are about to end."""
        found = self._kubectl(
            *("get", "pods", "--output=json", "--selector", victim.selector), namespace=victim.namespace
        )
        return sorted(
            pod["metadata"]["name"]
            for pod in json.loads(found)["items"]
            if "deletionTimestamp" not in pod["metadata"] and pod.get("status", {}).get("phase") == "Running"
        )
