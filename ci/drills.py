"""Reads the table of drills, `ci/drills.toml`: which tests each drill has, and which drills a gate runs.

A gate runs the drills whose own files the last commit changes, as long as their budgets fit into `MINUTES`
together and none of their tests awaits repair (`until`). It names the drills it leaves out. It also runs one
drill of the rotation if that fits. The commit selects this drill, so that a second run of the commit runs the
same one.
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
"""Environment variable that names the commit to compare with. The default is HEAD's parent."""

MINUTES = 15.0


def _is_of(node_id: str, entry: str) -> bool:
    """Whether an entry of the table covers a test.

    An entry names a test, with all its parameters, or a module. An entry that ends inside the parameters
    (`[`) is the beginning of a node id.
    """
    return node_id == entry or node_id.startswith(entry if "[" in entry else (f"{entry}::", f"{entry}["))


def drill_of(node_id: str) -> str:
    """Return the drill that a test belongs to, or an empty string."""
    for name, row in DRILLS.items():
        if node_id in row.get("keep", ()):
            return ""
        if any(_is_of(node_id, test) for test in row.get("tests", ())):
            return name
    return ""


def stale(node_ids: Collection[str]) -> list[str]:
    """Return the entries for single tests that match no test, although their module is in `node_ids`."""
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
    """Files and folders whose change selects a drill: its test modules, and the paths it `owns`."""
    row = DRILLS[name]
    return {test.partition("::")[0] for test in row.get("tests", ())} | set(row.get("owns", ()))


def drills_of_changes(paths: Iterable[str]) -> list[str]:
    """The drills that own one of these paths, in the order of the table."""
    changed = list(paths)
    return [
        name
        for name in DRILLS
        if any(path == owned or path.startswith(f"{owned}/") for owned in own_paths(name) for path in changed)
    ]


@dataclass(frozen=True)
class Choice:
    """The drills that a gate runs, and notes for its summary about those it leaves out."""

    run: tuple[str, ...]
    notes: tuple[str, ...] = ()


def choose(commit: str, paths: Iterable[str] | None) -> Choice:
    """Choose the drills of a gate.

    `commit`: hexadecimal, or empty without git. `paths`: the paths that the commit changes, or None if they
    are unknown.
    """
    run: list[str] = []
    notes = []
    if paths is None:
        notes.append("NOT RUN: drills whose files changed, for git does not say what changed")
    for name in drills_of_changes(paths or ()):
        if "until" not in DRILLS[name] and _minutes([*run, name]) <= MINUTES:
            run.append(name)
        else:
            notes.append(f"NOT RUN: drill-{name}, whose files changed; run 'make drill-{name}'")
    rotation_drill = ROTATION[int(commit[:8] or "0", 16) % len(ROTATION)]
    if rotation_drill not in run and _minutes([*run, rotation_drill]) <= MINUTES:
        run.append(rotation_drill)
    return Choice(tuple(run), tuple(notes))


def _minutes(names: Iterable[str]) -> float:
    return float(sum(DRILLS[name]["minutes"] for name in names))


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """Run a git command and return its output, or None if it fails or there is no git."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def head(root: Path = ROOT) -> str:
    """Return the commit that is checked out, or an empty string without git."""
    return (git("rev-parse", "--verify", "HEAD", root=root) or "").strip()


def changed(root: Path = ROOT) -> list[str] | None:
    """Return the paths that differ from the commit in `MMD_CI_BASE`, by default from HEAD's parent.

    Returns None if that is unknown.

    Raises:
        SystemExit: `MMD_CI_BASE` names no commit.
    """
    base = os.environ.get(BASE)
    names = git("diff", "--name-only", "--no-renames", "-z", base or "HEAD^", root=root)
    if names is None and base:
        raise SystemExit(f"ci: {BASE}: git knows no commit {base!r}")
    return None if names is None else names.split("\0")[:-1]


def chosen() -> Choice:
    """Choose the drills of a gate for the working tree, uncommitted edits included."""
    return choose(head(), changed())
