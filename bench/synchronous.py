"""In the pods of a bench alone: media are encoded between two steps of the engine, one after the other, and it makes no step meanwhile. That is
the baseline of the articles in `docs/articles.md`: a server that has no encoder beside its language model.

`bench.mixes` has it imported by what forks the pods of a deployment (`mmd_cli.local.engines.Interpreter.imported`); nothing else does. The
threads and the batches of an encoder pod are left unused: decode, processing and tower run for one medium, while the engine's thread waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, cast

from bench import no_overlap  # noqa: F401 -- nothing of a request is given to the language model before its media
from mmd_workers.encoder.local_source import LocalSource
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.features.source import FeatureSource
from mmd_workers.features.store import FeatureStore
from mmd_workers.model.prompt import Feature
from mmd_workers.prefill.prefill_role import PrefillRole
from mmd_workers.sequences.native import NativeEngine
from mmd_workers.wire.messages.message_parts import FeatureRef

LONGEST_SECONDS = 60.0

Read = Callable[[], Coroutine[Any, Any, bytes]]
Encode = Callable[[FeatureRef, Read], Coroutine[Any, Any, tuple[Feature, dict[str, float]]]]


class BetweenSteps:
    """Encodes media, each while the engine's thread waits for it."""

    def __init__(self, encode: Encode, runner: EngineRunner[Any]) -> None:
        self._encode = encode
        self._runner = runner
        self._one = asyncio.Lock()  # so that the engine steps once at least between two media

    async def encode(self, ref: FeatureRef, read: Read) -> tuple[Feature, dict[str, float]]:
        """As `EncodePipeline.encode`. The bytes are fetched before."""
        data = await read()

        async def fetched() -> bytes:
            return data

        async with self._one:
            loop, begun, over = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

            def wait(_: object) -> None:
                loop.call_soon_threadsafe(begun.set)
                over.wait(LONGEST_SECONDS)

            waiting = asyncio.create_task(self._runner.call(wait))
            begins = asyncio.create_task(begun.wait())
            try:
                await asyncio.wait({waiting, begins}, return_when=asyncio.FIRST_COMPLETED)
                return await self._encode(ref, fetched)
            finally:
                over.set()
                begins.cancel()
                await waiting


_asynchronous = PrefillRole._source


async def _source(self: PrefillRole, store: FeatureStore) -> FeatureSource:
    source = await _asynchronous(self, store)
    if not isinstance(source, LocalSource):
        raise TypeError(
            "encoders have pods of their own; media are encoded between steps only in one process"
        )
    pipeline, engine = source._pipeline, cast("NativeEngine", self._engine.engine)
    pipeline.encode = BetweenSteps(pipeline.encode, engine._runner).encode
    return source


PrefillRole._source = _source
