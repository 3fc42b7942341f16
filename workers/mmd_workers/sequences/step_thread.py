"""The common base of engines that are stepped on a thread, as parts of a pod. They take the same commands between two steps."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from mmd_workers.engine.interface import EngineStats
from mmd_workers.engine.memory.cache_changes import CacheChanges, CacheDelta
from mmd_workers.engine.pacing.cpu_turns import Turns
from mmd_workers.engine.runner import EngineRunner, Stepped
from mmd_workers.model.grammar import Constraint, Grammars
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.server import Progress
from mmd_workers.process.pod import LIVENESS_SECONDS, Pod
from mmd_workers.process.warmup import LIMIT_SECONDS, warm_up
from mmd_workers.sequences.engine import EngineHost, SequenceEngine
from mmd_workers.sequences.prefixes import prefix_of
from mmd_workers.wire.messages.prefill import GenerateRequest


class Reporting(Stepped, Protocol):
    """An engine that a host runs; it reports its load and the content of its prefix cache."""

    def warm_up(self) -> None:
        """Run a chunk of prefill and a step of decode, and keep nothing of it."""
        ...

    def stats(self) -> EngineStats:
        """The engine's present load."""
        ...

    @property
    def prefix_changes(self) -> CacheChanges:
        """The changes of the prefix cache, for locality in routing."""
        ...


class SteppedEngine(SequenceEngine):
    """Commands that need no translation. Each runs on the engine's thread, between two steps."""

    def __init__(
        self, runner: EngineRunner[Any], grammars: Grammars, *, bidirectional_prompt: bool = False
    ) -> None:
        """`grammars`: grammars over the model's tokenizer. `bidirectional_prompt`: all tokens of a prompt see one another."""
        self._runner = runner
        self._grammars = grammars
        self._bidirectional_prompt = bidirectional_prompt
        self._identities: dict[str, list[bytes]] = {}  # a sequence has them until it is added or attached

    @abstractmethod
    def _identity_tokens(self, engine: Any) -> int:
        """Return the tokens per block whose identity is exchanged; 0: the engine has no prefix cache."""

    def _hashed(
        self,
        engine: Any,
        request: GenerateRequest,
        output_token_ids: Sequence[int],
        leading: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Return the identities of all whole blocks of these tokens. `leading`: those that the offer of the KV brought."""
        if not (block_tokens := self._identity_tokens(engine)):
            return []
        return prefix_of(
            request,
            block_tokens,
            bidirectional_prompt=self._bidirectional_prompt,
            output_token_ids=output_token_ids,
            leading=leading,
        )

    async def identities(self, sequence: str, request: GenerateRequest) -> list[bytes]:
        """Hash beside the engine, unless that is done."""
        if (identities := self._identities.get(sequence)) is None:
            identities = self._identities[sequence] = await self._runner.aside(
                lambda engine: self._hashed(engine, request, request.output_token_ids)
            )
        return identities

    async def _constraint(
        self, request: GenerateRequest, output_token_ids: Sequence[int]
    ) -> Constraint | None:
        """Follow the request's grammar to the end of its output so far, on other threads than the engine's.

        Raises:
            GrammarFailedError: the grammar cannot be compiled, or the tokens do not match it.
        """
        if (grammar := request.sampling.grammar) is None:
            return None
        return await self._grammars.begin_aside(grammar, output_token_ids)

    async def fill(self, sequence: str, medium: int, feature: Feature) -> None:
        """Put the feature where the model takes it from."""
        await self._runner.call(lambda engine: engine.fill(sequence, medium, feature))

    def abort(self, *sequences: str) -> None:
        """Free the blocks of all sequences in one command. If that fails for one of them, the others are freed nevertheless."""
        for sequence in sequences:
            self._identities.pop(sequence, None)

        def end(engine: Any) -> None:
            with ExitStack() as ends:
                for sequence in sequences:
                    ends.callback(engine.abort, sequence)

        self._runner.post(end)

    async def read_kv(self, sequence: str, start: int, end: int) -> list[torch.Tensor]:
        """Copy the range, on the engine's device."""
        read: list[torch.Tensor] = await self._runner.call(
            lambda engine: engine.read_kv(sequence, start, end)
        )
        return read

    async def reserve(
        self,
        sequence: str,
        prompt_tokens: int,
        max_tokens: int,
        prefix: Sequence[bytes],
        companion_tokens: int = 0,
    ) -> int:
        """Take blocks from the pool, and share those of the prefix cache."""
        cached: int = await self._runner.call(
            lambda engine: engine.reserve(sequence, prompt_tokens, max_tokens, prefix, companion_tokens)
        )
        self._identities[sequence] = list(prefix)
        return cached

    async def write_kv(self, sequence: str, start: int, tensors: list[torch.Tensor]) -> None:
        """Write to the reserved blocks."""
        await self._runner.call(lambda engine: engine.write_kv(sequence, start, tensors))


class SteppedHost(EngineHost):
    """Runs an engine on a thread of its own."""

    def __init__(self, pod: Pod, device: torch.device) -> None:
        super().__init__(pod)
        self._device = device
        self._runner: EngineRunner[Any] | None = None

    def _run(self, engine: Reporting) -> EngineRunner[Any]:
        """Start the thread."""
        file = self._pod.settings.turns if self._device.type == "cpu" else ""
        turns = Turns(Path(file)) if file else None
        self._runner = EngineRunner(engine, self.outputs.put_nowait, self._pod.tasks.failed, turns)
        self._runner.start()
        return self._runner

    async def warm_up(self) -> None:
        """Run the computations that sequences will need."""
        await warm_up(
            {"engine": self._warm_up_engine}, self._pod.startup, self._device, self._warm_up_limit_seconds()
        )

    def _warm_up_limit_seconds(self) -> float:
        return LIMIT_SECONDS

    async def _warm_up_engine(self) -> None:
        assert self._runner is not None
        await self._runner.call(lambda engine: engine.warm_up())

    def taken(self) -> None:
        """Let the thread post one more output."""
        assert self._runner is not None
        self._runner.taken()

    async def _sampled(self, most_identities: int, *, again: bool) -> tuple[EngineStats, CacheDelta] | None:
        if self._runner is None:
            return None

        def look(engine: Reporting) -> tuple[EngineStats, CacheDelta]:
            if again:
                engine.prefix_changes.restart()
            return engine.stats(), engine.prefix_changes.take(most_identities)

        return await self._runner.call(look)

    async def stop(self) -> None:
        """End the engine's thread after its current step."""
        if self._runner is not None:
            await self._runner.stop(5.0)

    def progress(self) -> dict[str, Progress]:
        """The progress of the engine's loop."""
        if (runner := self._runner) is None:
            return {}
        return {"engine": Progress(lambda: time.monotonic() - runner.last_progress, LIVENESS_SECONDS)}
