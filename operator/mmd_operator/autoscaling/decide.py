"""Sizing of one pool: the rules in the order in which they apply. Pure; time is an argument.

The order is that of the Horizontal Pod Autoscaler's behaviour section. The panic window is Knative's, and panic is held for ten windows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mmd_operator.autoscaling import sizing
from mmd_operator.autoscaling.decision import AppliedRule, Decision
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import PoolPolicy
from mmd_operator.autoscaling.samples import PoolSamples
from mmd_operator.autoscaling.signals import observe
from mmd_operator.autoscaling.sizing import RuleResult, State

SizingRule = Callable[[State], RuleResult]

RULES: tuple[SizingRule, ...] = (
    # The wanted size, and its record in the history.
    sizing.replace_pods_that_do_not_start,
    sizing.remember_tick,
    sizing.enter_or_leave_panic,
    # Sizes settled at once.
    sizing.follow_requested_size,
    sizing.keep_fixed_size,
    sizing.raise_to_minimum,
    sizing.lower_to_maximum,
    sizing.hold_growth_until_a_pod_starts,
    sizing.hold_at_minimum,
    sizing.hold_on_missing_reports,
    sizing.hold_during_panic,
    sizing.hold_until_window_is_seen,
    # From the wanted size to the size allowed now.
    sizing.stabilize,
    sizing.cool_down,
    sizing.limit_rate,
    sizing.keep_within_bounds,
    sizing.keep_pods_beside_absent_ones,
    sizing.settle_size,
)
"""Rules from the size that the signals ask for (`State.of`) to the final size. Once a rule settles the size, later rules are skipped."""
REPORTS: tuple[SizingRule, ...] = (
    sizing.report_pods_that_do_not_start,
    sizing.report_unschedulable_pods,
)
"""Rules that report limits even if the size is settled."""


def decide(now: float, policy: PoolPolicy, samples: PoolSamples, history: History) -> Decision:
    """Decide the size of one pool alone; `coordinate` fits the pools to each other and to the GPU budget.

    Args:
        now: Unix seconds of the clock that stamped the samples' `received_at`.
        policy: the pool's rules.
        samples: the pool's samples now.
        history: the history after the previous decision (`Decision.next_history`), or a new one after a start.
    """
    if policy.shadow:
        history = replace(history, written=None)
    current, foreign = history.size_now(samples.replicas)
    state, effects = _apply(
        State.of(now, policy, observe(now, policy, samples, current, history), current, samples.requested)
    )
    observation = state.observation
    return Decision(
        pool=policy.pool,
        at=now,
        spec_replicas=samples.replicas,
        current=current,
        ready=observation.ready,
        wanted=state.wanted,
        replicas=state.replicas,
        reason=state.reason,
        effects=effects,
        valid=not observation.missing,
        act=not policy.shadow,
        minimum=state.floor,
        signal=max(observation.signals, key=lambda s: s.need, default=None),
        signals=observation.signals,
        missing=observation.missing,
        panicking=state.panicking,
        idle=observation.idle,
        foreign_replicas=samples.replicas if foreign else None,
        history=state.history,
        unplaced=observation.unplaced,
        stuck=observation.stuck,
        external=policy.external,
    )


def _apply(state: State) -> tuple[State, tuple[AppliedRule, ...]]:
    """Apply all rules; return the final state and the effects."""
    effects: list[AppliedRule] = []
    for rule in (*RULES, *REPORTS):
        if state.is_settled and rule not in REPORTS:
            continue
        state, effect = rule(state)
        if effect is not None:
            effects.append(effect)
    return state, tuple(effects)
