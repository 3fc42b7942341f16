"""An operator and a CRD of different age: a field that only the CRD knows, and an object stored before a field was there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from mmd_api.crd import custom_resource_definition
from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace, eventually

pytestmark = pytest.mark.xdist_group("cluster-wide")
Schema = dict[str, Any]
FIELD = "cacheMebibytes"


@pytest.fixture
def definition(api: client.ApiClient) -> Iterator[Callable[[Schema], None]]:
    """Puts another CRD into the API server; the true one comes back at the end."""
    extensions = client.ApiextensionsV1Api(api)

    def put(changed: Schema) -> None:
        name = changed["metadata"]["name"]
        there = extensions.read_custom_resource_definition(name).metadata.resource_version
        changed["metadata"]["resourceVersion"] = there
        extensions.replace_custom_resource_definition(name, changed)

    yield put
    put(custom_resource_definition())


@pytest.fixture
def encoder_schema(definition: Callable[[Schema], None]) -> Callable[[Schema], None]:
    """Puts other properties of `spec.encoder` into the API server."""

    def put(properties: Schema) -> None:
        changed = custom_resource_definition()
        encoder_of(changed)["properties"] = properties
        definition(changed)

    return put


def fields_of(changed: Schema, part: str) -> Schema:
    """The properties of `spec` or `status`."""
    (version,) = changed["spec"]["versions"]
    found: Schema = version["schema"]["openAPIV3Schema"]["properties"][part]["properties"]
    return found


def encoder_of(changed: Schema) -> Schema:
    found: Schema = fields_of(changed, "spec")["encoder"]
    return found


def true_properties() -> Schema:
    found: Schema = encoder_of(custom_resource_definition())["properties"]
    return found


def encoder_as_stored(namespace: Namespace) -> dict[str, Any]:
    stored: dict[str, Any] = namespace.get()["spec"]["encoder"]
    return stored


def test_a_field_known_only_to_a_newer_crd_is_reported(
    namespace: Namespace,
    encoder_schema: Callable[[Schema], None],
    request: pytest.FixtureRequest,
):
    encoder_schema(true_properties() | {"futureKnob": {"type": "integer"}})
    namespace.apply(SPEC)

    def known_to_the_api_server() -> None:
        namespace.change({"encoder": {"futureKnob": 7}})
        assert encoder_as_stored(namespace).get("futureKnob") == 7

    eventually(known_to_the_api_server)
    request.getfixturevalue("operator")

    def told() -> None:
        namespace.is_ready()
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "UnknownFields")
        assert "spec.encoder.futureKnob" in message
        assert "install both from the same release" in message

    namespace.settled(told)
    namespace.change({"encoder": {"futureKnob": None}})
    namespace.settled(lambda: says_no_problem(namespace))


def says_no_problem(namespace: Namespace) -> None:
    assert namespace.condition("Degraded")[:2] == ("False", "NoProblem")


def test_an_object_stored_before_a_field_existed_gets_its_default(
    namespace: Namespace,
    encoder_schema: Callable[[Schema], None],
    request: pytest.FixtureRequest,
):
    older = true_properties()
    del older[FIELD]
    encoder_schema(older)
    namespace.apply(SPEC)

    eventually(lambda: is_without_it(namespace))
    # The API server prunes what it reads, so the field may still be stored; what is written now is stored without it.
    namespace.change({"encoder": {FIELD: 64}})
    encoder_schema(true_properties())
    eventually(lambda: has_the_default(namespace))
    request.getfixturevalue("operator")
    namespace.settled(namespace.is_ready)
    namespace.settled(lambda: says_no_problem(namespace))


def is_without_it(namespace: Namespace) -> None:
    assert FIELD not in encoder_as_stored(namespace)


def has_the_default(namespace: Namespace) -> None:
    assert encoder_as_stored(namespace)[FIELD] == true_properties()[FIELD]["default"]


def test_an_object_with_a_field_dropped_from_the_crd_is_served(
    namespace: Namespace,
    encoder_schema: Callable[[Schema], None],
    request: pytest.FixtureRequest,
):
    encoder_schema(true_properties() | {"failurePolicy": {"type": "string", "default": "Fail"}})
    namespace.apply(SPEC)

    def stored_with_it() -> None:
        namespace.change({"encoder": {"failurePolicy": "Fail"}})
        assert encoder_as_stored(namespace).get("failurePolicy") == "Fail"

    eventually(stored_with_it)
    encoder_schema(true_properties())

    def pruned() -> None:
        assert "failurePolicy" not in encoder_as_stored(namespace)

    eventually(pruned)
    request.getfixturevalue("operator")
    namespace.settled(namespace.is_ready)
    namespace.settled(lambda: says_no_problem(namespace))


def test_a_status_omits_what_an_older_crd_lacks(
    namespace: Namespace, definition: Callable[[Schema], None], request: pytest.FixtureRequest
):
    older = custom_resource_definition()
    status = fields_of(older, "status")
    del status["rollout"]
    del status["pools"]["properties"]["encoder"]["properties"]["draining"]
    condition = status["conditions"]["items"]
    del condition["properties"]["observedGeneration"]
    condition["required"].remove("observedGeneration")
    condition["properties"]["type"]["enum"].remove("AuthenticationRequired")
    definition(older)
    namespace.apply(SPEC)
    request.getfixturevalue("operator")
    namespace.settled(namespace.is_ready)
    written = namespace.get()["status"]
    assert "rollout" not in written
    assert "draining" not in written["pools"]["encoder"]
    assert "draining" in written["pools"]["decode"]
    assert all("observedGeneration" not in condition for condition in written["conditions"])
    assert namespace.condition("AuthenticationRequired") == ("", "", "")
    says_no_problem(namespace)
