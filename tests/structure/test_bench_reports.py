"""A report of a bench names the code that it measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.report import code, facts


def git(folder: Path, *command: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *command], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_report_names_its_commit_and_marks_changed_files(tmp_path: Path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--message", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "report.json").write_text("a report that is not tracked yet")
    assert code(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert code(tmp_path) == f"{commit}-dirty"


def test_there_is_no_code_where_there_is_no_git(tmp_path: Path, monkeypatch):
    assert code(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code() == ""


def test_every_report_has_the_code():
    assert facts()["code"] == code()
