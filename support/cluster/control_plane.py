"""etcd and kube-apiserver on loopback, which tests start, stop and restart, and their binaries."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from mmd_cli.local.pods import free_port
from support.harness.needed import lacking
from support.harness.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
SHARED_BUILD = REPOSITORY.parent / "shared" / "k8s"
CACHED_BUILD = REPOSITORY / ".cache" / "kubernetes"
TOKEN = "test"
CONTROLLERS = ("clusterrole-aggregation-controller", "namespace-controller")
"""Controllers of kube-controller-manager whose work no test plays."""


def binaries() -> Path:
    """A folder with etcd, kube-apiserver and kubectl.

    From KUBEBUILDER_ASSETS, else the cached build, else a prebuilt one beside the repository, else the PATH,
    else built by `e2e/kubernetes/build.sh` if Go is installed. Otherwise the test is skipped, or fails under
    CI.
    """
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        return Path(assets)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    build = CACHED_BUILD / "kube"
    if not build.exists():
        prebuilt = shutil.which("xz") and any(SHARED_BUILD.glob(f"kubernetes-*-linux-{machine}.xz"))
        if not prebuilt and (on_path := shutil.which("kube-apiserver")):
            return Path(on_path).parent
        if not prebuilt and not shutil.which("go"):
            lacking(
                "no API server: set KUBEBUILDER_ASSETS to a folder with etcd and kube-apiserver, or install Go"
            )
        subprocess.run(["sh", REPOSITORY / "e2e/kubernetes/build.sh", build], check=True, timeout=1800)
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm"):
        with contextlib.suppress(
            FileExistsError
        ):  # another process makes the links of a fresh clone at the same time
            (CACHED_BUILD / name).symlink_to("kube")
    return CACHED_BUILD


def write_kubeconfig(path: Path, server: str, token: str) -> Path:
    """Write a kubeconfig for an API server or its stand-in. Nobody checks the server's certificate.

    The file is replaced atomically: another process may be reading it.
    """
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    partial.write_text(yaml.safe_dump(body))
    return partial.replace(path)


class ControlPlane:
    """One etcd and one API server with their state in a folder. `Authorization: Bearer test` is the administrator."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.binaries = folder, binaries()
        self._client, self._peer, self.port = (free_port() for _ in range(3))
        self.url = f"https://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        (folder / "sa.key").write_bytes(pem)
        (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')

    def start(self) -> None:
        client = f"http://127.0.0.1:{self._client}"
        peer = f"http://127.0.0.1:{self._peer}"
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self.start_api_server()

    def start_api_server(self) -> None:
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            f"--service-account-key-file={self.folder / 'sa.key'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            "--endpoint-reconciler-type=none",
            f"--audit-policy-file={self._audit_policy()}",
            f"--audit-log-path={self.audit_log}",
        )
        self._wait_until(lambda: answers(f"{self.url}/readyz"))

    @property
    def audit_log(self) -> Path:
        """One JSON line for every request of a service account."""
        return self.folder / "audit.log"

    def _audit_policy(self) -> Path:
        path = self.folder / "audit-policy.yaml"
        rules = [
            {
                "level": "Metadata",
                "userGroups": ["system:serviceaccounts"],
                "omitStages": ["RequestReceived"],
            },
            {"level": "None"},
        ]
        path.write_text(yaml.safe_dump({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
        return path

    def kubeconfig(self, token: str = TOKEN) -> Path:
        """Write a kubeconfig for the user of a token."""
        return write_kubeconfig(self.folder / f"kubeconfig-{abs(hash(token))}.yaml", self.url, token)

    def start_controllers(self) -> None:
        """Run `CONTROLLERS` until `stop`. Skips the test if there is no kube-controller-manager."""
        program = self.binaries / "kube-controller-manager"
        if not program.exists():
            lacking(
                f"{program} is needed; envtest has none: unset KUBEBUILDER_ASSETS to use the repository's build"
            )
        kubeconfig = self.kubeconfig()
        if program.name not in self.processes:
            self._spawn(
                program.name,
                f"--kubeconfig={kubeconfig}",
                f"--authentication-kubeconfig={kubeconfig}",
                f"--authorization-kubeconfig={kubeconfig}",
                f"--controllers={','.join(CONTROLLERS)}",
                "--leader-elect=false",
                "--secure-port=0",
            )

    def kill_api_server(self) -> None:
        process = self.processes.pop("kube-apiserver")
        process.kill()
        process.wait(timeout=10)

    def stop(self) -> None:
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
            self._end(name)

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [self.binaries / name, *arguments], stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )

    def _end(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        def ready() -> bool:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    tail = (self.folder / f"{name}.log").read_text()[-3000:]
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{tail}")
            return condition()

        wait_until(ready, "the API server is ready", pause_seconds=0.2)


def answers(url: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    unchecked = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(request, timeout=2, context=unchecked) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
