"""The requests of a trace: their cost under a calibration, their state so far, and the queues in which they wait.

A request is its number in the trace; everything known about it is in lists by that number. Independent of pods.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mmd_api.contract.pools import MODALITIES
from mmd_api.contract.text_share import TextShare
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.simulate.calibration import KINDS, Calibration
from mmd_operator.simulate.traces import Trace

SPREAD_SEED = 20_240_501
"""Seed of the factors that requests draw, so that the same trace gives the same run."""


class Requests:
    """Lists by request, in the order of the trace. `work`, `overhead_seconds` and `tower_seconds` are per medium, by modality."""

    def __init__(self, spec: MultimodalDeploymentSpec, trace: Trace, calibration: Calibration) -> None:
        encoder, prefill, count = calibration.encoder, calibration.prefill, len(trace)
        self.work = [calibration.media[m] for m in MODALITIES]
        self.overhead_seconds = [encoder.overhead_seconds[m] for m in MODALITIES]
        self.tower_seconds = [calibration.media[m] / encoder.work_per_second[m] for m in MODALITIES]
        alone = np.array(self.overhead_seconds) + np.array(self.tower_seconds)
        media = np.stack([trace.media[m] for m in MODALITIES], axis=1)
        kv = -(-(trace.context_tokens + trace.output_tokens) // spec.decode.kv_block_tokens)
        seconds = prefill.overhead_seconds + trace.context_tokens / prefill.tokens_per_second
        self.factor: list[float] = _drawn_factors(trace, calibration).tolist()
        self.arrivals: list[float] = trace.arrivals.tolist()
        self.media: list[list[int]] = media.tolist()
        self.media_left: list[int] = media.sum(axis=1).tolist()
        self.context: list[int] = trace.context_tokens.tolist()
        self.output: list[int] = trace.output_tokens.tolist()
        self.kv: list[int] = kv.tolist()
        self.prefill_seconds: list[float] = seconds.tolist()
        # time to encode the media of a request one after the other
        self.alone_seconds: list[float] = (media @ alone).tolist()
        # whether the replica that prefills encodes the media
        self.encoded_here = bytearray([spec.encoder is None]) * count
        self.queued_at = [0.0] * count
        self.first_token = [math.nan] * count
        self.ttft = [math.nan] * count
        self.itl = [math.nan] * count
        self.done = bytearray(count)
        self.blocked = bytearray(count)  # media are being encoded in another pool
        self.media_cached = bytearray(count)  # media are in the prefix cache where it is placed

    def __len__(self) -> int:
        return len(self.arrivals)

    def prefills_media(self, request: int) -> bool:
        """Whether its prefill computes tokens of media."""
        return any(self.media[request]) and not self.media_cached[request]

    def own_encode_seconds(self, request: int) -> float:
        """Time that the replica that prefills takes to encode media itself."""
        encodes = self.encoded_here[request] and not self.media_cached[request]
        return self.alone_seconds[request] if encodes else 0.0

    def encode_share(self, request: int) -> float:
        """Share of encoding in the time of the replica that prefills."""
        encode = self.own_encode_seconds(request)
        return encode / max(encode + self.prefill_seconds[request], 1e-9)


class PrefillQueue:
    """Requests that wait for prefill, first come, first served.

    If text has a share, texts and prompts with media wait in a queue each. Whole prompts are taken from the two queues in turns that
    give each its share of the tokens.
    """

    def __init__(self, requests: Requests, share: TextShare | None = None) -> None:
        self._requests = requests
        self._share = share
        self._texts: deque[int] = deque()  # all requests if there is no share
        self._media: deque[int] = deque()
        self._longest = max(requests.context, default=0)

    def __len__(self) -> int:
        return len(self._texts) + len(self._media)

    def append(self, request: int) -> None:
        """Add a request to its queue."""
        with_media = self._share is not None and self._requests.prefills_media(request)
        (self._media if with_media else self._texts).append(request)

    @property
    def first(self) -> int:
        """The next request."""
        return self._next[0]

    def pop(self) -> int:
        """Take the next request."""
        queue, both = self._next, bool(self._texts and self._media)
        request = queue.popleft()
        if self._share is None:
            return request
        if not both:
            self._share.clear()
            return request
        tokens, of_media = self._requests.context[request], queue is self._media
        self._share.add(
            0 if of_media else tokens,
            tokens if of_media else 0,
            text_wants=bool(self._texts),
            media_want=bool(self._media),
            most=self._longest,
        )
        return request

    @property
    def _next(self) -> deque[int]:
        if self._texts and self._media and self._share is not None:
            return self._texts if self._share.text_first else self._media
        return self._texts or self._media


@dataclass(slots=True)
class Queues:
    """Queues of requests, with the sums that pods and gateways report about them."""

    prefill: PrefillQueue
    held: deque[int] = field(default_factory=deque)  # at the gateway: a role that they need has no ready pod
    encode: deque[tuple[int, int]] = field(default_factory=deque)  # (request, modality)
    encode_waiting: list[int] = field(default_factory=lambda: [0, 0, 0])  # waiting media, by modality
    blocked_tokens: int = 0  # prompt tokens of requests whose media are being encoded in another pool
    blocked_requests: int = 0
    prefill_waiting_tokens: int = 0
    # waiting media that prefill encodes itself, by modality
    prefill_waiting_media: list[int] = field(default_factory=lambda: [0, 0, 0])

    def push_media(self, requests: Requests, request: int) -> None:
        """Queue the media of a request for encoders; the request is blocked until they are done."""
        requests.blocked[request] = 1
        self.blocked_tokens += requests.context[request]
        self.blocked_requests += 1
        for modality, count in enumerate(requests.media[request]):
            for _ in range(count):
                self.encode.append((request, modality))
            self.encode_waiting[modality] += count

    def pop_medium(self) -> tuple[int, int]:
        """Take the next medium."""
        request, modality = self.encode.popleft()
        self.encode_waiting[modality] -= 1
        return request, modality

    def unblock(self, requests: Requests, request: int) -> None:
        """Unblock a request: none of its media is being encoded any more."""
        requests.blocked[request] = 0
        self.blocked_tokens -= requests.context[request]
        self.blocked_requests -= 1

    def push_prefill(self, requests: Requests, request: int, *, with_media: bool) -> None:
        """Queue a request for prefill. With `with_media`, prefill also encodes its media, since there is no pool of encoders."""
        self.prefill.append(request)
        self.prefill_waiting_tokens += requests.context[request]
        if with_media:
            for modality, count in enumerate(requests.media[request]):
                self.prefill_waiting_media[modality] += count

    def pop_prefill(self, requests: Requests, *, with_media: bool) -> int:
        """Take the next request."""
        request = self.prefill.pop()
        self.prefill_waiting_tokens -= requests.context[request]
        if with_media:
            for modality, count in enumerate(requests.media[request]):
                self.prefill_waiting_media[modality] -= count
        return request


def _drawn_factors(trace: Trace, calibration: Calibration) -> npt.NDArray[np.float64]:
    """The factor that each request draws, [requests]."""
    factors = np.ones(len(trace))
    for kind, selected in trace.kinds().items():
        if (spread := calibration.spread.get(kind)) is not None:
            rng = np.random.default_rng([SPREAD_SEED, KINDS.index(kind)])
            factors[selected] = rng.choice(np.array(spread), int(selected.sum()))
    return factors
