"""An operator that is killed at random moments, again and again, leads to the same end as one that is left alone."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from mmd_operator.resources.naming import CONFIG_HASH_ANNOTATION
from support.cluster.control_plane import ControlPlane
from support.cluster.deployments import ANOTHER_MODEL, SPEC
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace, eventually, forget_the_dead, is_gone
from support.harness.seeds import seed_of_commit

KILLS_EACH = 13
LIFE_SECONDS = 0.7
"""At most this long after it began to act; the first passes of a stage take less."""
CHANGES: dict[str, Callable[[Namespace], Any]] = {
    "create": lambda namespace: namespace.apply(SPEC),
    "update": lambda namespace: namespace.change(
        {"encoder": {"resources": {"memory": "1Gi"}}, "decode": {"replicas": 3}, "prefill": {"replicas": 2}}
    ),
    "rollout": lambda namespace: namespace.change(ANOTHER_MODEL),
    "delete": lambda namespace: namespace.delete(),
}


def end_of(stage: str, namespace: Namespace) -> Callable[[], None]:
    return (lambda: is_gone(namespace)) if stage == "delete" else namespace.is_ready


def picture(namespace: Namespace) -> Any:
    """All objects and what the status says, without names of the namespace and times."""
    body = namespace.get() if namespace.exists() else {}
    status = {k: v for k, v in body.get("status", {}).items() if k != "conditions"}
    conditions = [(c["type"], c["status"], c["reason"]) for c in body.get("status", {}).get("conditions", [])]
    text = json.dumps([namespace.content(), status, conditions], sort_keys=True, default=str)
    text = re.sub(rf"\b{namespace.name}\b", "NAMESPACE", text)
    return json.loads(
        re.sub(rf'("{CONFIG_HASH_ANNOTATION}": )"\w+"', r'\1"of a text with the namespace"', text)
    )


@pytest.mark.timeout(600)
def test_fifty_kills_change_nothing_in_the_end(
    control_plane: ControlPlane, api: client.ApiClient, tmp_path: Path
):
    calm = Namespace.create(api, "left-alone")
    expected = {}
    operator = OperatorProcess(control_plane.kubeconfig(), calm.name, tmp_path)
    operator.start()
    for stage, change in CHANGES.items():
        change(calm)
        calm.settled(end_of(stage, calm))
        expected[stage] = picture(calm)
    operator.kill()

    seed = seed_of_commit()
    moments = random.Random(seed)
    killed = Namespace.create(api, "killed-again-and-again")
    operator = OperatorProcess(control_plane.kubeconfig(), killed.name, tmp_path)
    for stage, change in CHANGES.items():
        change(killed)
        for _ in range(KILLS_EACH):
            live(operator)
            end = time.monotonic() + moments.uniform(0, LIFE_SECONDS)
            while time.monotonic() < end:
                killed.settle()
                killed.end_pods()
            operator.kill()
            forget_the_dead(killed)
            if stage == "rollout":
                assert serving_pools_stand(killed), f"seed {seed}"
        live(operator)
        killed.settled(end_of(stage, killed))
        eventually(partial(ends_as, killed, expected[stage], f"{stage}, seed {seed}"))
        operator.kill()
        forget_the_dead(killed)


def live(operator: OperatorProcess) -> None:
    """Start it, and wait until it acts."""
    operator.start()
    try:
        eventually(lambda: acts(operator))
    except AssertionError:
        pytest.fail(operator.stacks())


def ends_as(namespace: Namespace, expected: Any, where: str) -> None:
    same(picture(namespace), expected, where)


def same(found: Any, expected: Any, where: str) -> None:
    """Names the first place where the two differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()}"
        for key in expected:
            same(found[key], expected[key], f"{where} {key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            same(one, other, f"{where} [{number}]")
    else:
        assert found == expected, where


def acts(operator: OperatorProcess) -> None:
    assert f"_{operator.process.pid}_" in operator.log_text()


def serving_pools_stand(namespace: Namespace) -> bool:
    """The revision that the gateway speaks to has all its pools, whatever moment it was."""
    serving = namespace.gateway_revision()
    sets = namespace.apps.list_namespaced_stateful_set(namespace.name).items
    return {"encoder", "prefill", "decode"} <= {
        s.metadata.labels["app.kubernetes.io/component"]
        for s in sets
        if s.metadata.labels.get("serving.multimodal.dev/revision") == serving
    }
