"""Input of the autoscaler: samples of pods, of the work that waits for them, and of latencies.

Independent of the wire format, the cluster and the clock. Times are Unix seconds of the deciding machine, so that a pod's wrong clock
changes nothing. Work of media is in the units of the calibrated throughput (patches, mel frames).
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
    """One existing pod: its state, as the cluster and the pod report it, and its newest load.

    `received_at`: when that load arrived here; None, like `load`, if the pod has not reported yet. `waiting_since`: when the pod
    began to wait for what its state lacks (unschedulable: a node; starting: to become Ready), if not at its creation. `failing`: its
    container has ended several times, the last time without having become Ready. `surge`: it only joins the others while they are
    replaced, and is not part of the pool's size. `ordinal`: a pool loses its pods with the highest ones first. `lost`: its node is gone.
    """

    pod: str
    state: PodState
    created_at: float
    received_at: float | None = None
    load: PodLoad | None = None
    waiting_since: float | None = None
    failing: bool = False
    surge: bool = False
    ordinal: int = 0
    lost: bool = False

    @property
    def absent(self) -> bool:
        """Whether no node runs it, so that it serves nobody however small the pool becomes."""
        return self.lost or self.state == "unschedulable"

    def waited(self, now: float) -> float:
        """Seconds for which the pod has been waiting."""
        return now - (self.created_at if self.waiting_since is None else self.waiting_since)


@dataclass(frozen=True, slots=True)
class Demand:
    """Work for a pool that none of its pods holds yet.

    Such work is encode jobs in the queue, requests that gateways hold until a pod is Ready, and work that waits at gateways for
    room in the pool. `missing` names what is not in these numbers.
    """

    received_at: float
    encode_work: Mapping[Modality, float] = field(default_factory=dict)  # work units, by modality
    held_requests: int = 0
    prompt_tokens: int = 0
    sequences: int = 0
    missing: tuple[str, ...] = ()

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
    """Time to first token at gateways, at the SLO's percentile, over requests of the last `window_seconds`."""

    received_at: float
    window_seconds: float
    requests: int
    ttft_seconds: float


@dataclass(frozen=True, slots=True)
class PoolSamples:
    """Everything known about a pool now.

    `replicas`: the present `spec.replicas`. `demand`: None if the queue cannot be read. `requested`: the size that another client asks
    for, if known.
    """

    replicas: int
    pods: tuple[PodSample, ...] = ()
    demand: Demand | None = None
    latency: Latency | None = None
    requested: int | None = None
