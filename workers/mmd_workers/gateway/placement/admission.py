"""When requests of tenants start: at once while the pools have room, else in their turn. Bounds what waits, and refuses the rest.

What waits has been read and prepared: its media and tokens are in memory, which is why the wait is bounded in bytes as well. Independent of
HTTP; which request is next is decided in `fair_queue`, whether there is room in `work`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mmd_api.contract.errors import MmdError, OverloadedError, TooManyRequestsError
from mmd_api.contract.load import GatewayQueue
from mmd_api.contract.pools import Modality
from mmd_workers.gateway.access.keys import Access, KnownTenant
from mmd_workers.gateway.placement.decode_claim import PATIENCE_SECONDS, DecodeClaim
from mmd_workers.gateway.placement.fair_queue import WEIGHTS, FairQueue, Need, Waiting
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.gateway.placement.work import Capacity, Room, Shares, Size, Started
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages.message_parts import Phase

MAX_QUEUE_SECONDS = 60.0
"""Of work that waits; less where requests would not live so long."""
QUEUE_SHARE_OF_TIMEOUT = 0.5
PATIENCE_SHARE_OF_TIMEOUT = 0.125
MAX_RETRY_SECONDS = 120.0
NEWCOMER_SECONDS = 60.0
"""For which decode keeps room for a tenant that has gone."""
TICK_SECONDS = 0.25
"""Between two looks at what pods report, while something waits."""
NOTED_SECONDS = 0.001
"""A shorter wait is not in the timeline."""


class EndedAnswer(NamedTuple):
    """`complete`: by itself."""

    tokens: int
    complete: bool


class Admission:
    """One request's place in the order, for all its sequences. To be released whatever happens."""

    def __init__(
        self, admissions: FairAdmission, known: KnownTenant, size: Size, waiting: Waiting, timeline: Timeline
    ) -> None:
        self.known, self.size, self.waiting, self.timeline = known, size, waiting, timeline
        self.asked_at = time.time()
        timeline.at_gateway = "admission"
        self.started: Started | None = None
        self.error: MmdError | None = None
        self.decided = asyncio.Event()
        self._admissions = admissions
        self._sequences = size.sequences  # that have not ended
        self._silent = size.sequences  # that have no token yet
        self._tokens = 0  # of those that have ended

    @property
    def is_waiting(self) -> bool:
        """Whether the request has neither started nor been refused."""
        return not self.decided.is_set()

    async def wait(self) -> None:
        """Wait until the request may start.

        Raises:
            MmdError: it may not: others that wait have more of a claim.
        """
        await self.decided.wait()
        if self.error is not None:
            raise self.error

    def first_token(self) -> None:
        """One of its sequences has its first token."""
        self._silent -= 1
        if not self._silent and self.started is not None:
            self._admissions.first_token(self.started)

    def sequence_ended(self, tokens: int) -> None:
        """One of its sequences needs no pod any more, whether or not its client has read all of it. Pods have generated so many tokens."""
        self._sequences -= 1
        self._tokens += tokens
        if not self._sequences and self.started is not None:
            self._admissions.ended(self, self.started, self._tokens)

    def out_of_time(self) -> OverloadedError:
        """Why a request ends that still waits at its deadline."""
        return self._admissions.out_of_time(self)

    def resize(self, size: Size) -> None:
        """Its prompts have become others, before any of its sequences has a token."""
        self._admissions.resize(self, size)

    def release(self, answers: Sequence[EndedAnswer] = ()) -> None:
        """The request has ended, or will not start. Safe to call twice."""
        self._admissions.release(self, answers)


class FairAdmission:
    """Everything of this gateway that waits or has started. `capacity()`: of the Ready pods, which all gateways share."""

    def __init__(
        self,
        access: Access,
        capacity: Callable[[], Capacity],
        max_bytes: int,
        request_timeout_seconds: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access, self._gateways, self._read_capacity = access, access.gateways, capacity
        self._metrics, self._clock = metrics, clock
        self.max_bytes = max_bytes
        self.request_timeout_seconds = request_timeout_seconds
        self._queue = FairQueue()
        self._room = Room()
        self._claim = DecodeClaim()
        self._admissions: dict[Waiting, Admission] = {}
        self._here: Counter[str] = Counter()  # requests of each tenant that has any
        self._weights: dict[str, int] = {}  # of the same tenants
        self._newest = ""  # the tenant that has asked last
        self._alone_from = -math.inf  # when it may have all of decode, if no other has anything here
        self._capacity, self._capacity_until = Capacity(), -math.inf
        self._ticker: asyncio.Task[None] | None = None
        self.leaving = 0
        """Requests that were refused while they waited and are about to end: their places are free."""

    @property
    def length(self) -> int:
        """Requests that wait."""
        return self._queue.length

    def max_seconds(self) -> float:
        """Of work that may wait here: each of n gateways gets an n-th of the pools, so the same work waits n times as long.

        No bound while a role has no Ready pod: it is on its way, and requests are held until it is there.
        """
        capacity = self._capacity_now()
        if not all(self._admissions[waiting].size.is_served(capacity) for waiting in self._queue.entries()):
            return math.inf
        most = min(MAX_QUEUE_SECONDS, self.request_timeout_seconds * QUEUE_SHARE_OF_TIMEOUT)
        return most / self._gateways()

    def ask(
        self, known: KnownTenant, size: Size, num_bytes: int, deadline: float, timeline: Timeline
    ) -> Admission:
        """Ask for a request of this tenant to start. `num_bytes`: it holds while it waits. `deadline`: Unix seconds.

        Raises:
            RateLimitError: its tenant has had as much work as it may.
            TooManyRequestsError: of its tenant too much waits.
            OverloadedError: too much waits.
        """
        name, now = known.name, self._clock()
        capacity = self._capacity_now()
        seconds = size.work_seconds(capacity)
        waits = self._queue.work_seconds(name)
        known.usage.check_work(name, known.tenant.limits, self._gateways(), waits, now)
        weight = WEIGHTS[known.tenant.priority]
        waiting = Waiting(name, weight, size.lane(capacity), seconds, num_bytes, now, deadline)
        admission = Admission(self, known, size, waiting, timeline)
        self._admissions[waiting] = admission
        self._here[name] += 1
        self._weights[name] = weight
        if name != self._newest:
            self._alone_from = now + NEWCOMER_SECONDS if self._newest else -math.inf
            self._newest = name
        self._queue.add(waiting)
        self._start_what_may()
        while (excess := self._queue.excess(self.max_seconds(), self.max_bytes, now)) is not None:
            self._refuse(excess, self._too_much(excess))
        if admission.error is not None:
            admission.release()
            raise admission.error
        if admission.is_waiting and self._ticker is None:
            self._ticker = asyncio.create_task(self._tick(), name="admission")
        return admission

    def has_place_for(self, known: KnownTenant, own: int, places: int) -> bool:
        """Whether at least `places` requests wait, and of a tenant that has more here, for its weight, than this one with `own` of them."""
        name, most = self._most_crowded()
        return (
            name != known.name
            and most > own / WEIGHTS[known.tenant.priority]
            and self._queue.length >= places
        )

    def make_place(self, known: KnownTenant) -> bool:
        """Refuse a waiting request of the tenant that has most requests here for its weight, in favour of one of this tenant, which is
        counted already; False: there is none that would still have as many.
        """
        name, _ = self._most_crowded()
        least = self._queue.least_loss(name, self._clock())
        if least is None or not self.has_place_for(known, known.usage.running, 1):
            return False
        seconds = self._retry_seconds(name)
        error = TooManyRequestsError(
            f"tenant {name} has {self._here[name]} requests at this gateway, which takes no more of all tenants; retry in "
            f"{math.ceil(seconds)} s, or send less at once",
            retry_after_seconds=seconds,
        )
        self._refuse(least, error)
        return True

    def _most_crowded(self) -> tuple[str, float]:
        """Of the tenants of which something waits, that which has most requests here for its weight, and how many these are."""
        crowded = {name: self._here[name] / weight for name, weight in self._queue.tenants().items()}
        return max(crowded.items(), key=lambda one: one[1], default=("", 0.0))

    def first_token(self, started: Started) -> None:
        """A request has its first token: encoders and prefill have room for another."""
        self._room.first_token(started)
        self._start_what_may()

    def ended(self, admission: Admission, started: Started, tokens: int) -> None:
        """A request needs no pod any more. Its answers had so many tokens, and its tenant is charged for those that were not expected."""
        self._room.remove(started)
        known, more = admission.known, tokens - admission.size.output_tokens
        seconds = more * admission.size.slots * self._capacity_now().token_seconds
        known.usage.correct_work(known.tenant.limits, self._gateways(), seconds, self._clock())
        self._queue.charge(known.name, seconds)
        self._start_what_may()

    def resize(self, admission: Admission, size: Size) -> None:
        """A request that has started has other prompts now. Its work stays as it was: encoders have done it in vain."""
        more = size.all_prompt_tokens - admission.size.all_prompt_tokens
        admission.size = replace(size, output_tokens=admission.size.output_tokens)
        if admission.started is None:
            return
        tokens = admission.known.usage.tokens
        if more > 0:
            tokens.add(more)
        else:
            tokens.give_back(-more)
        self._room.remove(admission.started)
        admission.started = self._started(admission.waiting, self._capacity_now())
        self._room.add(admission.started)
        self._start_what_may()

    def release(self, admission: Admission, answers: Sequence[EndedAnswer]) -> None:
        """A request has ended, or will not start."""
        if self._admissions.pop(admission.waiting, None) is None:
            return
        if admission.started is not None:
            self._room.remove(admission.started)
            for tokens, complete in answers:
                admission.known.usage.note_answer(tokens, complete=complete)
                admission.known.usage.tokens.add(tokens)
        else:
            self._dequeue(admission.waiting)
            self.leaving -= admission.error is not None
        if admission.error is None:
            self._gone(admission.known.name)
        self._start_what_may()

    def out_of_time(self, admission: Admission) -> OverloadedError:
        """For a request that still waits at its deadline."""
        name = admission.known.name
        seconds = self._retry_seconds(name)
        return OverloadedError(
            f"the request waited for its turn until its deadline: {self._queue.work_seconds(name):.1f} s of work of tenant {name} waits, and "
            f"{self._queue.work_seconds():.1f} s of all tenants; retry in {math.ceil(seconds)} s, or add replicas",
            retry_after_seconds=seconds,
        )

    def demand(self) -> GatewayQueue:
        """What waits, by the pool whose room it lacks, which is the one that its autoscaler has to enlarge."""
        encode, lacks = dict[Modality, float](), self._lacks()
        tokens = sequences = 0
        for waiting in self._queue.entries():
            size = self._admissions[waiting].size
            if lacks(waiting) == "decode":
                sequences += size.sequences * size.slots
            elif size.encode_work:
                for modality, work in size.encode_work.items():
                    encode[modality] = encode.get(modality, 0.0) + work
            else:
                tokens += size.prefill_tokens
        return GatewayQueue(encode_work=encode, prompt_tokens=tokens, sequences=sequences)

    def sample(self) -> None:
        """Set the gauges of what waits, at a scrape."""
        requests, work = self._metrics.tenant_queued, self._metrics.tenant_queued_work
        requests.clear()
        work.clear()
        for name, count in Counter(waiting.tenant for waiting in self._queue.entries()).items():
            requests.labels(name).set(count)
            work.labels(name).set(self._queue.work_seconds(name))

    async def close(self) -> None:
        """Start nothing any more."""
        if self._ticker is not None:
            self._ticker.cancel()

    async def _tick(self) -> None:
        """Pods change without a word to this module."""
        try:
            while self._queue.length:
                await asyncio.sleep(TICK_SECONDS)
                self._start_what_may()
        finally:
            self._ticker = None

    def _capacity_now(self) -> Capacity:
        now = self._clock()
        if now >= self._capacity_until:
            self._capacity, self._capacity_until = self._read_capacity(), now + TICK_SECONDS
        return self._capacity

    def _lacks(self) -> Callable[[Waiting], Need | None]:
        """The room that a waiting request lacks, until anything starts or ends."""
        capacity, gateways, holder = self._capacity_now(), self._gateways(), self._claim.holder
        shares, reserved = self._shares(), None if holder is None else self._started(holder, capacity)
        found: dict[Waiting, Need | None] = {}

        def lacks(waiting: Waiting) -> Need | None:
            if waiting not in found:
                asked = self._started(waiting, capacity)
                found[waiting] = self._room.lacks(
                    asked, capacity, gateways, shares, None if waiting is holder else reserved
                )
            return found[waiting]

        return lacks

    def _start_what_may(self) -> None:
        while self._queue.length and (waiting := self._next()) is not None:
            admission = self._admissions[waiting]
            admission.started = self._started(waiting, self._capacity_now())
            self._room.add(admission.started)
            admission.decided.set()
            self._note_start(admission)

    def _next(self) -> Waiting | None:
        """Take the request that starts next: the one with a claim if it fits, or one whose turn it is."""
        claims, now, lacks = self._claim, self._clock(), self._lacks()
        if (held := claims.holder) is not None and lacks(held) not in (None, "decode"):
            claims.end(held, now)
            lacks = self._lacks()
        if claims.holder is None and self._choose_claim(lacks, now):
            lacks = self._lacks()
        if (held := claims.holder) is None or lacks(held) is not None:
            return self._queue.next(lacks)
        self._queue.take(held)
        claims.end(held, now)
        return held

    def _choose_claim(self, lacks: Callable[[Waiting], Need | None], now: float) -> bool:
        capacity, gateways, shares = self._capacity_now(), self._gateways(), self._shares()

        def is_within_share(waiting: Waiting) -> bool:
            return self._room.is_within_share(self._started(waiting, capacity), capacity, gateways, shares)

        patience = min(PATIENCE_SECONDS, self.request_timeout_seconds * PATIENCE_SHARE_OF_TIMEOUT)
        return self._claim.choose(self._queue.heads(), lacks, is_within_share, patience, now)

    def _shares(self) -> Shares:
        is_alone = len(self._weights) == 1 and self._clock() >= self._alone_from
        return Shares(self._weights, is_alone=is_alone)

    def _started(self, waiting: Waiting, capacity: Capacity) -> Started:
        size = self._admissions[waiting].size
        return Started(
            waiting.tenant,
            waiting.lane,
            size.first_token_seconds(capacity),
            size.decode_share(capacity),
            size.first_pods(capacity),
        )

    def _dequeue(self, waiting: Waiting) -> None:
        self._queue.remove(waiting)
        self._claim.end(waiting, self._clock())

    def _note_start(self, admission: Admission) -> None:
        now, known, seconds = time.time(), admission.known, admission.waiting.work_seconds
        admission.timeline.at_gateway = "placement"
        known.usage.begin_work(seconds, self._clock())
        known.usage.tokens.add(admission.size.all_prompt_tokens)
        self._metrics.queue_seconds.labels(known.tenant.priority).observe(max(0.0, now - admission.asked_at))
        self._metrics.tenant_work.labels(self._access.label_of(known)).inc(seconds)
        if now - admission.asked_at > NOTED_SECONDS:
            admission.timeline.add("gateway", [Phase("admission", admission.asked_at, now)])

    def _refuse(self, waiting: Waiting, error: OverloadedError) -> None:
        admission = self._admissions[waiting]
        admission.error = error
        self._dequeue(waiting)
        self._gone(waiting.tenant)
        self.leaving += 1
        self._metrics.refused_waiting.labels("tenant" if error.status == 429 else "deployment").inc()
        admission.decided.set()

    def _gone(self, tenant: str) -> None:
        self._here[tenant] -= 1
        if not self._here[tenant]:
            del self._here[tenant], self._weights[tenant]
            if self._here:
                self._alone_from = self._clock() + NEWCOMER_SECONDS

    def _too_much(self, excess: Waiting) -> OverloadedError:
        """429 where its tenant has more waiting than its share of the queue, 503 where tenants have no more than theirs."""
        name, tenants, queue = excess.tenant, self._queue.tenants(), self._queue
        part = tenants[name] / sum(tenants.values())
        own, whole, most = queue.work_seconds(name), queue.work_seconds(), self.max_seconds()
        unit, form, over = "s of work", ".3g", own - excess.work_seconds > part * most
        if queue.num_bytes() > self.max_bytes:
            own, whole, most = queue.num_bytes(name), queue.num_bytes(), self.max_bytes
            unit, form, over = "bytes", ".0f", own - excess.num_bytes > part * most
        seconds = self._retry_seconds(name)
        if over and len(tenants) > 1:
            return TooManyRequestsError(
                f"tenant {name} has {own:{form}} {unit} waiting, and its share of the gateway's queue is {part * most:{form}} while {len(tenants)} "
                f"tenants wait; retry in {math.ceil(seconds)} s, or send less at once",
                retry_after_seconds=seconds,
            )
        return OverloadedError(
            f"{whole:{form}} {unit} would wait, and the gateway's queue takes {most:{form}}; retry in {math.ceil(seconds)} s, or add replicas",
            retry_after_seconds=seconds,
        )

    def _retry_seconds(self, tenant: str) -> float:
        """Until the present backlog of a tenant has started, at its share of what one of the gateways gets."""
        tenants = self._queue.tenants()
        part = tenants[tenant] / sum(tenants.values()) if tenant in tenants else 1.0
        seconds = self._queue.work_seconds(tenant) * self._gateways() / part
        return min(MAX_RETRY_SECONDS, max(1.0, seconds))
