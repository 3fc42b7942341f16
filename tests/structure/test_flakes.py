"""`bench.flakes` stops processes of the tests, lets them go on, and spares its own."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import psutil
import pytest

from bench import flakes

pytestmark = pytest.mark.processes


def test_a_process_is_stopped_and_goes_on_and_the_spared_one_is_never_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
