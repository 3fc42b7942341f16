"""Result of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmd_api.contract.pools import PoolName


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a trace. Request arrays are in the order of the trace, with NaN for a request that was lost or had one token.

    `replicas` and `ready` are [ticks] per pool, at `ticks` seconds. `waited_seconds`: total time that requests spent
    in front of each pool.
    """

    ttft_seconds: npt.NDArray[np.float64]
    itl_seconds: npt.NDArray[np.float64]
    lost: Mapping[str, int]
    end_seconds: float
    ticks: npt.NDArray[np.float64]
    replicas: Mapping[PoolName, npt.NDArray[np.int64]]
    ready: Mapping[PoolName, npt.NDArray[np.int64]]
    replica_seconds: Mapping[PoolName, float]
    gpu_seconds: float
    waited_seconds: Mapping[PoolName, float]

    def attainment(self, ttft_slo: float | None, itl_slo: float | None) -> float:
        """Share of all requests that were answered within the SLO; lost ones were not."""
        good = ~np.isnan(self.ttft_seconds)
        if ttft_slo is not None:
            good &= ~(self.ttft_seconds > ttft_slo)
        if itl_slo is not None:
            good &= ~(self.itl_seconds > itl_slo)
        return float(good.mean()) if len(good) else 1.0
