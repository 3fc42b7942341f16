"""Which prefill pod takes a request, and which decode pods may follow. Pure: heartbeats and the time come in as arguments.

The estimate of the time to the first token joins what the encoders have to do, what has to travel, what this prefill pod has
queued and what of the prompt it would have to compute. Encoding and the queue run side by side, so the longer one counts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmd_workers.wire.messages import Heartbeat

EMBEDDING_SECONDS_PER_TOKEN = 3e-5  # 8 KB a token at 270 MB/s, what NATS core carries on one connection
DEFAULT_PREFILL_TOKENS_PER_SECOND = 2000.0  # until a pod has measured its own
DEFAULT_WORK_PER_SECOND = 2000.0
TIE_SECONDS = 0.005
TIE_FRACTION = 0.1
OWN_PLACEMENT_SECONDS = 3.0  # a heartbeat that long overdue is the directory's business


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """One medium of the request: identity, encoder work in the units of its modality, rows of its embeddings."""

    feature_id: str
    modality: str
    work: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What routing needs to know. `prefix_blocks`: hashes of the prompt's whole KV blocks, first to last.

    `avoid`: pods that have just refused or lost this request; they are taken only if nothing else is there.
    """

    request_id: str
    num_tokens: int
    max_tokens: int
    features: tuple[FeatureNeed, ...] = ()
    prefix_blocks: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """`decode_pods` in order of preference; empty: the prefill pod decodes itself."""

    prefill_pod: str
    decode_pods: tuple[str, ...]
    estimated_ttft_seconds: float


@dataclass(frozen=True, slots=True)
class NothingRoutable:
    """A role that the request needs has no ready pod: hold the request, pods may be on their way."""

    missing_role: str


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Every pod's queue is full."""

    retry_after_seconds: float


Outcome = Placement | NothingRoutable | Overloaded


@dataclass(slots=True)
class _Own:
    """Placements of this gateway that no heartbeat of the pod has shown yet: (time, tokens)."""

    placed: list[tuple[float, int]] = field(default_factory=list)

    def forget(self, seen_until: float, now: float) -> None:
        oldest = max(seen_until, now - OWN_PLACEMENT_SECONDS)
        self.placed = [entry for entry in self.placed if entry[0] > oldest]


class Router:
    """Places requests of one pipeline revision. Holds nothing but its own placements of the last heartbeat interval."""

    def __init__(self, revision: str, max_waiting_requests: int, rng: random.Random) -> None:
        self._revision = revision
        self._max_waiting = max_waiting_requests
        self._rng = rng
        self._own_prefill: dict[str, _Own] = {}
        self._own_decode: dict[str, _Own] = {}

    def route(self, request: RouteRequest, heartbeats: Sequence[Heartbeat], now: float) -> Outcome:
        """Choose pods among the ready ones of this revision, and count the placement until heartbeats show it."""
        pods = [pod for pod in heartbeats if pod.state == "ready" and pod.revision == self._revision]
        self._forget({pod.pod: pod for pod in heartbeats}, now)
        missing = self._missing_role(request, pods)
        if missing is not None:
            return NothingRoutable(missing)
        open_pods = [pod for pod in _preferred(_with_role(pods, "prefill"), request) if not self._full(pod)]
        if not open_pods:
            open_pods = [pod for pod in _with_role(pods, "prefill") if not self._full(pod)]
        if not open_pods:
            waits = [self._queue_seconds(pod) for pod in _with_role(pods, "prefill")]
            return Overloaded(min(30.0, max(1.0, min(waits))))
        estimates = {pod.pod: self.estimate_ttft_seconds(request, pod, pods) for pod in open_pods}
        chosen = self._choose(open_pods, estimates)
        decode_pods = () if "decode" in chosen.roles else self._decode_order(request, pods)
        self._own_prefill.setdefault(chosen.pod, _Own()).placed.append((now, request.num_tokens))
        first_decoder = decode_pods[0] if decode_pods else chosen.pod
        self._own_decode.setdefault(first_decoder, _Own()).placed.append((now, 1))
        return Placement(chosen.pod, decode_pods, estimates[chosen.pod])

    def estimate_ttft_seconds(
        self, request: RouteRequest, pod: Heartbeat, pods: Sequence[Heartbeat]
    ) -> float:
        """Time to the first token if `pod` prefills: max(queue, encode + transfer) + uncached tokens ÷ throughput."""
        rate = _prefill_rate(pod)
        uncached = max(1, request.num_tokens - _cached_prefix_tokens(request, pod))
        return max(self._queue_seconds(pod), _encode_seconds(request, pod, pods)) + uncached / rate

    def _missing_role(self, request: RouteRequest, pods: Sequence[Heartbeat]) -> str | None:
        """Encoders may be scaled to zero: they hold nobody up whose features are cached or who has none."""
        for role in ("prefill", "decode"):
            if not any(role in pod.roles for pod in pods):
                return role
        return None

    def _queue_seconds(self, pod: Heartbeat) -> float:
        own = sum(tokens for _, tokens in self._own_prefill.get(pod.pod, _Own()).placed)
        seconds = (pod.load.prefill_waiting_tokens + own) / _prefill_rate(pod)
        if "decode" in pod.roles:
            # A pod that also decodes shares its steps: a waiting sequence costs about one step, a full batch a whole turn.
            seconds += self._decode_waiting(pod) * max(pod.load.itl_seconds, 0.001)
        return seconds

    def _decode_waiting(self, pod: Heartbeat) -> int:
        own = len(self._own_decode.get(pod.pod, _Own()).placed)
        over = pod.load.decode_running + own - max(pod.load.decode_max_sequences, 1)
        return pod.load.decode_waiting + max(0, over)

    def _full(self, pod: Heartbeat) -> bool:
        own = len(self._own_prefill.get(pod.pod, _Own()).placed)
        return pod.load.prefill_waiting_requests + own >= self._max_waiting

    def _choose(self, pods: Sequence[Heartbeat], estimates: dict[str, float]) -> Heartbeat:
        """Of the pods that are as good as the best, two at random, the better of the two: gateways do not herd."""
        best = min(estimates.values())
        tied = [pod for pod in pods if estimates[pod.pod] <= best + max(TIE_SECONDS, best * TIE_FRACTION)]
        two = self._rng.sample(tied, min(2, len(tied)))
        return min(
            two, key=lambda pod: (estimates[pod.pod], len(self._own_prefill.get(pod.pod, _Own()).placed))
        )

    def _decode_order(self, request: RouteRequest, pods: Sequence[Heartbeat]) -> tuple[str, ...]:
        def cost(pod: Heartbeat) -> tuple[bool, bool, float, float]:
            own = len(self._own_decode.get(pod.pod, _Own()).placed)
            load = pod.load
            needed = -(-(request.num_tokens + request.max_tokens) // max(load.kv_block_tokens, 1))
            used = 1 - (load.kv_blocks_free - load.kv_blocks_reserved) / max(load.kv_blocks_total, 1)
            busy = (load.decode_running + load.decode_waiting + own) / max(load.decode_max_sequences, 1)
            never_fits = load.kv_blocks_total > 0 and needed > load.kv_blocks_total
            return pod.pod in request.avoid, never_fits, max(busy, used), self._rng.random()

        decoders = [pod for pod in _with_role(pods, "decode") if "prefill" not in pod.roles]
        return tuple(pod.pod for pod in sorted(decoders or _with_role(pods, "decode"), key=cost))

    def _forget(self, pods: dict[str, Heartbeat], now: float) -> None:
        for table in (self._own_prefill, self._own_decode):
            for name in list(table):
                table[name].forget(pods[name].sent if name in pods else now, now)
                if not table[name].placed:
                    del table[name]


def _with_role(pods: Sequence[Heartbeat], role: str) -> list[Heartbeat]:
    return [pod for pod in pods if role in pod.roles]


def _preferred(pods: Sequence[Heartbeat], request: RouteRequest) -> list[Heartbeat]:
    return [pod for pod in pods if pod.pod not in request.avoid] or list(pods)


def _prefill_rate(pod: Heartbeat) -> float:
    return pod.load.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_SECOND


def _cached_prefix_tokens(request: RouteRequest, pod: Heartbeat) -> int:
    """Tokens up to the last block that the pod names: an identity covers everything before it, and what it names is a sample."""
    known = set(pod.prefix_blocks)
    blocks = next(
        (n for n in range(len(request.prefix_blocks), 0, -1) if request.prefix_blocks[n - 1] in known), 0
    )
    return blocks * pod.load.kv_block_tokens


def _encode_seconds(request: RouteRequest, pod: Heartbeat, pods: Sequence[Heartbeat]) -> float:
    """Backlog ahead of this request's media plus their own work, over the pool's throughput; then the transfer.

    Encoders pull from one queue, so the backlog is the pool's. A pod that encodes for itself has its own. A request without
    media has none, whatever the encoders have to do.
    """
    wanted = [need for need in request.features if need.feature_id not in set(pod.features)]
    if not wanted:
        return 0.0
    local = "encode" in pod.roles
    encoders = [pod] if local else _with_role(pods, "encode")
    encoded = {feature for encoder in encoders for feature in encoder.features}
    seconds = 0.0
    for modality in {need.modality for need in wanted if need.feature_id not in encoded}:
        work = sum(n.work for n in wanted if n.modality == modality and n.feature_id not in encoded)
        queued = sum(encoder.load.encode_queued_work.get(modality, 0) for encoder in encoders)
        rate = sum(encoder.load.encode_work_per_second.get(modality, 0.0) for encoder in encoders)
        seconds += (queued + work) / (rate or DEFAULT_WORK_PER_SECOND)
    transfer = 0.0 if local else sum(need.num_tokens for need in wanted) * EMBEDDING_SECONDS_PER_TOKEN
    return seconds + transfer
