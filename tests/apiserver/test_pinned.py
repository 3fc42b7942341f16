"""What a pipeline revision consists of is recorded when it is first seen and handed to later pods, which are created from the pinned image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mmd_operator.kube.contests import FREE_REPAIRS
from mmd_operator.resources.naming import INPUTS_ANNOTATION, REVISION_LABEL
from support.cluster.deployments import ANOTHER_MODEL, SPEC
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace

from .fleet import Fleet

FIRST = "registry.example/worker@sha256:aa"


@pytest.fixture
def fleet(namespace: Namespace, any_operator: AnyOperator) -> Iterator[Fleet]:
    made = Fleet(namespace)
    namespace.apply(SPEC)
    made.until(namespace.is_ready)
    yield made
    made.stop()


def pinned(fleet: Fleet) -> dict[str, Any]:
    status = fleet.namespace.get()["status"]
    found = [pin for pin in status["pinned"] if pin["revision"] == status["pipelineRevision"]]
    assert len(found) == 1, found
    return dict(found[0])


def told(fleet: Fleet) -> dict[str, Any]:
    """What pods that start from now on read."""
    revision = fleet.namespace.get()["status"]["pipelineRevision"]
    files = fleet.namespace.objects()[f"ConfigMap/demo-{revision}"].data
    found = [json.loads(text)["pinned"] for text in files.values()]
    assert all(one == found[0] for one in found)
    return dict(found[0])


def templates(fleet: Fleet) -> dict[str, Any]:
    listed = fleet.namespace.apps.list_namespaced_stateful_set(fleet.namespace.name).items
    return {item.metadata.name: item.spec.template.to_dict() for item in listed}


def test_a_revision_is_pinned_from_its_first_ready_pod(fleet: Fleet) -> None:
    before = templates(fleet)
    fleet.until(lambda: pinned(fleet))
    revision = fleet.namespace.get()["status"]["pipelineRevision"]
    assert pinned(fleet) == {"revision": revision, "identity": "0123456789", "image": FIRST}
    fleet.until(lambda: told(fleet))
    assert told(fleet) == pinned(fleet)
    assert templates(fleet) == before  # nobody is replaced for it
    fleet.namespace.reported("Pinned", "0123456789")


def test_a_tag_that_moved_is_reported_where_no_registry_is_known(fleet: Fleet) -> None:
    fleet.until(lambda: pinned(fleet))
    fleet.image = "registry.example/worker@sha256:bb"
    fleet.namespace.change({"decode": {"replicas": 3}})
    fleet.until(lambda: moved(fleet))
    assert pinned(fleet)["image"] == FIRST
    fleet.namespace.change({"decode": {"replicas": 2}})
    fleet.until(lambda: not_moved(fleet))


REPOSITORY = "registry.example/team/worker"
TAG, BEGAN, MOVED = f"{REPOSITORY}:v1", f"{REPOSITORY}@sha256:{'a' * 64}", f"{REPOSITORY}@sha256:{'b' * 64}"


@pytest.fixture
def pulling(namespace: Namespace, any_operator: AnyOperator) -> Iterator[Fleet]:
    """A deployment whose image comes from a registry, with its first revision pinned."""
    made = Fleet(namespace)
    made.image = BEGAN
    namespace.apply({**SPEC, "image": {"worker": TAG}})
    made.until(namespace.is_ready)
    made.until(lambda: pinned(made))
    yield made
    made.stop()


def test_a_revision_keeps_its_first_image_after_the_tag_moves(pulling: Fleet) -> None:
    before = everyone(pulling)
    pulling.until(lambda: images_are(pulling, BEGAN))
    pulling.until(pulling.namespace.is_ready)
    assert everyone(pulling) == before, "nobody is replaced for it"
    pulling.image = MOVED
    pulling.namespace.change({"decode": {"replicas": 3}})
    pulling.until(lambda: pulling.assert_size("decode", 3))
    core, name = pulling.namespace.core, pulling.namespace.name
    (lost, *_) = sorted(pod for pod in before if "-decode-" in pod)
    core.delete_namespaced_pod(lost, name, grace_period_seconds=0)

    def both_are_there() -> None:
        made = [
            p for p in core.list_namespaced_pod(name).items if before.get(p.metadata.name) != p.metadata.uid
        ]
        assert len(made) == 2
        assert {p.spec.containers[0].image for p in made} == {BEGAN}
        ran = [status.image_id for p in made for status in p.status.container_statuses or ()]
        assert ran == [BEGAN, BEGAN]
        pulling.namespace.is_ready()

    pulling.until(both_are_there)
    assert before.items() - everyone(pulling).items() == {(lost, before[lost])}
    assert pulling.namespace.condition("Degraded")[0] == "False"


def test_gateways_are_replaced_once_by_those_of_the_pinned_image(pulling: Fleet) -> None:
    pulling.until(lambda: images_are(pulling, BEGAN))
    pulling.until(lambda: gateway_is(pulling, BEGAN))
    generation = gateway(pulling).metadata.generation
    pulling.image = MOVED
    core, name = pulling.namespace.core, pulling.namespace.name
    (lost,) = pulling.namespace.gateway_pods()
    core.delete_namespaced_pod(lost.metadata.name, name, grace_period_seconds=0)
    pulling.remove(lost.metadata.name)

    def another_runs_the_same_image() -> None:
        (made,) = pulling.namespace.gateway_pods()
        assert made.metadata.uid != lost.metadata.uid
        assert [status.image_id for status in made.status.container_statuses or ()] == [BEGAN]
        pulling.namespace.is_ready()

    pulling.until(another_runs_the_same_image)
    assert gateway(pulling).metadata.generation == generation
    assert pulling.namespace.condition("Degraded")[0] == "False"


def test_the_next_revision_has_its_own_image(pulling: Fleet) -> None:
    pulling.until(lambda: images_are(pulling, BEGAN))
    first = pulling.namespace.get()["status"]["pipelineRevision"]
    pulling.image = MOVED
    pulling.namespace.change(ANOTHER_MODEL)

    def followed() -> None:
        pulling.namespace.is_ready()
        assert pulling.namespace.get()["status"]["pipelineRevision"] != first
        images_are(pulling, MOVED)
        gateway_is(pulling, MOVED)

    pulling.until(followed)


def everyone(fleet: Fleet) -> dict[str, str]:
    found = fleet.namespace.core.list_namespaced_pod(fleet.namespace.name).items
    return {pod.metadata.name: pod.metadata.uid for pod in found}


def images_are(fleet: Fleet, image: str) -> None:
    """Of the templates of all pools."""
    listed = fleet.namespace.apps.list_namespaced_stateful_set(
        fleet.namespace.name, label_selector=REVISION_LABEL
    ).items
    assert {item.spec.template.spec.containers[0].image for item in listed} == {image}


def gateway(fleet: Fleet) -> Any:
    return fleet.namespace.apps.read_namespaced_deployment("demo-gateway", fleet.namespace.name)


def gateway_is(fleet: Fleet, image: str) -> None:
    assert gateway(fleet).spec.template.spec.containers[0].image == image


def moved(fleet: Fleet) -> None:
    status, reason, message = fleet.namespace.condition("Degraded")
    assert (status, reason) == ("True", "ImageMoved"), message
    assert "sha256:bb" in message
    assert FIRST in message


def not_moved(fleet: Fleet) -> None:
    assert fleet.namespace.condition("Degraded")[0] == "False"


def test_the_only_pod_is_replaced_after_its_successor_is_ready(fleet: Fleet) -> None:
    name = f"{fleet.namespace.stateful_set('encoder').metadata.name}-0"
    fleet.until(lambda: ready_encoders(fleet))
    fewest = 1
    fleet.namespace.change({"encoder": {"batching": {"maxItems": 3}}})

    surges: list[bool] = []

    def watched() -> None:
        nonlocal fewest
        fewest = min(fewest, len(ready_encoders(fleet)))
        if (workload := fleet.workload("encoder")).replicas == 2:
            surges.append(workload.surged)
        assert uids(fleet).keys() == {name}, uids(fleet)
        assert uids(fleet)[name] != old

    (old,) = uids(fleet).values()
    fleet.until(watched)
    assert fleet.largest_size["encoder"] == 2
    assert fewest == 1
    assert surges
    assert all(surges), "the size of a surge is marked as one"
    assert not fleet.workload("encoder").surged
    template = fleet.namespace.stateful_set("encoder").spec.template
    (pod,) = encoders(fleet)
    assert pod.metadata.annotations[INPUTS_ANNOTATION] == template.metadata.annotations[INPUTS_ANNOTATION]


def test_the_operators_own_surges_are_not_a_contest(fleet: Fleet) -> None:
    """Each replacement of the only pod of a pool makes the pool larger and smaller again."""
    fleet.until(lambda: ready_encoders(fleet))
    for items in range(3, 3 + FREE_REPAIRS + 2):
        fleet.largest_size["encoder"] = 1
        fleet.namespace.change({"encoder": {"batching": {"maxItems": items}}})
        fleet.until(lambda: replaced(fleet))
        assert fleet.largest_size["encoder"] == 2
    assert fleet.namespace.condition("Degraded")[0] == "False"
    assert not fleet.namespace.events("FieldsContested")


def replaced(fleet: Fleet) -> None:
    template = fleet.namespace.stateful_set("encoder").spec.template
    wanted = template.metadata.annotations[INPUTS_ANNOTATION]
    assert [pod.metadata.annotations[INPUTS_ANNOTATION] for pod in encoders(fleet)] == [wanted]
    assert fleet.largest_size["encoder"] == 2
    assert ready_encoders(fleet)


def encoders(fleet: Fleet) -> list[Any]:
    selector = "app.kubernetes.io/component=encoder"
    return list(fleet.namespace.core.list_namespaced_pod(fleet.namespace.name, label_selector=selector).items)


def uids(fleet: Fleet) -> dict[str, str]:
    return {p.metadata.name: p.metadata.uid for p in encoders(fleet)}


def ready_encoders(fleet: Fleet) -> list[str]:
    found = [
        p.metadata.name
        for p in encoders(fleet)
        if any(c.type == "Ready" and c.status == "True" for c in p.status.conditions or [])
        and p.metadata.deletion_timestamp is None
    ]
    assert found
    return found
