"""A pod counts the cores that its container may use, not those of its node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmd_workers.basics import cores
from mmd_workers.basics.cores import usable_cores

MACHINE = range(32)


@pytest.fixture(autouse=True)
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cores, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cores, "_CGROUP_V1_FOLDER", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(MACHINE))
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("400000 100000", 4),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("6400000 100000", len(MACHINE)),
        ("max 100000", len(MACHINE)),
        ("", len(MACHINE)),
    ],
)
def test_a_limit_of_the_container_bounds_the_cores(cgroup: Path, quota: str, expected: int) -> None:
    (cgroup / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [("250000", 2), ("-1", len(MACHINE))])
def test_a_limit_of_the_first_version_of_cgroups_counts_too(cgroup: Path, quota: str, expected: int) -> None:
    (cgroup / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (cgroup / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores() == expected


def test_without_a_limit_a_pod_uses_the_cores_that_it_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_cores() == 2
