"""Places the requests of `mmd simulate` with the gateway's own router, over heartbeats of the simulated pods.

The router knows what it would know in a cluster: loads as of the last heartbeat, its own placements since,
and reported changes of prefix caches, which are those of real block pools.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmd_api.contract.errors import OverloadedError
from mmd_api.contract.pools import MODALITIES, POOL_NAMES
from mmd_api.pipeline import encodes_small_media
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.placing import PlacedAt
from mmd_operator.simulate.telemetry import REVISION, Telemetry
from mmd_operator.simulate.traces import Trace
from mmd_workers.engine.memory.blocks import BlockPool
from mmd_workers.gateway.placement.router import (
    EMBEDDING_SECONDS_PER_TOKEN,
    FeatureNeed,
    Placement,
    PlacementLimits,
    Router,
    RouteRequest,
)
from mmd_workers.wire.messages.every_pod import CacheReport, Heartbeat

HEARTBEAT_SECONDS = 0.5
MOST_REPORTED_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True)
class SimulatedPrompt:
    """The part of a prompt that requests may share.

    `blocks`: identities of its leading whole blocks. `media_tokens`: how many of its first tokens hold all of
    its media.
    """

    blocks: Sequence[bytes] = ()
    media_tokens: int = 0


class SimulatedRouter:
    """Places the requests of one run."""

    def __init__(
        self,
        spec: MultimodalDeploymentSpec,
        trace: Trace,
        calibration: Calibration,
        prompts: Callable[[int], SimulatedPrompt] = lambda _: SimulatedPrompt(),
        router: Callable[[str, PlacementLimits, random.Random], Router] = Router,
    ) -> None:
        """`prompts`: the prompt of a request, by its number; by default no two have anything in common.

        `router`: another policy, to compare with.
        """
        # Prefill pods compute all prompts here.
        limits = replace(PlacementLimits.of(spec), local_prefill_tokens=0)
        self.router = router(REVISION, limits, random.Random(0))  # noqa: S311 - the same trace gives the same run
        self._spec = spec
        self._prompts = prompts
        self._context: list[int] = trace.context_tokens.tolist()
        self._output: list[int] = trace.output_tokens.tolist()
        self._media: list[tuple[int, ...]] = list(
            zip(*(trace.media[modality].tolist() for modality in MODALITIES), strict=True)
        )
        self._work = {modality: round(calibration.media[modality]) for modality in MODALITIES}
        self._medium_tokens = round(calibration.transfer.seconds_per_medium / EMBEDDING_SECONDS_PER_TOKEN)
        self._block_tokens: int = spec.decode.kv_block_tokens
        self._kv_blocks = calibration.decode.kv_blocks
        self._caches: dict[str, BlockPool] = {}
        self._reports: dict[str, int] = {}
        self._placed: dict[int, tuple[Placement, float]] = {}
        self._computing: dict[int, tuple[str, list[int]]] = {}  # pod and blocks of each prompt
        self.beats: list[Heartbeat] = []
        self._newest: dict[str, Heartbeat] = {}
        self._heartbeats_at = float("-inf")

    # --- called by the model of the pipeline --------------------------------------------------------------------------

    def place(self, now: float, request: int, telemetry: Telemetry) -> PlacedAt | None:
        """Place a request; None if the router places it nowhere."""
        if now - self._heartbeats_at >= HEARTBEAT_SECONDS:
            self._heartbeats_at = now
            self.beats = self._heartbeats(now, telemetry)
            self.router.waiting_encode_work = telemetry.waiting_encode_work()
            self._newest = {beat.pod: beat for beat in self.beats}
            self._forget_pods_that_left()
            self._report()
        outcome = self.router.route(self._route_request(request), self.beats, now)
        if not isinstance(outcome, Placement):
            return None
        self.router.confirm(outcome, self._newest.get)
        self._placed[request] = outcome, now
        pod, prompt = outcome.prefill_pod, self._prompts(request)
        cached = self._cached_tokens(pod, request)
        needs_media = not 0 < prompt.media_tokens <= cached
        return PlacedAt(pod, outcome.decode_pods, needs_media, outcome.encode_here)

    def begin(self, pod: str, request: int) -> int:
        """Take the blocks of a prompt: its cached ones, and new ones for the rest if there are enough.

        Returns the number of cached tokens.
        """
        cache, identities = self._cache(pod), self._prompts(request).blocks
        cached = cache.find(identities)
        cache.share(cached)
        try:
            new = cache.allocate(len(identities) - len(cached))
        except OverloadedError:
            # Prompts that share nothing take no blocks: room for them is not modelled here.
            new = []
        self._computing[request] = pod, [*cached, *new]
        return len(cached) * self._block_tokens

    def computed(self, now: float, pod: str, request: int) -> None:
        """Register the blocks, and let the router learn from the outcome."""
        cache, (_, blocks) = self._cache(pod), self._computing.pop(request)
        for block, identity in zip(blocks, self._prompts(request).blocks, strict=False):
            cache.register(block, identity)
        cache.release(blocks)
        placement, placed_at = self._placed.pop(request)
        self.router.learn(placement, now - placed_at)

    def pods_changed(self) -> None:
        """Take new heartbeats at the next placement, so that a changed state does not wait."""
        self._heartbeats_at = float("-inf")

    # --- parts --------------------------------------------------------------------------------------------------------

    def _route_request(self, request: int) -> RouteRequest:
        end = self._prompts(request).media_tokens or math.inf
        features = tuple(
            FeatureNeed(
                f"{request}-{modality}-{number}", modality, self._work[modality], self._medium_tokens, end
            )
            for modality, count in zip(MODALITIES, self._media[request], strict=True)
            for number in range(count)
        )
        blocks = self._prompts(request).blocks
        prefix = {self._block_tokens: blocks} if blocks else {}
        return RouteRequest(str(request), self._context[request], self._output[request], features, prefix)

    def _heartbeats(self, now: float, telemetry: Telemetry) -> list[Heartbeat]:
        return [
            Heartbeat(
                pod=name,
                pool=pool,
                roles=list(roles),
                incarnation="simulated",
                revision=REVISION,
                state="ready",
                http_endpoint="",
                sent=now,
                load=load,
                encodes_small_media=encodes_small_media(self._spec, pool),
            )
            for pool in POOL_NAMES
            if pool in telemetry.policy.pools
            for name, roles, load in telemetry.ready_loads(pool)
        ]

    def _forget_pods_that_left(self) -> None:
        """Forget pods that take no more requests, as a gateway does.

        Their caches are forgotten once they compute nothing.
        """
        ready, computing = {beat.pod for beat in self.beats}, {pod for pod, _ in self._computing.values()}
        for name in self._reports.keys() - ready:
            self.router.index.forget(name)
            del self._reports[name]
        for name in self._caches.keys() - ready - computing:
            del self._caches[name]

    def _report(self) -> None:
        """Report what prefix caches have gained and lost since the last heartbeats."""
        for beat in self.beats:
            if (cache := self._caches.get(name := beat.pod)) is None:
                continue
            delta = cache.changes.take(MOST_REPORTED_AT_ONCE)
            if not delta.empty:
                self._reports[name] = number = self._reports.get(name, 0) + 1
                self.router.index.take(
                    CacheReport(name, "simulated", number, self._block_tokens, delta.added, delta.evicted)
                )

    def _cache(self, pod: str) -> BlockPool:
        if (cache := self._caches.get(pod)) is None:
            cache = self._caches[pod] = BlockPool(self._kv_blocks, self._block_tokens)
        return cache

    def _cached_tokens(self, pod: str, request: int) -> int:
        return len(self._cache(pod).find(self._prompts(request).blocks)) * self._block_tokens
