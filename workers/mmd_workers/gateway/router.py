"""Which prefill pod takes a request, and which decode pods may follow. Pure: heartbeats and the time come in as arguments.

The estimate of the time to the first token joins what the encoders have to do, what has to travel, what this prefill pod has
queued and what of the prompt it would have to compute. Encoding and the queue run side by side, so the longer one counts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from mmd_api.contract.pools import Modality, Role
from mmd_workers.wire.messages import Heartbeat

EMBEDDING_SECONDS_PER_TOKEN = 3e-5  # 8 KB a token at 270 MB/s, what NATS core carries on one connection
DEFAULT_PREFILL_TOKENS_PER_SECOND = 2000.0  # until a pod has measured its own
DEFAULT_WORK_PER_SECOND = 2000.0
TIE_SECONDS = 0.005
TIE_FRACTION = 0.1
_NEEDED_ROLES: tuple[Role, ...] = ("prefill", "decode")
MIN_RETRY_AFTER_SECONDS, MAX_RETRY_AFTER_SECONDS = 1.0, 30.0
OWN_PLACEMENT_SECONDS = 3.0  # a heartbeat this long overdue is for the directory to judge
MAX_LOCAL_PROMPTS = 4  # of the longest that a decode pod computes itself, which may wait there: more of them would hold up its decoding


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """One medium of the request: identity, encoder work in the units of its modality, rows of its embeddings."""

    feature_id: str
    modality: Modality
    work: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What routing needs to know. `prefix_blocks`: identities of the prompt's whole blocks of `block_tokens`, first to last; a pod's own
    blocks may have another size.

    `media_end`: leading tokens that hold all of its media. `avoid`: pods that have just refused or lost this request; they are taken only
    if nothing else is there. `prefill_only`: no decode pod computes it, because one has given it back.
    """

    request_id: str
    num_tokens: int
    max_tokens: int
    features: tuple[FeatureNeed, ...] = ()
    prefix_blocks: tuple[str, ...] = ()
    block_tokens: int = 16
    media_end: int = 0
    avoid: frozenset[str] = frozenset()
    prefill_only: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """`decode_pods` in order of preference; empty: the pod that computes the prompt decodes itself. `number`: under which it is counted."""

    prefill_pod: str
    decode_pods: tuple[str, ...]
    estimated_ttft_seconds: float
    number: int

    @property
    def decoder(self) -> str:
        """The pod that is expected to decode."""
        return self.decode_pods[0] if self.decode_pods else self.prefill_pod

    @property
    def retry_after_seconds(self) -> float:
        """When to come back if the prefill pod refuses: its requests in flight are done by then."""
        return _patience(self.estimated_ttft_seconds)


@dataclass(frozen=True, slots=True)
class NothingRoutable:
    """A role that the request needs has no ready pod: hold the request, pods may be on their way."""

    missing_role: Role


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Every pod's queue is full."""

    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class NeverFits:
    """No ready pod of a role could hold the request, even if it were idle."""

    message: str


Outcome = Placement | NothingRoutable | Overloaded | NeverFits


Beat = tuple[str, float]
"""Which heartbeat of a pod: incarnation and time by the pod's own clock, which is compared with no other clock."""


@dataclass(slots=True)
class _Entry:
    """A placement; `accepted_after`: the newest heartbeat when the pod had accepted it, so that the next one shows it."""

    tokens: int
    placed_at: float
    accepted_after: Beat | None = None


@dataclass(slots=True)
class _Own:
    """Placements of this gateway that no heartbeat of the pod has shown yet, by number."""

    placed: dict[int, _Entry] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.placed.values())

    def forget(self, newest: Beat, now: float) -> None:
        self.placed = {
            number: entry
            for number, entry in self.placed.items()
            if entry.placed_at > now - OWN_PLACEMENT_SECONDS and entry.accepted_after in (None, newest)
        }


class Router:
    """Places requests of one pipeline revision. Holds nothing but its own placements of the last heartbeat interval."""

    def __init__(
        self,
        revision: str,
        max_waiting_requests: int,
        rng: random.Random,
        local_prefill_tokens: int = 0,
    ) -> None:
        """`local_prefill_tokens`: of a prompt without media to compute, up to which a decode pod computes it itself."""
        self._revision = revision
        self.max_waiting_requests = max_waiting_requests
        self.local_prefill_tokens = local_prefill_tokens
        self._rng = rng
        self._own_prefill: dict[str, _Own] = {}
        self._own_decode: dict[str, _Own] = {}
        self._placements = 0

    def route(self, request: RouteRequest, heartbeats: Sequence[Heartbeat], now: float) -> Outcome:
        """Choose pods among the ready ones of this revision, and count the placement until heartbeats show it.

        `now`: seconds on a clock that never goes back. The caller must `confirm` it or `take_back` it.
        """
        pods = self.routable(heartbeats)
        self._forget({pod.pod: pod for pod in heartbeats}, now)
        if (decoder := self._computing_decoder(request, pods)) is not None:
            uncached = request.num_tokens - _cached_prefix_tokens(request, decoder)
            estimate = self.estimate_ttft_seconds(request, decoder, pods)
            return self._placed(request, decoder.pod, (), estimate, uncached, now)
        missing = self._missing_role(request, pods)
        if missing is not None:
            return NothingRoutable(missing)
        prefill_pods = [pod for pod in _with_role(pods, "prefill") if _fits(request, pod)]
        for role, fitting in (
            ("prefill", prefill_pods),
            ("decode", [pod for pod in _with_role(pods, "decode") if _fits(request, pod)]),
        ):
            if not fitting:
                return NeverFits(_why_not(request, role, _with_role(pods, role)))
        open_pods = [pod for pod in _preferred(prefill_pods, request) if not self._full(pod)]
        if not open_pods:
            open_pods = [pod for pod in prefill_pods if not self._full(pod)]
        if not open_pods:
            waits = [self._queue_seconds(pod) for pod in prefill_pods]
            return Overloaded(_patience(min(waits)))
        estimates = {pod.pod: self.estimate_ttft_seconds(request, pod, pods) for pod in open_pods}
        chosen = self._choose(open_pods, estimates)
        decode_pods = () if "decode" in chosen.roles else self._decode_order(request, pods)
        return self._placed(request, chosen.pod, decode_pods, estimates[chosen.pod], request.num_tokens, now)

    def _placed(
        self,
        request: RouteRequest,
        pod: str,
        decode_pods: tuple[str, ...],
        estimate: float,
        prefill_tokens: int,
        now: float,
    ) -> Placement:
        """Count a placement where it waits: `prefill_tokens` with the pod that computes it, its KV with the one that decodes it."""
        self._placements += 1
        placement = Placement(pod, decode_pods, estimate, self._placements)
        tokens = prefill_tokens, request.num_tokens
        for (table, name), count in zip(self._counted(placement), tokens, strict=True):
            table.setdefault(name, _Own()).placed[placement.number] = _Entry(count, now)
        return placement

    def confirm(self, placement: Placement, heartbeats: Sequence[Heartbeat]) -> None:
        """Its pod has just accepted it, and `heartbeats` came before that: later ones show it."""
        newest = {beat.pod: _beat(beat) for beat in heartbeats}
        for table, pod in self._counted(placement):
            if pod in table and (entry := table[pod].placed.get(placement.number)) is not None:
                entry.accepted_after = newest.get(pod)

    def take_back(self, placement: Placement) -> None:
        """Stop counting a placement: its pod refused it, or it was never sent."""
        for table, pod in self._counted(placement):
            if pod in table:
                table[pod].placed.pop(placement.number, None)  # it may have been forgotten since

    def _counted(self, placement: Placement) -> tuple[tuple[dict[str, _Own], str], ...]:
        return (self._own_prefill, placement.prefill_pod), (self._own_decode, placement.decoder)

    def routable(self, heartbeats: Sequence[Heartbeat]) -> list[Heartbeat]:
        """The pods that requests may be sent to: ready, and of this revision."""
        return [pod for pod in heartbeats if pod.state == "ready" and pod.revision == self._revision]

    def estimate_ttft_seconds(
        self, request: RouteRequest, pod: Heartbeat, pods: Sequence[Heartbeat]
    ) -> float:
        """Time to the first token if `pod` prefills: max(queue, encode + transfer) + uncached tokens ÷ throughput."""
        rate = _prefill_rate(pod)
        uncached = max(1, request.num_tokens - _cached_prefix_tokens(request, pod))
        return max(self._queue_seconds(pod), _encode_seconds(request, pod, pods)) + uncached / rate

    def _missing_role(self, request: RouteRequest, pods: Sequence[Heartbeat]) -> Role | None:
        """Encoders may be scaled to zero: they delay no request whose features are cached or that has none."""
        for role in _NEEDED_ROLES:
            if not any(role in pod.roles for pod in pods):
                return role
        return None

    def _queue_seconds(self, pod: Heartbeat) -> float:
        own = self._own_prefill.get(pod.pod, _Own()).tokens
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
        return pod.load.prefill_waiting_requests + own >= self.max_waiting_requests

    def _choose(self, pods: Sequence[Heartbeat], estimates: dict[str, float]) -> Heartbeat:
        """Of the pods that are as good as the best, two at random, the better of the two: gateways do not herd."""
        best = min(estimates.values())
        tied = [pod for pod in pods if estimates[pod.pod] <= best + max(TIE_SECONDS, best * TIE_FRACTION)]
        two = self._rng.sample(tied, min(2, len(tied)))
        return min(
            two, key=lambda pod: (estimates[pod.pod], len(self._own_prefill.get(pod.pod, _Own()).placed))
        )

    def _computing_decoder(self, request: RouteRequest, pods: Sequence[Heartbeat]) -> Heartbeat | None:
        """The least busy decode pod that computes this prompt itself: little of it is left to compute, no medium is in that, and
        no more than a few prompts wait there. A handover would cost more, and the prefill pods compute long prompts.
        """
        if not (most := self.local_prefill_tokens) or request.prefill_only:
            return None

        def computes(pod: Heartbeat) -> bool:
            cached = _cached_prefix_tokens(request, pod)
            uncached = request.num_tokens - cached
            waiting = pod.load.prefill_waiting_tokens + self._own_prefill.get(pod.pod, _Own()).tokens
            return (
                pod.takes_prompts
                and pod.pod not in request.avoid
                and request.media_end <= cached
                and uncached <= most
                and waiting + uncached <= MAX_LOCAL_PROMPTS * most
                and _fits(request, pod)
                and self._busy(pod) < 1.0
            )

        able = [pod for pod in pods if computes(pod)]
        return min(able, key=lambda pod: (self._busy(pod), self._rng.random()), default=None)

    def _decode_order(self, request: RouteRequest, pods: Sequence[Heartbeat]) -> tuple[str, ...]:
        def cost(pod: Heartbeat) -> tuple[bool, float, float]:
            return pod.pod in request.avoid, self._busy(pod), self._rng.random()

        fitting = [pod for pod in _with_role(pods, "decode") if _fits(request, pod)]
        decoders = [pod for pod in fitting if "prefill" not in pod.roles]
        return tuple(pod.pod for pod in sorted(decoders or fitting, key=cost))

    def _busy(self, pod: Heartbeat) -> float:
        """Share of a decode pod's places or KV blocks that is taken, whichever is larger; 1: another sequence would wait."""
        own = self._own_decode.get(pod.pod, _Own())
        load = pod.load
        sequences = load.decode_running + load.decode_waiting + len(own.placed)
        busy = sequences / max(load.decode_max_sequences, 1)
        if load.kv_blocks_total and load.kv_block_tokens:
            taken = load.kv_blocks_total - load.kv_blocks_free  # what is reserved is not free
            busy = max(busy, (taken + own.tokens / load.kv_block_tokens) / load.kv_blocks_total)
        return busy

    def _forget(self, pods: dict[str, Heartbeat], now: float) -> None:
        for table in (self._own_prefill, self._own_decode):
            for name in list(table):
                if name in pods:
                    table[name].forget(_beat(pods[name]), now)
                if name not in pods or not table[name].placed:
                    del table[name]


def _beat(heartbeat: Heartbeat) -> Beat:
    return heartbeat.incarnation, heartbeat.sent


def _patience(seconds: float) -> float:
    return min(MAX_RETRY_AFTER_SECONDS, max(MIN_RETRY_AFTER_SECONDS, seconds))


def _with_role(pods: Sequence[Heartbeat], role: str) -> list[Heartbeat]:
    return [pod for pod in pods if role in pod.roles]


def _needed_tokens(request: RouteRequest, pod: Heartbeat) -> int:
    """Tokens whose KV the pod must hold at the end: prompt and output where it decodes, prompt and first token elsewhere."""
    total = request.num_tokens + (request.max_tokens if "decode" in pod.roles else 1)
    return min(total, pod.max_model_len) if pod.max_model_len else total


def _fits(request: RouteRequest, pod: Heartbeat) -> bool:
    """Whether the pod could hold the request if it were idle; True while it has not reported its pool."""
    load = pod.load
    known = load.kv_blocks_total > 0 and load.kv_block_tokens > 0
    return not known or -(-_needed_tokens(request, pod) // load.kv_block_tokens) <= load.kv_blocks_total


def _why_not(request: RouteRequest, role: str, pods: Sequence[Heartbeat]) -> str:
    largest = max(pods, key=lambda pod: pod.load.kv_blocks_total * pod.load.kv_block_tokens)
    room = largest.load.kv_blocks_total * largest.load.kv_block_tokens
    return (
        f"the prompt of {request.num_tokens} tokens and up to {request.max_tokens} output tokens need KV for "
        f"{_needed_tokens(request, largest)} tokens, but the largest {role} pod holds {room}; shorten the prompt, lower max_tokens, or "
        f"raise spec.{role}.kvCacheMebibytes"
    )


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
    return blocks * request.block_tokens


def _encode_seconds(request: RouteRequest, pod: Heartbeat, pods: Sequence[Heartbeat]) -> float:
    """Backlog ahead of this request's media plus their own work, over the pool's throughput; then the transfer.

    Encoders pull from one queue, so the backlog is the pool's. A pod that encodes for itself has its own. A request without
    media has none, whatever the encoders have to do. A feature that an encoder pod has cached costs its transfer alone: the job
    goes to that very pod.
    """
    wanted = [need for need in request.features if need.feature_id not in set(pod.features)]
    if not wanted:
        return 0.0
    local = "encode" in pod.roles
    encoders = [pod] if local else [other for other in pods if other.roles == ["encode"]]
    encoded = {feature for encoder in encoders for feature in encoder.features}
    seconds = 0.0
    for modality in {need.modality for need in wanted if need.feature_id not in encoded}:
        work = sum(n.work for n in wanted if n.modality == modality and n.feature_id not in encoded)
        queued = sum(encoder.load.encode_queued_work.get(modality, 0) for encoder in encoders)
        rate = sum(encoder.load.encode_work_per_second.get(modality, 0.0) for encoder in encoders)
        seconds += (queued + work) / (rate or DEFAULT_WORK_PER_SECOND)
    transfer = 0.0 if local else sum(need.num_tokens for need in wanted) * EMBEDDING_SECONDS_PER_TOKEN
    return seconds + transfer
