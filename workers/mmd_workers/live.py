"""Settings that change while a process runs: its configuration file is read again whenever the file changes.

Kubernetes updates the files of a mounted ConfigMap, and `mmd up` writes the same files. Independent of the meaning of settings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_workers.observe.metrics import Metrics

CHECK_SECONDS = 1.0
MAX_CONFIG_BYTES = 2**20  # what a ConfigMap can hold
MAX_REASON_CHARACTERS = 2000

_log = logging.getLogger(__name__)


class LiveConfig:
    """Hands over the settings of a configuration file that may change while this process runs, whenever they have changed."""

    def __init__(
        self,
        file: Path,
        started_with: PipelineConfig,
        apply: Callable[[MultimodalDeploymentSpec], None],
        metrics: Metrics,
        check: Callable[[PipelineConfig], None] = lambda _: None,
    ) -> None:
        """`check` may end this process because of the file's content: `run` raises what it raises.

        `apply` is given the spec that this process started with, with the present values of its live fields.
        """
        self._file, self._apply, self._metrics = file, apply, metrics
        self._check_file = check
        self._text: str | None = None
        self._config = started_with
        metrics.config_rejected.set(0)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Read the file and apply what is new. What cannot be used is rejected as a whole, and the settings in force stay."""
        try:
            text = await asyncio.to_thread(self._read)
        except (
            OSError
        ) as error:  # being replaced, or missing: the current settings stay, and the next check reads again
            _log.debug("failed to read %s: %s", self._file, error)
            return
        if text == self._text:
            return
        self._text = text
        try:
            fresh = self._parsed(text)
            self._check_file(fresh)
            config = self._config.with_live_fields_of(fresh)
            if config.dump() != self._config.dump():
                self._apply(config.spec)
                self._config = config
                self._metrics.config_reloads.labels("applied").inc()
                _log.info("applied changed settings from %s", self._file)
        except ValueError as error:
            self._metrics.config_reloads.labels("rejected").inc()
            self._metrics.config_rejected.set(1)
            reason = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
            _log.error(
                "rejected %s, previous settings stay in effect: %s; fix the spec, or use a worker image from the operator's release",
                self._file,
                reason,
            )
            return
        self._metrics.config_rejected.set(0)

    def _read(self) -> str:
        with self._file.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1).decode(errors="replace")

    def _parsed(self, text: str) -> PipelineConfig:
        if len(text) > MAX_CONFIG_BYTES:
            raise ValueError(f"more than {MAX_CONFIG_BYTES} bytes")
        fresh, own = PipelineConfig.parse(text), self._config
        identity = (own.namespace, own.name, own.revision, own.readers)
        if (fresh.namespace, fresh.name, fresh.revision, fresh.readers) != identity:
            raise ValueError(
                f"it is for {fresh.namespace}/{fresh.name}, revision {fresh.revision}, {fresh.readers}, and this process is of "
                f"{own.namespace}/{own.name}, revision {own.revision}, {own.readers}"
            )
        return fresh
