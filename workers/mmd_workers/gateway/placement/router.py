"""Chooses the prefill pod of a request and the decode pods that may follow. Pure: heartbeats, outcomes and the time are arguments.

Prefill and decode pods are chosen together, by seconds. The first part is the time to the first token at each prefill pod: work of the
encoders, data to transfer, the queue, and prompt tokens that are not cached. The second part is the time until the best decode pod
continues: KV to transfer, and how busy that pod is. Where prefill pods have towers beside a pool of encoders, the pod that computes the
prompt encodes small media itself if that is sooner. The factors of the estimate are fitted to measured times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmd_api.contract.pools import MODALITIES, Modality, Role
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import PrefillSpec
from mmd_workers.caches.index import CacheIndex, Prefix
from mmd_workers.features.held import feature_identity
from mmd_workers.gateway.placement.fleet import UNKNOWN_NODE, EncodeRows, Figures, Flags, Fleet, Rows
from mmd_workers.gateway.placement.link_speeds import Links
from mmd_workers.gateway.placement.ttft_model import Terms, TtftModel
from mmd_workers.wire.messages.every_pod import Heartbeat

EMBEDDING_BYTES_PER_TOKEN = 8100.0  # until a transfer has been measured
NATS_BYTES_PER_SECOND = 270e6  # throughput of NATS core on one connection
EMBEDDING_SECONDS_PER_TOKEN = EMBEDDING_BYTES_PER_TOKEN / NATS_BYTES_PER_SECOND
KV_SAME_NODE_BYTES_PER_SECOND = 4e9
KV_OTHER_NODE_BYTES_PER_SECOND = 1e9
DEFAULT_WORK_PER_SECOND = 2000.0
BUSY_TOKENS = 64  # a full decode pod costs as much as this many of its tokens
MOST_DECODERS = 16  # maximum number of decode pods in a placement
TIE_SECONDS = 0.005
TIE_FRACTION = 0.1
DECODE_TIE_SECONDS = 1e-6
MIN_RETRY_AFTER_SECONDS, MAX_RETRY_AFTER_SECONDS = 1.0, 30.0
OWN_PLACEMENT_SECONDS = 3.0  # the directory judges pods whose heartbeat is overdue for longer
EXPIRY_CHECK_SECONDS = 0.25
# Maximum number of prompts, of the longest local length, that wait at a decode pod. More would delay its decoding.
MAX_LOCAL_PROMPTS = 4
_AVOIDED_SECONDS = 1e9
_ANYWHERE = ""  # sender of embeddings: any encoder may take the job


@dataclass(frozen=True, slots=True)
class FeatureNeed:
    """One medium of the request: identity, encoder work in the units of its modality, rows of its embeddings.

    `end`: the position in the prompt after its last placeholder. A pod with the KV of all tokens before `end` need not encode the medium.
    """

    feature_id: str
    modality: Modality
    work: int
    num_tokens: int
    end: float = math.inf


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The facts that routing needs about a request.

    `prefix`: identities of the prompt's complete KV blocks, first to last, by block size.
    `avoid`: pods that have just refused or lost this request; they are chosen only if there are no others.
    `prefill_only`: no decode pod computes the prompt, because one has returned it.
    `encoders_only`: with a pool of encoders, only its pods encode the media.
    `encoders_first`: the same, but only while a pod of that pool is Ready.
    `companion_tokens`: tokens of the companion, whose KV is not transferred; 0: there is no companion.
    """

    request_id: str
    num_tokens: int
    max_tokens: int
    features: tuple[FeatureNeed, ...] = ()
    prefix: Prefix = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()
    prefill_only: bool = False
    encoders_only: bool = False
    encoders_first: bool = False
    companion_tokens: int = 0

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt and its companion."""
        return self.num_tokens + self.companion_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """The pods chosen for one attempt.

    `decode_pods`: in order of preference; empty: the pod that computes the prompt also decodes. `terms`: the parts of the estimate.
    `cached_tokens`: leading tokens of the prompt in the prefill pod's cache, as far as known. `number`: key under which the router counts
    the placement. `encode_here`: the prefill pod encodes the media itself.
    """

    prefill_pod: str
    decode_pods: tuple[str, ...]
    estimated_ttft_seconds: float
    terms: Terms
    cached_tokens: int
    number: int
    encode_here: bool = False

    @property
    def decoder(self) -> str:
        """The pod that is expected to decode."""
        return self.decode_pods[0] if self.decode_pods else self.prefill_pod

    @property
    def retry_after_seconds(self) -> float:
        """Seconds after which to retry if the prefill pod refuses: its present requests are finished by then."""
        return _patience(self.estimated_ttft_seconds)


@dataclass(frozen=True, slots=True)
class NothingRoutable:
    """A role that the request needs has no ready pod. Hold the request: pods may be starting."""

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
"""Identifies a heartbeat of a pod: incarnation, and time by the pod's own clock, which is never compared with other clocks."""


@dataclass(slots=True)
class _Entry:
    """A counted placement.

    `accepted_after`: the pod's newest heartbeat when it accepted the request; any later heartbeat includes it.
    """

    tokens: int
    placed_at: float
    accepted_after: Beat | None = None


Own = dict[str, dict[int, _Entry]]
"""Placements by this gateway that are not in a heartbeat of the pod yet, by pod and number."""


@dataclass(frozen=True, slots=True)
class _Estimates:
    """Estimates as arrays [rows of prefill]; see `Terms` for the first four.

    `ttft`: with the factors applied. `encode_here`: True where the pod should encode the `media` itself.
    """

    queue: Figures
    encode: Figures
    transfer: Figures
    prefill: Figures
    ttft: Figures
    encode_here: Flags
    media: _MediaWork

    def terms(self, row: int) -> Terms:
        return Terms(
            float(self.queue[row]),
            float(self.encode[row]),
            float(self.transfer[row]),
            float(self.prefill[row]),
            bool(self.encode_here[row]),
        )


@dataclass(slots=True)
class _MediaWork:
    """Arrays [rows of prefill]: tokens of the media that each pod lacks, and their encoder work by modality.

    `own`: work if the pod encodes them itself. `shared`: work if encoder pods do, without features in their caches.
    """

    tokens: Figures
    own: dict[Modality, Figures]
    shared: dict[Modality, Figures]

    def add(self, need: FeatureNeed, is_missing: Figures, *, cached_by_encoder: bool) -> None:
        """Add a medium. `is_missing`: 1 where the pod lacks the medium, else 0."""
        self.tokens += need.num_tokens * is_missing
        needed = need.work * is_missing
        for work in (self.own,) if cached_by_encoder else (self.own, self.shared):
            before = work.get(need.modality)
            work[need.modality] = needed if before is None else before + needed

    def own_seconds(self, row: int, fleet: Fleet) -> float:
        """Seconds that the pod's own tower needs for these media alone."""
        rates = fleet.local_encoders.work_per_second[:, row]
        return sum(
            float(work[row]) / (float(rates[MODALITIES.index(modality)]) or DEFAULT_WORK_PER_SECOND)
            for modality, work in self.own.items()
        )


@dataclass(frozen=True, slots=True)
class _Cached:
    """Leading tokens of a prompt in each pod's prefix cache, as arrays [rows of prefill] and [rows of decode]."""

    prefill: Figures
    decode: Figures


class _View:
    """Facts about the pods of a fleet that are not in heartbeats.

    Rebuilt when the rows or the slots of an index change, and once a second, because measurements of links fade.
    """

    def __init__(
        self, fleet: Fleet, index: CacheIndex, features: CacheIndex, embeddings: Links, now: float
    ) -> None:
        self.versions = fleet.version, index.version, features.version, int(now)
        self.prefill_slots, self.decode_slots = (
            np.array([index.slot(name) for name in rows.names], dtype=np.int64)
            for rows in (fleet.prefill, fleet.decode)
        )
        slots = [features.slot(name) for name in fleet.prefill.names]
        self.feature_slots = np.array(slots, dtype=np.int64)
        self.prefill_feature_bits = sum(1 << slot for slot in set(slots))
        self.encoder_feature_bits = sum(1 << slot for slot in set(map(features.slot, fleet.encoders.names)))
        rates = [embeddings.rate(_ANYWHERE, name, same_node=False, now=now) for name in fleet.prefill.names]
        self.embedding_bytes_per_second = np.array(rates, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """Limits that the spec sets for placement.

    `max_waiting_requests`: maximum number of requests that wait at a prefill pod.
    `local_prefill_tokens`: maximum tokens to compute, none of them of media, for a decode pod to compute a prompt itself.
    `local_encode_tokens`: maximum tokens of media to encode for a prefill pod, with a tower beside encoder pods, to encode them itself.
    """

    max_waiting_requests: int
    local_prefill_tokens: int = 0
    local_encode_tokens: int = 0

    @classmethod
    def of(cls, spec: MultimodalDeploymentSpec) -> PlacementLimits:
        """Read the limits from a spec."""
        return cls(
            (spec.prefill or PrefillSpec()).max_waiting_requests,
            spec.decode.local_prefill_tokens,
            spec.local_encode_tokens,
        )


class Router:
    """Places requests of one pipeline revision.

    Keeps its own placements of the last heartbeat interval, the index of prefixes, and a model fitted to outcomes.
    """

    def __init__(
        self,
        revision: str,
        limits: PlacementLimits,
        rng: random.Random,
        index: CacheIndex | None = None,
        features: CacheIndex | None = None,
    ) -> None:
        self.limits = limits
        self.waiting_encode_work: Mapping[Modality, float] = {}  # queued, not taken by an encoder pod
        self.index = index if index is not None else CacheIndex()
        self.features = features if features is not None else CacheIndex()
        self.model = TtftModel()
        self.embeddings = Links(NATS_BYTES_PER_SECOND, NATS_BYTES_PER_SECOND, EMBEDDING_BYTES_PER_TOKEN)
        self.kv = Links(KV_SAME_NODE_BYTES_PER_SECOND, KV_OTHER_NODE_BYTES_PER_SECOND, 0.0)
        self._revision = revision
        self._rng = rng
        self._numbers = np.random.default_rng(rng.getrandbits(64))
        self._fleet = Fleet(revision)
        self._view = _View(self._fleet, self.index, self.features, self.embeddings, 0.0)
        self._own_prefill: Own = {}
        self._own_prompts: Own = {}  # on decode pods
        self._own_decode: Own = {}
        self._expired_at = float("-inf")
        self._placements = 0

    # --- decisions ------------------------------------------------------------------------------------------------

    def route(self, request: RouteRequest, heartbeats: Sequence[Heartbeat], now: float) -> Outcome:
        """Choose among the ready pods of this revision, and count the placement until heartbeats include it.

        `now`: seconds on a monotonic clock. The caller must `confirm` the placement or `take_back` it.
        """
        self._follow(heartbeats, now)
        fleet = self._fleet
        cached = self._cached_tokens(request, fleet)
        if (local := self._computed_by_decoder(request, fleet, cached, now)) is not None:
            return local
        if not len(fleet.prefill):  # encoders may be scaled to zero; they delay no placement
            return NothingRoutable("prefill")
        if not len(fleet.decode):
            return NothingRoutable("decode")
        fits = fleet.prefill.fits(request.num_tokens, request.max_tokens, request.companion_tokens)
        if not fits.any():
            return NeverFits(_why_not(request, "prefill", fleet))
        decodes = fleet.decode.fits(request.num_tokens, request.max_tokens, request.companion_tokens)
        if not decodes.any():
            return NeverFits(_why_not(request, "decode", fleet))
        open_pods = fits & (
            fleet.prefill.waiting_requests + fleet.prefill.own_requests < self.limits.max_waiting_requests
        )
        if not open_pods.any():
            _, all_waiting = self._queue_seconds(fleet)
            return Overloaded(_patience(float(all_waiting[fits].min())))
        if request.avoid:
            others = open_pods & ~fleet.prefill.flags(request.avoid)
            open_pods = others if others.any() else open_pods
        estimates = self._estimates(request, fleet, cached.prefill)
        load = self._decode_load(request, fleet, decodes)
        missing = np.maximum(0.0, request.num_tokens - cached.decode)
        cost = self._costs(request, fleet, estimates, cached.prefill, load, missing)
        row = self._choose(fleet, np.where(open_pods, cost, np.inf))
        pod = fleet.prefill.names[row]
        decode_pods: tuple[str, ...] = ()
        if not fleet.prefill.also_decodes[row]:
            decode_pods = self._decode_order(fleet, row, load, missing, now)
        placement = Placement(
            pod,
            decode_pods,
            float(estimates.ttft[row]),
            estimates.terms(row),
            int(cached.prefill[row]),
            self._next_number(),
            bool(estimates.encode_here[row]),
        )
        to_compute = max(1, request.held_tokens - placement.cached_tokens)
        if placement.encode_here:
            # Until heartbeats include it, the tower's work counts as the prompt tokens that take the same time.
            seconds = estimates.media.own_seconds(row, fleet)
            to_compute += math.ceil(seconds * fleet.prefill.tokens_per_second[row])
        self._count(placement, to_compute, request.held_tokens, now)
        return placement

    def _next_number(self) -> int:
        self._placements += 1
        return self._placements

    def _count(self, placement: Placement, prompt_tokens: int, num_tokens: int, now: float) -> None:
        """Count a placement where it waits: tokens to compute at the computing pod, all KV at the decoding pod."""
        for (rows, table, name), tokens in zip(
            self._counted(placement), (prompt_tokens, num_tokens), strict=True
        ):
            table.setdefault(name, {})[placement.number] = _Entry(tokens, now)
            _count_own(rows, table, name)

    def _computed_by_decoder(
        self, request: RouteRequest, fleet: Fleet, cached: _Cached, now: float
    ) -> Placement | None:
        """Place the request on the best decode pod that may compute its prompt, or return None.

        A decode pod may compute a prompt if few tokens are left to compute, none of them belong to a medium, and few prompts wait there.
        A handover would cost more, and the prefill pods are left to long prompts.
        """
        takers, max_tokens = fleet.takers, self.limits.local_prefill_tokens
        if not max_tokens or not len(takers) or request.prefill_only:
            return None
        cached_tokens = cached.decode[fleet.decode_row_of_taker]
        missing = request.held_tokens - cached_tokens
        waiting = takers.waiting_tokens + takers.own_tokens
        busy = fleet.decode.busy()[fleet.decode_row_of_taker]
        able = (
            (missing <= max_tokens)
            & (cached_tokens >= max((need.end for need in request.features), default=0))
            & (waiting + missing <= MAX_LOCAL_PROMPTS * max_tokens)
            & takers.fits(request.num_tokens, request.max_tokens, request.companion_tokens)
            & (busy < 1)
            & ~takers.flags(request.avoid)
        )
        if not able.any():
            return None
        queue, prefill = (tokens / takers.tokens_per_second for tokens in (waiting, np.maximum(1.0, missing)))
        cost = queue + prefill + busy * takers.step_seconds() * BUSY_TOKENS
        cost += self._numbers.random(len(takers)) * DECODE_TIE_SECONDS
        row = int(np.where(able, cost, np.inf).argmin())
        terms = Terms(float(queue[row]), 0.0, 0.0, float(prefill[row]))
        estimate = float(self.model.factors.ttft(terms.queue, 0.0, 0.0, terms.prefill))
        placement = Placement(
            takers.names[row], (), estimate, terms, int(cached_tokens[row]), self._next_number()
        )
        self._count(placement, int(missing[row]), request.held_tokens, now)
        return placement

    def confirm(self, placement: Placement, newest: Callable[[str], Heartbeat | None]) -> None:
        """Note that the pod has accepted the placement. `newest`: a pod's last heartbeat before that; later heartbeats include it."""
        for _, table, name in self._counted(placement):
            if (entry := table.get(name, {}).get(placement.number)) is not None:
                entry.accepted_after = None if (beat := newest(name)) is None else _beat(beat)

    def take_back(self, placement: Placement) -> None:
        """Stop counting a placement that its pod refused, or that was never sent."""
        for rows, table, name in self._counted(placement):
            table.get(name, {}).pop(placement.number, None)  # it may have been dropped meanwhile
            _count_own(rows, table, name)

    def routable(self, heartbeats: Sequence[Heartbeat]) -> list[Heartbeat]:
        """The pods that may be sent requests: ready, and of this revision."""
        return [pod for pod in heartbeats if pod.state == "ready" and pod.revision == self._revision]

    # --- time to the first token ------------------------------------------------------------------------------------

    def _estimates(self, request: RouteRequest, fleet: Fleet, cached_tokens: Figures) -> _Estimates:
        factors, prefill = self.model.factors, fleet.prefill
        ready, all_waiting = self._queue_seconds(fleet)
        media = self._media_work(request, fleet, cached_tokens)
        encode, transfer = self._sent_for(media, fleet)
        # New media are encoded after those already waiting, so this prompt also follows the prompts of those.
        queue = np.where(media.tokens > 0, all_waiting, ready) if media.own else ready
        compute = np.maximum(1.0, request.held_tokens - cached_tokens) / prefill.tokens_per_second
        ttft = factors.ttft(queue, encode, transfer, compute)
        here = np.zeros(len(ttft), dtype=np.bool_)
        if fleet.has_towers and media.own:
            own_seconds, nothing = _own_encode_seconds(media, fleet), np.zeros(len(ttft))
            sent = request.encoders_only or (request.encoders_first and len(fleet.encoders))
            if self.limits.local_encode_tokens and not sent:
                small = (media.tokens > 0) & (media.tokens <= self.limits.local_encode_tokens)
                sooner = factors.ttft(ready, own_seconds, nothing, compute, in_turn=True) < ttft
                here = fleet.encodes_small_media & small & (sooner if len(fleet.encoders) else True)
            encodes_itself = here | fleet.encodes_all
            encode, transfer = (
                np.where(encodes_itself, own_seconds, encode),
                np.where(encodes_itself, nothing, transfer),
            )
            queue = np.where(here, ready, queue)
            ttft = factors.ttft(queue, encode, transfer, compute, in_turn=here)
        return _Estimates(queue, encode, transfer, compute, ttft, here, media)

    def _cached_tokens(self, request: RouteRequest, fleet: Fleet) -> _Cached:
        if not request.prefix:
            return _Cached(np.zeros(len(fleet.prefill)), np.zeros(len(fleet.decode)))
        view, tokens = self._view, self.index.cached_tokens(request.prefix)
        return _Cached(tokens[view.prefill_slots], tokens[view.decode_slots])

    def _queue_seconds(self, fleet: Fleet) -> tuple[Figures, Figures]:
        """Seconds of queued work ahead of a request, as arrays [rows]: without prompts that wait for their media, and with them.

        A pod that also decodes shares its steps: each waiting sequence costs about one step.
        """
        prefill = fleet.prefill
        waiting = prefill.waiting_tokens + prefill.own_tokens
        ready: Figures = np.maximum(0.0, waiting - prefill.blocked_tokens) / prefill.tokens_per_second
        seconds: Figures = waiting / prefill.tokens_per_second
        if prefill.also_decodes.any():
            own_decodes = fleet.decode.own_requests[fleet.decode_row_of_prefill]
            steps = np.where(prefill.also_decodes, prefill.decode_waits(own_decodes), 0.0)
            ready, seconds = ready + steps, seconds + steps
        return ready, seconds

    def _media_work(self, request: RouteRequest, fleet: Fleet, cached_tokens: Figures) -> _MediaWork:
        """The encoder work and transfers that are left for a request's media.

        A feature cached by an encoder pod costs only its transfer, because the job goes to that pod. A feature at the prefill pod costs
        nothing, nor does a medium whose tokens are all in the pod's prefix cache.
        """
        view, work = self._view, _MediaWork(np.zeros(len(fleet.prefill)), {}, {})
        for need in request.features:
            is_missing = cached_tokens < need.end
            holders = self.features.holders(feature_identity(need.feature_id))
            if holders & view.prefill_feature_bits:
                is_missing &= ~self.features.flags(holders)[view.feature_slots]
            cached_by_encoder = bool(holders & view.encoder_feature_bits)
            work.add(need, is_missing.astype(np.float64), cached_by_encoder=cached_by_encoder)
        return work

    def _sent_for(self, media: _MediaWork, fleet: Fleet) -> tuple[Figures, Figures]:
        """Seconds until encoder pods have encoded these media, and seconds to transfer them, as arrays [rows].

        Encoding includes the backlog ahead. Encoders pull from one queue, so the backlog is that of the pool: jobs taken plus jobs queued.
        """
        encode = np.zeros(len(fleet.prefill))
        for modality, work in media.shared.items():
            waiting = self.waiting_encode_work.get(modality, 0.0)
            encode += _encode_seconds(fleet.encoders, modality, work, waiting)
        return encode, media.tokens * self.embeddings.bytes_per_token / self._view.embedding_bytes_per_second

    # --- decode pods --------------------------------------------------------------------------------------------------

    def _decode_load(self, request: RouteRequest, fleet: Fleet, fits: Flags) -> Figures:
        """Seconds that a pod's load costs a request there, as an array [rows of decode]; infinite where the request may not go."""
        decode = fleet.decode
        seconds = decode.busy() * decode.step_seconds() * BUSY_TOKENS
        alone = fits & ~decode.also_prefills
        seconds[~(alone if alone.any() else fits)] = np.inf
        if request.avoid:
            seconds[decode.flags(request.avoid)] += _AVOIDED_SECONDS
        return seconds

    def _costs(
        self,
        request: RouteRequest,
        fleet: Fleet,
        estimates: _Estimates,
        _cached_tokens: Figures,
        load: Figures,
        missing_tokens: Figures,
    ) -> Figures:
        """The cost of a request at each pod, as an array [rows of prefill]; the lowest is the best.

        Alternative policies, for comparison, override this method and use the other arguments.
        """
        return estimates.ttft + self._handover_seconds(fleet, load, missing_tokens)

    def _handover_seconds(self, fleet: Fleet, load: Figures, missing_tokens: Figures) -> Figures:
        """Seconds by which the handover from each prefill pod delays decoding, as an array [rows of prefill].

        The delay is relative to starting at once on the least loaded decode pod: the best decode pod also waits for the KV it lacks. The
        transfer is assumed to be as fast as between any two pods on one node, or on two.
        """
        prefill = fleet.prefill
        if not self.kv.bytes_per_token or fleet.num_nodes < 2:
            return np.zeros(len(prefill))
        num_bytes = missing_tokens * self.kv.bytes_per_token
        far, near = (load + num_bytes / self.kv.rate_of_kind(same_node=same) for same in (False, True))
        by_node = np.full(fleet.num_nodes + 1, np.inf)  # the last entry: pods whose node is unknown
        order, starts, nodes = fleet.decode_by_node
        by_node[nodes] = np.minimum.reduceat(near[order], starts)
        by_node[UNKNOWN_NODE] = np.inf
        seconds = np.minimum(by_node[prefill.nodes], far.min()) - load.min()
        return np.where(prefill.also_decodes, 0.0, seconds)

    def _decode_order(
        self, fleet: Fleet, prefill_row: int, load: Figures, missing_tokens: Figures, now: float
    ) -> tuple[str, ...]:
        """The best decode pods for a prefill pod, by their load and the time to transfer the KV they lack."""
        decode, prefill = fleet.decode, fleet.prefill
        cost = load + self._numbers.random(len(load)) * DECODE_TIE_SECONDS
        if not self.kv.bytes_per_token:
            best = {row: float(cost[row]) for row in _lowest(cost, MOST_DECODERS)}
        else:
            sender, node = prefill.names[prefill_row], prefill.nodes[prefill_row]
            near = (decode.nodes == node) & (node != UNKNOWN_NODE)
            num_bytes = missing_tokens * self.kv.bytes_per_token
            kinds = [self.kv.rate_of_kind(same_node=same) for same in (False, True)]
            by_kind = cost + num_bytes / np.where(near, kinds[True], kinds[False])
            best = {}
            for row in _lowest(by_kind, MOST_DECODERS):
                best[row] = float(by_kind[row])
                if self.kv.knows(sender, receiver := decode.names[row]):
                    rate = self.kv.rate(sender, receiver, same_node=bool(near[row]), now=now)
                    best[row] = float(cost[row] + num_bytes[row] / rate)
        return tuple(decode.names[row] for row in sorted(best, key=best.__getitem__) if best[row] < np.inf)

    def _choose(self, fleet: Fleet, cost: Figures) -> int:
        """Choose the better of two random pods among those about as good as the best, so that gateways do not herd.

        The overhead is the same at all pods, so it does not widen the tie.
        """
        best = float(cost.min())
        width = max(TIE_SECONDS, (best - self.model.factors.overhead) * TIE_FRACTION)
        tied: list[int] = np.flatnonzero(cost <= best + width).tolist()
        candidates = self._rng.sample(tied, min(2, len(tied)))
        return min(candidates, key=lambda row: (cost[row], fleet.prefill.own_requests[row]))

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def learn(self, placement: Placement, ttft_seconds: float) -> None:
        """Fit the model to a request whose first token came this long after placement."""
        self.model.learn(placement.terms, ttft_seconds)

    def embeddings_moved(
        self, receiver: str, tokens: int, num_bytes: int, seconds: float, now: float
    ) -> None:
        """Note the transfer of a feature to a prefill pod: its bytes took so many seconds."""
        self.embeddings.note(
            _ANYWHERE, receiver, same_node=False, tokens=tokens, num_bytes=num_bytes, seconds=seconds, now=now
        )
        if (row := self._fleet.prefill.row_of.get(receiver)) is not None:
            rate = self.embeddings.rate(_ANYWHERE, receiver, same_node=False, now=now)
            self._view.embedding_bytes_per_second[row] = rate

    def kv_moved(
        self, sender: str, receiver: str, tokens: int, num_bytes: int, seconds: float, now: float
    ) -> None:
        """Note the handover of a sequence: its bytes took so many seconds."""
        self.kv.note(
            sender,
            receiver,
            same_node=self._same_node(sender, receiver),
            tokens=tokens,
            num_bytes=num_bytes,
            seconds=seconds,
            now=now,
        )

    def _same_node(self, sender: str, receiver: str) -> bool:
        prefill, decode = self._fleet.prefill, self._fleet.decode
        sender_row, receiver_row = prefill.row_of.get(sender), decode.row_of.get(receiver)
        if sender_row is None or receiver_row is None:
            return False
        return bool(prefill.nodes[sender_row] == decode.nodes[receiver_row] != UNKNOWN_NODE)

    # --- own placements -----------------------------------------------------------------------------------------------

    def _counted(self, placement: Placement) -> tuple[tuple[Rows, Own, str], ...]:
        fleet = self._fleet
        pod, computing = placement.prefill_pod, (fleet.prefill, self._own_prefill)
        if pod in self._own_prompts or pod in fleet.takers.row_of:
            computing = fleet.takers, self._own_prompts
        return (
            (*computing, pod),
            (fleet.decode, self._own_decode, placement.decoder),
        )

    def _tables(self, fleet: Fleet) -> tuple[tuple[Rows, Own], ...]:
        return (
            (fleet.prefill, self._own_prefill),
            (fleet.takers, self._own_prompts),
            (fleet.decode, self._own_decode),
        )

    def _follow(self, heartbeats: Sequence[Heartbeat], now: float) -> None:
        """Take the newest heartbeats, and drop the placements that they include."""
        fleet, version = self._fleet, self._fleet.version
        newest = {beat.pod: _beat(beat) for beat in fleet.update(heartbeats)}
        renewed, expires = fleet.version != version, now - self._expired_at >= EXPIRY_CHECK_SECONDS
        for rows, table in self._tables(fleet):
            for name in list(table) if renewed or expires else [name for name in newest if name in table]:
                if not fleet.has(name):
                    del table[name]
                    continue
                table[name] = {
                    number: entry
                    for number, entry in table[name].items()
                    if entry.placed_at > now - OWN_PLACEMENT_SECONDS
                    and (name not in newest or entry.accepted_after in (None, newest[name]))
                }
                _count_own(rows, table, name)
        if expires:
            self._expired_at = now
        if self._view.versions != (fleet.version, self.index.version, self.features.version, int(now)):
            self._view = _View(fleet, self.index, self.features, self.embeddings, now)


def _lowest(cost: Figures, count: int) -> list[int]:
    """The rows with the lowest costs, in any order."""
    rows: list[int] = (
        np.argpartition(cost, count)[:count].tolist() if len(cost) > count else list(range(len(cost)))
    )
    return rows


def _count_own(rows: Rows, table: Own, name: str) -> None:
    """Update the row of a pod from its placements; drop a pod without placements from the table."""
    placed = table.get(name, {})
    if not placed:
        table.pop(name, None)
    if (row := rows.row_of.get(name)) is not None:
        rows.own_requests[row] = len(placed)
        rows.own_tokens[row] = sum(entry.tokens for entry in placed.values())


def _own_encode_seconds(media: _MediaWork, fleet: Fleet) -> Figures:
    """Seconds for the pod's own tower to do its queued work and these media, as an array [rows of prefill]."""
    seconds = np.zeros(len(fleet.prefill))
    for modality, work in media.own.items():
        seconds += _encode_seconds(fleet.local_encoders, modality, work)
    return seconds


def _encode_seconds(
    encoders: EncodeRows, modality: Modality, work: Figures, waiting: float | None = None
) -> Figures:
    """Seconds until encoders have done their queued work and `work`, as an array [rows of `work`]; 0 where `work` is 0.

    `waiting`: work in the queue from which all encoders pull; None: each row has its own encoder.
    """
    number = MODALITIES.index(modality)
    queued, rate = encoders.queued[number], encoders.work_per_second[number]
    if waiting is not None:
        queued, rate = queued.sum() + waiting, rate.sum()
    seconds: Figures = (queued + work) / np.where(rate > 0, rate, DEFAULT_WORK_PER_SECOND)
    return np.where(work > 0, seconds, 0.0)


def _beat(heartbeat: Heartbeat) -> Beat:
    return heartbeat.incarnation, heartbeat.sent


def _patience(seconds: float) -> float:
    return min(MAX_RETRY_AFTER_SECONDS, max(MIN_RETRY_AFTER_SECONDS, seconds))


def _why_not(request: RouteRequest, role: Role, fleet: Fleet) -> str:
    rows = fleet.prefill if role == "prefill" else fleet.decode
    capacities = [beat.load.kv_blocks_total * beat.load.kv_block_tokens for beat in rows.beats]
    largest = max(range(len(capacities)), key=capacities.__getitem__)
    needed = int(
        rows.needed_tokens(request.num_tokens, request.max_tokens, request.companion_tokens)[largest]
    )
    guided = request.companion_tokens > 0
    beside = f", its negative prompt of {request.companion_tokens}" if guided else ""
    after = "after each " if guided else ""
    return (
        f"the prompt of {request.num_tokens} tokens{beside} and up to {request.max_tokens} output tokens {after}need KV for "
        f"{needed} tokens, but the largest {role} pod holds {capacities[largest]}; shorten the prompt, lower max_tokens, or "
        f"raise spec.{role}.kvCacheMebibytes"
    )
