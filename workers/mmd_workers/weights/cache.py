"""The folder of cached weights on this machine, and its complete downloads. Knows neither networks nor models."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmd_api.contract import environment as env
from mmd_api.weights import folder_of

MANIFEST = ".mmd-weights.json"
"""File in a download's folder that lists its source, and the size and digest of each file."""
PARTIAL = ".partial"
"""Folder beside the complete downloads that holds the incomplete ones."""


def is_required() -> bool:
    """Whether this process may load weights from the cache only."""
    return env.WEIGHTS in os.environ


def root() -> Path:
    """The folder of all downloads: on the pod's claim, or else in this user's home."""
    configured = os.environ.get(env.WEIGHTS)
    return Path(configured) if configured else Path.home() / ".cache" / "mmd" / "weights"


def found(url: str) -> Path | None:
    """The folder of a complete download, or None.

    Raises:
        OSError: the cache cannot be read.
    """
    folder = root() / folder_of(url)
    files = CachedFiles.of(folder)
    return folder if files is not None and files.url == url else None


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """The files of a complete download.

    `version`: commit of a hub repository, else empty. `files`: size in bytes and digest, by name.
    """

    url: str
    version: str
    files: Mapping[str, tuple[int, str]]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    @classmethod
    def of(cls, folder: Path) -> CachedFiles | None:
        """Read the list of a folder; None if it has no list, or if a file is missing or has another size.

        Raises:
            OSError: the folder cannot be read.
        """
        manifest = cls.listed(folder)
        if manifest is None:
            return None
        try:
            sizes = {name: (folder / name).stat().st_size for name in manifest.files}
        except (FileNotFoundError, NotADirectoryError):
            return None
        return manifest if all(manifest.files[name][0] == size for name, size in sizes.items()) else None

    @classmethod
    def listed(cls, folder: Path) -> CachedFiles | None:
        """Read the list of a folder, whose download may be incomplete; None if it cannot be parsed.

        Raises:
            OSError: the folder cannot be read.
        """
        try:
            content = json.loads((folder / MANIFEST).read_text())
            files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
            return cls(str(content["url"]), str(content["version"]), files)
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        """Write the list to a folder, replacing an earlier one."""
        content = {"url": self.url, "version": self.version, "files": dict(self.files)}
        new_manifest = folder / f"{MANIFEST}.new"
        with new_manifest.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new_manifest.replace(folder / MANIFEST)
