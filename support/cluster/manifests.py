"""The table of bad manifests, which our own reader and, in its suite, the API server must refuse."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TABLE = yaml.safe_load((Path(__file__).parents[2] / "tests" / "api" / "bad_manifests.yaml").read_text())


@dataclass(frozen=True)
class BadManifest:
    """A manifest, and the field and words with which it must be refused."""

    name: str
    manifest: dict[str, Any]
    field: str
    words: str
    same_words_from_server: bool
    file_only: bool
    server_field: str


def merge(base: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def base_manifest() -> dict[str, Any]:
    """The valid manifest that every case breaks in one place."""
    return copy.deepcopy(TABLE["base"])


def bad_manifests() -> list[BadManifest]:
    """All cases of the table."""
    return [
        BadManifest(
            name=case["name"],
            manifest=merge(TABLE["base"], case["patch"]),
            field=case["field"],
            words=case.get("rule") or case["says"],
            same_words_from_server="rule" in case,
            file_only=case.get("file_only", False),
            server_field="" if case.get("root") else case.get("server_field", case["field"]),
        )
        for case in TABLE["cases"]
    ]
