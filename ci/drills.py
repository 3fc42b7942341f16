"""Reads the table of drills, `ci/drills.toml`: which tests each drill has, and which drills a gate runs.

A gate runs the drills whose own files have changed since the base, as long as their budgets fit into `MINUTES`
together and none of their tests awaits repair (`until`). It also runs one drill of the rotation if that fits.
The commit selects it, so that a second run of the commit runs the same one. The gate names the drills it leaves
out.

The base is the commit in `MMD_CI_BASE`; or where the branch left `origin/main`, or without that `main`; or, on
that branch itself, HEAD's parent.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DRILLS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "ci" / "drills.toml").read_text())
ROTATION = tuple(name for name, row in DRILLS.items() if row.get("rotation"))
BASE = "MMD_CI_BASE"
"""Environment variable that names the commit to compare with."""

UPSTREAM = ("origin/main", "main")

MINUTES = 15.0
"""Time of the drills of a gate together."""


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

    `commit`: hexadecimal, or empty without git. `paths`: the paths that have changed, or None if they are
    unknown.
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
    in_turn = ROTATION[int(commit[:8] or "0", 16) % len(ROTATION)]
    if in_turn not in run and _minutes([*run, in_turn]) <= MINUTES:
        run.append(in_turn)
    elif in_turn not in run and not any(f"drill-{in_turn}," in note for note in notes):
        notes.append(f"NOT RUN: drill-{in_turn}, whose turn it was; run 'make drill-{in_turn}'")
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
    """Return the paths of the working tree that differ from the base, or None if there is none.

    Raises:
        SystemExit: `MMD_CI_BASE` names no commit.
    """
    names = git("diff", "--name-only", "--no-renames", "-z", base(root), root=root)
    return None if names is None else names.split("\0")[:-1]


def base(root: Path = ROOT) -> str:
    """Return the commit to compare with.

    Raises:
        SystemExit: `MMD_CI_BASE` names no commit.
    """
    if named := os.environ.get(BASE):
        if git("rev-parse", "--verify", f"{named}^{{commit}}", root=root) is None:
            raise SystemExit(f"ci: {BASE}: git knows no commit {named!r}")
        return named
    for upstream in UPSTREAM:
        if forked := (git("merge-base", "HEAD", upstream, root=root) or "").strip():
            return forked if forked != head(root) else "HEAD^"
    return "HEAD^"


def day(root: Path = ROOT) -> datetime.date:
    """Return the day of the commit, by which dates in tables are judged: it passes or fails on any day.

    An edit that is not committed has today's.
    """
    edited = git("status", "--porcelain", "--untracked-files=no", root=root)
    written = "" if edited else (git("log", "-1", "--format=%cI", root=root) or "").strip()
    now = datetime.datetime.now(datetime.UTC)
    return (datetime.datetime.fromisoformat(written) if written else now).astimezone(datetime.UTC).date()


def chosen() -> Choice:
    """Choose the drills of a gate for the working tree, uncommitted edits included."""
    choice = choose(head(), changed())
    return replace(
        choice, notes=(f"drills for what changed since {base()}: {', '.join(choice.run)}", *choice.notes)
    )
