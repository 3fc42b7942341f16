"""Coordination of a deployment's pools: nothing grows upstream of a saturated pool, and GPUs go where they help the SLO most.

Takes the decisions that each pool would make alone, and cuts them down. Independent of the cluster and the clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_operator.autoscaling.decide import decide
from mmd_operator.autoscaling.decision import AppliedRule, Decision, Limit, ScalingReason, in_replicas
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import DeploymentPolicy
from mmd_operator.autoscaling.samples import PoolSamples

Decisions = Mapping[PoolName, Decision]
SATURATED = 0.95
"""A pool cannot take more from upstream once its load uses up this share of the pods it may have."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The pool that limits the SLO now.

    `load`: its work as a fraction of what its ready pods do at their target. `load_with_one_more`: the same with one more replica.
    `seconds_gained`: how much sooner one more replica would clear its backlog (0 if its work is not counted in seconds).
    """

    pool: PoolName
    ready: int
    load: float
    load_with_one_more: float
    seconds_gained: float

    def __str__(self) -> str:
        text = (
            f"{self.pool} is the bottleneck at {self.load:.0%} of its target load ({self.ready} ready); one more replica "
            f"would bring it to {self.load_with_one_more:.0%}"
        )
        if self.seconds_gained > 0:
            text += f" and clear the backlog {self.seconds_gained:.2f} s sooner"
        return text


@dataclass(frozen=True, slots=True)
class DeploymentDecision:
    """Result of one tick of a deployment's autoscaler."""

    decisions: Mapping[PoolName, Decision]
    bottleneck: Bottleneck | None

    @property
    def histories(self) -> dict[PoolName, History]:
        """The histories to pass to the next tick."""
        return {pool: decision.next_history for pool, decision in self.decisions.items()}


def coordinate(
    now: float,
    policy: DeploymentPolicy,
    samples: Mapping[PoolName, PoolSamples],
    histories: Mapping[PoolName, History],
) -> DeploymentDecision:
    """Decide the sizes of all pools of `policy`. `samples` has every pool, `histories` the pools known from earlier ticks."""
    decisions = {
        pool: decide(now, rules, samples[pool], histories.get(pool, History()))
        for pool, rules in policy.pools.items()
    }
    decisions = _couple(decisions)
    for _ in range(len(decisions)):
        shared = share_gpu_budget(policy, decisions)
        coupled = _couple(shared)
        if coupled == shared:
            break
        # Growth that coupling takes back from one pool is shared out again.
        decisions |= {pool: d for pool, d in coupled.items() if d != shared[pool]}
    return DeploymentDecision(coupled, bottleneck(coupled))


def _order(decisions: Decisions) -> list[PoolName]:
    return [pool for pool in POOL_NAMES if pool in decisions]


def stop_growth_before_a_saturated_pool(decisions: Decisions) -> dict[PoolName, Decision]:
    """Nothing upstream of a saturated pool grows, unless others give it its size: more prefill does not help when decode is the
    bottleneck."""
    coupled = dict(decisions)
    saturated = False
    for pool in reversed(_order(decisions)):
        decision = coupled[pool]
        largest = max(decision.current, decision.minimum, 1)
        if saturated and decision.replicas > largest and not decision.external:
            coupled[pool] = decision = _limited(
                decision, largest, stop_growth_before_a_saturated_pool, "DownstreamSaturated"
            )
        saturated = saturated or _saturated(decision)
    return coupled


def keep_one_replica_after_a_busy_pool(decisions: Decisions) -> dict[PoolName, Decision]:
    """No pool scales to zero while one upstream has work."""
    coupled = dict(decisions)
    busy_upstream = False
    for pool in _order(decisions):
        decision = coupled[pool]
        if busy_upstream and decision.reason == "Idle":
            coupled[pool] = _limited(
                decision,
                1,
                keep_one_replica_after_a_busy_pool,
                "UpstreamBusy",
                None if decision.current == 1 else "LoadFell",
            )
        busy_upstream = busy_upstream or not decision.idle
    return coupled


COUPLING: tuple[Callable[[Decisions], dict[PoolName, Decision]], ...] = (
    stop_growth_before_a_saturated_pool,
    keep_one_replica_after_a_busy_pool,
)
"""Rules by which pools bound each other, in order of application. `share_gpu_budget` follows; both repeat until neither changes anything."""


def _limited(
    decision: Decision,
    replicas: int,
    rule: Callable[..., object],
    limit: Limit,
    reason: ScalingReason | None = None,
) -> Decision:
    numbers = f"{in_replicas(replicas)} instead of {decision.replicas}"
    return decision.limited(replicas, AppliedRule.of(rule, numbers, limit), reason)


def _couple(decisions: Decisions) -> dict[PoolName, Decision]:
    coupled = dict(decisions)
    for rule in COUPLING:
        coupled = rule(coupled)
    return coupled


def _saturated(decision: Decision) -> bool:
    """Whether the pool is saturated even at its decided size; never at zero.

    Starting pods count, and pods that no node takes do not.
    """
    return decision.in_force > 0 and 0 < decision.full >= SATURATED * decision.capacity


def share_gpu_budget(policy: DeploymentPolicy, decisions: Decisions) -> dict[PoolName, Decision]:
    """GPUs are shared out under `gpuBudget`: minima first, then what pools have, then each to the pool where it lowers the excess most.

    Pods that still drain use their GPUs, so growth waits for them. Replicas above the budget are taken back from the pools that
    lose least.
    """
    if policy.gpu_budget is None:
        return dict(decisions)
    sharing = [pool for pool, rules in policy.pools.items() if rules.gpus > 0]
    gpus = {pool: policy.pools[pool].gpus for pool in sharing}
    sizes = {pool: _size_before_growth(decisions[pool]) for pool in sharing}
    reduced: set[PoolName] = set()
    while sum(sizes[p] * gpus[p] for p in sharing) > policy.gpu_budget:
        candidates = [p for p in sharing if decisions[p].act and sizes[p] > decisions[p].minimum]
        if not candidates:
            break
        cheapest = min(candidates, key=lambda p: _gain(decisions[p], sizes[p] - 1) / gpus[p])
        sizes[cheapest] -= 1
        reduced.add(cheapest)
    free = policy.gpu_budget - sum(
        max(sizes[p], _occupied(decisions[p], p in reduced)) * gpus[p] for p in sharing
    )
    heap = [
        (not decisions[p].act, -_gain(decisions[p], sizes[p]) / gpus[p], number, p)
        for number, p in enumerate(sharing)
        if p not in reduced and sizes[p] < decisions[p].replicas
    ]
    heapq.heapify(heap)
    while heap:
        shadow, _, number, pool = heapq.heappop(heap)
        if gpus[pool] > free:
            continue
        sizes[pool] += 1
        free -= gpus[pool]
        if sizes[pool] < decisions[pool].replicas:
            gain = _gain(decisions[pool], sizes[pool]) / gpus[pool]
            heapq.heappush(heap, (shadow, -gain, number, pool))
    return {
        pool: _cut_to(decision, sizes[pool]) if pool in sizes else decision
        for pool, decision in decisions.items()
    }


def _size_before_growth(decision: Decision) -> int:
    """Size of a pool before growth is shared out; below its minimum only if its own decision is."""
    return max(min(decision.replicas, decision.current), min(decision.minimum, decision.replicas))


def _occupied(decision: Decision, reduced: bool) -> int:
    """Replicas that occupy GPUs now. A shrinking pool frees GPUs only when its pods are removed."""
    shrinking = reduced or not decision.act or decision.replicas < decision.spec_replicas
    return max(decision.current, decision.spec_replicas) if shrinking else decision.current


def _cut_to(decision: Decision, replicas: int) -> Decision:
    if replicas == decision.replicas:
        return decision
    reason: ScalingReason | None = "OverBudget" if replicas < decision.current else None
    return _limited(decision, replicas, share_gpu_budget, "GpuBudget", reason)


def _gain(decision: Decision, replicas: int) -> float:
    """How much one more replica, after `replicas`, reduces the pool's excess over its target."""
    return _excess(decision.need, replicas) - _excess(decision.need, replicas + 1)


def _excess(need: float, replicas: int) -> float:
    """Relative excess over the target; a pool with work and no pods is further from its SLO than any other."""
    if replicas == 0:
        return 1e9 if need > 0 else 0.0
    return max(0.0, need / replicas - 1)


def bottleneck(decisions: Decisions) -> Bottleneck | None:
    """Find the bottleneck among pools over their target: the last saturated pool, which backs up those upstream; else the most loaded."""
    busy = {pool: d for pool, d in decisions.items() if d.need > d.ready}
    if not busy:
        return None
    order = _order(busy)
    saturated = [pool for pool in order if busy[pool].full >= SATURATED * max(busy[pool].ready, 1)]
    pool = saturated[-1] if saturated else max(order, key=lambda p: busy[p].need / max(busy[p].ready, 1))
    decision = busy[pool]
    ready = max(decision.ready, 1)
    backlog_seconds = max((s.seconds for s in decision.signals), default=0.0)
    return Bottleneck(
        pool=pool,
        ready=decision.ready,
        load=decision.need / ready,
        load_with_one_more=decision.need / (ready + 1),
        seconds_gained=backlog_seconds / ready - backlog_seconds / (ready + 1),
    )
