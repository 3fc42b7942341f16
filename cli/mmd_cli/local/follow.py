"""Makes `mmd up` follow its file.

Settings that may change at runtime reach the processes as on a cluster, through the files they read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from mmd_api.faults import InvalidDeploymentError
from mmd_api.readers import changed_paths, effect_of
from mmd_api.resource import MultimodalDeployment
from mmd_cli.local.pods import write_config_maps
from mmd_cli.local.steps import repeat
from mmd_operator.resources.plan import plan_objects

CHECK_SECONDS = 1.0
SHOWN_FIELDS = 8


class FileFollower:
    """Applies changes of the resource's file to the processes that run from it, until it is cancelled."""

    def __init__(
        self,
        file: Path,
        load: Callable[[Path], MultimodalDeployment],
        running: MultimodalDeployment,
        namespace: str,
        directory: Path,
        log_line: Callable[[str, str], None],
    ) -> None:
        """`directory`: folder of the processes' configuration files; see `local_pods`."""
        self._file, self._load, self._namespace, self._directory = file, load, namespace, directory
        self._started_with, self._log_line = running, log_line
        self._last_text = _text(file)

    async def run(self) -> None:
        """Follow the file until cancelled."""
        await repeat("file follower", CHECK_SECONDS, lambda: asyncio.to_thread(self.check))

    def check(self) -> None:
        """Apply the file's content if it is new and valid. Invalid content changes nothing."""
        text = _text(self._file)
        if text is None or text == self._last_text:
            return
        self._last_text = text
        try:
            fresh = self._load(self._file)
            objects = plan_objects(fresh, self._namespace)
        except InvalidDeploymentError as error:
            self._log_line("mmd", f"rejected {self._file}, previous settings stay in effect: {error}")
            return
        if fresh.metadata.name != self._started_with.metadata.name:
            self._log_line(
                "mmd", f"{self._file} now names another deployment; restart `mmd up` to run that deployment"
            )
            return
        changed = changed_paths(self._started_with.spec, fresh.spec)
        later = [p for p in changed if not effect_of(p).live or effect_of(p).start]
        write_config_maps(objects, self._directory)  # files of another pipeline revision have no reader
        if later:
            more = f" and {len(later) - SHOWN_FIELDS} more" if len(later) > SHOWN_FIELDS else ""
            fields = ", ".join(f"spec.{path}" for path in later[:SHOWN_FIELDS])
            self._log_line("mmd", f"restart `mmd up` for the change of {fields}{more} to take effect")


def _text(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return None  # an editor is replacing it
