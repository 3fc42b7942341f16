"""How many replicas one pool should have now: the rules in the order in which they apply. Pure; time is an argument.

The order is that of the Horizontal Pod Autoscaler's behaviour section; the panic window is Knative's, held for ten windows.
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
    # What is wanted, and what is remembered of it.
    sizing.replace_pods_that_do_not_start,
    sizing.remember_tick,
    sizing.enter_or_leave_panic,
    # Sizes that are settled at once.
    sizing.follow_requested_size,
    sizing.keep_fixed_size,
    sizing.raise_to_minimum,
    sizing.lower_to_maximum,
    sizing.hold_growth_until_a_pod_starts,
    sizing.hold_at_minimum,
    sizing.hold_on_missing_reports,
    sizing.hold_during_panic,
    sizing.hold_until_window_is_seen,
    # From what is wanted to what is allowed now.
    sizing.stabilize,
    sizing.cool_down,
    sizing.limit_rate,
    sizing.keep_within_bounds,
    sizing.settle_size,
)
"""From what the signals ask for (`State.of`) to the size; once a rule has settled the size, those after it are skipped."""
REPORTS: tuple[SizingRule, ...] = (
    sizing.report_pods_that_do_not_start,
    sizing.report_unschedulable_pods,
)
"""Limits that are reported even if the size is settled."""


def decide(now: float, policy: PoolPolicy, samples: PoolSamples, history: History) -> Decision:
    """The size of one pool, looked at alone; `coordinate` fits the pools to each other and to the GPU budget.

    Args:
        now: Unix seconds of the clock that stamped the samples' `received_at`.
        policy: the pool's rules.
        samples: what is known now.
        history: that of the previous decision (`Decision.next_history`), or a new one after a start.
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
    """The state after all rules, and their effects."""
    effects: list[AppliedRule] = []
    for rule in (*RULES, *REPORTS):
        if state.is_settled and rule not in REPORTS:
            continue
        state, effect = rule(state)
        if effect is not None:
            effects.append(effect)
    return state, tuple(effects)
