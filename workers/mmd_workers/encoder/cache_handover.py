"""What an encoder that drains has in its cache goes to those that remain, within a time and a number of bytes.

All remaining encoders hear what there is, hottest first, and answer what they have and what they would take. Each feature that none has goes
to one that would take it. They never give up what is hotter, and nothing depends on the hand-over: what does not arrive is encoded again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mmd_api.contract.errors import MmdError
from mmd_api.contract.pools import Modality
from mmd_workers.features.cache import FeatureCache, Hot
from mmd_workers.features.tensors import buffers_of, feature_of
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.embedding_receiver import EmbeddingReceiver
from mmd_workers.wire.embedding_sender import EmbeddingSender
from mmd_workers.wire.messages.encoder import FeaturesGiven, FeaturesWanted, GivenFeature
from mmd_workers.wire.messages.message_parts import TensorHeader

log = logging.getLogger(__name__)

MOST_FEATURES = 512  # that one encoder hands over
MOST_BYTES = 1 << 30
MOST_ENCODERS = 32  # that it offers them to
MOST_EXPECTED = 4096  # features that an encoder waits for, of all that drain
SENT_AT_ONCE = 4
IN_FLIGHT_BYTES = (
    64 << 20
)  # on top of the cache of an encoder that takes features; a larger feature comes alone
REPLY_SECONDS = 2.0
MOST_SECONDS = 30.0
DRAIN_SHARE = 0.25  # of the time that the pod has to drain


def seconds_of(drain_seconds: float) -> float:
    """How long a hand-over may take of a drain."""
    return min(MOST_SECONDS, DRAIN_SHARE * drain_seconds)


# --- the encoder that remains -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Expected:
    modality: Modality
    heat_seconds: float
    until: float  # time.monotonic


class FeatureTaker:
    """Takes features of encoders that drain into the cache."""

    def __init__(self, bus: Bus, pod: str, cache: FeatureCache, draining: Callable[[], bool]) -> None:
        self._bus = bus
        self._pod = pod
        self._cache = cache
        self._draining = draining
        self._expected: dict[str, _Expected] = {}
        budget = min(IN_FLIGHT_BYTES, cache.budget_bytes)
        self._receiver = EmbeddingReceiver(
            *(bus, pod, budget, self._verdict, self._arrived),
            subject=bus.subjects.feature_offer(pod),
            largest_bytes=cache.budget_bytes,
        )

    async def start(self) -> None:
        """Answer encoders that drain, from now on."""
        await self._receiver.start()
        await self._bus.serve(self._bus.subjects.features_given(self._pod), FeaturesGiven, self._given)

    async def close(self) -> None:
        """Take nothing more."""
        await self._receiver.close()

    async def _given(self, given: FeaturesGiven) -> FeaturesWanted:
        now = time.monotonic()
        self._expected = {name: one for name, one in self._expected.items() if one.until > now}
        held, wanted, num_bytes, room = list[str](), list[str](), 0, self._cache.room()
        for feature in given.features[:MOST_FEATURES]:
            if feature.feature_id in self._cache:
                held.append(feature.feature_id)
                continue
            if self._draining() or feature.num_bytes < 0 or len(self._expected) >= MOST_EXPECTED:
                continue
            if num_bytes + feature.num_bytes <= room.bytes_for(feature.heat_seconds):
                num_bytes += feature.num_bytes
                wanted.append(feature.feature_id)
                until = now + min(given.seconds, MOST_SECONDS)
                self._expected[feature.feature_id] = _Expected(feature.modality, feature.heat_seconds, until)
        return FeaturesWanted(held, wanted)

    def _verdict(self, feature_id: str, num_bytes: int) -> Literal["send", "have", "refuse"]:
        if feature_id in self._cache:
            return "have"
        expected = self._expected.get(feature_id)
        if (
            expected is None
            or self._draining()
            or not self._cache.has_room_for(num_bytes, expected.heat_seconds)
        ):
            return "refuse"
        return "send"

    def _arrived(
        self, feature_id: str, headers: list[TensorHeader], data: memoryview, _: dict[str, float]
    ) -> None:
        if (expected := self._expected.pop(feature_id, None)) is not None:
            feature = feature_of(expected.modality, headers, data)
            self._cache.put_handed_over(feature_id, feature, expected.heat_seconds)


# --- the encoder that drains --------------------------------------------------------------------------------------


async def hand_over(
    bus: Bus, cache: FeatureCache, encoders: Sequence[str], seconds: float, metrics: Metrics
) -> Counter[str]:
    """Give the hottest features to `encoders`, for at most `seconds`; how many came to which end."""
    begun = time.monotonic()
    hottest = cache.hottest(MOST_FEATURES, MOST_BYTES)
    if not encoders or not hottest:
        return Counter()
    ends: dict[str, str] = {}
    try:
        async with asyncio.timeout(seconds):
            await _Giver(bus, hottest, encoders, seconds, ends).run()
    except TimeoutError:
        pass
    counts = Counter(ends.get(hot.feature_id, "late") for hot in hottest)
    sent_bytes = sum(hot.feature.num_bytes for hot in hottest if ends.get(hot.feature_id) == "sent")
    for end, count in counts.items():
        metrics.handed_over.labels(end).inc(count)
    metrics.transfer_bytes.labels("embedding", "sent").inc(sent_bytes)
    log.info(
        "handed over %d of %d cached features (%d bytes) to %d encoders in %.1f s: %s",
        *(counts["sent"], len(cache), sent_bytes, len(encoders), time.monotonic() - begun),
        ", ".join(f"{count} {end}" for end, count in sorted(counts.items())),
    )
    return counts


class _Giver:
    """One hand-over. `ends` gets what became of each feature: sent, held (by an encoder that remains), refused, failed."""

    def __init__(
        self, bus: Bus, hottest: Sequence[Hot], encoders: Sequence[str], seconds: float, ends: dict[str, str]
    ) -> None:
        self._bus = bus
        self._hottest = hottest
        self._encoders = random.sample(encoders, min(MOST_ENCODERS, len(encoders)))
        self._seconds = seconds
        self._ends = ends
        self._sender = EmbeddingSender(bus)
        self._deadline = time.time() + seconds

    async def run(self) -> None:
        features = [
            GivenFeature(hot.feature_id, hot.feature.modality, hot.feature.num_bytes, hot.heat_seconds)
            for hot in self._hottest
        ]
        given = FeaturesGiven(self._bus.client_name, features, self._seconds)
        answers = await asyncio.gather(*(self._offer(pod, given) for pod in self._encoders))
        jobs = iter(self._assigned(dict(zip(self._encoders, answers, strict=True))))
        async with asyncio.TaskGroup() as group:
            for _ in range(SENT_AT_ONCE):
                group.create_task(self._send_each(jobs))

    async def _offer(self, pod: str, given: FeaturesGiven) -> FeaturesWanted:
        try:
            subject = self._bus.subjects.features_given(pod)
            return await self._bus.request(subject, given, FeaturesWanted, timeout=REPLY_SECONDS)
        except MmdError as error:
            log.info("%s takes no features: %s", pod, error.message)
            return FeaturesWanted([], [])

    def _assigned(self, answers: dict[str, FeaturesWanted]) -> list[tuple[Hot, str]]:
        """Each feature that none has, with the one of those that would take it which gets the fewest bytes."""
        held = {feature_id for answer in answers.values() for feature_id in answer.held}
        wanting = {pod: set(answer.wanted) for pod, answer in answers.items()}
        num_bytes = dict.fromkeys(answers, 0)
        assigned = []
        for hot in self._hottest:
            pods = [pod for pod, wanted in wanting.items() if hot.feature_id in wanted]
            if hot.feature_id in held:
                self._ends[hot.feature_id] = "held"
            elif pods:
                pod = min(pods, key=num_bytes.__getitem__)
                num_bytes[pod] += hot.feature.num_bytes
                assigned.append((hot, pod))
            else:
                self._ends[hot.feature_id] = "refused"
        return assigned

    async def _send_each(self, jobs: Iterable[tuple[Hot, str]]) -> None:
        for hot, pod in jobs:
            try:
                sent = await self._sender.send_to(
                    *(pod, hot.feature_id, self._deadline, buffers_of(hot.feature)),
                    subject=self._bus.subjects.feature_offer(pod),
                )
                self._ends[hot.feature_id] = "held" if sent == "have" else sent
            except MmdError as error:
                self._ends[hot.feature_id] = "failed"
                log.info("feature %s was not handed over to %s: %s", hot.feature_id[:16], pod, error.message)
