"""Strategic merge of a patch into a pod template, by the merge keys of the Kubernetes API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmd_api.spec.pod_parts import DIRECTIVE, MERGE_KEYS

BESIDE: Mapping[str, tuple[str, str]] = {
    "ports": ("protocol", "TCP"),
    "topologySpreadConstraints": ("whenUnsatisfiable", "DoNotSchedule"),
}
"""Second field, and its default, that tells entries of one merge key apart in the API's own lists."""
EXCLUSIVE = {"value": "valueFrom", "valueFrom": "value"}
"""Exclusive fields of a variable: the field that a patch sets removes the other."""


def merged(base: Any, patch: Any, field: str = "") -> Any:
    """Merge `patch` into `base`: objects field by field, lists with a merge key entry by entry; everything else is replaced.

    `field`: name of the field with both values. An entry of a keyed list may have `$patch: delete`, which removes the entry with its
    key, or `$patch: replace`, which replaces the whole entry. New entries come last. Neither argument is changed.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merged(base.get(key), value, key) for key, value in patch.items()}}
    if field in MERGE_KEYS and isinstance(patch, list):
        return _merged_list(base if isinstance(base, list) else [], patch, field)
    if isinstance(patch, dict):
        return merged({}, patch) if patch else {}
    return patch


def _merged_list(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    second_field, default = BESIDE.get(field, ("", ""))

    def identity(item: Any) -> tuple[Any, ...]:
        return item[MERGE_KEYS[field]], item.get(second_field, default)

    entries = {identity(item): item for item in base}
    for item in patch:
        key = identity(item)
        content = {name: value for name, value in item.items() if name != DIRECTIVE}
        match item.get(DIRECTIVE):
            case "delete":
                entries.pop(key, None)
            case "replace":
                entries[key] = merged({}, content)
            case _:
                removed = (
                    {EXCLUSIVE[name] for name in EXCLUSIVE.keys() & content.keys()}
                    if field == "env"
                    else set()
                )
                remaining = {
                    name: value for name, value in entries.get(key, {}).items() if name not in removed
                }
                entries[key] = merged(remaining, content)
    return list(entries.values())
