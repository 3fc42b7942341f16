"""The schedule of faults: all kinds, repeatable from its seed, and never stuck on a pool without pods."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from e2e.clusters import kill_task
from e2e.faults import EXTRA_FAULTS, Faults, Victim
from e2e.shell import AlreadyEndedError, FailedError

VICTIMS = [
    Victim(c, "e2e", f"component={c}")
    for c in ("encoder", "prefill", "decode", "gateway", "nats", "operator")
]


class Pods:
    def __init__(self, empty: str = "") -> None:
        self.empty = empty
        self.deleted: list[str] = []
        self.killed: list[str] = []
        self.rolled = 0

    def kubectl(self, *arguments: str, namespace: str) -> str:
        if arguments[0] == "delete":
            self.deleted.append(arguments[2])
            return ""
        component = arguments[-1].removeprefix("component=")
        names = [] if component == self.empty else [f"{component}-{n}" for n in range(3)]
        items = [{"metadata": {"name": name}, "status": {"phase": "Running"}} for name in names]
        ending = {"metadata": {"name": "ending", "deletionTimestamp": "now"}, "status": {"phase": "Running"}}
        return json.dumps({"items": [*items, ending]})

    def kill(self, pod: str, namespace: str) -> bool:
        self.killed.append(pod)
        return True

    def roll_out(self) -> None:
        self.rolled += 1


def storm(seed: int, pods: Pods) -> Faults:
    faults = Faults(seed, pods.kubectl, pods.kill, VICTIMS, pods.roll_out)
    for _ in range(len(faults) + 5):
        faults.strike()
    return faults


def test_a_storm_kills_and_deletes_every_kind_of_pod_and_rolls_out() -> None:
    pods = Pods()
    faults = storm(7, pods)
    kinds = Counter((s.component, s.killed) for s in faults.struck)
    assert {(v.component, killed) for v in VICTIMS for killed in (True, False)} <= set(kinds)
    assert pods.rolled == 1
    assert len(faults.struck) == 2 * len(VICTIMS) + 1 + EXTRA_FAULTS
    assert "ending" not in pods.deleted + pods.killed


def test_every_strike_finds_a_victim_though_gateways_were_just_killed() -> None:
    for seed in range(20):
        pods = Pods()
        faults = Faults(seed, pods.kubectl, pods.kill, VICTIMS, pods.roll_out)
        assert all(faults.strike() for _ in range(len(faults)))


def test_the_same_seed_strikes_the_same_pods_in_the_same_order() -> None:
    one, two, other = (storm(seed, Pods()) for seed in (7, 7, 8))
    assert [(s.pod, s.killed) for s in one.struck] == [(s.pod, s.killed) for s in two.struck]
    assert [s.pod for s in one.struck] != [s.pod for s in other.struck]


def test_faults_of_a_pool_without_pods_wait_and_the_others_strike() -> None:
    pods = Pods(empty="encoder")
    faults = storm(7, pods)
    assert len(faults) >= 2
    assert all(s.component != "encoder" for s in faults.struck)
    pods.empty = ""
    while len(faults):
        assert faults.strike()
    assert {(s.component, s.killed) for s in faults.struck} >= {("encoder", True), ("encoder", False)}


def test_a_kill_that_comes_too_late_waits_for_another_pod() -> None:
    pods = Pods()

    late = True

    def kill(pod: str, namespace: str) -> bool:
        if late:
            raise AlreadyEndedError("container 6f does not run any more")
        return pods.kill(pod, namespace)

    faults = Faults(7, pods.kubectl, kill, VICTIMS, pods.roll_out)
    while faults.strike():
        pass
    assert len(faults) >= len(VICTIMS)
    assert not any(s.killed for s in faults.struck)
    late = False
    while len(faults):
        assert faults.strike()
    assert {s.component for s in faults.struck if s.killed} == {v.component for v in VICTIMS}


def test_killing_a_container_that_ended_is_distinguished_from_a_failure(tmp_path: Path) -> None:
    ctr = tmp_path / "ctr"
    for words, error in (
        ("ctr: permission denied", FailedError),
        ("task 6f not found: not found", AlreadyEndedError),
    ):
        ctr.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
        ctr.chmod(0o755)
        with pytest.raises(error) as caught:
            kill_task((ctr,), "6f")
        assert type(caught.value) is error


def test_a_node_out_of_reach_means_deletion_by_force() -> None:
    pods = Pods()
    faults = Faults(7, pods.kubectl, lambda _pod, _namespace: False, VICTIMS, pods.roll_out)
    while len(faults):
        faults.strike()
    assert len(pods.deleted) == len(faults.struck) - 1


@pytest.mark.parametrize("kills", [["gateway"], ["decode", "operator"]])
def test_a_storm_of_kills_kills_each_named_component_once_and_nothing_else(kills: list[str]) -> None:
    for seed in range(10):
        pods = Pods()
        faults = Faults(seed, pods.kubectl, pods.kill, VICTIMS, pods.roll_out, kills)
        assert len(faults) == len(kills)
        while len(faults):
            assert faults.strike()
        assert sorted((s.component, s.killed) for s in faults.struck) == [(c, True) for c in kills]
        assert len(pods.killed) == len(kills)
        assert (pods.deleted, pods.rolled) == ([], 0)
