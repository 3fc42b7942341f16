"""Computes the work of a request, and whether the pools have room for it now. Pure: heartbeats are arguments.

Work is in seconds of the whole deployment. Media count as their work ÷ the measured throughput of all encoders, prompt tokens as their
number ÷ the throughput of all prefill pods. Answers count as the share of all decode slots they take, times how long they take them. The
pools get enough work to stay busy. The rest waits at the gateway, where it is ordered, because a pool's own queue knows no tenants.
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
"""Work of requests that have started and have no token yet.

Long enough that no pool runs dry between a first token and the next start. No longer, because started requests are in their pool's order.
"""
REQUESTS_PER_POD: dict[Lane, int] = {"text": 4, "media": 8, "small_media": 8}
"""Requests that may have started, whatever their work, for each pod that prefills or encodes: pods work on several at once.

One more for each pod is reserved for tenants with less than their share.
"""
RESERVED_DIVISOR = 8
"""One in this many places is reserved for tenants with less than their share, so that a newcomer finds room at once."""
DEFAULT_STEP_SECONDS = 0.02
"""Duration of a decode step until a pod has measured its own."""
_ROUNDING = 1e-9  # tolerance for rounding errors of sums


@dataclass(frozen=True, slots=True)
class Encoders:
    """Pods with a tower, and their joint throughput."""

    pods: int = 0
    per_second: Mapping[Modality, float] = field(default_factory=dict)

    @classmethod
    def of(cls, pods: Sequence[Heartbeat]) -> Encoders:
        """Combine these pods."""
        rates = [pod.load.encode_work_per_second for pod in pods]
        modalities = {modality for rate in rates for modality in rate}
        return cls(
            len(pods), {m: sum(rate.get(m) or DEFAULT_WORK_PER_SECOND for rate in rates) for m in modalities}
        )

    def seconds(self, work: Mapping[Modality, float]) -> float:
        """Seconds for the pods to do this work together. With none Ready, as long as one pod takes."""
        default = DEFAULT_WORK_PER_SECOND * max(1, self.pods)
        return sum(amount / (self.per_second.get(m) or default) for m, amount in work.items())


@dataclass(frozen=True, slots=True)
class Capacity:
    """The joint capacity of the Ready pods. Zero: no pod, or not reported yet.

    `small_media_encoders`: encoders of media of at most `small_media_tokens`, including prefill pods with a tower.
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
        """Work per token of an answer."""
        return self.step_seconds / self.sequences if self.sequences else 0.0

    @classmethod
    def of(cls, pods: Sequence[Heartbeat], small_media_tokens: int = 0) -> Capacity:
        """Compute the capacity of these pods, which are all Ready."""
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
    """The size of a request: `answers` to each of its prompts.

    `prompt_tokens`: of all its prompts, of which `media_tokens` are for media. `output_tokens`: expected of all answers. `encoders_only`: no
    prefill pod encodes its media, however small. `companion_tokens`: of the companions' prompts; each answer then has a companion.
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
        """Number of answers to all prompts."""
        return self.prompts * self.answers

    @property
    def all_prompt_tokens(self) -> int:
        """Tokens of the prompts and their companions."""
        return self.prompt_tokens + self.companion_tokens

    @property
    def slots(self) -> int:
        """Decode slots that each answer takes in every step."""
        return 2 if self.companion_tokens else 1

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of all sequences and their companions."""
        return self.all_prompt_tokens * self.answers

    def lane(self, capacity: Capacity) -> Lane:
        """The lane: whether the request needs encoders, and whether prefill pods may encode its media too."""
        if not self.encode_work:
            return "text"
        is_small = 0 < self.media_tokens <= capacity.small_media_tokens
        return "small_media" if is_small and not self.encoders_only else "media"

    def encoders(self, capacity: Capacity) -> Encoders:
        """The pods that may encode its media."""
        return capacity.small_media_encoders if self.lane(capacity) == "small_media" else capacity.encoders

    def is_served(self, capacity: Capacity) -> bool:
        """True if each role it needs has a Ready pod. If not, nobody knows how long it will take."""
        needs_encoders = bool(self.encode_work)
        return bool(
            capacity.prefill_pods
            and capacity.decode_pods
            and (self.encoders(capacity).pods or not needs_encoders)
        )

    def encode_seconds(self, capacity: Capacity) -> float:
        """Work in seconds of all encoders, or of one if none is Ready."""
        return self.encoders(capacity).seconds(self.encode_work)

    def prefill_seconds(self, capacity: Capacity) -> float:
        """Work in seconds of all prefill pods, or of one if none is Ready."""
        return self.prefill_tokens / (capacity.prefill_tokens_per_second or DEFAULT_PREFILL_TOKENS_PER_SECOND)

    def work_seconds(self, capacity: Capacity) -> float:
        """Work in seconds of the whole deployment."""
        decode = self.output_tokens * self.slots * capacity.token_seconds
        return self.encode_seconds(capacity) + self.prefill_seconds(capacity) + decode

    def first_token_seconds(self, capacity: Capacity) -> float:
        """Seconds for which its first stages keep their pools busy. Encoding and prefill run side by side."""
        return max(self.encode_seconds(capacity), self.prefill_seconds(capacity))

    def first_pods(self, capacity: Capacity) -> int:
        """Number of pods of its first stage, at least 1: those that encode its media, or prefill if there are none."""
        return max(1, (self.encode_work and self.encoders(capacity).pods) or capacity.prefill_pods)

    def decode_share(self, capacity: Capacity) -> float:
        """The share of all slots or of all KV that its sequences take, whichever is larger; 0 if neither is known."""
        slots = self.sequences * self.slots / capacity.sequences if capacity.sequences else 0.0
        tokens = self.prefill_tokens + self.output_tokens * self.slots
        return max(slots, tokens / capacity.kv_tokens if capacity.kv_tokens else 0.0)


@dataclass(slots=True, eq=False)
class Started:
    """A request that has started.

    `first_token_seconds`: counted until its first token. `decode_share`: counted until its end. `first_pods`: pods of its first stage.
    """

    tenant: str
    lane: Lane
    first_token_seconds: float
    decode_share: float
    first_pods: int = 1
    awaits_token: bool = True


class Shares:
    """Each tenant's share of everything, assuming one more tenant of normal priority.

    `weights`: of all tenants with requests here. `is_alone`: no other tenant has had requests here lately, so decode reserves nothing.
    """

    def __init__(self, weights: Mapping[str, int], *, is_alone: bool = False) -> None:
        self.is_alone = is_alone
        self._weights, self._total = weights, sum(weights.values()) + WEIGHTS["Normal"]

    def of(self, tenant: str) -> float:
        """The share of a tenant with requests here."""
        return self._weights[tenant] / self._total

    def of_others(self, tenant: str) -> float:
        """The share of all other tenants with requests here."""
        return 1 - (WEIGHTS["Normal"] + self._weights[tenant]) / self._total


@dataclass(slots=True)
class _Sum:
    """One amount, summed over several requests. Exactly zero without requests, whatever was added and removed."""

    requests: int = 0
    amount: float = 0.0

    def add(self, amount: float) -> None:
        self.requests += 1
        self.amount += amount

    def take(self, amount: float) -> None:
        self.requests -= 1
        self.amount = max(0.0, self.amount - amount) if self.requests else 0.0


class Room:
    """The requests that have started at this gateway and not ended, and whether more may start. Each of `gateways` has its part of the pools."""

    def __init__(self) -> None:
        self._started: set[Started] = set()
        # Sums by tenant; the key None is for all tenants.
        self._sums: defaultdict[tuple[Need, str | None], _Sum] = defaultdict(_Sum)

    def add(self, started: Started) -> None:
        """Add a request that has started."""
        self._started.add(started)
        for key in (started.tenant, None):
            self._sums[started.lane, key].add(started.first_token_seconds)
            self._sums["decode", key].add(started.decode_share)

    def first_token(self, started: Started) -> None:
        """Note that a request no longer waits for encoders and prefill."""
        if started.awaits_token:
            started.awaits_token = False
            for key in (started.tenant, None):
                self._take(started.lane, key, started.first_token_seconds)

    def remove(self, started: Started) -> None:
        """Remove a request that has ended. Safe to call twice."""
        if started in self._started:
            self.first_token(started)
            self._started.remove(started)
            for key in (started.tenant, None):
                self._take("decode", key, started.decode_share)

    @property
    def is_empty(self) -> bool:
        """True if every started request has ended."""
        return not self._started and not self._sums

    def lacks(
        self,
        request: Started,
        capacity: Capacity,
        gateways: int,
        shares: Shares,
        reserved: Started | None = None,
    ) -> Need | None:
        """The room that a request lacks; None if it may start.

        A tenant above its share may not use the last 1/`RESERVED_DIVISOR` of the room. A request larger than all the room starts when nothing
        else is running. `reserved`: another request, which gets the room in decode that becomes free.
        """
        share = shares.of(request.tenant)
        if self._lane_is_full(request, gateways, share):
            return request.lane
        in_use, tenant_in_use = self._held("decode", None).amount, self._held("decode", request.tenant).amount
        need, limit = request.decode_share, _decode_limit(capacity, gateways)
        if reserved is not None:
            if not _leaves_shares(reserved, limit, shares):
                return "decode"
            tenant_in_use += reserved.decode_share if reserved.tenant == request.tenant else 0.0
            if not _is_within(tenant_in_use + need, limit * share):
                in_use += reserved.decode_share
        allowed = limit if shares.is_alone else _allowed(limit, tenant_in_use + need, share)
        if in_use and not _is_within(in_use + need, allowed):
            return "decode"
        return None

    def is_within_share(self, request: Started, capacity: Capacity, gateways: int, shares: Shares) -> bool:
        """True if the request keeps its tenant within its share of decode."""
        tenant_in_use = self._held("decode", request.tenant).amount
        limit = _decode_limit(capacity, gateways)
        return _is_within(tenant_in_use + request.decode_share, limit * shares.of(request.tenant))

    def _lane_is_full(self, request: Started, gateways: int, share: float) -> bool:
        lane, need = request.lane, request.first_token_seconds
        in_use, tenant_in_use = self._held(lane, None), self._held(lane, request.tenant)
        requests = math.ceil(REQUESTS_PER_POD[lane] * request.first_pods / gateways)
        if tenant_in_use.requests < requests * share:
            requests += math.ceil(request.first_pods / gateways)
        if in_use.requests < requests:
            return False
        return in_use.amount + need > _allowed(
            WINDOW_SECONDS[lane] / gateways, tenant_in_use.amount + need, share
        )

    def _held(self, need: Need, tenant: str | None) -> _Sum:
        return self._sums.get((need, tenant)) or _Sum()

    def _take(self, need: Need, tenant: str | None, amount: float) -> None:
        total = self._sums[need, tenant]
        total.take(amount)
        if not total.requests:
            del self._sums[need, tenant]


def _is_within(amount: float, limit: float) -> bool:
    return amount <= limit + _ROUNDING


def _decode_limit(capacity: Capacity, gateways: int) -> float:
    """The part of decode that one of the gateways may use. Slots are not divided."""
    slots = capacity.sequences
    return math.ceil(slots / gateways) / slots if slots else 1 / gateways


def _leaves_shares(reserved: Started, limit: float, shares: Shares) -> bool:
    """True if the request fits beside other tenants that use no more than their shares of decode."""
    need, share = reserved.decode_share, shares.of(reserved.tenant)
    return _is_within(need + limit * shares.of_others(reserved.tenant), _allowed(limit, need, share))


def _allowed(limit: float, tenant_amount: float, share: float) -> float:
    """The total that all may use, if a tenant takes more and would have `tenant_amount` of it."""
    return limit if _is_within(tenant_amount, limit * share) else limit - limit / RESERVED_DIVISOR
