"""The reference page of the resource, written from the same schema and rules as the CRD."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mmd_api.contract.pools import Role
from mmd_api.crd import Schema, custom_resource_definition
from mmd_api.readers import Component, effect_of, live_for, readers_of, replacing, spec_paths

_HEAD = """\
<!-- Generated from crds/mmd_api by `make crds`. Edit the models, not this page. -->
# MultimodalDeployment

`apiVersion: serving.multimodal.dev/v1alpha1`, short name `mmd`. `mmd validate -f FILE` reports everything that is wrong with a file;
`mmd render -f FILE` prints every Kubernetes object that the operator would apply.

- **The work of an omitted pool is done by the next pool downstream.** Without `encoder`, prefill workers encode; without `prefill`, decode
  workers prefill; `decode` alone is a monolithic server.
- **Size of a pool:** `replicas`, or `autoscaling`, or neither, which means one replica. With `autoscaling`, a pool is created with
  `minReplicas`, or with one replica if that is 0, so that a new revision can become Ready.
- **`gpuBudget`** limits the GPUs of all pools together. If it is too small, each GPU goes to the pool that is furthest above its target, which `slo` and
  `autoscaling` set; a budget below the minimum sizes is rejected.
- **Where the model comes from:** `builtin/demo`; a hub id such as `org/model`, fetched (`storage.type: Hub`) or baked into the worker image
  (`Image`); a folder of a web server or object store (`Url`), with an id that is its name alone; or an absolute path, in the image or under `/models`, where a claim is mounted (`PersistentVolumeClaim`). A path that begins with `./`
  or `../` is resolved by `mmd up` relative to the file; a cluster rejects it, and `mmd validate` notes this without failing.
- **Pipeline revision:** ten hex digits in the names of pods, subjects and streams; pods of different revisions never communicate. It changes
  with `model.id`, `model.revision`, `model.dtype`, `model.storage` (type, claim, sub-path, URL, and the claim of the cache), `gateway.media.video.maxFrames` and
  `framesPerSecondMilli`, `gateway.media.document.dotsPerInch`, `decode.kvBlockTokens`, `engine.type`, `engine.kvDtype`, `engine.adapters`, `quantization`, `kvCacheDtype` and `extraArgs` of
  `engine.prefill` and `engine.decode`, how KV travels if there is a prefill pool (`transfer.kv.backend`, with `Auto` the `gpus` of both pools, and `wireFormat`), `image.worker` and the wire version, and with nothing else.
- **`spec.replicas` of a pool's StatefulSet** is what it is created with. From then on it belongs to the autoscaler, which writes it
  through `/scale`; an apply leaves it out.
- **Credentials:** `nats.credentialsSecret` names a Secret with the keys `username` and `password`; `model.storage.tokenSecret` one with
  the key `token`, `model.storage.credentialsSecret` one with the variables of an object store's client, and `gateway.auth.keysSecret` one with the key `keys.yaml`, [the tenants and hashes of their API keys](security.md#the-file-of-keys);
  `gateway.tls.secretName` one of type kubernetes.io/tls.
- **Numbers** are integers: fractions are in percent or thousandths (milli), and units are part of field names.
- **The column "change"** shows how a change of the field affects running pods. *No restart*: the operator, or the running process,
  applies the new value. *Replaces*: pods of these components are replaced in a rolling update, and no others; if a pool is omitted, the
  pods that perform its role. *New revision*: pods of a new pipeline revision start alongside the current ones, and requests move to them. No
  field is immutable.
"""
_ROLES: dict[Component, tuple[Role, ...]] = {
    "gateway": (),
    "nats": (),
    "encoder": ("encode",),
    "prefill": ("prefill",),
    "decode": ("decode",),
}
"""Roles of a component's pods where every pool has its own pods."""


def reference_page() -> str:
    """The page as Markdown."""
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    refusals = _grouped((message, path) for path, message in _messages(schema, ""))
    parts = _grouped(
        (_table(node, path), path) for part in ("spec", "status") for path, node in _objects(schema, part)
    )
    return "\n".join(
        [
            _HEAD,
            _refusals("Validation rules", refusals),
            *(f"## {', '.join(paths)}\n\n{table}" for table, paths in parts.items()),
        ]
    )


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Paths of each text, so that a text shared by several parts is printed once."""
    groups: dict[str, list[str]] = {}
    for text, path in pairs:
        groups.setdefault(text, []).append(path)
    return groups


def _refusals(title: str, paths_by_message: dict[str, list[str]]) -> str:
    rows = [
        f"| {', '.join(f'`{p}`' for p in dict.fromkeys(paths))} | {message} |"
        for message, paths in paths_by_message.items()
    ]
    return "\n".join([f"## {title}", "", "| field | problem and remedy |", "|---|---|", *rows, ""])


def _objects(parent: Schema, name: str, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every object with its own fields, parents first."""
    node, below = parent["properties"][name], f"{path}.{name}".lstrip(".")
    if "items" in node:
        node, below = node["items"], f"{below}[]"
    if "properties" in node:
        yield below, node
        for child in node["properties"]:
            yield from _objects(node, child, below)


def _table(node: Schema, path: str) -> str:
    required, in_spec = node.get("required", []), path.partition(".")[0] == "spec"
    head = ["| field | type | default | change | |", "|---|---|---|---|---|"]
    if not in_spec:
        head = ["| field | type | default | |", "|---|---|---|---|"]
    rows = []
    for name, child in node["properties"].items():
        cells = [f"`{name}`", _type(child), "required" if name in required else _default(child)]
        if in_spec:
            cells.append(change_of(f"{path}.{name}".removeprefix("spec.")))
        rows.append(f"| {' | '.join([*cells, child.get('description', '')])} |")
    return "\n".join([node.get("description", ""), "", *head, *rows, ""])


def change_of(path: str) -> str:
    """The effect that a change of a field of the spec has on running pods.

    Empty for a part whose fields have effects of their own.
    """
    path = path.partition("[]")[0]  # a list is taken as a whole
    if path not in set(spec_paths()):
        return ""
    if effect_of(path).revision:
        return "new revision"
    owner = path.partition(".")[0]
    readers = {component: readers_of(component, roles) for component, roles in _ROLES.items()}
    # A field that is a pool (`c == path`) adds or removes the pool itself.
    replaced = [c for c in _ROLES if replacing(c, readers[c])(path) and c != path]
    running = [c for c in _ROLES if live_for(readers[c])(path) and c not in replaced]
    if not replaced:
        return "no restart"
    if replaced == [owner]:
        text = "replaces its pods"
    elif len(replaced) == len(_ROLES):
        text = "replaces all pods"
    else:
        text = f"replaces {', '.join(replaced)}"
    return f"{text}; no restart of {', '.join(running)}" if running else text


def _default(node: Schema) -> str:
    value = node.get("default")
    if value is None or "properties" in node:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(node: Schema) -> str:
    """Type and bounds in a few words."""
    if "enum" in node:
        return ", ".join(f"`{choice}`" for choice in node["enum"])
    if "x-kubernetes-int-or-string" in node:
        return f"integer, or string of at most {node['maxLength']}"
    match node["type"]:
        case "integer":
            low, high = node.get("minimum"), node.get("maximum")
            return (
                f"{low} to {high}"
                if high is not None
                else f"at least {low}"
                if low is not None
                else "integer"
            )
        case "array":
            least = f"{node['minItems']} to " if "minItems" in node else "at most "
            return f"list of {least}{node['maxItems']}"
        case "object":
            return f"map of at most {node['maxProperties']}" if "maxProperties" in node else "object"
        case "string" if "maxLength" in node:
            return f"string of at most {node['maxLength']}"
        case other:
            return str(other)


def _messages(node: Any, path: str) -> Iterator[tuple[str, str]]:
    for entry in node.get("x-kubernetes-validations", ()):
        field, _, rest = entry["message"].partition(": ")
        at_root = not path and "fieldPath" not in entry  # such a message begins with its field
        yield (
            (field, rest) if at_root else ((path + entry.get("fieldPath", "")).lstrip("."), entry["message"])
        )
    for name, child in node.get("properties", {}).items():
        yield from _messages(child, f"{path}.{name}")
    if "items" in node:
        yield from _messages(node["items"], f"{path}[]")
