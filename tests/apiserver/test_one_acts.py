"""Of two operators one acts: the other waits, takes over from one that is gone or frozen, and one that wakes up too late ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_plane import TOKEN, ControlPlane
from deployments import SPEC
from operator_process import OperatorProcess
from standin import Namespace, eventually
from unruly_server import UnrulyServer

LEASE_END_SECONDS = 40


@pytest.fixture
def pair(
    control_plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> Iterator[list[tuple[OperatorProcess, UnrulyServer]]]:
    """Two operators, each behind a door of its own where its calls are counted."""
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
    assert " leads" in process.said()


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
    namespace.settled(namespace.is_ready, LEASE_END_SECONDS)
    assert namespace.stateful_set("decode").spec.replicas == 3
    assert writes(door_of_second)

    namespace.change({"decode": {"replicas": 1}})
    before = writes(door_of_first)
    first.thaw()
    assert first.wait(20) == 1, first.said()[-2000:]
    assert "lost" in first.said()
    assert writes(door_of_first) - before == Counter()
    namespace.settled(namespace.is_ready)

    first.start()
    assert second.stop() == 0
    eventually(lambda: handed_over(first), 8)  # given back: nobody waits for its end
    namespace.change({"decode": {"replicas": 2}})
    namespace.settled(namespace.is_ready)


def handed_over(process: OperatorProcess) -> None:
    assert process.said().count(" leads") == 2
