"""How much work a request is, and whether the pools have room for it now. Pure: heartbeats come in as arguments.

Work is in seconds of the whole deployment: media ÷ measured throughput of all encoders, prompt tokens ÷ that of all prefill pods, and the
slots that the answers take ÷ all slots of decode, times how long they take them. The pools get enough to stay busy, and what is
beyond that waits at the gateway, where it is ordered: a pool's own queue knows no tenants.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mmd_api.contract.pools import Modality
from mmd_workers.gateway.placement.fair_queue import WEIGHTS, Lane, Need
from mmd_workers.gateway.placement.fleet import DEFAULT_PREFILL_TOKENS_PER_SECOND
from mmd_workers.gateway.placement.router import DEFAULT_WORK_PER_SECOND
from mmd_workers.wire.messages.every_pod import Heartbeat

WINDOW_SECONDS: dict[Lane, float] = {"text": 0.25, "media": 0.5, "small_media": 0.5}
"""Work of requests that have started and have no token yet. Long enough that no pool runs dry between a first token and the next start,
and no longer: what has started is in the order of its pool.
"""
REQUESTS_PER_POD: dict[Lane, int] = {"text": 4, "media": 8, "small_media": 8}
"""So many may have started whatever their work is, for each pod that prefills or encodes: pods work on several at once. One more for each pod
is only for tenants with less than their share.
"""
RESERVED_DIVISOR = 8
"""One in so many places is only for tenants with less than their share, so that a newcomer finds room at once."""
DEFAULT_STEP_SECONDS = 0.02
"""Of decoding, until a pod has measured its own."""
_ROUNDING = 1e-9  # of sums


@dataclass(frozen=True, slots=True)
class Encoders:
    """Pods with a tower, and what they encode together."""

    pods: int = 0
    per_second: Mapping[Modality, float] = field(default_factory=dict)

    @classmethod
    def of(cls, pods: Sequence[Heartbeat]) -> Encoders:
        """These pods."""
        rates = [pod.load.encode_work_per_second for pod in pods]
        modalities = {modality for each in rates for modality in each}
        return cls(
            len(pods), {m: sum(each.get(m) or DEFAULT_WORK_PER_SECOND for each in rates) for m in modalities}
        )

    def seconds(self, work: Mapping[Modality, float]) -> float:
        """How long they take for it together, with none Ready as long as one takes."""
        default = DEFAULT_WORK_PER_SECOND * max(1, self.pods)
        return sum(amount / (self.per_second.get(m) or default) for m, amount in work.items())


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the Ready pods do together. Zero: no pod, or not reported yet.

    `small_media_encoders`: of media of at most `small_media_tokens`, which prefill pods with a tower encode too.
    """

    encoders: Encoders = Encoders()
    small_media_encoders: Encoders = Encoders()
    small_media_tokens: int = 0
    prefill_pods: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_pods: int = 0
    sequences: int = 0
    kv_tokens: int = 0
    step_seconds: float = DEFAULT_STEP_SECONDS

    @property
    def token_seconds(self) -> float:
        """Work of a token of an answer."""
        return self.step_seconds / self.sequences if self.sequences else 0.0

    @classmethod
    def of(cls, pods: Sequence[Heartbeat], small_media_tokens: int = 0) -> Capacity:
        """Of these pods, which are all Ready."""
        encoders = [pod for pod in pods if "encode" in pod.roles]
        towers = [pod for pod in pods if pod.encodes_small_media and "encode" not in pod.roles]
        prefill = [pod.load.prefill_tokens_per_second for pod in pods if "prefill" in pod.roles]
        decode = [pod.load for pod in pods if "decode" in pod.roles]
        steps = [load.itl_seconds for load in decode if load.itl_seconds > 0]
        return cls(
            encoders=Encoders.of(encoders),
            small_media_encoders=Encoders.of([*encoders, *towers]),
            small_media_tokens=small_media_tokens,
            prefill_pods=len(prefill),
            prefill_tokens_per_second=sum(rate or DEFAULT_PREFILL_TOKENS_PER_SECOND for rate in prefill),
            decode_pods=len(decode),
            sequences=sum(load.decode_max_sequences for load in decode),
            kv_tokens=sum(load.kv_blocks_total * load.kv_block_tokens for load in decode),
            step_seconds=sum(steps) / len(steps) if steps else DEFAULT_STEP_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class Size:
    """What a request asks for: `answers` to each of its prompts, which have so many tokens together, `media_tokens` of them for media;
    `output_tokens`: expected of all. `encoders_only`: no prefill pod encodes its media, however small. `companion_tokens`: of the prompts of
    companions, of which each answer has one then.
    """

    prompt_tokens: int
    output_tokens: int
    prompts: int = 1
    answers: int = 1
    encode_work: Mapping[Modality, int] = field(default_factory=dict)
    media_tokens: int = 0
    encoders_only: bool = False
    companion_tokens: int = 0

    @property
    def sequences(self) -> int:
        """Answers to all prompts."""
        return self.prompts * self.answers

    @property
    def all_prompt_tokens(self) -> int:
        """Of prompts and of their companions'."""
        return self.prompt_tokens + self.companion_tokens

    @property
    def slots(self) -> int:
        """Of each answer, in every step."""
        return 2 if self.companion_tokens else 1

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of all sequences and their companions."""
        return self.all_prompt_tokens * self.answers

    def lane(self, capacity: Capacity) -> Lane:
        """Whether it needs encoders, and whether prefill pods do as well."""
        if not self.encode_work:
            return "text"
        is_small = 0 < self.media_tokens <= capacity.small_media_tokens
        return "small_media" if is_small and not self.encoders_only else "media"

    def encoders(self, capacity: Capacity) -> Encoders:
        """Those that may encode its media."""
        return capacity.small_media_encoders if self.lane(capacity) == "small_media" else capacity.encoders

    def is_served(self, capacity: Capacity) -> bool:
        """Whether each role that it needs has a Ready pod. If not, nobody knows how long it will take."""
        needs_encoders = bool(self.encode_work)
        return bool(
            capacity.prefill_pods
            and capacity.decode_pods
            and (self.encoders(capacity).pods or not needs_encoders)
        )

    def encode_seconds(self, capacity: Capacity) -> float:
        """Of all encoders, with none Ready of one."""
        return self.encoders(capacity).seconds(self.encode_work)

    def prefill_seconds(self, capacity: Capacity) -> float:
        """Of all prefill pods, with none Ready of one."""
        return self.prefill_tokens / (capacity.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_SECOND)

    def work_seconds(self, capacity: Capacity) -> float:
        """Of the whole deployment."""
        decode = self.output_tokens * self.slots * capacity.token_seconds
        return self.encode_seconds(capacity) + self.prefill_seconds(capacity) + decode

    def first_token_seconds(self, capacity: Capacity) -> float:
        """How long its first stages keep their pools busy; encoding and prefill run side by side."""
        return max(self.encode_seconds(capacity), self.prefill_seconds(capacity))

    def first_pods(self, capacity: Capacity) -> int:
        """Of its first stage: as many as encode its media or, where it has none or they have no pod, prefill; at least 1."""
        return max(1, (self.encode_work and self.encoders(capacity).pods) or capacity.prefill_pods)

    def decode_share(self, capacity: Capacity) -> float:
        """The part of all slots, or of the whole KV, that its sequences take; 0 where neither is known."""
        slots = self.sequences * self.slots / capacity.sequences if capacity.sequences else 0.0
        tokens = self.prefill_tokens + self.output_tokens * self.slots
        return max(slots, tokens / capacity.kv_tokens if capacity.kv_tokens else 0.0)


@dataclass(slots=True, eq=False)
class Started:
    """A request that has started: `first_token_seconds` until it has its first token, `decode_share` until its end. `first_pods`: of its
    first stage.
    """

    tenant: str
    lane: Lane
    first_token_seconds: float
    decode_share: float
    first_pods: int = 1
    awaits_token: bool = True


class Shares:
    """The part of everything that is a tenant's, if one more of normal priority came. `weights`: of all tenants that have something here.
    `is_alone`: no other tenant has had anything here lately, so that decode keeps nothing for one.
    """

    def __init__(self, weights: Mapping[str, int], *, is_alone: bool = False) -> None:
        self.is_alone = is_alone
        self._weights, self._total = weights, sum(weights.values()) + WEIGHTS["Normal"]

    def of(self, tenant: str) -> float:
        """Of one that has something here."""
        return self._weights[tenant] / self._total

    def of_others(self, tenant: str) -> float:
        """Of all others that have something here."""
        return 1 - (WEIGHTS["Normal"] + self._weights[tenant]) / self._total


@dataclass(slots=True)
class _Sum:
    """Of one amount of several requests. None of them: exactly zero, whatever was added and taken away."""

    requests: int = 0
    amount: float = 0.0

    def add(self, amount: float) -> None:
        self.requests += 1
        self.amount += amount

    def take(self, amount: float) -> None:
        self.requests -= 1
        self.amount = max(0.0, self.amount - amount) if self.requests else 0.0


class Room:
    """What has started at this gateway and not ended, and whether more may. Each of `gateways` has its part of the pools."""

    def __init__(self) -> None:
        self._started: set[Started] = set()
        self._sums: defaultdict[tuple[Need, str | None], _Sum] = defaultdict(
            _Sum
        )  # of a tenant; None: of all

    def add(self, started: Started) -> None:
        """It has started."""
        self._started.add(started)
        for key in (started.tenant, None):
            self._sums[started.lane, key].add(started.first_token_seconds)
            self._sums["decode", key].add(started.decode_share)

    def first_token(self, started: Started) -> None:
        """It no longer waits for encoders and prefill."""
        if started.awaits_token:
            started.awaits_token = False
            for key in (started.tenant, None):
                self._take(started.lane, key, started.first_token_seconds)

    def remove(self, started: Started) -> None:
        """It has ended. Safe to call twice."""
        if started in self._started:
            self.first_token(started)
            self._started.remove(started)
            for key in (started.tenant, None):
                self._take("decode", key, started.decode_share)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has started that has not ended."""
        return not self._started and not self._sums

    def lacks(
        self,
        request: Started,
        capacity: Capacity,
        gateways: int,
        shares: Shares,
        reserved: Started | None = None,
    ) -> Need | None:
        """The room that it lacks; None: it may start.

        A tenant that holds more than its share leaves the last `RESERVED_DIVISOR`th to others. A request that is larger than all the
        room starts when nothing else is there. `reserved`: another request, which gets the room in decode that frees up.
        """
        share = shares.of(request.tenant)
        if self._lane_is_full(request, gateways, share):
            return request.lane
        taken, own = self._held("decode", None).amount, self._held("decode", request.tenant).amount
        need, limit = request.decode_share, _decode_limit(capacity, gateways)
        if reserved is not None:
            if not _leaves_shares(reserved, limit, shares):
                return "decode"
            own += reserved.decode_share if reserved.tenant == request.tenant else 0.0
            if not _is_within(own + need, limit * share):
                taken += reserved.decode_share
        allowed = limit if shares.is_alone else _allowed(limit, own + need, share)
        if taken and not _is_within(taken + need, allowed):
            return "decode"
        return None

    def is_within_share(self, request: Started, capacity: Capacity, gateways: int, shares: Shares) -> bool:
        """Whether its tenant has no more than its share of decode with it."""
        own = self._held("decode", request.tenant).amount
        limit = _decode_limit(capacity, gateways)
        return _is_within(own + request.decode_share, limit * shares.of(request.tenant))

    def _lane_is_full(self, request: Started, gateways: int, share: float) -> bool:
        lane, need = request.lane, request.first_token_seconds
        taken, own = self._held(lane, None), self._held(lane, request.tenant)
        requests = math.ceil(REQUESTS_PER_POD[lane] * request.first_pods / gateways)
        if own.requests < requests * share:
            requests += math.ceil(request.first_pods / gateways)
        if taken.requests < requests:
            return False
        return taken.amount + need > _allowed(WINDOW_SECONDS[lane] / gateways, own.amount + need, share)

    def _held(self, need: Need, tenant: str | None) -> _Sum:
        return self._sums.get((need, tenant)) or _Sum()

    def _take(self, need: Need, tenant: str | None, amount: float) -> None:
        held = self._sums[need, tenant]
        held.take(amount)
        if not held.requests:
            del self._sums[need, tenant]


def _is_within(amount: float, limit: float) -> bool:
    return amount <= limit + _ROUNDING


def _decode_limit(capacity: Capacity, gateways: int) -> float:
    """The part of decode that one of the gateways may use: slots are whole."""
    slots = capacity.sequences
    return math.ceil(slots / gateways) / slots if slots else 1 / gateways


def _leaves_shares(reserved: Started, limit: float, shares: Shares) -> bool:
    """Whether a request fits beside other tenants that have no more than their shares of decode."""
    need, share = reserved.decode_share, shares.of(reserved.tenant)
    return _is_within(need + limit * shares.of_others(reserved.tenant), _allowed(limit, need, share))


def _allowed(limit: float, own: float, share: float) -> float:
    """What all may hold when a tenant that would have `own` of it takes more."""
    return limit if _is_within(own, limit * share) else limit - limit / RESERVED_DIVISOR
