"""Strategic merge of a patch into a pod template, by the merge keys of the Kubernetes API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmd_api.spec.pod_parts import DIRECTIVE, MERGE_KEYS

BESIDE: Mapping[str, tuple[str, str]] = {
    "ports": ("protocol", "TCP"),
    "topologySpreadConstraints": ("whenUnsatisfiable", "DoNotSchedule"),
}
"""What tells entries of one merge key apart in the API's own lists, and its default."""
EXCLUSIVE = {"value": "valueFrom", "valueFrom": "value"}
"""Of a variable: what a patch sets removes the other."""


def merged(base: Any, patch: Any, field: str = "") -> Any:
    """`base` with `patch`: objects field by field, lists with a merge key entry by entry, everything else replaced.

    `field`: the name of the field that both are values of. An entry of a keyed list may have `$patch: delete`, which removes the entry
    with its key, or `$patch: replace`, which replaces it whole. New entries come last. Neither argument is changed.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merged(base.get(key), value, key) for key, value in patch.items()}}
    if field in MERGE_KEYS and isinstance(patch, list):
        return _merged_list(base if isinstance(base, list) else [], patch, field)
    if isinstance(patch, dict):
        return merged({}, patch) if patch else {}
    return patch


def _merged_list(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    beside, default = BESIDE.get(field, ("", ""))

    def identity(item: Any) -> tuple[Any, ...]:
        return item[MERGE_KEYS[field]], item.get(beside, default)

    found = {identity(item): item for item in base}
    for item in patch:
        key = identity(item)
        content = {name: value for name, value in item.items() if name != DIRECTIVE}
        match item.get(DIRECTIVE):
            case "delete":
                found.pop(key, None)
            case "replace":
                found[key] = merged({}, content)
            case _:
                given_up = (
                    {EXCLUSIVE[name] for name in EXCLUSIVE.keys() & content.keys()}
                    if field == "env"
                    else set()
                )
                kept = {name: value for name, value in found.get(key, {}).items() if name not in given_up}
                found[key] = merged(kept, content)
    return list(found.values())
