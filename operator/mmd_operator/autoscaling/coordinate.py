"""All pools of a deployment together: nothing grows upstream of a saturated pool, GPUs go where they help the SLO most.

Takes the decisions that each pool would make alone and cuts them down. Knows no cluster and no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from mmd_api.pools import POOL_NAMES, PoolName
from mmd_operator.autoscaling.decide import decide
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import DeploymentPolicy
from mmd_operator.autoscaling.types import Decision, PoolSamples

SATURATED = 0.95
"""A pool whose load uses up this share of the pods it may have cannot take more from upstream."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The pool that bounds the SLO now.

    `load` is what it has to do as a fraction of what its ready pods do at their target; `load_with_one_more` is the same with
    one replica more; `seconds_gained` is how much sooner its backlog would be gone (0 where work is not counted in seconds).
    """

    pool: PoolName
    ready: int
    load: float
    load_with_one_more: float
    seconds_gained: float

    def __str__(self) -> str:
        text = (
            f"{self.pool} bounds the SLO: {self.ready} ready replicas carry {self.load:.0%} of their target load; one more "
            f"would bring that to {self.load_with_one_more:.0%}"
        )
        if self.seconds_gained > 0:
            text += f" and end the backlog {self.seconds_gained:.2f} s sooner"
        return text


@dataclass(frozen=True, slots=True)
class Verdict:
    """One tick of a deployment's autoscaler."""

    decisions: Mapping[PoolName, Decision]
    bottleneck: Bottleneck | None

    @property
    def histories(self) -> dict[PoolName, History]:
        """What the next tick must be given."""
        return {pool: decision.history for pool, decision in self.decisions.items()}


def coordinate(
    now: float,
    policy: DeploymentPolicy,
    samples: Mapping[PoolName, PoolSamples],
    histories: Mapping[PoolName, History],
) -> Verdict:
    """Decide the sizes of all pools of `policy`; `samples` holds each of them, `histories` those known from before."""
    decisions = {
        pool: decide(now, rules, samples[pool], histories.get(pool, History()))
        for pool, rules in policy.pools.items()
    }
    decisions = _couple(decisions)
    for _ in range(len(decisions)):
        fitted = _keep_budget(policy, decisions)
        coupled = _couple(fitted)
        if coupled == fitted:
            break
        # What coupling takes back from one pool is shared out again.
        decisions |= {pool: d for pool, d in coupled.items() if d != fitted[pool]}
    return Verdict(coupled, bottleneck(coupled))


def _order(decisions: Mapping[PoolName, Decision]) -> list[PoolName]:
    return [pool for pool in POOL_NAMES if pool in decisions]


def _couple(decisions: Mapping[PoolName, Decision]) -> dict[PoolName, Decision]:
    """From the last pool upwards: a pool that stays saturated stops growth before it. No pool is at zero below a busy one."""
    coupled = dict(decisions)
    saturated = False
    for pool in reversed(_order(decisions)):
        decision = coupled[pool]
        most = max(decision.current, decision.minimum, 1)
        if saturated and decision.replicas > most:
            coupled[pool] = decision = decision.limited(most, "DownstreamSaturated")
        saturated = saturated or _saturated(decision)
    busy_upstream = False
    for pool in _order(decisions):
        decision = coupled[pool]
        if busy_upstream and decision.reason == "Idle":
            coupled[pool] = decision.limited(1, "UpstreamBusy", None if decision.current == 1 else "LoadFell")
        busy_upstream = busy_upstream or not decision.idle
    return coupled


def _saturated(decision: Decision) -> bool:
    """Whether even the size it is given leaves it used up. Pods on their way count; a pool at zero has nothing to use up."""
    return decision.in_force > 0 and decision.full >= SATURATED * decision.in_force


def _keep_budget(
    policy: DeploymentPolicy, decisions: Mapping[PoolName, Decision]
) -> dict[PoolName, Decision]:
    """Share the GPUs: minima first, then what the pools have, then growth by gain per GPU, one replica at a time.

    GPUs of pods that still drain are in use, so growth waits for them. What is above the budget is taken back from the pools
    that lose least.
    """
    if policy.gpu_budget is None:
        return dict(decisions)
    sharing = [pool for pool, rules in policy.pools.items() if rules.gpus > 0]
    gpus = {pool: policy.pools[pool].gpus for pool in sharing}
    sizes = {pool: _kept(decisions[pool]) for pool in sharing}
    reduced: set[PoolName] = set()
    while sum(sizes[p] * gpus[p] for p in sharing) > policy.gpu_budget:
        candidates = [p for p in sharing if decisions[p].act and sizes[p] > decisions[p].minimum]
        if not candidates:
            break
        cheapest = min(candidates, key=lambda p: _gain(decisions[p], sizes[p] - 1) / gpus[p])
        sizes[cheapest] -= 1
        reduced.add(cheapest)
    free = policy.gpu_budget - sum(
        max(sizes[p], _held(decisions[p], p in reduced)) * gpus[p] for p in sharing
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
        pool: _cut(decision, sizes[pool]) if pool in sizes else decision
        for pool, decision in decisions.items()
    }


def _kept(decision: Decision) -> int:
    """What a pool has before growth is shared out: never below its minimum, unless it goes there itself."""
    return max(min(decision.replicas, decision.current), min(decision.minimum, decision.replicas))


def _held(decision: Decision, reduced: bool) -> int:
    """Replicas whose GPUs are taken now; a pool on its way down gives them back only when its pods are gone."""
    shrinking = reduced or not decision.act or decision.replicas < decision.spec_replicas
    return max(decision.current, decision.spec_replicas) if shrinking else decision.current


def _cut(decision: Decision, replicas: int) -> Decision:
    if replicas == decision.replicas:
        return decision
    return decision.limited(replicas, "GpuBudget", "OverBudget" if replicas < decision.current else None)


def _gain(decision: Decision, replicas: int) -> float:
    """How much one more replica, after `replicas`, lowers what the pool is beyond its target."""
    return _excess(decision.need, replicas) - _excess(decision.need, replicas + 1)


def _excess(need: float, replicas: int) -> float:
    """Relative excess over the target; a pool with work and nobody to do it is further from its SLO than any other."""
    if replicas == 0:
        return 1e9 if need > 0 else 0.0
    return max(0.0, need / replicas - 1)


def bottleneck(decisions: Mapping[PoolName, Decision]) -> Bottleneck | None:
    """The pool beyond its target that bounds the SLO: the last saturated one, for it backs up those before; else the most loaded."""
    ready = {pool: d for pool, d in decisions.items() if d.need > d.ready}
    if not ready:
        return None
    order = _order(ready)
    full = [pool for pool in order if ready[pool].full >= SATURATED * max(ready[pool].ready, 1)]
    pool = full[-1] if full else max(order, key=lambda p: ready[p].need / max(ready[p].ready, 1))
    decision = ready[pool]
    have = max(decision.ready, 1)
    seconds = max((s.seconds for s in decision.signals), default=0.0)
    return Bottleneck(
        pool=pool,
        ready=decision.ready,
        load=decision.need / have,
        load_with_one_more=decision.need / (have + 1),
        seconds_gained=seconds / have - seconds / (have + 1),
    )
