"""`bench.flakes` stops processes of the tests, lets them go on, and spares its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench import flakes
from ci import run
from ci.legs import Leg

pytestmark = pytest.mark.processes


def test_a_process_is_stopped_and_resumed_but_never_the_spared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flakes, "PAUSE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(flakes, "STOPPED_SECONDS", (0.2, 0.3))
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as victim, subprocess.Popen(command) as spared:
        others = {one.pid for one in psutil.Process().children(recursive=True)} - {victim.pid}
        stopper = flakes.Stopper(random.Random(1), others)
        stopper.start()
        seen = set()
        while psutil.STATUS_STOPPED not in seen:
            seen.add(psutil.Process(victim.pid).status())
            assert psutil.Process(spared.pid).status() != psutil.STATUS_STOPPED
            time.sleep(0.01)
        stopper.close()
        assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
        assert stopper.num_stopped >= 1
        victim.kill()
        spared.kill()


def test_runs_are_added_only_to_those_of_the_same_commit_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path / "logs")
    monkeypatch.setattr(flakes, "REPORTS", tmp_path)
    monkeypatch.setattr(flakes, "legs_of", lambda words: [Leg(words[0], (words[0],), 1)])
    first = flakes.Findings.kept("abc", True, ["test"])
    first.add(["true"], patience=1)
    first.add(["false"], patience=1)
    (tmp_path / "flakes.json").write_text(
        json.dumps({"code": "abc", "load": True, "words": ["test"]} | first.body())
    )
    again = flakes.Findings.kept("abc", True, ["test"])
    again.add(["false"], patience=1)
    assert (again.runs, [leg["run"] for leg in again.legs]) == (3, [0, 1, 2])
    assert {name: one.runs for name, one in again.failures.items()} == {"leg false": {1, 2}}
    for other in (("abc", False, ["test"]), ("abcd", True, ["test"]), ("abc", True, ["demo"])):
        assert flakes.Findings.kept(*other).runs == 0
