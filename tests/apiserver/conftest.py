"""A real API server (etcd and kube-apiserver, from KUBEBUILDER_ASSETS or the PATH), started once for the suite."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tenacity import Retrying, retry_if_not_result, stop_after_delay, wait_fixed

sys.path.append(str(Path(__file__).parents[1] / "api"))

TOKEN = "test"
START_SECONDS = 60


def binary(name: str) -> str:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    found = shutil.which(name, path=assets) if assets else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here; set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    unchecked = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(request, timeout=2, context=unchecked) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until(condition: Callable[[], bool], processes: list[subprocess.Popen[bytes]], logs: Path) -> None:
    def ready() -> bool:
        for process in processes:
            if process.poll() is not None:
                tail = "\n".join(log.read_text()[-2000:] for log in logs.glob("*.log"))
                raise RuntimeError(f"{process.args[0]} ended with {process.returncode}:\n{tail}")
        return condition()

    Retrying(retry=retry_if_not_result(bool), stop=stop_after_delay(START_SECONDS), wait=wait_fixed(0.2))(
        ready
    )


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a fresh API server; `Authorization: Bearer test` is its administrator."""
    etcd, api_server = binary("etcd"), binary("kube-apiserver")
    folder = tmp_path_factory.mktemp("apiserver")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (folder / "sa.key").write_bytes(pem)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    client, peer, secure = (free_port() for _ in range(3))
    commands = [
        [
            etcd,
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        ],
        [
            api_server,
            f"--etcd-servers=http://127.0.0.1:{client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={secure}",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            f"--service-account-key-file={folder / 'sa.key'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            "--endpoint-reconciler-type=none",
        ],
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            log = (folder / f"{Path(command[0]).name}.log").open("wb")
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder))
        url = f"https://127.0.0.1:{secure}"
        wait_until(lambda: answers(f"{url}/readyz"), processes, folder)
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=5)
