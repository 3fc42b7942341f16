"""What hosts of engines that are stepped on a thread have in common."""

from __future__ import annotations

import time
from typing import Any, Protocol

from mmd_workers.engine.interface import EngineStats
from mmd_workers.engine.runner import EngineRunner, Stepped
from mmd_workers.observe.server import Progress
from mmd_workers.pod import LIVENESS_SECONDS, Pod
from mmd_workers.sequences.engine import EngineHost

ADVERTISED_BLOCKS = 64


class Reporting(Stepped, Protocol):
    """An engine that a host runs: it reports its load, and what its prefix cache holds."""

    def stats(self) -> EngineStats:
        """How loaded it is."""
        ...

    def prefix_blocks(self, limit: int) -> list[str]:
        """Identities of up to `limit` of the newest cached blocks, for locality in routing."""
        ...


class SteppedHost(EngineHost):
    """Runs an engine on a thread of its own."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(pod)
        self._runner: EngineRunner[Any] | None = None

    def _run(self, engine: Reporting) -> EngineRunner[Any]:
        """Start the thread."""
        self._runner = EngineRunner(engine, self.outputs.put_nowait, self._pod.tasks.failed)
        self._runner.start()
        return self._runner

    def taken(self) -> None:
        """The thread may post one more."""
        assert self._runner is not None
        self._runner.taken()

    async def _sampled(self) -> tuple[EngineStats, list[str]] | None:
        if self._runner is None:
            return None
        return await self._runner.call(
            lambda engine: (engine.stats(), engine.prefix_blocks(ADVERTISED_BLOCKS))
        )

    async def stop(self) -> None:
        """End the engine's thread after its current step."""
        if self._runner is not None:
            await self._runner.stop(5.0)

    def progress(self) -> dict[str, Progress]:
        """The engine's turns."""
        if (runner := self._runner) is None:
            return {}
        return {"engine": Progress(lambda: time.monotonic() - runner.last_progress, LIVENESS_SECONDS)}
