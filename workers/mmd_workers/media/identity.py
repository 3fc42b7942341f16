"""Derives the identities of media and features; no other module does. Independent of their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(data: bytes | memoryview) -> str:
    """sha256 hex of a medium's bytes as received."""
    return hashlib.sha256(data).hexdigest()


def feature_id(digest: str, revision: str, sampling: Mapping[str, Any]) -> str:
    """Identity of a feature: sha256 hex over the canonical JSON of (content digest, pipeline revision, sampling settings).

    Keys are sorted and numbers are JSON's, so equal settings give equal identities in every process.

    Raises:
        ValueError: a setting is NaN or infinite.
        TypeError: a setting is not JSON.
    """
    canonical = json.dumps(
        [digest, revision, dict(sampling)],
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=True,
        allow_nan=False,
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
