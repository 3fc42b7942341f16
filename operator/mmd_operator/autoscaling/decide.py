"""How many replicas one pool should have now: signals, then panic, stabilise, rate-limit, clamp. Pure; time is an argument.

The order is that of the Horizontal Pod Autoscaler's behaviour section; the panic window is Knative's, held for ten windows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import PoolPolicy
from mmd_operator.autoscaling.signals import MOST_REPLICAS, Reading, read
from mmd_operator.autoscaling.types import Decision, Limit, PoolSamples, Reason

RATE_PERIOD_SECONDS = 15.0
"""`maxScaleUpPercent` and `maxScaleDownPercent` are of the size this long ago."""
PANIC_HOLD_WINDOWS = 10
ROUNDING = 1e-6


def decide(now: float, policy: PoolPolicy, samples: PoolSamples, history: History) -> Decision:
    """The size of one pool, looked at alone; `coordinate` fits the pools to each other and to the GPU budget.

    Args:
        now: Unix seconds of the clock that stamped the samples' `received_at`.
        policy: the pool's rules.
        samples: what is known now.
        history: that of the decision before (`Decision.history`), or a new one after a start.
    """
    if policy.shadow:
        history = replace(history, written=None)
    current, foreign = history.size_now(samples.replicas)
    reading = read(now, policy, samples, current, history)
    floor = policy.floor(now)
    wanted = max((math.ceil(min(s.need, MOST_REPLICAS) - ROUNDING) for s in reading.signals), default=0)
    if reading.stuck and reading.ready:
        wanted += reading.stuck
    memory = _remember(now, policy, reading, current, wanted)
    replicas, reason, limit = _resize(now, policy, reading, memory, current, wanted, floor)
    strongest = max(reading.signals, key=lambda s: s.need, default=None)
    return Decision(
        pool=policy.pool,
        at=now,
        spec_replicas=samples.replicas,
        current=current,
        ready=reading.ready,
        wanted=wanted,
        replicas=replicas,
        reason=reason,
        limited_by=limit,
        valid=not reading.missing,
        act=not policy.shadow,
        minimum=floor,
        signal=strongest,
        signals=reading.signals,
        missing=reading.missing,
        panicking=memory.panic_until is not None,
        idle=reading.idle,
        foreign_replicas=samples.replicas if foreign else None,
        observed=memory,
    )


def _remember(now: float, policy: PoolPolicy, reading: Reading, current: int, wanted: int) -> History:
    """The windows with this tick in them. A tick with something missing counts as wanting at least the present size."""
    history = reading.history
    floor_of_tick = max(wanted, current) if reading.missing else wanted
    idle_since = history.idle_since if history.idle_since is not None else now
    history = replace(
        history,
        wanted_high=history.wanted_high.push(now, floor_of_tick, policy.scale_down_stabilization_seconds),
        wanted_low=history.wanted_low.push(now, wanted, policy.scale_up_stabilization_seconds),
        wanted_burst=history.wanted_burst.push(now, wanted, policy.panic_window_seconds),
        size_high=history.size_high.push(now, current, RATE_PERIOD_SECONDS),
        size_low=history.size_low.push(now, current, RATE_PERIOD_SECONDS),
        idle_since=min(idle_since, now) if reading.idle else None,
    )
    return _panic(now, policy, history, current)


def _panic(now: float, policy: PoolPolicy, history: History, current: int) -> History:
    """Panic begins when the whole window asked for a multiple of the present size; it ends ten windows after the last such tick."""
    window = policy.panic_window_seconds
    if window > 0:
        seen = now - history.observed_since >= window
        if seen and history.wanted_burst.extreme >= policy.panic_threshold * max(current, 1):
            return replace(history, panic_until=now + PANIC_HOLD_WINDOWS * window)
        if history.panic_until is not None and now < history.panic_until <= now + PANIC_HOLD_WINDOWS * window:
            return history
    return replace(history, panic_until=None)


def _resize(
    now: float,
    policy: PoolPolicy,
    reading: Reading,
    history: History,
    current: int,
    wanted: int,
    floor: int,
) -> tuple[int, Reason, Limit | None]:
    """The chain of rules: a size, the reason for it, and the limit that cut what was wanted."""
    if policy.fixed:
        return policy.max_replicas, "Steady" if current == policy.max_replicas else "OutOfBounds", None
    if current < floor:
        return floor, "ScheduleOpened" if floor > policy.min_replicas else "OutOfBounds", None
    if current > policy.max_replicas:
        return policy.max_replicas, "OutOfBounds", "MaxReplicas"
    if wanted > current:
        return _grow(now, policy, reading, history, current, wanted)
    if floor == current > wanted and not reading.missing:
        return current, "Steady", "Schedule" if floor > policy.min_replicas else "MinReplicas"
    if wanted < current:
        return _shrink(now, policy, reading, history, current, wanted, floor)
    return current, "MetricsMissing" if reading.missing else "Steady", None


def _grow(
    now: float, policy: PoolPolicy, reading: Reading, history: History, current: int, wanted: int
) -> tuple[int, Reason, Limit | None]:
    if reading.unschedulable:
        return current, "Steady", "Unschedulable"
    if reading.stuck and not reading.ready:
        return current, "Steady", "PodsNotStarting"
    panicking = history.panic_until is not None
    target: int = wanted
    limit: Limit | None = None
    reason: Reason = "Panic" if panicking else "Woken" if current == 0 else "LoadRose"
    if not panicking and current > 0:
        stable = history.wanted_low.extreme
        if not _window_seen(now, history, policy.scale_up_stabilization_seconds):
            stable = current
        if stable < target:
            target, limit = max(stable, current), "Stabilization"
        if _cooling(now, history.last_up, policy.scale_up_cooldown_seconds):
            target, limit = current, "Cooldown"
    if not panicking:
        base = history.size_low.extreme
        most = max(base + 1, math.floor(base * (1 + policy.max_scale_up) + ROUNDING), current)
        if most < target:
            target, limit = most, "RateLimit"
    if policy.max_replicas < target:
        target, limit = policy.max_replicas, "MaxReplicas"
    return target, reason if target > current else "Steady", limit


def _shrink(
    now: float,
    policy: PoolPolicy,
    reading: Reading,
    history: History,
    current: int,
    wanted: int,
    floor: int,
) -> tuple[int, Reason, Limit | None]:
    if reading.missing:
        return current, "MetricsMissing", "MetricsMissing"
    if history.panic_until is not None:
        return current, "Panic", "PanicHold"
    if not _window_seen(now, history, policy.scale_down_stabilization_seconds):
        return current, "Steady", "WindowNotSeen"
    target: int = wanted
    limit: Limit | None = None
    idle_long = _idle_long(now, policy, history)
    stable = 0 if idle_long else max(1, history.wanted_high.extreme)
    if stable > target:
        target, limit = min(stable, current), "Stabilization"
    if target < current and _cooling_down(now, policy, history):
        return current, "Steady", "Cooldown"
    base = history.size_high.extreme
    least = min(base - 1, math.ceil(base * (1 - policy.max_scale_down) - ROUNDING))
    if target < min(least, current):
        target, limit = min(least, current), "RateLimit"
    if target < floor:
        target, limit = floor, "Schedule" if floor > policy.min_replicas else "MinReplicas"
    reason: Reason = "Steady" if target == current else "Idle" if target == 0 else "LoadFell"
    return target, reason, limit


def _window_seen(now: float, history: History, window_seconds: float) -> bool:
    """Whether ticks have come, without a gap, for a whole window."""
    return now - history.observed_since >= window_seconds


def _cooling(now: float, last: float | None, cooldown_seconds: float) -> bool:
    return last is not None and now - last < cooldown_seconds


def _cooling_down(now: float, policy: PoolPolicy, history: History) -> bool:
    """A pool is left alone for a while after it shrank; and what has just grown is not taken back at once."""
    return _cooling(now, history.last_down, policy.scale_down_cooldown_seconds) or _cooling(
        now, history.last_up, policy.scale_down_cooldown_seconds
    )


def _idle_long(now: float, policy: PoolPolicy, history: History) -> bool:
    since = history.idle_since
    return since is not None and now - since >= policy.scale_to_zero_after_seconds
