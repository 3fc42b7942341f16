"""Translates a rendered pod to a local process: the same command and environment, with local files and ports.

Reads the very objects that the operator would apply; independent of how they were planned.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmd_api.contract import environment as env
from mmd_api.spec.gateway import TLS_CERTIFICATE, TLS_KEY
from mmd_cli.errors import CommandError
from mmd_cli.local.forkserver import IDLE_NICE
from mmd_operator.resources.pods import FEATURES_VOLUME

LOOPBACK = "127.0.0.1"
_FREE_PORTS = range(15_000, 29_000)
_GIVEN: deque[socket.socket] = deque(maxlen=1000)
"""Claims on the last ports that this process was given."""
NICE_STEP = 1.25  # Linux: weight of a process with nice n, relative to one with n + 1
COMPONENT_LABEL = "app.kubernetes.io/component"


class RenderError(CommandError):
    """A rendered object needs something that a local process cannot have."""


@dataclass(frozen=True, slots=True)
class LocalSecrets:
    """Local files in place of the user's own Secrets. Gateways follow them.

    `keys`: the file of API keys. `tls`: the folder with the certificate and its key.
    """

    keys: Path | None = None
    tls: Path | None = None


NO_SECRETS = LocalSecrets()


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One process to run: name of the pod, its component (gateway, encoder, prefill, decode), command line and environment.

    `nice`: its niceness when cores are scarce, 0 (not at all) to `IDLE_NICE`.
    """

    name: str
    component: str
    command: list[str]
    environment: dict[str, str] = field(repr=False)  # contains passwords
    http_port: int
    grace_seconds: float
    nice: int = 0
    admin_port: int = 0  # 0: the same as http_port

    @property
    def http_url(self) -> str:
        """URL for clients."""
        scheme = "https" if env.TLS_FOLDER in self.environment else "http"
        return f"{scheme}://{LOOPBACK}:{self.http_port}"

    @property
    def admin_url(self) -> str:
        """URL for metrics, state and probes. A worker has one port for everything."""
        return f"http://{LOOPBACK}:{self.admin_port or self.http_port}"


def local_pods(
    objects: list[dict[str, Any]],
    directory: Path,
    nats_url: str,
    gateway_port: int,
    threads: int,
    memory_fraction: float,
    admin_port: int = 0,
    secrets: LocalSecrets = NO_SECRETS,
) -> list[LocalPod]:
    """Every pod of Deployments and StatefulSets except the message bus, which the local runner brings itself.

    `gateway_port`, `admin_port`: ports of the first gateway; 0 picks a free one. Secrets that the operator
    makes have their values in `stringData`. ConfigMaps are written below `directory`; the container paths
    where they are mounted are replaced in the environment.

    Raises:
        RenderError: an object refers to something that does not exist here, such as a value of a Secret that
            is not in our own environment.
    """
    write_config_maps(objects, directory)
    write_logins(objects, directory)
    pods = []
    for workload in objects:
        if workload["kind"] not in ("Deployment", "StatefulSet"):
            continue
        component = component_of(workload)
        if component == "nats":
            continue
        for ordinal in range(workload["spec"].get("replicas", 1)):
            name = f"{workload['metadata']['name']}-{ordinal}"
            chosen_ports = (gateway_port, admin_port) if component == "gateway" and ordinal == 0 else (0, 0)
            ports = (chosen_ports[0] or free_port(), chosen_ports[1] or free_port())
            pods.append(
                _local_pod(
                    objects, workload, name, ports, directory, nats_url, threads, memory_fraction, secrets
                )
            )
    return pods


def pool_pod(
    objects: list[dict[str, Any]],
    pool: str,
    ordinal: int,
    directory: Path,
    nats_url: str,
    threads: int,
    memory_fraction: float,
) -> LocalPod:
    """One more pod of a pool, as its StatefulSet would make it."""
    workload = next(o for o in objects if o["kind"] == "StatefulSet" and component_of(o) == pool)
    name = f"{workload['metadata']['name']}-{ordinal}"
    ports = (free_port(), 0)
    return _local_pod(objects, workload, name, ports, directory, nats_url, threads, memory_fraction)


def component_of(workload: dict[str, Any]) -> str:
    """Component of the pods of a workload: gateway, encoder, prefill, decode or nats."""
    return str(workload["spec"]["template"]["metadata"]["labels"][COMPONENT_LABEL])


def _local_pod(
    objects: list[dict[str, Any]],
    workload: dict[str, Any],
    name: str,
    ports: tuple[int, int],
    directory: Path,
    nats_url: str,
    threads: int,
    memory_fraction: float,
    local_secrets: LocalSecrets = NO_SECRETS,
) -> LocalPod:
    spec = workload["spec"]["template"]["spec"]
    container = spec["containers"][0]
    port, admin_port = ports
    secrets = {o["metadata"]["name"]: o.get("stringData", {}) for o in objects if o["kind"] == "Secret"}
    mounts = _mounts(workload, directory)
    environment: dict[str, str] = {}
    for variable in container.get("env", []):
        value = _value(variable, name, workload, secrets)
        for earlier, earlier_value in environment.items():
            value = value.replace(f"$({earlier})", earlier_value)
        mount_path = next((path for path in mounts if value == path or value.startswith(f"{path}/")), None)
        if mount_path is None:
            environment[variable["name"]] = value
        elif (folder := mounts[mount_path]) is not None:
            environment[variable["name"]] = str(folder) + value[len(mount_path) :]
    if any(variable["name"] == env.WEIGHTS for variable in container.get("env", [])):
        environment.pop("HF_HUB_OFFLINE", None)  # files that this machine's cache lacks come from the hub
    if env.ADMIN_PORT in environment:
        environment[env.ADMIN_PORT] = str(admin_port)
    if env.PICKER_PORT in environment:
        environment[env.PICKER_PORT] = "0"  # nobody asks there, and gateways share the machine
    environment |= _own_secrets(environment, local_secrets)
    environment |= {
        env.HTTP_PORT: str(port),
        env.NATS_URL: nats_url,
        env.THREADS: str(threads),
        env.MEMORY_FRACTION: f"{memory_fraction:.6f}",
        env.POD_ANNOTATIONS: str(directory / "annotations" / name),
    }
    if threads >= (os.cpu_count() or 1) and not _cores(workload):  # otherwise cores are shared as requested
        environment[env.TURNS] = str(directory / "turns")
    return LocalPod(
        name=name,
        component=component_of(workload),
        command=[*container.get("command", []), *container.get("args", [])],
        environment=environment,
        http_port=port,
        admin_port=admin_port if env.ADMIN_PORT in environment else 0,
        grace_seconds=float(spec.get("terminationGracePeriodSeconds", 30)),
        nice=_nice(workload, objects),
    )


def _own_secrets(environment: dict[str, str], local_secrets: LocalSecrets) -> dict[str, str]:
    """Variables with the local paths of the user's own Secrets.

    Raises:
        RenderError: a Secret is needed, and no option names its files.
    """
    variables = {}
    for variable, path, missing in (
        (
            env.KEYS_FILE,
            local_secrets.keys,
            "spec.gateway.auth is set, and its Secret does not exist locally; pass --keys FILE, which `mmd create-key` makes, "
            "or remove spec.gateway.auth",
        ),
        (
            env.TLS_FOLDER,
            local_secrets.tls,
            f"spec.gateway.tls is set, and its Secret does not exist locally; pass --tls FOLDER, with {TLS_CERTIFICATE} and {TLS_KEY}, "
            "or remove spec.gateway.tls",
        ),
    ):
        if variable not in environment:
            continue
        if path is None:
            raise RenderError(missing)
        variables[variable] = str(path.absolute())
    return variables


def _nice(workload: dict[str, Any], objects: list[dict[str, Any]]) -> int:
    """Niceness that gives a pod the share of scarce cores that a cluster would give it, from CPU requests.

    Each step of nice takes a fifth of a process's weight. Less than an eightieth, which nice cannot express,
    means idle priority. The pods that request most, and those that request nothing, keep nice 0.
    """
    requests = [cores for o in objects if o["kind"] in ("Deployment", "StatefulSet") and (cores := _cores(o))]
    request = _cores(workload)
    return min(IDLE_NICE, round(math.log(max(requests) / request, NICE_STEP))) if request else 0


def _cores(workload: dict[str, Any]) -> float:
    """Cores that each pod of a workload requests; 0: none."""
    container = workload["spec"]["template"]["spec"]["containers"][0]
    quantity = str(container.get("resources", {}).get("requests", {}).get("cpu", 0))
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def write_config_maps(objects: list[dict[str, Any]], directory: Path) -> None:
    """Write every ConfigMap's files below `directory`, each atomically: a reader finds the old text or the new one."""
    for config_map in (o for o in objects if o["kind"] == "ConfigMap"):
        folder = directory / "config" / config_map["metadata"]["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in config_map.get("data", {}).items():
            part = folder / f"{file}.part"
            part.write_text(text)
            part.rename(folder / file)


def write_logins(objects: list[dict[str, Any]], directory: Path) -> None:
    """Write the files of every Secret that a pod mounts, each atomically and readable by this user alone."""
    secrets = {o["metadata"]["name"]: o.get("stringData", {}) for o in objects if o["kind"] == "Secret"}
    for workload in (o for o in objects if o["kind"] in ("Deployment", "StatefulSet")):
        for volume in workload["spec"]["template"]["spec"].get("volumes", []):
            source = volume.get("secret", {})
            for item in source.get("items", ()):
                if (value := secrets.get(source["secretName"], {}).get(item["key"])) is None:
                    continue
                file = login_folder(workload, directory) / item["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                part = file.with_suffix(".part")
                part.touch(mode=0o600)
                part.write_text(value)
                part.rename(file)


def login_folder(workload: dict[str, Any], directory: Path) -> Path:
    """Folder with the NATS login of a workload's pods."""
    return directory / "login" / component_of(workload)


def _mounts(workload: dict[str, Any], directory: Path) -> dict[str, Path | None]:
    """Mount path → folder with the files of a ConfigMap or Secret, or for features.

    None for a volume that does not exist locally, where the programs' defaults apply.
    """
    spec = workload["spec"]["template"]["spec"]
    folders: dict[str, Path] = {}
    for volume in spec.get("volumes", []):
        if "configMap" in volume:
            folders[volume["name"]] = directory / "config" / volume["configMap"]["name"]
        elif "secret" in volume:
            folders[volume["name"]] = login_folder(workload, directory)
        elif volume["name"] == FEATURES_VOLUME:
            folders[volume["name"]] = directory / FEATURES_VOLUME
    mounted = spec["containers"][0].get("volumeMounts", [])
    return {mount["mountPath"].rstrip("/"): folders.get(mount["name"]) for mount in mounted}


def _value(
    variable: dict[str, Any], pod: str, workload: dict[str, Any], secrets: dict[str, dict[str, str]]
) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable.get("valueFrom", {})
    if secret := source.get("secretKeyRef"):
        if (generated := secrets.get(secret["name"], {}).get(secret["key"])) is not None:
            return generated
        if (local_value := os.environ.get(variable["name"])) is None and not secret.get("optional"):
            raise RenderError(
                f"environment variable {variable['name']} of {pod} comes from the Secret {secret['name']}, which does not "
                f"exist locally; set {variable['name']} in the environment of `mmd up`"
            )
        return local_value or ""
    path = source.get("fieldRef", {}).get("fieldPath")
    facts: dict[str | None, str] = {
        "metadata.name": pod,
        "metadata.namespace": workload["metadata"].get("namespace", "default"),
        "metadata.uid": pod,
        "status.podIP": LOOPBACK,
    }
    if path not in facts:
        raise RenderError(
            f"environment variable {variable['name']} of {pod} comes from {source}, which does not exist "
            "locally; use a cluster or remove the variable"
        )
    return facts[path]


def free_port() -> int:
    """A free TCP port on loopback, which no connection takes by chance.

    It is below the ports that the kernel gives to connections. No other process of this program is given it
    while this one lives and asks for less than a thousand more.

    Raises:
        OSError: none of a hundred ports is free.
    """
    for port in random.SystemRandom().sample(_FREE_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            _GIVEN.append(_claim(port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free TCP port on {LOOPBACK}")


def _claim(port: int) -> socket.socket:
    """Tell other processes that a port is taken, although nobody listens there yet.

    The claim is a name that Linux frees when its last holder ends.

    Raises:
        OSError: another process has claimed it.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":
        try:
            claim.bind(f"\0mmd-port-{port}")
        except OSError:
            claim.close()
            raise
    return claim
