"""What the operator asks of the API server stays small: lists come in pages, and nobody is fought against without a pause."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kubernetes import client
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_kube_config

from mmd_api.resource import GROUP, PLURAL, VERSION
from mmd_operator.kube import cluster as module
from mmd_operator.kube.cluster import (
    CHILD_KINDS,
    DEPLOYMENTS,
    PODS,
    BusyError,
    Cluster,
    ExpiredError,
    Resource,
)
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION, Pauses
from mmd_operator.kube.sweep import Sweep
from mmd_operator.observed.observed import MANAGED_BY_LABEL, child_of
from mmd_operator.passes.finalizer import FINALIZER
from mmd_operator.resources.naming import DEPLOYMENT_LABEL
from mmd_operator.rollout.applier import Applier
from mmd_operator.sizes.pending_growth import PendingGrowth
from support.cluster.definitions import OF_USERS, installed
from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace, eventually
from support.cluster.unruly_server import UnrulyServer

T = TypeVar("T")
CONFIG_MAPS = CHILD_KINDS["ConfigMap"]
SELECTOR = "bounded=yes"
PATH = f"/apis/{GROUP}/{VERSION}/namespaces/{{}}/{PLURAL}/demo"


@pytest.fixture
def kubeconfig(unruly: UnrulyServer) -> Path:
    return unruly.kubeconfig


@pytest.fixture
def pauses() -> Pauses:
    """Those of production: calls are counted."""
    return PRODUCTION


@pytest.fixture
def pages_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_OBJECTS", 3)


def asked(server: UnrulyServer, work: Callable[[Cluster], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        configuration = Configuration()
        await load_kube_config(str(server.kubeconfig), client_configuration=configuration)
        async with ApiClient(configuration) as api:
            return await work(Cluster(api, OperatorMetrics()))

    return asyncio.run(run())


def make(namespace: Namespace, count: int) -> dict[str, str]:
    """UID and resource version of each."""
    made = {}
    for n in range(count):
        body = {"metadata": {"name": f"m{n}", "labels": {"bounded": "yes"}}}
        found = namespace.core.create_namespaced_config_map(namespace.name, body)
        made[found.metadata.uid] = found.metadata.resource_version
    return made


@pytest.mark.usefixtures("pages_of_three")
def test_a_sweep_lists_in_pages_no_older_than_the_index(unruly: UnrulyServer, namespace: Namespace):
    made, found = make(namespace, 8), set()
    kinds = {CONFIG_MAPS: (SELECTOR, made.items)}

    async def work(cluster: Cluster) -> None:
        sweep = Sweep(cluster, lambda: (namespace.name,), kinds, found.update, PRODUCTION)
        await sweep.look(kinds)
        assert not found
        gone = namespace.core.read_namespaced_config_map("m5", namespace.name).metadata.uid
        namespace.core.delete_namespaced_config_map("m5", namespace.name)
        await sweep.look(kinds)
        if not found:  # the version of the first list, which the watch cache may still have had
            await asyncio.sleep(1.0)
            await sweep.look(kinds)
        assert found == {gone}
        assert gone in sweep

    asked(unruly, work)
    queries = [q for path, q in unruly.queries if path.endswith("/configmaps")]
    assert all(q["limit"] == "3" for q in queries)
    assert ["continue" in q for q in queries[:3]] == [False, True, True]
    newest = max(made.values(), key=int)
    assert (queries[0]["resourceVersion"], queries[0]["resourceVersionMatch"]) == (newest, "NotOlderThan")
    assert "resourceVersion" not in queries[1]


@pytest.mark.usefixtures("pages_of_three")
def test_a_list_that_expires_halfway_makes_no_ghosts(unruly: UnrulyServer, namespace: Namespace):
    made, found = make(namespace, 8), set()
    kinds = {CONFIG_MAPS: (SELECTOR, made.items)}
    expired = unruly.refuse("GET", r"/configmaps\?.*continue=", 410)

    async def work(cluster: Cluster) -> None:
        sweep = Sweep(cluster, lambda: (namespace.name,), kinds, found.update, PRODUCTION)
        await sweep.look(kinds)
        assert expired.met == 1
        assert not found
        await sweep.look(kinds)
        assert not found
        assert not any(uid in sweep for uid in made)

    asked(unruly, work)
    assert "resourceVersion" not in unruly.queries[-3][1], "afresh"
    assert "resourceVersion" in unruly.queries[0][1]


@pytest.mark.parametrize("resource", [*CHILD_KINDS.values(), PODS, DEPLOYMENTS], ids=lambda r: r.plural)
@pytest.mark.parametrize("version", [None, "1"], ids=["newest", "cached"])
def test_of_what_there_is_none_the_list_is_empty(
    api: client.ApiClient,
    unruly: UnrulyServer,
    namespace: Namespace,
    resource: Resource,
    version: str | None,
):
    """The API server says `items: null` then."""
    definition = OF_USERS.get(resource.group)
    with installed(api, definition) if definition else nullcontext():
        listing = asked(unruly, lambda cluster: cluster.uids(resource, namespace.name, SELECTOR, version))
    assert not listing.uids
    assert listing.version.isdecimal()


@pytest.mark.usefixtures("pages_of_three")
def test_a_list_without_an_end_is_given_up(
    unruly: UnrulyServer, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_PAGES", 2)
    make(namespace, 8)
    with pytest.raises(BusyError, match="more than 6 configmaps"):
        asked(unruly, lambda cluster: cluster.uids(CONFIG_MAPS, namespace.name, SELECTOR, None))
    unruly.refuse("GET", r"/configmaps", 410)
    with pytest.raises(ExpiredError):
        asked(unruly, lambda cluster: cluster.uids(CONFIG_MAPS, namespace.name, SELECTOR, None))


def test_a_deleted_object_that_others_annotate_is_recreated_at_once(
    unruly: UnrulyServer, namespace: Namespace
):
    labels = {MANAGED_BY_LABEL: "multimodal-operator", DEPLOYMENT_LABEL: "demo"}
    manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "demo-c", "namespace": namespace.name, "labels": labels},
        "data": {"key": "value"},
    }

    async def work(cluster: Cluster) -> None:
        uid = namespace.core.read_namespace(namespace.name).metadata.uid
        applier = Applier(cluster, namespace.name, "demo", uid, PendingGrowth(), PRODUCTION)
        assert await applier.apply(manifest, None, 0.0) == ("Created", None)
        for minute in range(1, 11):
            note = {"metadata": {"annotations": {"example.com/minute": str(minute)}}}
            namespace.core.patch_namespaced_config_map("demo-c", namespace.name, note)
            found = await cluster.get("ConfigMap", namespace.name, "demo-c")
            assert found is not None
            await applier.apply(manifest, child_of("ConfigMap", found), 60.0 * minute)
        namespace.core.delete_namespaced_config_map("demo-c", namespace.name)
        assert await applier.apply(manifest, None, 610.0) == ("Repaired", None)

    asked(unruly, work)


def test_the_newest_warning_is_found_at_any_position_in_the_list(unruly: UnrulyServer, namespace: Namespace):
    now = datetime.now(UTC)
    for n in range(30):  # the oldest are listed first
        seen = (now - timedelta(minutes=n)).isoformat()
        about = {"kind": "StatefulSet", "name": "demo", "namespace": namespace.name}
        body = {
            "metadata": {"name": f"demo.{30 - n:03}"},
            "involvedObject": about,
            "type": "Warning",
            "reason": "FailedCreate",
            "message": f"{n} minutes ago",
            "firstTimestamp": seen,
            "lastTimestamp": seen,
        }
        namespace.core.create_namespaced_event(namespace.name, body)
    for size in (500, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "PAGE_OBJECTS", size)
            found = asked(unruly, lambda c: c.warnings_about(namespace.name, "StatefulSet", "demo"))
        assert [w["message"] for w in found] == [f"{n} minutes ago" for n in range(19, -1, -1)]


def test_a_competing_writer_is_named_and_answered_ever_more_rarely(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    path = f"/api/v1/namespaces/{namespace.name}/services/demo-gateway"
    before, begun, stolen = unruly.calls["PATCH", path], time.monotonic(), 0

    def contested() -> None:
        nonlocal stolen
        selector = namespace.core.read_namespaced_service("demo-gateway", namespace.name).spec.selector
        if selector["app.kubernetes.io/component"] == "gateway":
            steal(namespace)
            stolen += 1
        assert unruly.calls["PATCH", path] - before >= 4
        status, _, message = namespace.condition("Degraded")
        assert status == "True"
        assert 'field manager "rival" keeps changing Service demo-gateway' in message

    eventually(contested)
    patches = unruly.calls["PATCH", path] - before
    assert patches <= 4 + math.log2(1 + (time.monotonic() - begun) / 5), (patches, stolen)
    namespace.reported("FieldsContested", "rival")
    assert "rival" in operator.log_text()

    def restored() -> None:
        selector = namespace.core.read_namespaced_service("demo-gateway", namespace.name).spec.selector
        assert selector["app.kubernetes.io/component"] == "gateway"

    eventually(restored)


def steal(namespace: Namespace) -> None:
    edit = {"spec": {"selector": {"app.kubernetes.io/component": "stolen"}}}
    namespace.core.patch_namespaced_service("demo-gateway", namespace.name, edit, field_manager="rival")


def test_a_competing_status_writer_is_named_and_answered_ever_more_rarely(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    path = f"{PATH.format(namespace.name)}/status"
    endpoint = namespace.get()["status"]["endpoint"]
    before, begun = unruly.calls["PATCH", path], time.monotonic()

    def contested() -> None:
        if namespace.get()["status"]["endpoint"] == endpoint:
            namespace.custom.patch_namespaced_custom_object_status(
                GROUP,
                VERSION,
                namespace.name,
                PLURAL,
                "demo",
                {"status": {"endpoint": "http://rival"}},
                field_manager="rival",
            )
        is_contested(namespace, "status", 'field manager "rival"')

    eventually(contested)
    others = 3  # that the Service had no endpoint yet, that it is contested, and one more
    patches = unruly.calls["PATCH", path] - before
    assert patches <= 4 + others + math.log2(1 + (time.monotonic() - begun) / 5)
    namespace.reported("FieldsContested", "rival")
    assert "rival" in operator.log_text()

    def restored() -> None:
        assert namespace.get()["status"]["endpoint"] == endpoint

    eventually(restored)


def test_a_deployment_whose_finalizer_is_removed_repeatedly_is_still_served(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    path = PATH.format(namespace.name)
    before, begun = unruly.calls["PATCH", path], time.monotonic()

    def contested() -> None:
        if namespace.get()["metadata"].get("finalizers"):
            namespace.custom.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                namespace.name,
                PLURAL,
                "demo",
                {"metadata": {"finalizers": None}},
                field_manager="rival",
            )
        is_contested(namespace, "finalizer", "another client")

    eventually(contested)
    assert unruly.calls["PATCH", path] - before <= 4 + math.log2(1 + (time.monotonic() - begun) / 5)
    namespace.reported("FieldsContested", "another client")
    namespace.change({"decode": {"replicas": 3}})

    def served() -> None:
        contested()
        assert namespace.stateful_set("decode").spec.replicas == 3

    eventually(served)

    def restored() -> None:
        assert namespace.get()["metadata"]["finalizers"] == [FINALIZER]

    eventually(restored)


def is_contested(namespace: Namespace, part: str, rival: str) -> None:
    status, _, message = namespace.condition("Degraded")
    assert status == "True"
    assert f"{rival} keeps changing the {part} of MultimodalDeployment demo" in message


def test_a_lagging_watch_is_not_taken_for_a_competing_writer(
    unruly: UnrulyServer, namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    revision = namespace.get()["status"]["pipelineRevision"]
    path = f"/api/v1/namespaces/{namespace.name}/configmaps/demo-{revision}"
    written, read = unruly.calls["PATCH", path], unruly.calls["GET", path]
    unruly.hold_watches("/configmaps")
    namespace.change({"observability": {"logLevel": "Debug"}})

    def looked_at() -> None:
        assert unruly.calls["PATCH", path] + unruly.calls["GET", path] - written - read >= 5

    namespace.settled(looked_at)
    assert unruly.calls["PATCH", path] - written == 1
    unruly.hold_watches(None)
    namespace.settled(namespace.is_ready)
    assert namespace.condition("Degraded")[0] == "False"
    assert not namespace.events("FieldsContested")
    assert not namespace.events("Repaired")
    assert "keeps changing" not in operator.log_text()
