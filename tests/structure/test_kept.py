"""A program that test processes share starts once, and ends with its last user, even where that one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.cluster.control_plane import write_kubeconfig
from support.cluster.standin import eventually
from support.servers.kept import Kept

PROGRAM = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
from support.servers.kept import keep

folder = Path(sys.argv[1])

@contextmanager
def running():
    yield {"pid": os.getpid()}
    (folder / f"{os.getpid()}.ended").touch()

keep(folder, running())
"""
USER = """
import sys
from pathlib import Path
from support.servers.kept import Kept

folder, *command = sys.argv[1:]
with Kept(Path(folder), command, 60).use() as facts:
    print(facts["pid"], flush=True)
    sys.stdin.read()
"""


def command(folder: Path, program: str = PROGRAM) -> list[str]:
    return [sys.executable, "-c", program, str(folder)]


def has_ended(folder: Path, pid: int) -> None:
    assert (folder / f"{pid}.ended").exists()


@pytest.mark.processes
def test_users_share_one_program_which_ends_with_the_last(tmp_path: Path):
    first, second = (Kept(tmp_path, command(tmp_path), 60) for _ in range(2))
    with first.use() as facts:
        with second.use() as others:
            assert others == facts
        second.join()
        os.kill(facts["pid"], 0)
    first.join()
    has_ended(tmp_path, facts["pid"])
    with second.use() as later:
        assert later != facts
    second.join()


@pytest.mark.processes
def test_a_program_ends_although_its_only_user_was_killed(tmp_path: Path):
    arguments = [*command(tmp_path, USER), *command(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        pid = int(user.stdout.readline())
        assert not list(tmp_path.glob("*.ended"))
        user.kill()
    eventually(lambda: has_ended(tmp_path, pid))


@pytest.mark.processes
def test_a_program_that_does_not_start_is_reported_with_its_output(tmp_path: Path):
    failing = Kept(tmp_path, command(tmp_path, "raise SystemExit('no such server')"), 60)
    with pytest.raises(RuntimeError, match="no such server"), failing.use():
        pass


def test_a_kubeconfig_that_is_written_again_stays_whole_for_its_readers(tmp_path: Path) -> None:
    path = write_kubeconfig(tmp_path / "kubeconfig.yaml", "https://127.0.0.1:1", "first")
    with path.open() as reader:
        write_kubeconfig(path, "https://127.0.0.1:1", "second")
        assert yaml.safe_load(reader)["users"][0]["user"] == {"token": "first"}
    assert yaml.safe_load(path.read_text())["users"][0]["user"] == {"token": "second"}
    assert [file.name for file in tmp_path.iterdir()] == ["kubeconfig.yaml"]
