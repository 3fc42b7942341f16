"""The passwords of NATS are rotated twice while clients keep asking: no request is lost, no answer is wrong, no pod starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmd_cli.samples import draw
from support.serving.askers import SPEC, Askers
from support.serving.local_deployment import Deployment, write

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("rotation"), pytest.mark.timeout(600)]

SAMPLES = [draw(kind, seed) for kind, seed in (("image", 1), ("audio", 2), ("image", 3), ("video", 4))]
"""One for each asker."""


def test_passwords_are_rotated_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    with Deployment(write(tmp_path / "rotation.yaml", SPEC, name="rotation")) as deployment:
        rotation = (deployment.rotate_passwords, deployment.show_passwords)
        with Askers(deployment, SAMPLES) as askers:
            askers.all_are_answered_twice()
            pids = {pod.name: deployment.pid(pod) for pod in deployment.local.pods}
            for change in (*rotation, *rotation, deployment.restart_nats):
                change()
                askers.all_are_answered_twice()
        assert {pod.name: deployment.pid(pod) for pod in deployment.local.pods} == pids
    assert askers.errors == []
    askers.check()
