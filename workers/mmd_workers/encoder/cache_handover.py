"""Hands the cache of a draining encoder over to the encoders that remain, within limits of time and bytes.

All remaining encoders get the list of features, hottest first, and answer which they have and which they would take. Each feature that
none has goes to an encoder that would take it. Encoders never give up hotter features, and nothing depends on the hand-over: a feature
that does not arrive is encoded again.
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

MOST_FEATURES = 512  # limit of features that one encoder hands over
MOST_BYTES = 1 << 30
MOST_ENCODERS = 32  # limit of encoders that get the offer
MOST_EXPECTED = 4096  # limit of features that an encoder waits for, from all draining encoders
SENT_AT_ONCE = 4
IN_FLIGHT_BYTES = 64 << 20  # on top of the receiving encoder's cache; a larger feature comes alone
REPLY_SECONDS = 2.0
MOST_SECONDS = 30.0
DRAIN_SHARE = 0.25  # fraction of the time that the pod has to drain


def seconds_of(drain_seconds: float) -> float:
    """The time limit of a hand-over during a drain."""
    return min(MOST_SECONDS, DRAIN_SHARE * drain_seconds)


# --- the encoder that remains -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Expected:
    modality: Modality
    heat_seconds: float
    until: float  # time.monotonic


class FeatureTaker:
    """Takes features of draining encoders into the cache."""

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
        """Answer draining encoders from now on."""
        await self._receiver.start()
        await self._bus.serve(self._bus.subjects.features_given(self._pod), FeaturesGiven, self._given)

    async def close(self) -> None:
        """Stop taking features."""
        await self._receiver.close()

    async def _given(self, given: FeaturesGiven) -> FeaturesWanted:
        now = time.monotonic()
        self._expected = {name: expected for name, expected in self._expected.items() if expected.until > now}
        held_ids, wanted_ids, num_bytes, room = list[str](), list[str](), 0, self._cache.room()
        for feature in given.features[:MOST_FEATURES]:
            if feature.feature_id in self._cache:
                held_ids.append(feature.feature_id)
                continue
            if self._draining() or feature.num_bytes < 0 or len(self._expected) >= MOST_EXPECTED:
                continue
            if num_bytes + feature.num_bytes <= room.bytes_for(feature.heat_seconds):
                num_bytes += feature.num_bytes
                wanted_ids.append(feature.feature_id)
                until = now + min(given.seconds, MOST_SECONDS)
                self._expected[feature.feature_id] = _Expected(feature.modality, feature.heat_seconds, until)
        return FeaturesWanted(held_ids, wanted_ids)

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
    """Give the hottest features to `encoders`, for at most `seconds`; returns the number of features by outcome."""
    started_at = time.monotonic()
    hottest = cache.hottest(MOST_FEATURES, MOST_BYTES)
    if not encoders or not hottest:
        return Counter()
    outcomes: dict[str, str] = {}
    try:
        async with asyncio.timeout(seconds):
            await _Giver(bus, hottest, encoders, seconds, outcomes).run()
    except TimeoutError:
        pass
    counts = Counter(outcomes.get(hot.feature_id, "late") for hot in hottest)
    sent_bytes = sum(hot.feature.num_bytes for hot in hottest if outcomes.get(hot.feature_id) == "sent")
    for outcome, count in counts.items():
        metrics.handed_over.labels(outcome).inc(count)
    metrics.transfer_bytes.labels("embedding", "sent").inc(sent_bytes)
    log.info(
        "handed over %d of %d cached features (%d bytes) to %d encoders in %.1f s: %s",
        *(counts["sent"], len(cache), sent_bytes, len(encoders), time.monotonic() - started_at),
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())),
    )
    return counts


class _Giver:
    """One hand-over. `outcomes` gets the outcome of each feature: sent, held (by an encoder that remains), refused, failed."""

    def __init__(
        self,
        bus: Bus,
        hottest: Sequence[Hot],
        encoders: Sequence[str],
        seconds: float,
        outcomes: dict[str, str],
    ) -> None:
        self._bus = bus
        self._hottest = hottest
        self._encoders = random.sample(encoders, min(MOST_ENCODERS, len(encoders)))
        self._seconds = seconds
        self._outcomes = outcomes
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
        """Each feature that no encoder has, with the willing encoder that gets the fewest bytes."""
        held_ids = {feature_id for answer in answers.values() for feature_id in answer.held}
        wanted_by_pod = {pod: set(answer.wanted) for pod, answer in answers.items()}
        num_bytes = dict.fromkeys(answers, 0)
        assigned = []
        for hot in self._hottest:
            pods = [pod for pod, wanted_ids in wanted_by_pod.items() if hot.feature_id in wanted_ids]
            if hot.feature_id in held_ids:
                self._outcomes[hot.feature_id] = "held"
            elif pods:
                pod = min(pods, key=num_bytes.__getitem__)
                num_bytes[pod] += hot.feature.num_bytes
                assigned.append((hot, pod))
            else:
                self._outcomes[hot.feature_id] = "refused"
        return assigned

    async def _send_each(self, jobs: Iterable[tuple[Hot, str]]) -> None:
        for hot, pod in jobs:
            try:
                outcome = await self._sender.send_to(
                    *(pod, hot.feature_id, self._deadline, buffers_of(hot.feature)),
                    subject=self._bus.subjects.feature_offer(pod),
                )
                self._outcomes[hot.feature_id] = "held" if outcome == "have" else outcome
            except MmdError as error:
                self._outcomes[hot.feature_id] = "failed"
                log.info("feature %s was not handed over to %s: %s", hot.feature_id[:16], pod, error.message)
