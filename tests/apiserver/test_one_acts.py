"""Of two operators one acts: the other waits, takes over from one that is gone or frozen, and one that wakes up too late ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from mmd_operator.kube.leadership import DEFAULT_LEASE_NAME
from support.cluster.control_plane import TOKEN, ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.operator_process import LeasePlace, OperatorProcess, release_with_one_lease_for_all
from support.cluster.standin import Namespace, eventually
from support.cluster.unruly_server import UnrulyServer
from support.harness.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.xdist_group("cluster-wide")


@pytest.fixture
def pair(
    control_plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> Iterator[list[tuple[OperatorProcess, UnrulyServer]]]:
    """Two operators, each behind its own proxy where its calls are counted."""
    made = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        server = UnrulyServer(control_plane.url, TOKEN, folder)
        server.start()
        made.append((OperatorProcess(server.kubeconfig, namespace.name, folder), server))
    yield made
    for process, server in made:
        if process._process is not None:
            process.kill()
        server.stop()


def writes(server: UnrulyServer) -> Counter[str]:
    """Of anything but the Lease."""
    calls = server.calls.items()
    return Counter({f"{m} {path}": n for (m, path), n in calls if m != "GET" and "/leases" not in path})


def leads(process: OperatorProcess) -> None:
    assert " is the leader" in process.log_text()


def test_a_frozen_operator_is_replaced_and_writes_nothing_when_it_wakes(
    pair: list[tuple[OperatorProcess, UnrulyServer]], namespace: Namespace
):
    (first, door_of_first), (second, door_of_second) = pair
    first.start()
    eventually(lambda: leads(first))
    second.start()
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    assert writes(door_of_first).total() > 10
    assert not writes(door_of_second)

    first.freeze()
    namespace.change({"decode": {"replicas": 3}})
    namespace.settled(namespace.is_ready)
    assert namespace.stateful_set("decode").spec.replicas == 3
    assert writes(door_of_second)

    namespace.change({"decode": {"replicas": 1}})
    before = writes(door_of_first)
    first.thaw()
    assert first.wait(DEADLINE_SECONDS) == 1, first.log_text()[-2000:]
    assert "lost" in first.log_text()
    assert writes(door_of_first) - before == Counter()
    namespace.settled(namespace.is_ready)

    first.start()
    held_by_second = namespace.leases.read_namespaced_lease(
        DEFAULT_LEASE_NAME, namespace.name
    ).spec.holder_identity
    assert second.stop() == 0
    given_back = namespace.leases.read_namespaced_lease(DEFAULT_LEASE_NAME, namespace.name).spec
    assert given_back.holder_identity != held_by_second, "else the first would wait for its end"
    eventually(lambda: leads_again(first))
    namespace.change({"decode": {"replicas": 2}})
    namespace.settled(namespace.is_ready)


def leads_again(process: OperatorProcess) -> None:
    assert process.log_text().count(" is the leader") == 2


@pytest.fixture
def start(
    control_plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts an operator that serves a namespace. The Leases of all are in the test's own."""
    begun: list[OperatorProcess] = []

    def started(served: Namespace, release: str = "multimodal-operator", **options: Any) -> OperatorProcess:
        process = OperatorProcess(
            control_plane.kubeconfig(),
            served.name,
            tmp_path,
            lease=LeasePlace(namespace.name, release),
            **options,
        )
        begun.append(process)
        process.start()
        return process

    yield started
    for process in begun:
        process.kill()


def test_two_releases_of_one_namespace_both_serve(
    api: client.ApiClient, namespace: Namespace, start: Callable[..., OperatorProcess]
):
    """Each serves another team, and neither waits for the other."""
    other = Namespace.create(api, "other-team")
    for served, release in ((namespace, "team-a"), (other, "team-b")):
        start(served, release=release)
        served.apply(SPEC)
    namespace.settled(namespace.is_ready)
    other.settled(other.is_ready)


def test_an_upgraded_release_waits_for_operators_that_know_one_lease_for_all(
    namespace: Namespace, start: Callable[..., OperatorProcess]
):
    """The leader before the upgrade is followed by its own standby, and only then by the first that has a Lease of its own."""
    old = [start(namespace, prepare=release_with_one_lease_for_all) for _ in range(2)]
    eventually(lambda: leading(old))
    upgraded = start(namespace, release="team-a")
    eventually(lambda: waits(upgraded))
    first = next(process for process in old if " is the leader" in process.log_text())
    old.remove(first)
    assert first.stop() == 0
    eventually(lambda: leading(old))
    assert " is the leader" not in upgraded.log_text()
    assert old[0].stop() == 0
    eventually(lambda: leads(upgraded))
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)


def test_a_release_gives_way_when_it_is_rolled_back_to_one_lease_for_all(
    namespace: Namespace, start: Callable[..., OperatorProcess]
):
    upgraded = start(namespace, release="team-a")
    eventually(lambda: leads(upgraded))
    old = start(namespace, prepare=release_with_one_lease_for_all)
    assert upgraded.wait(DEADLINE_SECONDS) == 1, upgraded.log_text()[-2000:]
    eventually(lambda: leads(old))
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)


def leading(processes: list[OperatorProcess]) -> None:
    assert any(" is the leader" in process.log_text() for process in processes)


def waits(process: OperatorProcess) -> None:
    assert "an operator of an earlier release may hold the lease multimodal-operator" in process.log_text()
