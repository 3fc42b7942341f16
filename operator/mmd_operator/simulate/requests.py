"""The requests of a trace: what each costs under a calibration, what became of it so far, and the queues in which they wait.

A request is its number in the trace; everything known of it stands in lists by that number. Independent of pods.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmd_api.contract.pools import MODALITIES
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.simulate.calibration import KINDS, Calibration
from mmd_operator.simulate.traces import Trace

SPREAD_SEED = 20_240_501
"""Of the factors that requests draw: the same trace gives the same run."""


class Requests:
    """Lists by request, in the order of the trace; `work`, `overhead_seconds` and `tower_seconds` are of a medium, by modality."""

    def __init__(self, spec: MultimodalDeploymentSpec, trace: Trace, calibration: Calibration) -> None:
        encoder, prefill, count = calibration.encoder, calibration.prefill, len(trace)
        self.work = [calibration.media[m] for m in MODALITIES]
        self.overhead_seconds = [encoder.overhead_seconds[m] for m in MODALITIES]
        self.tower_seconds = [calibration.media[m] / encoder.work_per_second[m] for m in MODALITIES]
        alone = np.array(self.overhead_seconds) + np.array(self.tower_seconds)
        media = np.stack([trace.media[m] for m in MODALITIES], axis=1)
        kv = -(-(trace.context_tokens + trace.output_tokens) // spec.decode.kv_block_tokens)
        seconds = prefill.overhead_seconds + trace.context_tokens / prefill.tokens_per_second
        if spec.encoder is None:
            seconds = seconds + media @ alone
        self.factor: list[float] = _drawn_factors(trace, calibration).tolist()
        self.arrivals: list[float] = trace.arrivals.tolist()
        self.media: list[list[int]] = media.tolist()
        self.media_left: list[int] = media.sum(axis=1).tolist()
        self.context: list[int] = trace.context_tokens.tolist()
        self.output: list[int] = trace.output_tokens.tolist()
        self.kv: list[int] = kv.tolist()
        self.prefill_seconds: list[float] = seconds.tolist()
        self.encode_share: list[float] = (
            np.zeros(count) if spec.encoder is not None else media @ alone / np.maximum(seconds, 1e-9)
        ).tolist()
        self.queued_at = [0.0] * count
        self.first_token = [math.nan] * count
        self.ttft = [math.nan] * count
        self.itl = [math.nan] * count
        self.done = bytearray(count)
        self.blocked = bytearray(count)  # media are being encoded in another pool

    def __len__(self) -> int:
        return len(self.arrivals)


@dataclass(slots=True)
class Queues:
    """Where requests wait, with the sums that pods and gateways report of them."""

    held: deque[int] = field(default_factory=deque)  # at the gateway: a role that they need has no ready pod
    encode: deque[tuple[int, int]] = field(default_factory=deque)  # (request, modality)
    encode_waiting: list[int] = field(default_factory=lambda: [0, 0, 0])  # media, by modality
    blocked_tokens: int = 0  # prompt tokens of requests whose media are being encoded in another pool
    blocked_requests: int = 0
    prefill: deque[int] = field(default_factory=deque)
    prefill_waiting_tokens: int = 0
    prefill_waiting_media: list[int] = field(default_factory=lambda: [0, 0, 0])  # that prefill encodes itself

    def push_media(self, requests: Requests, request: int) -> None:
        """The media of a request wait for encoders; until they are done it is blocked."""
        requests.blocked[request] = 1
        self.blocked_tokens += requests.context[request]
        self.blocked_requests += 1
        for modality, count in enumerate(requests.media[request]):
            for _ in range(count):
                self.encode.append((request, modality))
            self.encode_waiting[modality] += count

    def pop_medium(self) -> tuple[int, int]:
        """The next medium."""
        request, modality = self.encode.popleft()
        self.encode_waiting[modality] -= 1
        return request, modality

    def unblock(self, requests: Requests, request: int) -> None:
        """Nothing of a request is being encoded any more."""
        requests.blocked[request] = 0
        self.blocked_tokens -= requests.context[request]
        self.blocked_requests -= 1

    def push_prefill(self, requests: Requests, request: int, *, with_media: bool) -> None:
        """A request waits for prefill, which encodes its media too where no pool of encoders does."""
        self.prefill.append(request)
        self.prefill_waiting_tokens += requests.context[request]
        if with_media:
            for modality, count in enumerate(requests.media[request]):
                self.prefill_waiting_media[modality] += count

    def pop_prefill(self, requests: Requests, *, with_media: bool) -> int:
        """The next request."""
        request = self.prefill.popleft()
        self.prefill_waiting_tokens -= requests.context[request]
        if with_media:
            for modality, count in enumerate(requests.media[request]):
                self.prefill_waiting_media[modality] -= count
        return request


def _drawn_factors(trace: Trace, calibration: Calibration) -> npt.NDArray[np.float64]:
    """[requests]"""
    factors = np.ones(len(trace))
    for kind, mine in trace.kinds().items():
        if (spread := calibration.spread.get(kind)) is not None:
            rng = np.random.default_rng([SPREAD_SEED, KINDS.index(kind)])
            factors[mine] = rng.choice(np.array(spread), int(mine.sum()))
    return factors
