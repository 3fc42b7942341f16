"""A pool whose second hand we move: each tick says what is measured, decides, and carries the decision out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from mmd_api.contract.load import PodLoad
from mmd_operator.autoscaling import (
    Decision,
    Demand,
    History,
    Latency,
    PodSample,
    PoolPolicy,
    PoolSamples,
    decide,
)

START = 1_800_000_000.0

ENCODER = PoolPolicy("encoder", ("encode",), gpus=1, min_replicas=1, max_replicas=20)
PREFILL = PoolPolicy("prefill", ("prefill",), gpus=1, min_replicas=1, max_replicas=20)
DECODE = PoolPolicy("decode", ("decode",), gpus=1, min_replicas=1, max_replicas=20)


def encode_load(queued: float = 0.0, busy: float = 0.0, rate: float = 1000.0) -> PodLoad:
    """`queued` patches of video in a pod that does `rate` a second."""
    return PodLoad(
        encode_queued_work={"video": queued},
        encode_work_per_second={"video": rate},
        encode_busy_fraction=busy,
    )


def prefill_load(waiting: float = 0.0, rate: float = 10_000.0) -> PodLoad:
    return PodLoad(prefill_waiting_tokens=waiting, prefill_tokens_per_second=rate)


def decode_load(
    running: float = 0.0, waiting: float = 0.0, kv_used: float = 0.0, itl: float = 0.02
) -> PodLoad:
    """A pod with 64 places and 1000 KV blocks, `kv_used` of them in use."""
    return PodLoad(
        decode_running=running,
        decode_waiting=waiting,
        decode_max_sequences=64,
        kv_blocks_total=1000,
        kv_blocks_free=1000 - 1000 * kv_used,
        itl_seconds=itl,
    )


def ready_pods(now: float, loads: list[PodLoad], pool: str = "pod") -> tuple[PodSample, ...]:
    return tuple(
        PodSample(f"{pool}-{n}", "ready", now - 3600, received_at=now, load=load, ordinal=n)
        for n, load in enumerate(loads)
    )


@dataclass
class Pool:
    """A pool under its policy. `start_seconds` pass before a new pod is ready; `load(now, ready)` is what each ready pod reports."""

    policy: PoolPolicy
    load: Callable[[float, int], PodLoad]
    replicas: int = 1
    start_seconds: float = 0.0
    demand: Callable[[float], Demand | None] = lambda now: Demand(now)
    latency: Callable[[float], Latency | None] = lambda now: None
    now: float = START
    history: History = field(default_factory=History)
    created: list[float] = field(default_factory=list)
    unschedulable: int = 0
    silent: int = 0

    def __post_init__(self) -> None:
        self.created = [self.now - self.start_seconds - 3600.0] * self.replicas

    def samples(self) -> PoolSamples:
        up = [c for c in self.created if self.now - c >= self.start_seconds]
        loads = [self.load(self.now, len(up))] * len(up)
        pods = list(ready_pods(self.now, loads))
        for n in range(min(self.silent, len(pods))):
            pods[n] = replace(pods[n], received_at=self.now - 60)
        for n, created in enumerate(c for c in self.created if self.now - c < self.start_seconds):
            state = "unschedulable" if n < self.unschedulable else "starting"
            pods.append(PodSample(f"new-{n}", state, created, ordinal=len(pods)))
        return PoolSamples(self.replicas, tuple(pods), self.demand(self.now), self.latency(self.now))

    def tick(self) -> Decision:
        decision = decide(self.now, self.policy, self.samples(), self.history)
        self.history = decision.next_history
        if decision.act:
            grown = decision.replicas - len(self.created)
            self.created = self.created[: decision.replicas] + [self.now] * max(0, grown)
            self.replicas = decision.replicas
        return decision

    def run(self, seconds: float, step: float = 1.0) -> list[Decision]:
        """Ticks over a stretch of time; the clock stands at its end afterwards."""
        return list(self.ticks(seconds, step))

    def ticks(self, seconds: float, step: float = 1.0) -> Iterator[Decision]:
        end = self.now + seconds
        while self.now < end:
            yield self.tick()
            self.now += step

    def sizes(self, seconds: float, step: float = 1.0) -> list[int]:
        return [d.replicas for d in self.run(seconds, step)]


def changes(sizes: list[int]) -> int:
    """How often a size differs from the one before."""
    return sum(a != b for a, b in pairwise(sizes))
