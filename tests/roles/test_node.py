"""Pods of one machine know it by its kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mmd_workers.basics.node import BOOT_ID, NODE, node_of


def test_processes_of_a_machine_share_an_anonymous_node_name() -> None:
    code = "from mmd_workers.basics.node import NODE; print(NODE)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == NODE
    assert len(NODE) == 12
    assert NODE not in BOOT_ID.read_text()
    assert NODE not in os.uname().nodename


def test_machines_differ_and_one_without_a_boot_id_has_no_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}\n")
    assert node_of(tmp_path / "a") != node_of(tmp_path / "b")
    assert node_of(tmp_path / "missing") == ""
