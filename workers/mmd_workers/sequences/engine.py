"""The interface of roles to the engine that runs a pod's sequences. Roles do not know which engine it is."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Modality
from mmd_workers.caches.kinds import PREFIXES
from mmd_workers.caches.reports import MOST_AT_ONCE, CacheReports
from mmd_workers.engine.interface import EngineStats, StepOutput
from mmd_workers.engine.memory.cache_changes import CacheDelta
from mmd_workers.engine.scheduler import TEXT_SECONDS
from mmd_workers.model.prompt import Feature, KvLayout
from mmd_workers.process.pod import Advertised, Part, Pod
from mmd_workers.wire.messages.prefill import GenerateRequest


@dataclass(frozen=True, slots=True)
class Added:
    """When a sequence was added (Unix seconds), and the rotary position of its next token, for `attach`."""

    at: float
    next_position: int


class SequenceEngine(ABC):
    """Runs sequences, each under an id chosen by its role. The results of steps come from `EngineHost.outputs`.

    Every method may raise EngineDeadError: the engine has ended, and the pod ends with it.
    """

    @property
    @abstractmethod
    def kv_layout(self) -> KvLayout:
        """Geometry of the KV that `read_kv` and `write_kv` move."""

    @property
    @abstractmethod
    def keeps_features(self) -> bool:
        """Whether a sequence keeps its features to its end.

        Otherwise it has none of them after a token. If it is then preempted, `StepOutput.admitted` reports how many of its tokens need
        none, and the features of the others must come by `fill` again.
        """

    @abstractmethod
    def feature_bytes(self, modality: Modality, num_tokens: int) -> int:
        """Bytes of a feature of this many tokens, to reserve room before it is made."""

    @abstractmethod
    async def identities(self, sequence: str, request: GenerateRequest) -> list[bytes]:
        """Identities of the whole blocks of the request's tokens, as decoders and routers know them; empty without a prefix cache.

        They are hashed once, on another thread than the engine's, and kept for the sequence until `add` or `abort`.
        """

    @abstractmethod
    async def cached_tokens(self, sequence: str, request: GenerateRequest) -> int:
        """The number of the request's leading tokens with KV in the prefix cache now. Changes nothing there.

        They may be evicted before the sequence is added and admitted: `StepOutput.admitted` has the number that remains.
        """

    @abstractmethod
    async def add(
        self,
        sequence: str,
        request: GenerateRequest,
        *,
        stop_after_prefill: bool,
        features: Mapping[int, Feature] | None = None,
    ) -> Added:
        """Queue a request, with the output tokens that it already has.

        `features`: the features of its media that are here, by number; the others may follow by `fill`, each of which waits for the end of
        a step.

        With `stop_after_prefill` the engine samples one token, keeps the KV until `abort`, and reports in `StepOutput.kv_ready`
        which ranges `read_kv` may read.

        Raises:
            CapacityError: the request can never fit into the context or the KV pool.
            CountMismatchError: a feature has another number of tokens than the request's layout. The sequence is to be aborted.
            GrammarFailedError: its grammar cannot be compiled, or its output tokens do not match it.
        """

    @abstractmethod
    async def fill(self, sequence: str, medium: int, feature: Feature) -> None:
        """Give a sequence the feature of one of its media; nothing happens if the sequence no longer needs it.

        Raises:
            CountMismatchError: the feature has another number of tokens than the request's layout.
        """

    @abstractmethod
    def abort(self, *sequences: str) -> None:
        """Forget sequences and reservations in any state and free what they hold; unknown ids are ignored.

        Returns at once. All of them end together before the next step, and before any later command. Does not raise if the engine has
        ended: it then holds nothing.
        """

    # --- KV -------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def read_kv(self, sequence: str, start: int, end: int) -> list[torch.Tensor]:
        """KV of the tokens [start, end): for each layer a contiguous [2, tokens, kv_heads, head_dim]."""

    @abstractmethod
    async def reserve(
        self,
        sequence: str,
        prompt_tokens: int,
        max_tokens: int,
        prefix: Sequence[bytes],
        companion_tokens: int = 0,
    ) -> int:
        """Hold blocks for `prompt_tokens` tokens whose KV will arrive by `write_kv`, and for the first of `max_tokens` more.

        `prefix`: identities of the leading whole blocks. `companion_tokens`: tokens of a companion, which is computed here from `attach` on;
        0: there is no companion. Returns how many tokens have their KV in the prefix cache: the rest has to arrive.

        Raises:
            CapacityError: the blocks can never fit.
            OverloadedError: no blocks or no place for a sequence now.
        """

    @abstractmethod
    async def write_kv(self, sequence: str, start: int, tensors: list[torch.Tensor]) -> None:
        """Write KV of the tokens from `start` on (the layout of `read_kv`) to reserved blocks; ranges come in order.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: a gap, more tokens than reserved, or another model's geometry.
        """

    @abstractmethod
    async def attach(
        self, sequence: str, request: GenerateRequest, output_token_ids: list[int], next_position: int
    ) -> None:
        """Start decoding a reserved sequence after its KV has been written.

        Only the last of `output_token_ids` has no KV yet; its rotary position is `next_position`.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: KV of some token has not been written. The reservation stays.
            GrammarFailedError: as for `add`. The reservation stays.
        """


class EngineHost(Part, ABC):
    """The part of a pod that creates an engine and reports its load."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._cache_reports = CacheReports(pod, PREFIXES, pod.spec.decode.kv_block_tokens)
        self._max_model_len = 0
        self.outputs: asyncio.Queue[StepOutput] = asyncio.Queue()  # bounded: the engine waits for `taken`
        self.stats: EngineStats | None = None  # the latest sample
        self.sampled_at = 0.0  # Unix seconds; `stats` cover what the engine was given before
        self.worked_at = -math.inf  # time.monotonic of the last sample that showed sequences

    @property
    @abstractmethod
    def engine(self) -> SequenceEngine:
        """The engine, once it has started."""

    @abstractmethod
    def taken(self) -> None:
        """Note that one of `outputs` has been processed."""

    @abstractmethod
    async def _sampled(self, most_identities: int, *, again: bool) -> tuple[EngineStats, CacheDelta] | None:
        """The engine's figures, and the changes of its prefix cache; None before the engine has started.

        The changes have at most `most_identities` identities, and begin with the whole content if `again`.
        """

    def somebody_waits(self) -> bool:
        """Whether anyone waits for the end of a step, which other computation here would delay."""
        waits = self.stats is not None and self.stats.somebody_waits
        return waits and time.monotonic() - self.worked_at < TEXT_SECONDS  # an idle engine counts no time

    def load(self) -> PodLoad:
        """The engine's load, whichever role brought it."""
        if (stats := self.stats) is None:
            return PodLoad()
        return PodLoad(
            prefill_waiting_tokens=stats.waiting_tokens,
            prefill_blocked_tokens=stats.blocked_tokens,
            prefill_tokens_per_second=stats.prefill_tokens_per_second,
            decode_running=stats.running_sequences,
            decode_waiting=stats.waiting_sequences,
            decode_max_sequences=stats.max_sequences,
            kv_blocks_total=stats.blocks_total,
            kv_blocks_free=stats.blocks_free,
            kv_blocks_reserved=stats.blocks_reserved,
            kv_block_tokens=stats.block_tokens,
            itl_seconds=stats.itl_seconds,
        )

    def advertised(self) -> Advertised:
        """The longest request that the engine takes, and the number of its newest prefix cache report."""
        return Advertised(max_model_len=self._max_model_len, prefix_number=self._cache_reports.number)

    async def accept(self) -> None:
        """Report the prefix cache to gateways that ask."""
        await self._cache_reports.start()

    async def sample(self) -> None:
        """Ask the engine for its figures, and report changes of its prefix cache."""
        asked_at = time.time()
        sampled = await self._sampled(MOST_AT_ONCE, again=self._cache_reports.take_wanted())
        if sampled is None:
            return
        before = self.stats
        stats, delta = sampled
        self.stats, self.sampled_at = stats, asked_at
        # Whether prompts came since the last sample; they may have ended already.
        had_prompts = before is not None and stats.prefix_miss_tokens != before.prefix_miss_tokens
        if stats.waiting_sequences or stats.running_sequences or had_prompts:
            self.worked_at = time.monotonic()
        self._expose(stats, before)
        await self._cache_reports.publish(delta)

    def _expose(self, stats: EngineStats, before: EngineStats | None) -> None:
        metrics = self._pod.metrics
        used = stats.blocks_total - stats.blocks_free - stats.blocks_reserved
        blocks = {"free": stats.blocks_free, "reserved": stats.blocks_reserved, "used": used}
        for state, count in blocks.items():
            metrics.kv_blocks.labels(state).set(count)
        sequences = {
            "waiting": stats.waiting_sequences,
            "running": stats.running_sequences,
            "held": stats.held_sequences,
            "reserved": stats.reserved_sequences,
        }
        for state, count in sequences.items():
            metrics.sequences.labels(state).set(count)
        metrics.max_sequences.set(stats.max_sequences)
        metrics.media_step_tokens.set(stats.media_step_tokens)
        if "prefill" not in self._pod.roles:  # the prefill role also counts what has not reached the engine
            metrics.prefill_waiting.labels("prefill").set(stats.waiting_tokens - stats.blocked_tokens)
            metrics.prefill_waiting.labels("encode").set(stats.blocked_tokens)
        for counter, name in (
            (metrics.preemptions, "preemptions"),
            (metrics.prefix_tokens.labels("hit"), "prefix_hit_tokens"),
            (metrics.prefix_tokens.labels("miss"), "prefix_miss_tokens"),
            (metrics.draft_tokens, "draft_tokens"),
            (metrics.accepted_draft_tokens, "accepted_tokens"),
        ):
            counter.inc(getattr(stats, name) - (getattr(before, name) if before is not None else 0))
