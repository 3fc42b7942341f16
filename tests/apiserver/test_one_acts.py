"""Of two operators one acts: the other waits, takes over from one that is gone or frozen, and one that wakes up too late ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmd_operator.kube.leadership import LEASE_NAME
from support.cluster.control_plane import TOKEN, ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess
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
    held_by_second = namespace.leases.read_namespaced_lease(LEASE_NAME, namespace.name).spec.holder_identity
    assert second.stop() == 0
    given_back = namespace.leases.read_namespaced_lease(LEASE_NAME, namespace.name).spec
    assert given_back.holder_identity != held_by_second, "else the first would wait for its end"
    eventually(lambda: leads_again(first))
    namespace.change({"decode": {"replicas": 2}})
    namespace.settled(namespace.is_ready)


def leads_again(process: OperatorProcess) -> None:
    assert process.log_text().count(" is the leader") == 2
