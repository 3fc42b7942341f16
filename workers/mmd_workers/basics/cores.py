"""The number of cores that this process may use. Independent of what it computes."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # quota or "max", and period, in microseconds
_CGROUP_V1_FOLDER = Path("/sys/fs/cgroup/cpu")


def usable_cores() -> int:
    """Cores that this process may run on, but no more than the CPU limit of its container, rounded down; at least 1."""
    cores, limit = len(os.sched_getaffinity(0)), _container_limit()
    return cores if limit is None else max(1, min(cores, int(limit)))


def _container_limit() -> float | None:
    """The CPU limit of this container's cgroup in cores, if it has one."""
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (_CGROUP_V1_FOLDER / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        except OSError:
            return None
    has_limit = quota.isdigit() and period.isdigit()  # v2: "max" for none, v1: -1
    return int(quota) / int(period) if has_limit and int(period) else None
