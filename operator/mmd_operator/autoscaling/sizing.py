"""Rules that size one pool: each takes the state so far, and returns the changed state and an effect for people to read.

`decide.RULES` lists them in the order in which they apply. The first paragraph of a docstring is the rule's sentence in `mmd explain`
and in docs/autoscaling-mechanism.md. Pure; time is part of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mmd_operator.autoscaling.decision import AppliedRule, Limit, ScalingReason, in_replicas
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import PoolPolicy
from mmd_operator.autoscaling.signals import MOST_REPLICAS, Observation

RATE_PERIOD_SECONDS = 15.0
"""`maxScaleUpPercent` and `maxScaleDownPercent` apply to the size this long ago."""
PANIC_HOLD_WINDOWS = 10
MAX_FUTILE_STARTS = 2
"""Most pods started in place of others that do not start. A bad node costs one or two; if more do not start, another pod would fail for
the same reason."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class State:
    """One pool at one tick: the facts about it, and its size after the rules so far.

    `needed` replicas meet the targets of all signals; `wanted` adds replacements of pods that do not start. `replicas`: the size so
    far, until a rule settles it with its reason. `floor`: the minimum now, schedules included. `requested`: the size that another
    client asks for, if known.
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
    reason: ScalingReason = "Steady"
    is_settled: bool = False
    requested: int | None = None

    @classmethod
    def of(
        cls,
        now: float,
        policy: PoolPolicy,
        observation: Observation,
        current: int,
        requested: int | None = None,
    ) -> State:
        """The state that the signals ask for, before any rule."""
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
            requested=requested,
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
        """The limit that sets the minimum now."""
        return "Schedule" if self.floor > self.policy.min_replicas else "MinReplicas"

    def seen(self, window_seconds: float) -> bool:
        """Whether ticks have arrived without a gap for a full window."""
        return self.now - self.history.observed_since >= window_seconds

    def settled(self, replicas: int, reason: ScalingReason) -> State:
        """A copy with a size that no later rule changes."""
        return replace(self, replicas=replicas, reason=reason, is_settled=True)

    def instead(self, replicas: int) -> str:
        """Words for an effect: a size and the size that it replaces."""
        return f"{in_replicas(replicas)} instead of {self.replicas}"


RuleResult = tuple[State, AppliedRule | None]


def replace_pods_that_do_not_start(state: State) -> RuleResult:
    """At most two more are wanted in place of pods that do not become Ready, if any pod is Ready."""
    stuck = min(state.observation.stuck, MAX_FUTILE_STARTS)
    if not stuck or not state.observation.ready:
        return state, None
    wanted = state.wanted + stuck
    effect = AppliedRule.of(replace_pods_that_do_not_start, state.instead(wanted))
    return replace(state, wanted=wanted, replicas=wanted), effect


def remember_tick(state: State) -> RuleResult:
    """The windows record the wanted size; with a report missing, at least the present size."""
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
    raised = at_least > state.wanted
    return replace(state, history=history), AppliedRule.of(
        remember_tick, f"{in_replicas(at_least)} instead of {state.wanted}"
    ) if raised else None


def enter_or_leave_panic(state: State) -> RuleResult:
    """Panic begins when the load of a whole `panicWindowSeconds` asks for `panicThresholdPercent` of the present size, and ends ten
    windows after the last such tick."""
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
    effect = None
    if until is not None:
        effect = AppliedRule.of(enter_or_leave_panic, "the pool is in panic")
    elif history.panic_until is not None:
        effect = AppliedRule.of(enter_or_leave_panic, "the panic has ended")
    return replace(state, history=replace(history, panic_until=until)), effect


def follow_requested_size(state: State) -> RuleResult:
    """A pool with `mode: External` has the size that its MultimodalPool asks for, within its bounds."""
    if not state.policy.external:
        return state, None
    wanted = state.current if state.requested is None else state.requested
    size = max(state.floor, min(wanted, state.policy.max_replicas))
    limit: Limit | None = None
    if size != wanted:
        limit = "MaxReplicas" if size < wanted else state.floor_limit
    reason: ScalingReason = "Steady" if size == state.current else "External"
    effect = AppliedRule.of(follow_requested_size, f"{in_replicas(size)} of {wanted} requested", limit)
    return replace(state, wanted=wanted).settled(size, reason), effect


def keep_fixed_size(state: State) -> RuleResult:
    """A pool whose minimum is its maximum has that size."""
    size = state.policy.max_replicas
    if not state.policy.fixed:
        return state, None
    effect = AppliedRule.of(keep_fixed_size, in_replicas(size))
    return state.settled(size, "Steady" if state.current == size else "OutOfBounds"), effect


def raise_to_minimum(state: State) -> RuleResult:
    """A pool below its minimum is raised to it at once."""
    if state.current >= state.floor:
        return state, None
    scheduled = state.floor > state.policy.min_replicas
    effect = AppliedRule.of(
        raise_to_minimum, f"{in_replicas(state.floor)}{', by a schedule' if scheduled else ''}"
    )
    return state.settled(state.floor, "ScheduleOpened" if scheduled else "OutOfBounds"), effect


def lower_to_maximum(state: State) -> RuleResult:
    """A pool above its maximum is lowered to it at once."""
    maximum = state.policy.max_replicas
    if state.current <= maximum:
        return state, None
    return state.settled(maximum, "OutOfBounds"), AppliedRule.of(
        lower_to_maximum, in_replicas(maximum), "MaxReplicas"
    )


def hold_growth_until_a_pod_starts(state: State) -> RuleResult:
    """A pool with pods that do not start and none that is Ready starts no more."""
    if not (state.grows and state.observation.stuck and not state.observation.ready):
        return state, None
    effect = AppliedRule.of(hold_growth_until_a_pod_starts, state.instead(state.current), "PodsNotStarting")
    return state.settled(state.current, "Steady"), effect


def hold_at_minimum(state: State) -> RuleResult:
    """A pool at its minimum stays there; `Schedule` where a schedule sets it."""
    if not (state.shrinks and state.current == state.floor and not state.observation.missing):
        return state, None
    effect = AppliedRule.of(hold_at_minimum, state.instead(state.current), state.floor_limit)
    return state.settled(state.current, "Steady"), effect


def hold_on_missing_reports(state: State) -> RuleResult:
    """Nothing is lowered while a needed report is missing."""
    if not (state.shrinks and state.observation.missing):
        return state, None
    effect = AppliedRule.of(hold_on_missing_reports, state.instead(state.current), "MetricsMissing")
    return state.settled(state.current, "MetricsMissing"), effect


def hold_during_panic(state: State) -> RuleResult:
    """Nothing is lowered in a panic."""
    if not (state.shrinks and state.panicking):
        return state, None
    effect = AppliedRule.of(hold_during_panic, state.instead(state.current), "PanicHold")
    return state.settled(state.current, "Panic"), effect


def hold_until_window_is_seen(state: State) -> RuleResult:
    """Nothing is lowered before the operator has observed a whole `scaleDownStabilizationSeconds`."""
    if not state.shrinks or state.seen(state.policy.scale_down_stabilization_seconds):
        return state, None
    effect = AppliedRule.of(hold_until_window_is_seen, state.instead(state.current), "WindowNotSeen")
    return state.settled(state.current, "Steady"), effect


def stabilize(state: State) -> RuleResult:
    """Not below the highest size wanted in `scaleDownStabilizationSeconds`, not above the lowest in `scaleUpStabilizationSeconds`; to
    zero only after `scaleToZeroAfterSeconds`."""
    size = state.replicas
    if state.shrinks:
        stable = 0 if _idle_long(state) else max(1, state.history.wanted_high.extreme)
        if stable > size:
            size = min(stable, state.current)
    elif state.grows and state.current > 0 and not state.panicking:
        window_seen = state.seen(state.policy.scale_up_stabilization_seconds)
        stable = state.history.wanted_low.extreme if window_seen else state.current
        if stable < size:
            size = max(stable, state.current)
    return _resized(state, size, stabilize, "Stabilization")


def cool_down(state: State) -> RuleResult:
    """No step within `scaleUpCooldownSeconds` or `scaleDownCooldownSeconds` of the last."""
    policy, history = state.policy, state.history
    if state.grows:
        exempt = state.panicking or state.current == 0
        cooling = not exempt and _recent(state.now, history.last_up, policy.scale_up_cooldown_seconds)
    else:
        cooling = state.replicas < state.current and any(
            _recent(state.now, last, policy.scale_down_cooldown_seconds)
            for last in (history.last_down, history.last_up)
        )
    if not cooling:
        return state, None
    effect = AppliedRule.of(cool_down, state.instead(state.current), "Cooldown")
    return replace(state, replicas=state.current), effect


def limit_rate(state: State) -> RuleResult:
    """At most `maxScaleUpPercent` and `maxScaleDownPercent` of the size of 15 s ago."""
    policy, history, current = state.policy, state.history, state.current
    size = state.replicas
    if state.grows and not state.panicking:
        base = history.size_low.extreme
        largest = max(base + 1, math.floor(base * (1 + policy.max_scale_up) + ROUNDING), current)
        size = min(size, largest)
    elif state.shrinks:
        base = history.size_high.extreme
        smallest = min(base - 1, math.ceil(base * (1 - policy.max_scale_down) - ROUNDING), current)
        size = max(size, smallest)
    return _resized(state, size, limit_rate, "RateLimit")


def keep_within_bounds(state: State) -> RuleResult:
    """Between the minimum now, schedules included, and `maxReplicas`."""
    if state.replicas > state.policy.max_replicas:
        return _resized(state, state.policy.max_replicas, keep_within_bounds, "MaxReplicas")
    return _resized(state, max(state.replicas, state.floor), keep_within_bounds, state.floor_limit)


def keep_pods_beside_absent_ones(state: State) -> RuleResult:
    """A pool that shrinks keeps as many pods on nodes as it needs: those that no node runs leave only if they are the last."""
    size = state.replicas
    on_nodes = min(size, _on_nodes(state.current, state))
    while state.shrinks and size < state.current and _on_nodes(size, state) < on_nodes:
        size += 1
    return _resized(state, size, keep_pods_beside_absent_ones, "Unschedulable")


def _on_nodes(size: int, state: State) -> int:
    """Pods that nodes run among the first ones of a pool."""
    return size - sum(ordinal < size for ordinal in state.observation.absent)


def settle_size(state: State) -> RuleResult:
    """The size that is left is that of the pool, and its direction gives the reason."""
    reason: ScalingReason = "Steady"
    if state.replicas > state.current:
        reason = "Panic" if state.panicking else "Woken" if state.current == 0 else "LoadRose"
    elif state.replicas < state.current:
        reason = "Idle" if state.replicas == 0 else "LoadFell"
    elif state.observation.missing and state.wanted == state.current:
        reason = "MetricsMissing"
    effect = (
        AppliedRule.of(settle_size, f"{in_replicas(state.replicas)}, {reason}")
        if reason != "Steady"
        else None
    )
    return state.settled(state.replicas, reason), effect


def report_pods_that_do_not_start(state: State) -> RuleResult:
    """More pods do not start than are replaced, and the load needs them."""
    observed = state.observation
    working = state.current - observed.unplaced - observed.stuck
    if observed.stuck <= MAX_FUTILE_STARTS or state.needed <= working:
        return state, None
    return state, AppliedRule.of(
        report_pods_that_do_not_start, f"{observed.stuck} of {state.current} pods", "PodsNotStarting"
    )


def report_unschedulable_pods(state: State) -> RuleResult:
    """The load needs pods that no node takes; the pool grows all the same."""
    # the pool grows, because a cluster autoscaler reacts to pending pods
    unplaced = state.observation.unplaced
    if not unplaced or state.wanted <= state.current - unplaced:
        return state, None
    return state, AppliedRule.of(
        report_unschedulable_pods, f"{unplaced} of {state.current} pods", "Unschedulable"
    )


def _resized(state: State, replicas: int, rule: Callable[[State], RuleResult], limit: Limit) -> RuleResult:
    """Resize the state by a rule; without an effect if the size stays the same."""
    if replicas == state.replicas:
        return state, None
    return replace(state, replicas=replicas), AppliedRule.of(rule, state.instead(replicas), limit)


def _recent(now: float, last: float | None, cooldown_seconds: float) -> bool:
    return last is not None and now - last < cooldown_seconds


def _idle_long(state: State) -> bool:
    since = state.history.idle_since
    return since is not None and state.now - since >= state.policy.scale_to_zero_after_seconds
