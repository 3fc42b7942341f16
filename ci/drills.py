"""The table of drills, `ci/drills.toml`: which test belongs to which, and which of them a gate runs too.

A gate runs the drills whose own files the last commit changes, as far as their budgets together fit into `MINUTES` and none of their tests
waits for repair (`until`); the others it names. With them goes one of the rotation, if it fits: the commit chooses it, so that a second run
of a commit runs the same one.
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
    """The drills of a gate, and what its summary says of those that it leaves out."""

    run: tuple[str, ...]
    notes: tuple[str, ...] = ()


def choose(commit: str, paths: Iterable[str] | None) -> Choice:
    """The drills of a gate for a commit (hexadecimal, or empty where there is no git) and the paths that it changes, if that is known."""
    run: list[str] = []
    notes = []
    if paths is None:
        notes.append("NOT RUN: drills whose files changed, for git does not say what changed")
    for name in drills_of_changes(paths or ()):
        if "until" not in DRILLS[name] and _minutes([*run, name]) <= MINUTES:
            run.append(name)
        else:
            notes.append(f"NOT RUN: drill-{name}, whose files changed; run 'make drill-{name}'")
    of_commit = ROTATION[int(commit[:8] or "0", 16) % len(ROTATION)]
    if of_commit not in run and _minutes([*run, of_commit]) <= MINUTES:
        run.append(of_commit)
    return Choice(tuple(run), tuple(notes))


def _minutes(names: Iterable[str]) -> float:
    return float(sum(DRILLS[name]["minutes"] for name in names))


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """What a command of git prints, or nothing where it fails or there is no git."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def head(root: Path = ROOT) -> str:
    """The commit that is checked out; empty where there is no git."""
    return (git("rev-parse", "--verify", "HEAD", root=root) or "").strip()


def changed(root: Path = ROOT) -> list[str] | None:
    """Paths that differ from the commit that `MMD_CI_BASE` names, or the one before the last; nothing where that cannot be told.

    Raises:
        SystemExit: there is no commit of the name in `MMD_CI_BASE`.
    """
    base = os.environ.get(BASE)
    names = git("diff", "--name-only", "--no-renames", "-z", base or "HEAD^", root=root)
    if names is None and base:
        raise SystemExit(f"ci: {BASE}: git knows no commit {base!r}")
    return None if names is None else names.split("\0")[:-1]


def chosen() -> Choice:
    """The drills of a gate for what is checked out, edits that are not committed included."""
    return choose(head(), changed())
