"""The Secret with the passwords of a managed NATS server: made once, extended, rotated, and never read."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import replace

import pytest

from mmd_api.contract.subjects import USERS, previous_of
from mmd_operator.resources.naming import CONFIG_HASH_ANNOTATION
from mmd_operator.resources.nats import GENERATION_ANNOTATION, KEYS_ANNOTATION, PASSWORD_KEYS
from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.quick_pauses import QUICK_PAUSES
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace, eventually

NEW_ROLE = "encode_prefill_decode"
pytestmark = pytest.mark.usefixtures("any_operator")

SECRET = "demo-nats"


@pytest.fixture
def serving(any_operator: AnyOperator, namespace: Namespace) -> Namespace:
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    return namespace


def passwords(namespace: Namespace) -> dict[str, str]:
    data = namespace.core.read_namespaced_secret(SECRET, namespace.name).data
    return {key: b64decode(value).decode() for key, value in data.items()}


def generation_of_nats(namespace: Namespace) -> str:
    template = namespace.apps.read_namespaced_stateful_set(SECRET, namespace.name).spec.template
    return template.metadata.annotations[GENERATION_ANNOTATION]


def test_another_generation_moves_each_password_to_its_second_name(serving: Namespace):
    before = passwords(serving)
    assert set(before) == set(PASSWORD_KEYS)
    for generation in (2, 3):
        serving.change({"nats": {"passwordGeneration": generation}})
        eventually(lambda wanted=str(generation): restarted(serving, wanted))
        after = passwords(serving)
        assert {previous_of(user): before[user] for user in USERS}.items() <= after.items()
        assert not {after[user] for user in USERS} & set(before.values())
        assert len(set(after.values())) == len(PASSWORD_KEYS)
        before = after
    serving.reported("Changed", f"Secret {SECRET}")


def test_no_password_appears_in_the_status_an_event_or_the_operators_log(
    any_operator: AnyOperator, serving: Namespace
):
    made = set(passwords(serving).values())
    serving.change({"nats": {"passwordGeneration": 2}})
    eventually(lambda: restarted(serving, "2"))
    serving.settled(serving.is_ready)
    made |= set(passwords(serving).values())
    serving.reported("Changed", f"Secret {SECRET}")
    events = serving.core.list_namespaced_event(serving.name).items
    shown = {
        "status": json.dumps(serving.get()["status"]),
        "Events": " ".join(f"{event.reason} {event.message}" for event in events),
        "log": any_operator.log_text(),
    }
    assert all(shown.values())
    assert len(made) > len(PASSWORD_KEYS)
    encoded = {b64encode(password.encode()).decode() for password in made}
    leaks = [where for where, text in shown.items() for secret in made | encoded if secret in text]
    assert leaks == []


def restarted(namespace: Namespace, generation: str) -> None:
    assert generation_of_nats(namespace) == generation


def test_another_generation_replaces_no_pod_but_that_of_nats(serving: Namespace):
    def templates() -> dict[str, object]:
        sets = serving.apps.list_namespaced_stateful_set(serving.name).items
        gateways = serving.apps.list_namespaced_deployment(serving.name).items
        found = {item.metadata.name: item.spec.template.to_dict() for item in [*sets, *gateways]}
        assert found.pop(SECRET)
        return found

    before = templates()
    serving.change({"nats": {"passwordGeneration": 2}})
    eventually(lambda: restarted(serving, "2"))
    serving.settled(serving.is_ready)
    assert templates() == before


def test_a_missing_role_is_added_and_other_passwords_stay(operator: OperatorProcess, serving: Namespace):
    namespace = serving
    assert operator.stop() == 0
    before = passwords(namespace)
    lacked = {NEW_ROLE, previous_of(NEW_ROLE)}
    known = ",".join(key for key in PASSWORD_KEYS if key not in lacked)
    annotations = {KEYS_ANNOTATION: known}
    body = {"metadata": {"annotations": annotations}, "data": dict.fromkeys(lacked)}
    namespace.core.patch_namespaced_secret(SECRET, namespace.name, body)
    assert not set(passwords(namespace)) & lacked
    operator.start()

    def extended() -> None:
        after = passwords(namespace)
        assert {key: after.get(key) for key in before if key not in lacked} == {
            key: value for key, value in before.items() if key not in lacked
        }
        assert set(after) == set(PASSWORD_KEYS)

    eventually(extended)
    again = namespace.core.read_namespaced_secret(SECRET, namespace.name)
    assert again.metadata.annotations[KEYS_ANNOTATION].split(",") == list(PASSWORD_KEYS)


def test_an_existing_secret_of_the_user_is_left_unchanged(namespace: Namespace):
    mine = {key: f"mine{number}" for number, key in enumerate(PASSWORD_KEYS)}
    namespace.core.create_namespaced_secret(
        namespace.name, {"metadata": {"name": SECRET}, "stringData": mine}
    )
    before = namespace.core.read_namespaced_secret(SECRET, namespace.name)
    namespace.apply({**SPEC, "nats": {"passwordGeneration": 2}})
    namespace.settled(namespace.is_ready)
    namespace.change({"nats": {"passwordGeneration": 3}})
    eventually(lambda: restarted(namespace, "3"))
    assert passwords(namespace) == mine
    after = namespace.core.read_namespaced_secret(SECRET, namespace.name)
    assert after.metadata.resource_version == before.metadata.resource_version


@pytest.mark.parametrize("pauses", [replace(QUICK_PAUSES, resync_seconds=3600.0)], ids=["no-resync"])
def test_a_user_secret_that_lacks_keys_keeps_the_working_configuration(
    operator: OperatorProcess, serving: Namespace
):
    """As after an upgrade from a release whose users had one name each."""
    namespace, core = serving, serving.core
    assert operator.stop() == 0
    mine = dict.fromkeys(USERS, "mine")
    core.delete_namespaced_secret(SECRET, namespace.name)
    core.create_namespaced_secret(namespace.name, {"metadata": {"name": SECRET}, "stringData": mine})
    earlier = {"data": {"nats.conf": "as the release before wrote it"}}
    core.patch_namespaced_config_map(SECRET, namespace.name, earlier)
    template = {"metadata": {"annotations": {CONFIG_HASH_ANNOTATION: "before"}}}
    namespace.apps.patch_namespaced_stateful_set(SECRET, namespace.name, {"spec": {"template": template}})
    operator.start()

    def reported() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "SecretIncomplete"), message
        assert all(previous_of(user) in message for user in USERS)
        assert "USER_previous may be a copy of USER" in message

    namespace.settled(reported)
    namespace.change({"decode": {"replicas": 3}})
    namespace.settled(namespace.is_ready)
    assert namespace.stateful_set("decode").spec.replicas == 3, "the rest of the deployment is worked on"
    assert core.read_namespaced_config_map(SECRET, namespace.name).data == earlier["data"]
    assert config_hash(namespace) == "before"
    assert passwords(namespace) == mine

    rest = {"stringData": {previous_of(user): "mine" for user in USERS}}
    core.patch_namespaced_secret(SECRET, namespace.name, rest)

    def continued() -> None:
        assert namespace.condition("Degraded")[0] == "False"
        assert config_hash(namespace) != "before"
        assert core.read_namespaced_config_map(SECRET, namespace.name).data != earlier["data"]

    namespace.settled(continued)


def config_hash(namespace: Namespace) -> str:
    template = namespace.apps.read_namespaced_stateful_set(SECRET, namespace.name).spec.template
    return template.metadata.annotations[CONFIG_HASH_ANNOTATION]


def test_a_full_quota_of_secrets_does_not_stop_a_rotation(serving: Namespace):
    hard = {"count/secrets": "1"}
    body = {"metadata": {"name": "full"}, "spec": {"hard": hard}}
    serving.core.create_namespaced_resource_quota(serving.name, body)
    status = {"status": {"hard": hard, "used": hard}}
    serving.core.patch_namespaced_resource_quota_status("full", serving.name, status)
    before = passwords(serving)
    serving.change({"nats": {"passwordGeneration": 2}})
    eventually(lambda: restarted(serving, "2"))
    serving.settled(serving.is_ready)
    assert {previous_of(user): before[user] for user in USERS}.items() <= passwords(serving).items()
    assert serving.condition("Degraded")[0] == "False"
