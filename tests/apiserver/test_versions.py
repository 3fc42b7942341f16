"""An operator and a CRD of different age: a field that only the CRD knows, and an object stored before a field was there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from mmd_api.crd import custom_resource_definition
from tests.support.deployments import SPEC
from tests.support.standin import Namespace, eventually

EncoderSchema = dict[str, Any]
FIELD = "cacheMebibytes"


@pytest.fixture
def encoder_schema(api: client.ApiClient) -> Iterator[Callable[[EncoderSchema], None]]:
    """Puts other properties of `spec.encoder` into the API server; the true ones come back at the end."""
    extensions = client.ApiextensionsV1Api(api)
    true = custom_resource_definition()
    name = true["metadata"]["name"]

    def put(properties: EncoderSchema) -> None:
        changed = copy.deepcopy(true)
        encoder_of(changed)["properties"] = properties
        there = extensions.read_custom_resource_definition(name).metadata.resource_version
        changed["metadata"]["resourceVersion"] = there
        extensions.replace_custom_resource_definition(name, changed)

    yield put
    put(true_properties())


def encoder_of(definition: dict[str, Any]) -> dict[str, Any]:
    (version,) = definition["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
        "encoder"
    ]
    return found


def true_properties() -> EncoderSchema:
    found: EncoderSchema = encoder_of(custom_resource_definition())["properties"]
    return found


def encoder_as_stored(namespace: Namespace) -> dict[str, Any]:
    stored: dict[str, Any] = namespace.get()["spec"]["encoder"]
    return stored


def test_a_field_that_only_a_newer_crd_has_is_named_and_the_rest_works(
    namespace: Namespace,
    encoder_schema: Callable[[EncoderSchema], None],
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


def test_an_object_from_before_a_field_was_there_works_with_the_fields_default(
    namespace: Namespace,
    encoder_schema: Callable[[EncoderSchema], None],
    request: pytest.FixtureRequest,
):
    older = true_properties()
    del older[FIELD]
    encoder_schema(older)
    namespace.apply(SPEC)

    def stored_without_it() -> None:
        namespace.change({"encoder": {FIELD: 64}})
        assert FIELD not in encoder_as_stored(namespace)

    eventually(stored_without_it)
    encoder_schema(true_properties())
    eventually(lambda: has_the_default(namespace))
    request.getfixturevalue("operator")
    namespace.settled(namespace.is_ready)
    namespace.settled(lambda: says_no_problem(namespace))


def has_the_default(namespace: Namespace) -> None:
    assert encoder_as_stored(namespace)[FIELD] == true_properties()[FIELD]["default"]


def test_an_object_stored_with_a_field_that_the_crd_has_dropped_is_served_without_it(
    namespace: Namespace,
    encoder_schema: Callable[[EncoderSchema], None],
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
