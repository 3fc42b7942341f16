"""What the autoscaler is given: samples of pods, of what waits before them, and of latencies.

Independent of the wire format, the cluster and the clock. Times are Unix seconds of the machine that decides, so that a pod's wrong clock
changes nothing; work of media is in the units of the calibrated throughput (patches, mel frames).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmd_api.contract.load import PodLoad, WorkerState, plausible
from mmd_api.contract.pools import Modality

PodState = Literal["unschedulable", "starting"] | WorkerState


@dataclass(frozen=True, slots=True)
class PodSample:
    """One pod that exists: its state as the cluster and the pod itself report it, and the newest load it sent.

    `received_at` is when that load arrived here; None with `load` None for a pod that has not reported yet. `waiting_since`: when
    the pod began to wait for what its state lacks (unschedulable: a node; starting: to become Ready), if that is not when it was
    created. `failing`: its container has ended several times, the last time without having become Ready. `surge`: it
    only joins the others while these are replaced, and is no part of the pool's size.
    """

    pod: str
    state: PodState
    created_at: float
    received_at: float | None = None
    load: PodLoad | None = None
    waiting_since: float | None = None
    failing: bool = False
    surge: bool = False

    def waited(self, now: float) -> float:
        """Seconds for which it has been waiting."""
        return now - (self.created_at if self.waiting_since is None else self.waiting_since)


@dataclass(frozen=True, slots=True)
class Demand:
    """Work for a pool that no pod of it holds yet: encode jobs in the queue, requests that gateways hold back until a pod is Ready, and
    what waits at gateways for room in the pool.
    """

    received_at: float
    encode_work: Mapping[Modality, float] = field(default_factory=dict)  # work units, by modality
    held_requests: int = 0
    prompt_tokens: int = 0
    sequences: int = 0

    def fault(self) -> str | None:
        """Why these numbers cannot be true, or None."""
        for number in (
            *self.encode_work.values(),
            self.held_requests,
            self.prompt_tokens,
            self.sequences,
        ):
            if not plausible(number):
                return f"queue length {number}"
        return None


@dataclass(frozen=True, slots=True)
class Latency:
    """Time to the first token as gateways saw it, at the percentile of the SLO, over requests of the last `window_seconds`."""

    received_at: float
    window_seconds: float
    requests: int
    ttft_seconds: float


@dataclass(frozen=True, slots=True)
class PoolSamples:
    """All that is known of a pool now. `replicas` is `spec.replicas` as it stands; `demand` None: the queue cannot be read;
    `requested`: the size that others ask for, where that is known."""

    replicas: int
    pods: tuple[PodSample, ...] = ()
    demand: Demand | None = None
    latency: Latency | None = None
    requested: int | None = None
