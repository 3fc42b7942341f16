"""The table of drills, `ci/drills.toml`: which test belongs to which, and which of them a gate runs too.

A gate runs one drill of the rotation, chosen by the commit, so that a second run of a commit runs the same one. It runs those as well
whose own files the last commit changes, as far as their budgets together fit into `MINUTES` and none of their tests waits for
repair (`until`); the others it names.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DRILLS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "ci" / "drills.toml").read_text())
ROTATION = tuple(name for name, row in DRILLS.items() if row.get("rotation"))
BASE = "MMD_CI_BASE"
"""Environment variable: the commit since which changes count, instead of the one before the last."""

MINUTES = 15.0


def _is_of(node_id: str, test: str) -> bool:
    """Whether a test is the one named, or of the module named; a name that ends within its parameters has those that begin so."""
    return node_id == test or node_id.startswith(test if "[" in test else (f"{test}::", f"{test}["))


def drill_of(node_id: str) -> str:
    """The drill that a test belongs to, or nothing."""
    for name, row in DRILLS.items():
        if node_id in row.get("keep", ()):
            return ""
        if any(_is_of(node_id, test) for test in row.get("tests", ())):
            return name
    return ""


def stale(node_ids: Collection[str]) -> list[str]:
    """What the table says of single tests and none of all tests of the same module is."""
    modules = {node_id.partition("::")[0] for node_id in node_ids}
    named = [
        test
        for row in DRILLS.values()
        for test in (*row.get("tests", ()), *row.get("keep", ()))
        if "::" in test
    ]
    return [
        test
        for test in named
        if test.partition("::")[0] in modules and not any(_is_of(node_id, test) for node_id in node_ids)
    ]


def own_paths(name: str) -> set[str]:
    """Files and folders whose change selects a drill: the modules of its tests, and what it `owns`."""
    row = DRILLS[name]
    return {test.partition("::")[0] for test in row.get("tests", ())} | set(row.get("owns", ()))


def drills_of_changes(paths: Iterable[str]) -> list[str]:
    """The drills that own one of these paths, in the order of the table."""
    changed = list(paths)
    return [
        name
        for name in DRILLS
        if any(path == own or path.startswith(f"{own}/") for own in own_paths(name) for path in changed)
    ]


@dataclass(frozen=True)
class Choice:
    """The drills of a gate, and those that its changes ask for but its time does not allow."""

    run: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def choose(commit: str, paths: Iterable[str]) -> Choice:
    """The drills of a gate for a commit (hexadecimal, or empty where there is no git) and the paths that it changes."""
    run = [ROTATION[int(commit[:8] or "0", 16) % len(ROTATION)]]
    left_out = []
    minutes = DRILLS[run[0]]["minutes"]
    for name in drills_of_changes(paths):
        if name in run:
            continue
        if "until" not in DRILLS[name] and minutes + DRILLS[name]["minutes"] <= MINUTES:
            run.append(name)
            minutes += DRILLS[name]["minutes"]
        else:
            left_out.append(name)
    return Choice(tuple(run), tuple(left_out))


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def head() -> str:
    """The commit that is checked out, or nothing where there is no git."""
    return "".join(_git("rev-parse", "HEAD"))


def chosen() -> Choice:
    """The drills of a gate for what is checked out."""
    return choose(head(), _git("diff", "--name-only", os.environ.get(BASE, "HEAD^"), "HEAD"))
