"""The versions on docs/clients.md are those that the tests install."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (
    ROOT / "tests" / "gateway" / "agents" / "packages",
    ROOT / "tests" / "gateway" / "agents" / "aider",
    ROOT / "tests" / "pipeline" / "other_clients",
)
ROW = re.compile(r"^\| [^|]*`([^`|]+)`[^`|]*\| ([\d.]+) \|", re.MULTILINE)


def installed() -> set[tuple[str, str]]:
    """Names and versions of the packages that the tests install."""
    pinned: set[tuple[str, str]] = set()
    for folder in SOURCES:
        for line in (folder / "requirements.txt").read_text().splitlines():
            name, _, version = line.partition(";")[0].strip().partition("==")
            pinned.add((name, version))
        if (folder / "package.json").exists():
            pinned |= set(json.loads((folder / "package.json").read_text())["dependencies"].items())
    return pinned


def test_versions_of_clients_are_those_that_the_tests_install() -> None:
    rows = ROW.findall((ROOT / "docs" / "clients.md").read_text())
    assert len(rows) >= 14
    wrong = {(name.partition("[")[0], version) for name, version in rows} - installed()
    assert not wrong, f"docs/clients.md has other versions than the tests install: {sorted(wrong)}"
