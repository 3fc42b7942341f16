"""`mmd up` brings changes of its file to the configuration files that its processes follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mmd_api.pipeline import PipelineConfig
from mmd_cli.local import up
from mmd_cli.local.follow import FileFollower
from mmd_cli.local.pods import local_pods

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"


class Followed:
    """A deployment's file, its processes' configuration files, and what the follower logged."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "demo.yaml"
        self.resource: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
        self.write()
        deployment = up.load(self.file)
        pods = local_pods(up.objects_of(deployment), folder, "nats://127.0.0.1:1", 8000, 1, 0.5)
        self.configs = {pod.component: Path(pod.environment["MMD_PIPELINE_CONFIG"]) for pod in pods}
        self.logged: list[str] = []
        self.follower = FileFollower(
            self.file, up.load, deployment, "default", folder, lambda _, line: self.logged.append(line)
        )

    def write(self, **spec: Any) -> None:
        self.file.write_text(yaml.safe_dump({**self.resource, "spec": {**self.resource["spec"], **spec}}))

    def config(self, component: str) -> PipelineConfig:
        return PipelineConfig.load(self.configs[component])


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def test_a_runtime_setting_reaches_only_the_processes_that_read_it(followed: Followed) -> None:
    before = {c: file.read_text() for c, file in followed.configs.items()}
    followed.write(gateway={"maxRetries": 1}, slo={"ttftMilliseconds": 300})
    followed.follower.check()
    assert followed.config("gateway").spec.gateway.max_retries == 1
    assert followed.config("gateway").spec.slo.ttft_milliseconds == 300
    assert {c for c, file in followed.configs.items() if file.read_text() != before[c]} == {"gateway"}
    assert not followed.logged


def test_a_change_that_needs_a_start_is_named(followed: Followed) -> None:
    decode = {**followed.resource["spec"]["decode"], "maxSequences": 7}
    followed.write(decode=decode, gpuBudget=8)
    followed.follower.check()
    (line,) = followed.logged
    assert "spec.decode.maxSequences" in line
    assert "spec.gpuBudget" in line


def test_an_invalid_file_changes_nothing_and_is_reported_once(followed: Followed) -> None:
    before = followed.configs["gateway"].read_text()
    followed.write(gateway={"maxRetries": -1})
    followed.follower.check()
    followed.follower.check()
    assert followed.configs["gateway"].read_text() == before
    assert len(followed.logged) == 1
    assert "maxRetries" in followed.logged[0]


def test_a_followed_file_for_several_nats_servers_runs_with_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "three.yaml"
    resource = yaml.safe_load(EXAMPLE.read_text())
    resource["spec"]["nats"] = {"replicas": 3}
    file.write_text(yaml.safe_dump(resource))
    assert up.load_for_one_machine(file) == up.for_one_machine(up.load(file))
    assert up.load_for_one_machine(file).spec.nats.replicas == 1


def test_on_one_machine_kv_travels_over_gloo_unless_the_file_names_another(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    resource = yaml.safe_load(EXAMPLE.read_text())
    for pool in ("prefill", "decode"):
        resource["spec"][pool]["gpus"] = 1
    for backend, used in ((None, "Gloo"), ("Nixl", "Nixl"), ("Nccl", "Nccl")):
        resource["spec"]["transfer"] = {"kv": {} if backend is None else {"backend": backend}}
        file.write_text(yaml.safe_dump(resource))
        assert up.load_for_one_machine(file).spec.kv_backend == used
