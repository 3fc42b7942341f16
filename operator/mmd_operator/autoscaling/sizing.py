"""The rules that size one pool: each takes the state so far and returns it with its change, and the limit that it imposed.

`decide.RULES` lists them in the order in which they apply. Pure; time is part of the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mmd_operator.autoscaling.decision import Limit, ScalingReason
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import PoolPolicy
from mmd_operator.autoscaling.signals import MOST_REPLICAS, Observation

RATE_PERIOD_SECONDS = 15.0
"""`maxScaleUpPercent` and `maxScaleDownPercent` are of the size this long ago."""
PANIC_HOLD_WINDOWS = 10
MAX_FUTILE_STARTS = 2
"""Pods that are started in place of others that do not start. A bad node costs one or two; more do not start for a reason that
another pod would meet too."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class State:
    """One pool at one tick: what is known of it, and the size that the rules so far give it.

    `needed` replicas meet the targets of all signals; `wanted` are these and replacements of pods that do not start. `replicas` is
    the size so far. A rule that sets `reason` has the last word: the size is settled. `floor` is the minimum now, schedules included.
    """

    now: float
    policy: PoolPolicy
    observation: Observation
    history: History
    current: int
    floor: int
    needed: int
    wanted: int
    replicas: int
    reason: ScalingReason | None = None

    @classmethod
    def of(cls, now: float, policy: PoolPolicy, observation: Observation, current: int) -> State:
        """What the signals ask for, before any rule."""
        signals = observation.signals
        needed = max((math.ceil(min(s.need, MOST_REPLICAS) - ROUNDING) for s in signals), default=0)
        return cls(
            now=now,
            policy=policy,
            observation=observation,
            history=observation.history,
            current=current,
            floor=policy.floor(now),
            needed=needed,
            wanted=needed,
            replicas=needed,
        )

    @property
    def grows(self) -> bool:
        """Whether the load needs more replicas than there are."""
        return self.wanted > self.current

    @property
    def shrinks(self) -> bool:
        """Whether the load needs fewer replicas than there are."""
        return self.wanted < self.current

    @property
    def panicking(self) -> bool:
        """Whether the load recently rose to a multiple of the pool."""
        return self.history.panic_until is not None

    @property
    def floor_limit(self) -> Limit:
        """What sets the minimum now."""
        return "Schedule" if self.floor > self.policy.min_replicas else "MinReplicas"

    def seen(self, window_seconds: float) -> bool:
        """Whether ticks have arrived without a gap for a full window."""
        return self.now - self.history.observed_since >= window_seconds

    def settled(self, replicas: int, reason: ScalingReason) -> State:
        """With a size that no later rule changes."""
        return replace(self, replicas=replicas, reason=reason)

    def outcome(self) -> tuple[int, ScalingReason]:
        """The size, and the reason for it."""
        if self.reason is not None:
            return self.replicas, self.reason
        return self.replicas, self._reason()

    def _reason(self) -> ScalingReason:
        if self.replicas > self.current:
            return "Panic" if self.panicking else "Woken" if self.current == 0 else "LoadRose"
        if self.replicas < self.current:
            return "Idle" if self.replicas == 0 else "LoadFell"
        return "MetricsMissing" if self.observation.missing and self.wanted == self.current else "Steady"


RuleResult = tuple[State, Limit | None]


def replace_pods_that_do_not_start(state: State) -> RuleResult:
    """Some pods are wanted in place of those that do not become Ready, once one has shown that it can."""
    stuck = min(state.observation.stuck, MAX_FUTILE_STARTS)
    if state.observation.ready:
        wanted = state.wanted + stuck
        return replace(state, wanted=wanted, replicas=wanted), None
    return state, None


def remember_tick(state: State) -> RuleResult:
    """The windows take this tick in. One with a report missing counts as wanting at least the present size."""
    now, policy, history = state.now, state.policy, state.history
    at_least = max(state.wanted, state.current) if state.observation.missing else state.wanted
    idle_since = history.idle_since if history.idle_since is not None else now
    history = replace(
        history,
        wanted_high=history.wanted_high.push(now, at_least, policy.scale_down_stabilization_seconds),
        wanted_low=history.wanted_low.push(now, state.wanted, policy.scale_up_stabilization_seconds),
        wanted_burst=history.wanted_burst.push(now, state.wanted, policy.panic_window_seconds),
        size_high=history.size_high.push(now, state.current, RATE_PERIOD_SECONDS),
        size_low=history.size_low.push(now, state.current, RATE_PERIOD_SECONDS),
        idle_since=min(idle_since, now) if state.observation.idle else None,
    )
    return replace(state, history=history), None


def enter_or_leave_panic(state: State) -> RuleResult:
    """Panic begins when the whole window asked for a multiple of the present size; it ends ten windows after the last such tick."""
    now, policy, history = state.now, state.policy, state.history
    window = policy.panic_window_seconds
    hold = PANIC_HOLD_WINDOWS * window
    until = None
    if window > 0:
        threshold = policy.panic_threshold * max(state.current, 1)
        if state.seen(window) and history.wanted_burst.extreme >= threshold:
            until = now + hold
        elif history.panic_until is not None and now < history.panic_until <= now + hold:
            until = history.panic_until
    return replace(state, history=replace(history, panic_until=until)), None


def keep_fixed_size(state: State) -> RuleResult:
    """A pool without room between its bounds has one size."""
    size = state.policy.max_replicas
    if state.policy.fixed:
        return state.settled(size, "Steady" if state.current == size else "OutOfBounds"), None
    return state, None


def raise_to_minimum(state: State) -> RuleResult:
    """A pool below its minimum is raised to it at once."""
    if state.current < state.floor:
        scheduled = state.floor > state.policy.min_replicas
        return state.settled(state.floor, "ScheduleOpened" if scheduled else "OutOfBounds"), None
    return state, None


def lower_to_maximum(state: State) -> RuleResult:
    """A pool above its maximum is lowered to it at once."""
    if state.current > state.policy.max_replicas:
        return state.settled(state.policy.max_replicas, "OutOfBounds"), "MaxReplicas"
    return state, None


def hold_growth_until_a_pod_starts(state: State) -> RuleResult:
    """No further pod is started while those there do not become Ready and none is."""
    if state.grows and state.observation.stuck and not state.observation.ready:
        return state.settled(state.current, "Steady"), "PodsNotStarting"
    return state, None


def hold_at_minimum(state: State) -> RuleResult:
    """A pool at its minimum stays there, however little the load needs."""
    if state.shrinks and state.current == state.floor and not state.observation.missing:
        return state.settled(state.current, "Steady"), state.floor_limit
    return state, None


def hold_on_missing_reports(state: State) -> RuleResult:
    """Without every report that is needed no pool is lowered."""
    if state.shrinks and state.observation.missing:
        return state.settled(state.current, "MetricsMissing"), "MetricsMissing"
    return state, None


def hold_during_panic(state: State) -> RuleResult:
    """Nothing is lowered in a panic."""
    if state.shrinks and state.panicking:
        return state.settled(state.current, "Panic"), "PanicHold"
    return state, None


def hold_until_window_is_seen(state: State) -> RuleResult:
    """Nothing is lowered before a whole stabilization window has been observed."""
    if state.shrinks and not state.seen(state.policy.scale_down_stabilization_seconds):
        return state.settled(state.current, "Steady"), "WindowNotSeen"
    return state, None


def stabilize(state: State) -> RuleResult:
    """Not below the highest size wanted in the scale-down window, not above the lowest in the scale-up window."""
    if state.shrinks:
        stable = 0 if _idle_long(state) else max(1, state.history.wanted_high.extreme)
        if stable > state.replicas:
            return replace(state, replicas=min(stable, state.current)), "Stabilization"
    elif state.grows and state.current > 0 and not state.panicking:
        seen = state.seen(state.policy.scale_up_stabilization_seconds)
        stable = state.history.wanted_low.extreme if seen else state.current
        if stable < state.replicas:
            return replace(state, replicas=max(stable, state.current)), "Stabilization"
    return state, None


def cool_down(state: State) -> RuleResult:
    """A pool is left alone for a while after it changed; what has just grown is not taken back at once."""
    policy, history = state.policy, state.history
    if state.grows:
        exempt = state.panicking or state.current == 0
        cooling = not exempt and _recent(state.now, history.last_up, policy.scale_up_cooldown_seconds)
    else:
        cooling = state.replicas < state.current and any(
            _recent(state.now, last, policy.scale_down_cooldown_seconds)
            for last in (history.last_down, history.last_up)
        )
    return (replace(state, replicas=state.current), "Cooldown") if cooling else (state, None)


def limit_rate(state: State) -> RuleResult:
    """At most a share of the size of a while ago is added or removed, and at least one replica may be."""
    policy, history, current = state.policy, state.history, state.current
    if state.grows and not state.panicking:
        base = history.size_low.extreme
        most = max(base + 1, math.floor(base * (1 + policy.max_scale_up) + ROUNDING), current)
        if most < state.replicas:
            return replace(state, replicas=most), "RateLimit"
    elif state.shrinks:
        base = history.size_high.extreme
        least = min(base - 1, math.ceil(base * (1 - policy.max_scale_down) - ROUNDING), current)
        if state.replicas < least:
            return replace(state, replicas=least), "RateLimit"
    return state, None


def keep_within_bounds(state: State) -> RuleResult:
    """Between the minimum now and the maximum."""
    if state.replicas > state.policy.max_replicas:
        return replace(state, replicas=state.policy.max_replicas), "MaxReplicas"
    if state.replicas < state.floor:
        return replace(state, replicas=state.floor), state.floor_limit
    return state, None


def report_pods_that_do_not_start(state: State) -> RuleResult:
    """More pods do not start than are replaced, and the load needs them: a person must look."""
    observed = state.observation
    working = state.current - observed.unplaced - observed.stuck
    blocked = observed.stuck > MAX_FUTILE_STARTS and state.needed > working
    return state, "PodsNotStarting" if blocked else None


def report_unschedulable_pods(state: State) -> RuleResult:
    """The load needs pods that no node takes. The pool still grows: a cluster autoscaler reacts to pending pods."""
    unplaced = state.observation.unplaced
    return state, "Unschedulable" if unplaced and state.wanted > state.current - unplaced else None


def _recent(now: float, last: float | None, cooldown_seconds: float) -> bool:
    return last is not None and now - last < cooldown_seconds


def _idle_long(state: State) -> bool:
    since = state.history.idle_since
    return since is not None and state.now - since >= state.policy.scale_to_zero_after_seconds
