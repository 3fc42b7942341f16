"""A Secret as the kubelet mounts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


class MountedSecret:
    """A volume as the kubelet keeps it: files are links into `..data`, a link that is replaced when the Secret has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._version = folder, 0
        folder.mkdir()

    def update(self, entries: Mapping[str, str]) -> None:
        self._version += 1
        version = self.folder / f"..version{self._version}"
        version.mkdir()
        for name, text in entries.items():
            (version / name).write_text(text)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self.folder / "..data")
