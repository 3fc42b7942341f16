"""Simulated pods and pools: what each pod holds, how busy it has been, and which pod takes the next piece of work."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from mmd_api.contract.pools import PoolName, Role
from mmd_operator.simulate.requests import PrefillQueue


class SimulatedPod:
    """One replica. `marks`: its busy seconds at the latest ticks."""

    __slots__ = (
        "active_marks",
        "active_since",
        "active_total",
        "assigned",
        "batch",
        "blocked_tokens",
        "busy_since",
        "busy_total",
        "created",
        "draining",
        "encode_marks",
        "encode_total",
        "host_marks",
        "host_total",
        "job",
        "kv_used",
        "marks",
        "media",
        "name",
        "number",
        "places",
        "ready",
        "step_seconds",
        "steps",
        "steps_at",
        "tower",
        "version",
        "waiting",
        "waiting_media",
        "waiting_tokens",
    )

    def __init__(
        self, name: str, number: int, now: float, marks: int, step_seconds: float, waiting: PrefillQueue
    ) -> None:
        self.name = name
        self.number = number
        self.created = now
        self.ready = False
        self.draining = False
        self.job = -1  # the medium in the tower, or the request in prefill
        self.media = [0, 0, 0]  # media in progress, by modality
        self.tower: deque[int] = deque()  # media that wait for the tower
        self.busy_since = 0.0
        self.busy_total = 0.0
        self.marks: deque[float] = deque([0.0], maxlen=marks)
        self.batch: list[tuple[float, int]] = []  # (step at which it ends, request)
        self.places = 0  # media in progress; sequences decoding or on their way from prefill
        self.kv_used = 0
        self.steps = 0.0
        self.steps_at = now
        self.step_seconds = step_seconds
        self.version = 0
        self.active_since = 0.0
        self.active_total = 0.0
        self.active_marks: deque[float] = deque([0.0], maxlen=marks)
        self.encode_total = 0.0  # encoding part of the busy time of a replica that also prefills
        self.encode_marks: deque[float] = deque([0.0], maxlen=marks)
        self.host_total = 0.0  # core seconds of reading and decoding media
        self.host_marks: deque[float] = deque([0.0], maxlen=marks)
        self.assigned = 0  # requests placed here whose prefill has not begun
        self.waiting = waiting  # assigned requests that could begin
        self.waiting_tokens = 0
        self.waiting_media = [0, 0, 0]  # media that this pod encodes itself, by modality
        self.blocked_tokens = 0  # tokens of assigned requests whose media are being encoded elsewhere

    @property
    def empty(self) -> bool:
        """Whether it holds no work."""
        return self.job < 0 and self.places == 0 and self.assigned == 0

    def end_job(self, now: float, encode_share: float) -> None:
        """End the job; `encode_share` of its time was encoding."""
        seconds = now - self.busy_since
        self.busy_total += seconds
        self.encode_total += seconds * encode_share
        self.job = -1

    def progress(self, now: float) -> None:
        """Count the steps up to now at the pace so far."""
        self.steps += (now - self.steps_at) / self.step_seconds
        self.steps_at = now


@dataclass(slots=True)
class SimulatedPool:
    """The pods of one pool, in the order in which they were created."""

    name: PoolName
    start_seconds: float
    gpus: int
    pods: list[SimulatedPod] = field(default_factory=list)
    idle: list[tuple[int, SimulatedPod]] = field(default_factory=list)
    created: int = 0
    replica_seconds: float = 0.0
    waited_seconds: float = 0.0

    def members(self) -> list[SimulatedPod]:
        """Pods that are not draining."""
        return [pod for pod in self.pods if not pod.draining]

    def ready_pods(self) -> list[SimulatedPod]:
        """Pods that take work."""
        return [pod for pod in self.pods if pod.ready and not pod.draining]

    def serves(self) -> bool:
        """Whether any pod takes work."""
        return any(pod.ready and not pod.draining for pod in self.pods)

    def add(self, now: float, marks: int, step_seconds: float, waiting: PrefillQueue) -> SimulatedPod:
        """Add a new pod, which is not Ready yet."""
        pod = SimulatedPod(f"{self.name}-{self.created}", self.created, now, marks, step_seconds, waiting)
        self.created += 1
        self.pods.append(pod)
        return pod

    def release(self, pod: SimulatedPod) -> None:
        """Mark the pod as free for the next job."""
        heapq.heappush(self.idle, (pod.number, pod))

    def take_idle(self) -> SimulatedPod | None:
        """Take the free pod with the lowest number, since the highest numbers leave first."""
        while self.idle:
            pod = heapq.heappop(self.idle)[1]
            if not pod.draining:
                return pod
        return None

    def least_busy(self, at_once: int) -> SimulatedPod | None:
        """The pod with the fewest media in progress that accepts one more."""
        best, fewest = None, at_once
        for pod in self.pods:
            if pod.places < fewest and pod.ready and not pod.draining:
                best, fewest = pod, pod.places
        return best

    def with_room(
        self, blocks: int, kv_blocks: int, max_sequences: int, *, free: bool
    ) -> SimulatedPod | None:
        """The pod with the fewest sequences that has a place and the blocks; with `free`, one that does not prefill now."""
        best, fewest = None, max_sequences
        for pod in self.pods:
            if (
                pod.places < fewest
                and pod.ready
                and not pod.draining
                and pod.kv_used + blocks <= kv_blocks
                and (pod.job < 0 or not free)
            ):
                best, fewest = pod, pod.places
        return best

    def has_room(self, pod: SimulatedPod, blocks: int, kv_blocks: int, max_sequences: int) -> bool:
        """Whether a pod has a place and the blocks for one more sequence, and is not about to leave before it has begun."""
        return (
            pod.places < max_sequences
            and pod.ready
            and (not pod.draining or pod.assigned > 0)
            and pod.kv_used + blocks <= kv_blocks
        )

    def remove_if_empty(self, pod: SimulatedPod, now: float) -> None:
        """Remove a draining pod once it holds nothing."""
        if pod.empty:
            self.pods.remove(pod)
            self.replica_seconds += now - pod.created


def missing_role(pools: Mapping[PoolName, SimulatedPool]) -> Role | None:
    """The role without a ready pod, for which the gateway's router holds requests. A missing encoder holds up no request."""
    if not pools["prefill" if "prefill" in pools else "decode"].serves():
        return "prefill"
    return None if pools["decode"].serves() else "decode"
