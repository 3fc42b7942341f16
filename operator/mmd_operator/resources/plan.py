"""Plan of a MultimodalDeployment: all its Kubernetes objects. Pure: imports neither kopf nor a Kubernetes client."""

from __future__ import annotations

from mmd_api.contract.pools import POOL_NAMES
from mmd_api.faults import InvalidDeploymentError, cluster_faults
from mmd_api.readers import Component
from mmd_api.resource import MultimodalDeployment
from mmd_api.status import PinnedRevision
from mmd_operator.resources.config import config_map
from mmd_operator.resources.disruption import component_budget, pool_budget
from mmd_operator.resources.exposure import exposure_objects
from mmd_operator.resources.gateway import gateway_objects
from mmd_operator.resources.naming import Manifest, RevisionScope
from mmd_operator.resources.nats import nats_objects
from mmd_operator.resources.network import network_policies
from mmd_operator.resources.pools import pool_objects
from mmd_operator.resources.weights import weights_objects


def plan_objects(
    deployment: MultimodalDeployment, namespace: str, pinned: PinnedRevision | None = None
) -> list[Manifest]:
    """Every object of the deployment's present revision, in the order to apply them; the same for the same input.

    `pinned`: what that revision consists of, once known. The applier adds the ownerReference, and leaves `spec.replicas` out of every pool
    that already exists.

    Raises:
        InvalidDeploymentError: the deployment has something that only `mmd up` can serve (a relative model path, which `mmd up` resolves).
    """
    if faults := cluster_faults(deployment):
        raise InvalidDeploymentError(faults)
    scope = RevisionScope.of(deployment, namespace, pinned)
    pools = {name: pool for name in POOL_NAMES if (pool := getattr(scope.spec, name)) is not None}
    objects = [config_map(scope), *network_policies(scope)]
    if scope.spec.nats.managed:
        objects += nats_objects(scope)
    objects += weights_objects(scope)
    for name, pool in pools.items():
        objects += pool_objects(scope, name, pool)
    objects += gateway_objects(scope)
    components: list[Component] = ["gateway"]
    if scope.spec.nats.managed:
        components.append("nats")
    objects += [pool_budget(scope, name) for name in pools]
    objects += [component_budget(scope, component) for component in components]
    return objects + exposure_objects(scope)
