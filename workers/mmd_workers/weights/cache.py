"""The folder of cached weights on this machine: which downloads it holds completely. Knows neither networks nor models."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmd_api.contract import environment as env
from mmd_api.weights import folder_of

MANIFEST = ".mmd-weights.json"
"""In the folder of a download: where it is from, and the size and digest of each file."""
PARTIAL = ".partial"
"""Folder beside complete downloads, with those that are not."""


def is_required() -> bool:
    """Whether this process may use nothing but the cache."""
    return env.WEIGHTS in os.environ


def root() -> Path:
    """The folder that holds all downloads: that of the pod's claim, else one of this user."""
    configured = os.environ.get(env.WEIGHTS)
    return Path(configured) if configured else Path.home() / ".cache" / "mmd" / "weights"


def found(url: str) -> Path | None:
    """The folder of a complete download; None where there is none.

    Raises:
        OSError: the cache cannot be read.
    """
    folder = root() / folder_of(url)
    files = CachedFiles.of(folder)
    return folder if files is not None and files.url == url else None


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """What a complete download consists of. `version`: commit of a hub repository, else empty; `files`: size in bytes and digest by name."""

    url: str
    version: str
    files: Mapping[str, tuple[int, str]]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    @classmethod
    def of(cls, folder: Path) -> CachedFiles | None:
        """That of a folder; None where it has none, or where a file of it is missing or has another size.

        Raises:
            OSError: the folder cannot be read.
        """
        listed = cls.listed(folder)
        if listed is None:
            return None
        try:
            sizes = {name: (folder / name).stat().st_size for name in listed.files}
        except (FileNotFoundError, NotADirectoryError):
            return None
        return listed if all(listed.files[name][0] == size for name, size in sizes.items()) else None

    @classmethod
    def listed(cls, folder: Path) -> CachedFiles | None:
        """What a folder has or is to have; None where no list can be read from it.

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
        """Put it into a folder, in the place of another."""
        content = {"url": self.url, "version": self.version, "files": dict(self.files)}
        written = folder / f"{MANIFEST}.new"
        with written.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        written.replace(folder / MANIFEST)
