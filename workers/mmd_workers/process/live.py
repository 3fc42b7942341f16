"""Settings that change while a process runs: its configuration file is read again whenever the file changes.

Kubernetes updates the files of a mounted ConfigMap, and `mmd up` writes the same files. Independent of the meaning of settings.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_workers.observe.metrics import Metrics

CHECK_SECONDS = 1.0
MAX_CONFIG_BYTES = 2**20  # what a ConfigMap can hold
MAX_REASON_CHARACTERS = 2000

_log = logging.getLogger(__name__)


class LiveFile(ABC):
    """A file that may change while this process runs; new content is taken or rejected as a whole."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._text: str | None = None

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Read the file and take new content. Unusable content is rejected as a whole, and the content in force stays."""
        try:
            text = await asyncio.to_thread(self._read)
        except OSError as error:
            self._unreadable(error)
            return
        settled = self._is_settled(text)
        if text == self._text or not settled:
            return
        self._text = text
        try:
            if len(text) > self._max_bytes:
                raise ValueError(f"more than {self._max_bytes} bytes")
            await self._take(text)
        except ValueError as error:
            self._rejected(" ".join(str(error).split())[:MAX_REASON_CHARACTERS])
            return
        self._accepted()

    def _is_settled(self, text: str) -> bool:
        """Whether the content may be taken now; called at every check. If not, the next check may bring more."""
        return True

    @abstractmethod
    async def _take(self, text: str) -> None:
        """Use new content.

        Raises:
            ValueError: the content cannot be used; the message is logged.
        """

    @abstractmethod
    def _unreadable(self, error: OSError) -> None:
        """Handle a file that is missing or being replaced; the next check reads again."""

    @abstractmethod
    def _rejected(self, reason: str) -> None:
        """Handle new content that cannot be used."""

    @abstractmethod
    def _accepted(self) -> None:
        """Note that new content is in force."""

    def _read(self) -> str:
        with self._file.open("rb") as file:
            return file.read(self._max_bytes + 1).decode(errors="replace")


class LiveSecret(LiveFile):
    """A file of a Secret; its content must be the same at two checks.

    A file that is being written in place may be valid before it is complete. At the start nothing is in force that it could replace, so
    the first content is taken at once.
    """

    def __init__(self, file: Path, max_bytes: int) -> None:
        super().__init__(file, max_bytes)
        self._previous: str | None = None  # at the last check; None: this is the first

    def _is_settled(self, text: str) -> bool:
        previous, self._previous = self._previous, text
        return previous is None or text == previous

    def _unreadable(self, error: OSError) -> None:
        self._text = None  # the next content counts as new, even if it is the same as before
        self._previous = ""
        self._rejected(error.strerror or type(error).__name__)


class LiveConfig(LiveFile):
    """Applies the settings of a configuration file whenever they change while this process runs."""

    def __init__(
        self,
        file: Path,
        started_with: PipelineConfig,
        apply: Callable[[MultimodalDeploymentSpec], None],
        metrics: Metrics,
        check: Callable[[PipelineConfig], None] = lambda _: None,
    ) -> None:
        """`check` may end this process because of the file's content: `run` passes on its errors.

        `apply` gets the spec that this process started with, with the present values of its live fields.
        """
        super().__init__(file, MAX_CONFIG_BYTES)
        self._apply, self._metrics = apply, metrics
        self._check_file = check
        self._config = started_with
        metrics.config_rejected.set(0)

    async def _take(self, text: str) -> None:
        fresh = self._parsed(text)
        if fresh.readers != self._config.readers:
            _log.info("%s is for the pods that replace this one; present settings stay in effect", self._file)
            return
        self._check_file(fresh)
        config = self._config.with_live_fields_of(fresh)
        if config.dump() != self._config.dump():
            self._apply(config.spec)
            self._config = config
            self._metrics.config_reloads.labels("applied").inc()
            _log.info("applied changed settings from %s", self._file)

    def _unreadable(self, error: OSError) -> None:
        _log.debug("failed to read %s: %s", self._file, error)

    def _rejected(self, reason: str) -> None:
        self._metrics.config_reloads.labels("rejected").inc()
        self._metrics.config_rejected.set(1)
        _log.error(
            "rejected %s, previous settings stay in effect: %s; fix the spec, or use a worker image from the operator's release",
            self._file,
            reason,
        )

    def _accepted(self) -> None:
        self._metrics.config_rejected.set(0)

    def _parsed(self, text: str) -> PipelineConfig:
        fresh, current = PipelineConfig.parse(text), self._config
        if (fresh.namespace, fresh.name, fresh.revision) != (
            current.namespace,
            current.name,
            current.revision,
        ):
            raise ValueError(
                f"it is for {fresh.namespace}/{fresh.name}, revision {fresh.revision}, and this process is of {current.namespace}/{current.name}, "
                f"revision {current.revision}"
            )
        return fresh
