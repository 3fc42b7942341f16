"""Checks the names of downloaded files: each stays inside its folder, and no file overwrites another. Pure."""

from __future__ import annotations

from collections.abc import Collection

from mmd_api.contract.weights import WeightsError
from mmd_api.weights import Download
from mmd_workers.weights.cache import MANIFEST

MAX_FILES = 10_000
PART = ".part"
"""Suffix of an incomplete file."""
MAX_NAME_BYTES = 255 - len(PART)
MAX_PATH_BYTES = 1024


def check_names(download: Download, names: Collection[str]) -> None:
    """Check the relative names, with slashes, of all files of a download.

    Raises:
        WeightsError: there are too many, or one cannot be used; the message quotes it.
    """
    where = f"{download.field}: {download.url}"
    if len(names) > MAX_FILES:
        raise WeightsError(
            "WeightsNotFound",
            f"{where} lists {len(names)} files, more than {MAX_FILES}; list the model's files alone",
        )
    folders = {
        "/".join(parts[:end]) for parts in (n.split("/") for n in names) for end in range(1, len(parts))
    }
    taken_names = {*names, *folders}
    for name in names:
        if problem := _problem(name, taken_names, folders):
            raise WeightsError(
                "WeightsNotFound",
                f"{where} lists a file {name[:100]!r}, {problem}; give it another name at its source",
            )


def _problem(name: str, taken_names: Collection[str], folders: Collection[str]) -> str:
    """Why a file cannot have this name; empty if it can. `taken_names`: all names of files and folders."""
    segments = name.split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        return "which is not a relative path without '..'"
    if not name.isprintable():
        return "whose name has control characters"
    if len(name.encode()) > MAX_PATH_BYTES or any(len(s.encode()) > MAX_NAME_BYTES for s in segments):
        return f"whose path is longer than {MAX_PATH_BYTES} bytes or has a part of more than {MAX_NAME_BYTES}"
    if any(segment.startswith(MANIFEST) for segment in segments):
        return f"although {MANIFEST} is the list of the cache itself"
    if name in folders:
        return "which is a folder too"
    return f"beside {name}{PART}" if f"{name}{PART}" in taken_names else ""
