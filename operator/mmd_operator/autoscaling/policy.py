"""Autoscaling policies of a deployment's spec, in seconds and fractions, with schedules as cron windows.

Reads the spec and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from cronsim import CronSim, CronSimError

from mmd_api.contract.pools import POOL_NAMES, PoolName, Role
from mmd_api.faults import Fault, InvalidDeploymentError
from mmd_api.pipeline import encodes_small_media, roles_of
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import SCHEDULING_DEADLINE_SECONDS, START_DEADLINE_SECONDS, Pool


@dataclass(frozen=True, slots=True)
class Window:
    """A schedule of at least `min_replicas` for `seconds` after each match of `cron` (UTC)."""

    cron: str
    seconds: float
    min_replicas: int

    def is_open(self, now: float) -> bool:
        """Whether the newest opening at or before `now` is less than `seconds` ago."""
        return now - _last_opening(self.cron, int(now // 60)) < self.seconds


@lru_cache(maxsize=256)
def _last_opening(cron: str, minute: int) -> float:
    """Unix seconds of the newest match at or before the minute's beginning; a schedule without a match never opened."""
    just_after = datetime.fromtimestamp(minute * 60 + 1, UTC)
    opening = next(CronSim(cron, just_after, reverse=True), None)
    return opening.timestamp() if opening else float("-inf")


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """The rules of one pool. A pool of fixed size has `min_replicas` equal to `max_replicas`."""

    pool: PoolName
    roles: tuple[Role, ...]
    gpus: int
    min_replicas: int
    max_replicas: int
    encodes_small_media: bool = False
    """Whether its pods encode small media beside the pool of encoders."""
    shadow: bool = False
    external: bool = False
    """Whether another client sets its size."""
    target_backlog_seconds: float = 1.0
    target_utilization: float = 0.75
    scale_up_stabilization_seconds: float = 0.0
    scale_down_stabilization_seconds: float = 300.0
    scale_up_cooldown_seconds: float = 0.0
    scale_down_cooldown_seconds: float = 60.0
    max_scale_up: float = 1.0
    max_scale_down: float = 0.5
    panic_window_seconds: float = 6.0
    panic_threshold: float = 2.0
    scale_to_zero_after_seconds: float = 300.0
    schedules: tuple[Window, ...] = ()
    ttft_slo_seconds: float | None = None
    itl_slo_seconds: float | None = None
    stale_after_seconds: float = 2.5
    scheduling_deadline_seconds: float = SCHEDULING_DEADLINE_SECONDS
    start_deadline_seconds: float = START_DEADLINE_SECONDS

    @property
    def fixed(self) -> bool:
        """Whether there is nothing to decide."""
        return self.min_replicas == self.max_replicas and not self.schedules

    def floor(self, now: float) -> int:
        """The smallest size allowed at `now`, schedules included."""
        return max([self.min_replicas, *(w.min_replicas for w in self.schedules if w.is_open(now))])

    @classmethod
    def of(cls, spec: MultimodalDeploymentSpec, pool: PoolName) -> PoolPolicy:
        """The policy of a pool in the spec.

        Raises:
            InvalidDeploymentError: a schedule that no clock can follow.
        """
        part: Pool = getattr(spec, pool)
        roles, scaling = roles_of(spec, pool), part.autoscaling
        if scaling is None:
            size = part.min_replicas
            return cls(pool, roles, spec.replica_gpus(pool), size, size, encodes_small_media(spec, pool))
        windows, faults = [], []
        for number, schedule in enumerate(scaling.schedules):
            try:
                CronSim(schedule.cron, datetime.fromtimestamp(0, UTC))
            except CronSimError as error:
                field = f"spec.{pool}.autoscaling.schedules[{number}].cron"
                problem = f"{schedule.cron!r} is not a valid cron schedule ({error}); set minute, hour, day of month, month and day of week"
                faults.append(Fault(field, problem))
            windows.append(Window(schedule.cron, schedule.duration_minutes * 60.0, schedule.min_replicas))
        if faults:
            raise InvalidDeploymentError(faults)
        slo = spec.slo
        return cls(
            pool=pool,
            roles=roles,
            gpus=spec.replica_gpus(pool),
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            encodes_small_media=encodes_small_media(spec, pool),
            shadow=scaling.mode == "Shadow",
            external=scaling.mode == "External",
            target_backlog_seconds=scaling.target_backlog_milliseconds / 1000,
            target_utilization=scaling.target_utilization_percent / 100,
            scale_up_stabilization_seconds=scaling.scale_up_stabilization_seconds,
            scale_down_stabilization_seconds=scaling.scale_down_stabilization_seconds,
            scale_up_cooldown_seconds=scaling.scale_up_cooldown_seconds,
            scale_down_cooldown_seconds=scaling.scale_down_cooldown_seconds,
            max_scale_up=scaling.max_scale_up_percent / 100,
            max_scale_down=scaling.max_scale_down_percent / 100,
            panic_window_seconds=0.0 if scaling.mode == "External" else scaling.panic_window_seconds,
            panic_threshold=scaling.panic_threshold_percent / 100,
            scale_to_zero_after_seconds=scaling.scale_to_zero_after_seconds,
            schedules=tuple(windows),
            ttft_slo_seconds=slo.ttft_milliseconds / 1000 if slo.ttft_milliseconds else None,
            itl_slo_seconds=slo.itl_milliseconds / 1000 if slo.itl_milliseconds else None,
            stale_after_seconds=spec.observability.heartbeat_timeout_milliseconds / 1000,
            scheduling_deadline_seconds=part.scheduling_deadline_seconds,
            start_deadline_seconds=part.start_deadline_seconds,
        )


@dataclass(frozen=True, slots=True)
class DeploymentPolicy:
    """All pools of a deployment, upstream first, and the GPUs they share (None: as many as the bounds allow)."""

    pools: Mapping[PoolName, PoolPolicy]
    gpu_budget: int | None = None

    @classmethod
    def of(cls, spec: MultimodalDeploymentSpec) -> DeploymentPolicy:
        """The policies of every pool in the spec.

        Raises:
            InvalidDeploymentError: a schedule that no clock can follow, or schedules that need more GPUs than there are.
        """
        pools: dict[PoolName, PoolPolicy] = {}
        faults: list[Fault] = []
        for pool in POOL_NAMES:
            if getattr(spec, pool) is not None:
                try:
                    pools[pool] = PoolPolicy.of(spec, pool)
                except InvalidDeploymentError as error:
                    faults += error.faults
        if faults:
            raise InvalidDeploymentError(faults)
        budget = spec.gpu_budget
        needed = sum(
            max([p.min_replicas, *(w.min_replicas for w in p.schedules)]) * p.gpus for p in pools.values()
        )
        if budget is not None and needed > budget:
            problem = (
                f"the pools' minima and schedules may need {needed} GPUs at once, but the budget is {budget}; "
                "raise gpuBudget, or lower minReplicas of the pools or their schedules"
            )
            raise InvalidDeploymentError([Fault("spec.gpuBudget", problem)])
        return cls(pools, budget)
