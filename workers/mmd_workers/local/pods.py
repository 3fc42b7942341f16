"""What a rendered pod means on this machine: the same command and environment, with files and ports where they can be here.

Reads the very objects that the operator would apply; knows nothing of how they were planned.
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mmd_workers.errors import MmdError
from mmd_workers.local.forkserver import IDLE_NICE

LOOPBACK = "127.0.0.1"
NICE_STEP = 1.25  # Linux: a process of nice n weighs this much more than one of n + 1
COMPONENT_LABEL = "app.kubernetes.io/component"


class RenderError(MmdError):
    """A rendered object needs something that a local process cannot have."""

    code = "render"


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One process to run: name of the pod, its component (gateway, encoder, prefill, decode), command line and environment.

    `nice`: how far it stands back when cores are scarce, 0 (not at all) to `IDLE_NICE`.
    """

    name: str
    component: str
    command: list[str]
    environment: dict[str, str]
    http_port: int
    grace_seconds: float
    nice: int = 0

    @property
    def http_url(self) -> str:
        """Where its HTTP server listens."""
        return f"http://{LOOPBACK}:{self.http_port}"


def local_pods(
    objects: list[dict[str, Any]], directory: Path, nats_url: str, gateway_port: int, threads: int
) -> list[LocalPod]:
    """Every pod of Deployments and StatefulSets but the message bus, which the local runner brings itself.

    Secrets hold their values in `stringData`. ConfigMaps are written below `directory`; container paths that they are mounted at are replaced in the environment.

    Raises:
        RenderError: an object refers to what does not exist here (a Secret's value that is not in our own environment, say).
    """
    pods = []
    for workload in objects:
        if workload["kind"] not in ("Deployment", "StatefulSet"):
            continue
        component = component_of(workload)
        if component == "nats":
            continue
        for ordinal in range(workload["spec"].get("replicas", 1)):
            name = f"{workload['metadata']['name']}-{ordinal}"
            port = gateway_port if component == "gateway" and ordinal == 0 and gateway_port else free_port()
            pods.append(_local_pod(objects, workload, name, port, directory, nats_url, threads))
    return pods


def pool_pod(
    objects: list[dict[str, Any]], pool: str, ordinal: int, directory: Path, nats_url: str, threads: int
) -> LocalPod:
    """One more pod of a pool: what its StatefulSet would make."""
    workload = next(o for o in objects if o["kind"] == "StatefulSet" and component_of(o) == pool)
    name = f"{workload['metadata']['name']}-{ordinal}"
    return _local_pod(objects, workload, name, free_port(), directory, nats_url, threads)


def component_of(workload: dict[str, Any]) -> str:
    """What the pods of a workload are: gateway, encoder, prefill, decode or nats."""
    return str(workload["spec"]["template"]["metadata"]["labels"][COMPONENT_LABEL])


def _local_pod(
    objects: list[dict[str, Any]],
    workload: dict[str, Any],
    name: str,
    port: int,
    directory: Path,
    nats_url: str,
    threads: int,
) -> LocalPod:
    spec = workload["spec"]["template"]["spec"]
    container = spec["containers"][0]
    maps = {o["metadata"]["name"]: o.get("data", {}) for o in objects if o["kind"] == "ConfigMap"}
    secrets = {o["metadata"]["name"]: o.get("stringData", {}) for o in objects if o["kind"] == "Secret"}
    mounts = _write_mounts(spec, container, maps, directory)
    environment: dict[str, str] = {}
    for variable in container.get("env", []):
        value = _value(variable, name, workload, secrets)
        for known, its in environment.items():
            value = value.replace(f"$({known})", its)
        within = next((path for path in mounts if value == path or value.startswith(f"{path}/")), None)
        if within is None:
            environment[variable["name"]] = value
        elif (folder := mounts[within]) is not None:
            environment[variable["name"]] = str(folder) + value[len(within) :]
    environment |= {
        "MMD_HTTP_PORT": str(port),
        "MMD_NATS_URL": _with_user_of(environment.get("MMD_NATS_URL", ""), nats_url),
        "MMD_THREADS": str(threads),
        "MMD_POD_ANNOTATIONS": str(directory / "annotations" / name),
    }
    return LocalPod(
        name=name,
        component=component_of(workload),
        command=[*container.get("command", []), *container.get("args", [])],
        environment=environment,
        http_port=port,
        grace_seconds=float(spec.get("terminationGracePeriodSeconds", 30)),
        nice=_nice(workload, objects),
    )


def _nice(workload: dict[str, Any], objects: list[dict[str, Any]]) -> int:
    """From CPU requests, the shares of scarce cores that a cluster would give: each step of nice takes a fifth of a process's weight.

    Less than an eightieth, which nice cannot say, is what others leave. The pods that ask for most, and those that ask for nothing, stand back for nobody.
    """
    asked = [cores for o in objects if o["kind"] in ("Deployment", "StatefulSet") and (cores := _cores(o))]
    own = _cores(workload)
    return min(IDLE_NICE, round(math.log(max(asked) / own, NICE_STEP))) if own else 0


def _cores(workload: dict[str, Any]) -> float:
    """What the pods of a workload ask for; 0: nothing."""
    container = workload["spec"]["template"]["spec"]["containers"][0]
    asked = str(container.get("resources", {}).get("requests", {}).get("cpu", 0))
    return float(asked[:-1]) / 1000 if asked.endswith("m") else float(asked)


def _write_mounts(
    spec: dict[str, Any], container: dict[str, Any], maps: dict[str, dict[str, str]], directory: Path
) -> dict[str, Path | None]:
    """Mount path → folder with a ConfigMap's files; None for a volume that a laptop has not: its programs' defaults serve."""
    volumes = {v["name"]: v["configMap"]["name"] for v in spec.get("volumes", []) if "configMap" in v}
    mounts: dict[str, Path | None] = {}
    for mount in container.get("volumeMounts", []):
        if (source := volumes.get(mount["name"])) is None:
            mounts[mount["mountPath"].rstrip("/")] = None
            continue
        folder = directory / "config" / source
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in maps[source].items():
            (folder / file).write_text(text)
        mounts[mount["mountPath"].rstrip("/")] = folder
    return mounts


def _with_user_of(planned: str, url: str) -> str:
    """`url` with the user and password that the planned URL names, if any."""
    user, at, _ = urlsplit(planned).netloc.rpartition("@")
    scheme, _, address = url.partition("://")
    return f"{scheme}://{user}{at}{address}"


def _value(
    variable: dict[str, Any], pod: str, workload: dict[str, Any], secrets: dict[str, dict[str, str]]
) -> str:
    if "value" in variable:
        return str(variable["value"])
    source = variable.get("valueFrom", {})
    if secret := source.get("secretKeyRef"):
        if (made := secrets.get(secret["name"], {}).get(secret["key"])) is not None:
            return made
        if (own := os.environ.get(variable["name"])) is None and not secret.get("optional"):
            raise RenderError(
                f"environment variable {variable['name']} of {pod} comes from the Secret {secret['name']}, which a laptop has "
                f"not: set {variable['name']} in the environment of `mmd up`"
            )
        return own or ""
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
            "on a laptop; use a cluster, or a resource without it"
        )
    return facts[path]


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
