"""Rendered pods as processes of this machine: commands and environments that mean the same without containers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import yaml

from mmd_api.contract.environment import FEATURE_DISK, KEYS_FILE, TLS_FOLDER, TURNS, WEIGHTS
from mmd_api.resource import MultimodalDeployment
from mmd_api.spec.gateway import AuthSpec, TlsSpec
from mmd_api.spec.pods import Resources
from mmd_api.spec.pools import DiskCache, EncoderCache
from mmd_cli.commands.up import StartProgress
from mmd_cli.local import pods, up
from mmd_cli.local.pods import LocalPod, LocalSecrets, RenderError, local_pods
from mmd_cli.local.supervisor import Supervisor

EXAMPLES = Path(__file__).parents[2] / "examples"


def pods_of(example: str | Path, folder: Path) -> list[LocalPod]:
    objects = up.objects_of(up.load(EXAMPLES / example))
    return local_pods(
        objects, folder, "nats://127.0.0.1:1", gateway_port=8000, threads=1, memory_fraction=0.5
    )


def test_every_replica_of_every_pool_is_a_process_with_its_own_port(tmp_path: Path) -> None:
    pods = pods_of("demo.yaml", tmp_path)
    components = [pod.component for pod in pods]
    assert {name: components.count(name) for name in set(components)} == {
        "gateway": 1,
        "encoder": 1,
        "prefill": 1,
        "decode": 2,
    }
    assert len({pod.http_port for pod in pods}) == len(pods)
    assert [pod.http_port for pod in pods if pod.component == "gateway"] == [8000]


def test_config_maps_are_files_that_the_environment_points_to(tmp_path: Path) -> None:
    for pod in pods_of("demo.yaml", tmp_path):
        config = [value for value in pod.environment.values() if value.startswith(f"{tmp_path}/config/")]
        assert config
        assert all(Path(value).is_file() for value in config), config


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_no_process_is_pointed_at_a_volume_that_only_a_container_has(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_own")
    for pod in pods_of(example, tmp_path):
        gone = {
            name: value for name, value in pod.environment.items() if value.startswith(("/var/cache", "/etc"))
        }
        assert not gone, f"{pod.name}: {gone}"


def test_a_cache_on_a_claim_becomes_the_machines_own(tmp_path: Path) -> None:
    """What the cache lacks comes from the hub."""
    body = yaml.safe_load((EXAMPLES / "demo.yaml").read_text())
    cache = {"type": "Hub", "cache": {"claimName": "weights"}}
    body["spec"]["model"] = {"id": "org/model", "storage": cache}
    (tmp_path / "cached.yaml").write_text(yaml.safe_dump(body))
    for pod in pods_of(tmp_path / "cached.yaml", tmp_path):
        assert pod.component in ("gateway", "encoder", "prefill", "decode")
        assert not {WEIGHTS, "HF_HUB_OFFLINE"} & set(pod.environment)


def test_pods_with_a_thread_per_core_take_turns_unless_requesting_cpu(tmp_path: Path) -> None:
    deployment = up.load(EXAMPLES / "demo.yaml")
    prefill = deployment.spec.prefill
    assert prefill is not None
    limited = prefill.model_copy(update={"resources": Resources(cpu="1")})
    deployment = deployment.model_copy(
        update={"spec": deployment.spec.model_copy(update={"prefill": limited})}
    )
    cores = os.cpu_count() or 1
    objects = up.objects_of(deployment)
    for threads in range(1, cores + 1):
        pods = local_pods(objects, tmp_path, "nats://127.0.0.1:1", 0, threads, 0.5)
        found = {pod.component: pod.environment.get(TURNS) for pod in pods}
        one = str(tmp_path / "turns") if threads == cores else None
        assert (found["prefill"], found["decode"], found["encoder"]) == (None, one, one)


def test_a_secret_is_what_our_own_environment_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_own")
    assert {pod.environment["HF_TOKEN"] for pod in pods_of("gpu.yaml", tmp_path)} == {"hf_own"}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(RenderError, match="set HF_TOKEN in the environment"):
        pods_of("gpu.yaml", tmp_path)


def test_pods_get_a_nice_value_in_proportion_to_their_cpu_request(tmp_path: Path) -> None:
    deployment = up.load(EXAMPLES / "demo.yaml")
    shares = {"encoder": "250m", "prefill": "1", "decode": "2"}
    pools = {
        name: getattr(deployment.spec, name).model_copy(update={"resources": Resources(cpu=cpu)})
        for name, cpu in shares.items()
    }
    deployment = deployment.model_copy(update={"spec": deployment.spec.model_copy(update=pools)})
    pods = local_pods(
        up.objects_of(deployment),
        tmp_path,
        "nats://127.0.0.1:1",
        gateway_port=0,
        threads=1,
        memory_fraction=0.5,
    )
    nice = {pod.component: pod.nice for pod in pods}
    assert nice["decode"] == 0
    for pool, share in (("encoder", 8), ("prefill", 2)):
        assert 1.25 ** nice[pool] == pytest.approx(share, rel=0.13)  # half a step of nice


def test_no_pod_is_niced_where_none_requests_cpu(tmp_path: Path) -> None:
    assert {pod.nice for pod in pods_of("demo.yaml", tmp_path)} == {0}


async def test_a_process_runs_at_its_pods_nice(tmp_path: Path) -> None:
    printed: asyncio.Queue[str] = asyncio.Queue()
    supervisor = Supervisor(lambda _, line: printed.put_nowait(line))
    code = "import os, time; print(os.getpriority(os.PRIO_PROCESS, 0)); time.sleep(60)"
    pod = LocalPod("e-0", "encoder", [sys.executable, "-c", code], {}, 0, grace_seconds=5.0, nice=7)
    supervisor.start(pod)
    try:
        async with asyncio.timeout(30):
            assert await printed.get() == str(os.getpriority(os.PRIO_PROCESS, 0) + 7)
    finally:
        await supervisor.close()


def test_the_gateway_has_a_separate_admin_port(tmp_path: Path) -> None:
    for pod in pods_of("demo.yaml", tmp_path):
        if pod.component == "gateway":
            assert pod.http_url == "http://127.0.0.1:8000"
            assert (
                pod.environment["MMD_ADMIN_PORT"] == str(pod.admin_port) != pod.environment["MMD_HTTP_PORT"]
            )
            assert pod.admin_url == f"http://127.0.0.1:{pod.admin_port}"
        else:
            assert pod.admin_url == pod.http_url
            assert "MMD_ADMIN_PORT" not in pod.environment


def test_gateways_with_an_endpoint_picker_share_the_machine(tmp_path: Path) -> None:
    example = yaml.safe_load((EXAMPLES / "monolithic.yaml").read_text())
    example["spec"]["gateway"] = {"replicas": 2, "inferencePool": {}}
    file = tmp_path / "picker.yaml"
    file.write_text(yaml.safe_dump(example))
    pods = [pod for pod in pods_of(file, tmp_path) if pod.component == "gateway"]
    assert [pod.environment["MMD_PICKER_PORT"] for pod in pods] == ["0", "0"]


def test_a_quiet_start_still_shows_that_a_pod_exits_and_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StartProgress(quiet_logs=True)
    progress.log("decode-0", "INFO loaded 12 tensors")
    progress.log(
        "decode-0", "exited with code 137; restarting in 1.0 s"
    )  # killed for its memory: it says nothing itself
    said = capsys.readouterr().out
    assert "exited with code 137; restarting in 1.0 s" in said
    assert "loaded" not in said


def test_a_line_of_a_pod_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    StartProgress().log("decode-0", "model said \x1b]0;title\x07 and \x9b2J")
    said = capsys.readouterr().out
    assert r"\x1b]0;title\x07 and \x9b2J" in said
    assert "\x1b" not in said


def test_a_given_port_is_not_given_again_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pods, "_FREE_PORTS", range(14_000, 14_100))
    given = [pods.free_port() for _ in range(50)]
    assert len(set(given)) == 50


def with_keys() -> MultimodalDeployment:
    deployment = up.load(EXAMPLES / "demo.yaml")
    gateway = deployment.spec.gateway.model_copy(update={"auth": AuthSpec(keys_secret="demo-keys")})
    spec = deployment.spec.model_copy(update={"gateway": gateway})
    return deployment.model_copy(update={"spec": spec})


def test_the_gateway_follows_the_users_own_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    pods = local_pods(
        up.objects_of(with_keys()),
        tmp_path,
        "nats://127.0.0.1:1",
        8000,
        1,
        0.5,
        secrets=LocalSecrets(keys=file),
    )
    given = {pod.component: pod.environment.get(KEYS_FILE) for pod in pods}
    assert given.pop("gateway") == str(file)
    assert set(given.values()) == {None}


def test_a_deployment_that_needs_keys_does_not_start_without_their_file(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="pass --keys FILE"):
        local_pods(up.objects_of(with_keys()), tmp_path, "nats://127.0.0.1:1", 8000, 1, 0.5)


def with_tls() -> MultimodalDeployment:
    deployment = up.load(EXAMPLES / "demo.yaml")
    gateway = deployment.spec.gateway.model_copy(update={"tls": TlsSpec(secret_name="gateway-tls")})
    spec = deployment.spec.model_copy(update={"gateway": gateway})
    return deployment.model_copy(update={"spec": spec})


def test_the_gateway_follows_the_users_own_certificate_and_is_reached_over_https(tmp_path: Path) -> None:
    made = local_pods(
        up.objects_of(with_tls()),
        tmp_path,
        "nats://127.0.0.1:1",
        8000,
        1,
        0.5,
        secrets=LocalSecrets(tls=tmp_path),
    )
    for pod in made:
        is_gateway = pod.component == "gateway"
        assert pod.environment.get(TLS_FOLDER) == (str(tmp_path) if is_gateway else None)
        assert pod.http_url.startswith("https://127.0.0.1:" if is_gateway else "http://127.0.0.1:")
        assert pod.admin_url.startswith("http://127.0.0.1:")


def test_a_deployment_with_tls_does_not_start_without_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="pass --tls FOLDER"):
        local_pods(up.objects_of(with_tls()), tmp_path, "nats://127.0.0.1:1", 8000, 1, 0.5)


async def test_mmd_up_refuses_a_certificate_that_it_could_not_use(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("hello")
    for deployment, said in (
        (with_tls(), "No such file"),
        (up.load(EXAMPLES / "demo.yaml"), "spec.gateway.tls is not set"),
        (with_tls(), "tls.crt is no chain of PEM certificates"),
    ):
        with pytest.raises(up.SecretError, match=said):
            async with up.running(deployment, log_line=lambda *_: None, secrets=LocalSecrets(tls=tmp_path)):
                pytest.fail("it started")
        (tmp_path / "tls.key").write_text("hello")


async def test_mmd_up_refuses_keys_that_it_could_not_use(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    for deployment, content, said in (
        (with_keys(), "tenants: [", "line 1: invalid YAML"),
        (up.load(EXAMPLES / "demo.yaml"), "tenants: []", "spec.gateway.auth is not set"),
    ):
        file.write_text(content)
        with pytest.raises(up.SecretError, match=said):
            async with up.running(deployment, log_line=lambda *_: None, secrets=LocalSecrets(keys=file)):
                pytest.fail("it started")


def test_the_disk_of_an_encoders_cache_is_a_folder_of_each_pod(tmp_path: Path) -> None:
    deployment = up.load(EXAMPLES / "demo.yaml")
    encoder = deployment.spec.encoder
    assert encoder is not None
    with_disk = encoder.model_copy(
        update={"replicas": 2, "autoscaling": None, "cache": EncoderCache(disk=DiskCache(size_mebibytes=16))}
    )
    deployment = deployment.model_copy(
        update={"spec": deployment.spec.model_copy(update={"encoder": with_disk})}
    )
    pods = local_pods(up.objects_of(deployment), tmp_path, "nats://127.0.0.1:1", 8000, 1, 0.5)
    owner = f"{deployment.metadata.namespace or 'default'}-{deployment.metadata.name}"
    folders = {pod.name: pod.environment.get(FEATURE_DISK) for pod in pods}
    assert {name: folder for name, folder in folders.items() if folder} == {
        pod.name: str(tmp_path / "features" / ".mmd-features" / owner / pod.name)
        for pod in pods
        if pod.component == "encoder"
    }
