"""Decides what a pass does next for a rollout: its steps, in the order in which they apply. Pure.

A new pipeline revision is brought up alongside the serving one. When all pods of its pools are Ready, the gateway's Deployment is applied with
it. Kubernetes then starts gateway pods of the new revision before it stops old ones. New gateway pods place requests on the new pools only;
old ones finish their requests on the old pools. The old pools are removed when no gateway pod of their revision is left. Until the new revision
is Ready the gateway is not touched, so a bad revision never serves, and reverting it is a rollout whose target is already Ready.
Under a GPU budget, a new revision starts with the GPUs left by the serving one, and waits if they are too few for one pod of each pool.
Pools grow, and surge while their only pod is replaced, within the rest of the budget; each takes its part before the next one asks. GPUs that
the autoscaler has given away since are part of the observed state: see `pending_growth`.
Pods of the serving revision with outdated settings are replaced one at a time: see `replacement`.
The serving revision is read from the gateway's pod template: nothing else needs to be remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.status import StepEffect
from mmd_operator.observed.observed import Child, ObjectKey, Observed, PoolGrowth
from mmd_operator.resources.naming import Manifest
from mmd_operator.rollout import rollout_steps as steps
from mmd_operator.rollout.rollout_steps import RolloutState, StepResult
from mmd_operator.sizes.replacement import Replacement

Stage = Literal["Creating", "BringingUp", "SwitchingGateway", "Draining", "Complete", "Updating"]

STEPS: tuple[Callable[[RolloutState], StepResult], ...] = (
    # Objects to apply.
    steps.share_gpu_budget,
    steps.apply_planned_objects,
    steps.keep_budgets_of_all_revisions,
    steps.route_to_service_without_picker,
    steps.hold_gateway_until_pools_are_ready,
    steps.hold_new_pools_without_gpus,
    steps.hold_paused_rollout,
    steps.hold_pods_until_weights_are_cached,
    steps.restore_serving_gateway,
    steps.start_pools_at_present_size,
    # Sizes and pods to correct.
    steps.correct_pool_sizes,
    steps.replace_outdated_pods,
    steps.restore_fixed_sizes,
    # Objects to remove.
    steps.remove_unused_objects,
    steps.retry_failed_downloads,
)

STAGES: tuple[tuple[Stage, Callable[[RolloutState], bool]], ...] = (
    ("Creating", steps.nothing_serves),
    ("BringingUp", steps.pools_are_not_ready),
    ("SwitchingGateway", steps.another_revision_serves),
    ("Draining", steps.older_gateways_finish),
    ("Complete", steps.nothing_is_left),
    ("Updating", steps.something_is_left),
)
"""The first stage whose test holds after all steps is the current one, and the reason of `Progressing`."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now: objects to apply in order, sizes to set, objects to remove."""

    stage: Stage
    revision: str
    serving: str | None
    apply: tuple[Manifest, ...]
    sizes: Mapping[str, int]
    remove: tuple[Child, ...]
    replace: Mapping[str, Replacement] = field(default_factory=dict)
    """Pods to replace, by StatefulSet of the revision."""
    waits_for: str = ""
    """The pools that wait for GPUs or nodes, with numbers. A pause, weights and unready pools are in `effects` and `stage`."""
    restore: Mapping[ObjectKey, int] = field(default_factory=dict)
    """Sizes of the gateway and NATS to restore after another client changed them. No scaler owns them, and neither drains before shrinking."""
    blocked: bool = False
    """Whether the GPU budget leaves too few GPUs for one pod of each pool."""
    effects: tuple[StepEffect, ...] = ()
    """Effects of the steps, in the order in which they applied."""
    growth: Mapping[str, PoolGrowth] = field(default_factory=dict)
    """Growth of the pools created or enlarged by the step, by workload name."""
    lacks_gateway: bool = False
    """Whether no gateway is left for the pools that serve, and the step makes none."""


def next_step(
    spec: MultimodalDeploymentSpec,
    revision: str,
    planned: Sequence[Manifest],
    observed: Observed,
    uid: str,
    now: float = 0.0,
    last_serving: str | None = None,
    serving_gateway: Manifest | None = None,
) -> Step:
    """The step from `observed` towards `planned`, the objects of `revision`.

    `uid`: the deployment's UID; `now`: Unix seconds; `last_serving`: the revision that served in the last pass, and `serving_gateway`: its
    gateway's Deployment, for the case that another client has deleted or changed the present one.
    """
    state = RolloutState(spec, revision, planned, observed, uid, now, last_serving, serving_gateway)
    effects: list[StepEffect] = []
    for step in STEPS:
        state, effect = step(state)
        effects += [effect] if effect is not None else []
    return Step(
        stage=next(stage for stage, holds in STAGES if holds(state)),
        revision=revision,
        serving=state.serving,
        apply=state.apply,
        sizes=state.sizes,
        remove=state.remove,
        replace=state.replace,
        waits_for="; ".join(words for words in (state.share.words, state.waits_for) if words),
        restore=state.restore,
        blocked=state.share.blocked,
        effects=tuple(effects),
        growth=steps.growth_of(state),
        lacks_gateway=state.gateway_is_lost and all(m["kind"] != "Deployment" for m in state.apply),
    )
