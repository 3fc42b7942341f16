"""What roles know of the engine that runs a pod's sequences. They do not know which engine it is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Modality
from mmd_workers.engine.interface import EngineStats, StepOutput
from mmd_workers.model.prompt import Feature, KvLayout
from mmd_workers.pod import Advertised, Part, Pod
from mmd_workers.wire.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class Added:
    """A sequence that the engine has: since when (Unix seconds), and the rotary position of its next token, for `attach`."""

    at: float
    next_position: int


class SequenceEngine(ABC):
    """Runs sequences, each under an id that its role chooses. What its steps did comes from `EngineHost.outputs`.

    Every method may raise EngineDeadError: the engine has ended, and the pod ends with it.
    """

    @property
    @abstractmethod
    def kv_layout(self) -> KvLayout:
        """Geometry of the KV that `read_kv` and `write_kv` move."""

    @abstractmethod
    def feature_bytes(self, modality: Modality, num_tokens: int) -> int:
        """Bytes of a feature of this many tokens, to reserve room before it is made."""

    @abstractmethod
    async def cached_tokens(self, sequence: str, request: GenerateRequest) -> int:
        """How many of the request's leading tokens have their KV in the prefix cache now. Changes nothing there.

        They may be evicted before the sequence is added and admitted: `StepOutput.admitted` has the number left.
        """

    @abstractmethod
    async def add(self, sequence: str, request: GenerateRequest, *, stop_after_prefill: bool) -> Added:
        """Queue a request, with the output tokens that it has already. Its features may follow by `fill`.

        With `stop_after_prefill` the engine samples one token, keeps the KV until `abort`, and reports in `StepOutput.kv_ready`
        which ranges `read_kv` may read.

        Raises:
            CapacityError: it can never fit into the context or the KV pool.
            GrammarFailedError: its grammar cannot be compiled, or its output tokens do not match it.
        """

    @abstractmethod
    async def fill(self, sequence: str, medium: int, feature: Feature) -> None:
        """Give a sequence the feature of one of its media; nothing happens if it no longer needs it.

        Raises:
            CountMismatchError: the feature has another number of tokens than the request's layout.
        """

    @abstractmethod
    async def abort(self, sequence: str) -> None:
        """Forget a sequence or reservation in any state and free what it holds; unknown ids are ignored. An engine that has ended holds
        nothing: it does not raise.
        """

    # --- KV -------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def read_kv(self, sequence: str, start: int, end: int) -> list[torch.Tensor]:
        """KV of the tokens [start, end): for each layer a contiguous [2, tokens, kv_heads, head_dim]."""

    @abstractmethod
    async def reserve(
        self, sequence: str, prompt_tokens: int, max_tokens: int, prefix: Sequence[bytes]
    ) -> int:
        """Hold blocks for `prompt_tokens` tokens whose KV will arrive by `write_kv`, and for the first of `max_tokens` more. `prefix`:
        identities of the leading whole blocks. Returns how many tokens have their KV in the prefix cache: the rest has to arrive.

        Raises:
            CapacityError: this can never fit.
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
        """Start decoding a reserved sequence whose KV has been written, but for the last of `output_token_ids`, whose rotary position
        is `next_position`.

        Raises:
            KeyError: nothing is reserved under this id.
            CountMismatchError: KV of some token has not been written. The reservation stays.
            GrammarFailedError: as for `add`. The reservation stays.
        """


class EngineHost(Part, ABC):
    """The part of a pod that makes an engine and reports its load."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._prefix_blocks: list[str] = []
        self._max_model_len = 0
        self.outputs: asyncio.Queue[StepOutput] = asyncio.Queue()  # bounded: the engine waits for `taken`
        self.stats: EngineStats | None = None  # as sampled last

    @property
    @abstractmethod
    def engine(self) -> SequenceEngine:
        """The engine, once it has started."""

    @abstractmethod
    def taken(self) -> None:
        """One of `outputs` has been dealt with."""

    @abstractmethod
    async def _sampled(self) -> tuple[EngineStats, list[str]] | None:
        """The engine's figures and the identities of prefix blocks in its cache; None before it has started."""

    def load(self) -> PodLoad:
        """What the engine has to do, whichever role brought it."""
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
        """The longest request it takes, and prefix blocks in its cache."""
        return Advertised(max_model_len=self._max_model_len, prefix_blocks=self._prefix_blocks)

    async def sample(self) -> None:
        """Ask the engine for its figures."""
        if (sampled := await self._sampled()) is None:
            return
        before = self.stats
        stats, self._prefix_blocks = sampled
        self.stats = stats
        self._expose(stats, before)

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
        if "prefill" not in self._pod.roles:  # else that role counts what has not reached the engine, too
            metrics.prefill_waiting.labels("prefill").set(stats.waiting_tokens - stats.blocked_tokens)
            metrics.prefill_waiting.labels("encode").set(stats.blocked_tokens)
        for counter, name in (
            (metrics.preemptions, "preemptions"),
            (metrics.prefix_tokens.labels("hit"), "prefix_hit_tokens"),
            (metrics.prefix_tokens.labels("miss"), "prefix_miss_tokens"),
        ):
            counter.inc(getattr(stats, name) - (getattr(before, name) if before is not None else 0))
