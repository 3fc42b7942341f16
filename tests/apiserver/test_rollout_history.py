"""What becomes of a changed spec on the API server: it is recorded, undone, paused, and given up where its pods are not Ready in time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mmd_api.history import COMPLETED_ANNOTATION, SPEC_LABEL, spec_digest
from mmd_api.pipeline import pipeline_revision
from mmd_cli.commands.rollout import _status, rollout
from mmd_operator.kube.pauses import Pauses
from support.cluster.deployments import ANOTHER_MODEL, SPEC, deployment
from support.cluster.operator_process import OperatorProcess
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace, eventually, forget_the_dead
from support.harness.waiting import UNTIMED_SECONDS, wait_until

FIRST, SECOND = SPEC, {**SPEC, **ANOTHER_MODEL}
OLD, NEW = (pipeline_revision(deployment(spec).spec) for spec in (FIRST, SECOND))
DIGESTS = [spec_digest(deployment(spec).spec) for spec in (FIRST, SECOND)]


@pytest.fixture
def mmd(kubeconfig: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    def run(command: str, *arguments: str) -> Result:
        return CliRunner().invoke(rollout, [command, "demo", "-n", namespace.name, *arguments])

    return run


def recorded(namespace: Namespace) -> dict[int, Any]:
    """By number. StatefulSets would have ControllerRevisions of their own."""
    found = namespace.apps.list_namespaced_controller_revision(namespace.name, label_selector=SPEC_LABEL)
    return {item.revision: item for item in found.items}


def digests(namespace: Namespace) -> dict[int, str]:
    return {number: item.metadata.labels[SPEC_LABEL] for number, item in recorded(namespace).items()}


def has_recorded(namespace: Namespace, *expected: str, first: int = 1, complete: bool = True) -> None:
    assert digests(namespace) == dict(enumerate(expected, first))
    annotations = [item.metadata.annotations or {} for item in recorded(namespace).values()]
    assert not complete or all(COMPLETED_ANNOTATION in found for found in annotations)


def sized(namespace: Namespace, replicas: int) -> None:
    assert namespace.stateful_set("decode").spec.replicas == replicas


def progressing(namespace: Namespace, reason: str) -> None:
    assert namespace.condition("Progressing")[1] == reason, namespace.condition("Progressing")


def test_specs_are_recorded_undone_and_paused_by_the_command_line(
    any_operator: AnyOperator, namespace: Namespace, mmd
):
    namespace.apply(FIRST)
    namespace.settled(namespace.is_ready)
    namespace.change({**ANOTHER_MODEL, "decode": {"replicas": 3}})
    namespace.settled(namespace.is_ready)
    eventually(lambda: has_recorded(namespace, *DIGESTS))
    owner = recorded(namespace)[1].metadata.owner_references[0]
    assert (owner.kind, owner.uid) == ("MultimodalDeployment", namespace.get()["metadata"]["uid"])
    listed = mmd("history")
    assert listed.exit_code == 0, listed.output
    assert "spec.model.dtype" in listed.output
    assert "replicas" not in listed.output

    before = namespace.get()
    told = mmd("undo", "--dry-run")
    assert namespace.get()["spec"] == before["spec"]
    assert told.output.splitlines() == [
        "spec.model.dtype: BFloat16 -> Float32 (new revision)",
        "demo would return to revision 1",
    ]
    assert mmd("undo", "--to-revision", "7").exit_code == 1
    assert "demo returns to revision 1" in mmd("undo").output
    assert namespace.get()["spec"] == {
        **before["spec"],
        "model": {**before["spec"]["model"], "dtype": "Float32"},
    }
    followed: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        wait = _status("demo", namespace.name, UNTIMED_SECONDS, followed.append)
        follows = threads.submit(asyncio.run, wait)
        wait_until(lambda: followed or follows.done(), "it follows")
        namespace.settled(namespace.is_ready)
        follows.result(timeout=UNTIMED_SECONDS)
    assert len(followed) > 1
    assert followed[-1] == f"Complete: revision {OLD} is complete"
    eventually(lambda: has_recorded(namespace, DIGESTS[1], DIGESTS[0], first=2))

    assert mmd("pause").exit_code == 0
    eventually(lambda: progressing(namespace, "RolloutPaused"))
    late = mmd("status", "--timeout", "5")
    assert late.exit_code == 1
    assert "is not complete after 5 s (RolloutPaused: " in late.stderr
    assert mmd("undo").exit_code == 1
    namespace.change({**ANOTHER_MODEL, "decode": {"replicas": 2}, "rollout": {"revisionHistoryLimit": 0}})
    namespace.settled(lambda: sized(namespace, 2))
    assert namespace.revisions() == {OLD}
    assert namespace.stateful_set("decode").metadata.labels["serving.multimodal.dev/revision"] == OLD
    assert mmd("resume").exit_code == 0
    namespace.settled(namespace.is_ready)
    assert namespace.revisions() == {NEW}
    eventually(lambda: has_recorded(namespace, DIGESTS[1], first=4))


def test_a_revision_that_misses_its_deadline_is_removed_until_the_spec_changes(
    kubeconfig: Path, operator: OperatorProcess, namespace: Namespace, tmp_path: Path, pauses: Pauses, mmd
):
    namespace.apply({**FIRST, "rollout": {"progressDeadlineSeconds": 1, "onFailure": "RollBack"}})
    namespace.settled(namespace.is_ready)
    namespace.broken.add(NEW)
    spec = namespace.change(ANOTHER_MODEL)["spec"]
    namespace.settled(lambda: namespace.stateful_set("decode", NEW))
    namespace.settled(lambda: rolled_back(namespace))
    message = namespace.condition("Progressing")[2]
    assert namespace.condition("Stalled") == ("True", "ProgressDeadlineExceeded", message)
    assert f"revision {OLD} serves with spec 1" in message
    assert namespace.condition("Ready")[0] == "True"
    assert namespace.get()["spec"] == spec
    namespace.reported("RolledBack", f"revision {NEW} made no progress for 1 s")
    failed = mmd("status", "--timeout", "30")
    assert failed.exit_code == 1
    assert "ProgressDeadlineExceeded" in failed.stderr

    found = namespace.get()["status"]["rolledBack"]
    operator.kill()
    forget_the_dead(namespace)
    successor = OperatorProcess(kubeconfig, namespace.name, tmp_path, pauses=pauses)
    successor.start()
    try:
        namespace.apps.delete_namespaced_stateful_set(f"demo-prefill-{OLD}", namespace.name)
        namespace.settled(lambda: namespace.stateful_set("prefill", OLD))  # healed, and nothing else is made
        namespace.settled(lambda: rolled_back(namespace))
        assert namespace.get()["status"]["rolledBack"] == found  # it was not tried again
        namespace.broken.clear()
        namespace.change({"rollout": {"progressDeadlineSeconds": 600}})
        namespace.settled(namespace.is_ready)
        assert namespace.revisions() == {NEW}
        assert "rolledBack" not in namespace.get()["status"]
        assert namespace.condition("Stalled") == ("", "", "")
    finally:
        successor.kill()


def rolled_back(namespace: Namespace) -> None:
    status = namespace.get()["status"]
    assert status.get("rolledBack", {}).get("toRevision") == OLD, status
    progressing(namespace, "ProgressDeadlineExceeded")
    assert namespace.condition("PrefillReady")[0] == "True"
    assert namespace.revisions() == {OLD}
