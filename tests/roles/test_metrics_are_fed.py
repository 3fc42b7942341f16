"""No metric stands in the catalogue that nobody feeds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mmd_workers
from mmd_workers.observe.metrics import Metrics

SOURCES = "\n".join(
    path.read_text()
    for path in Path(mmd_workers.__path__[0]).rglob("*.py")
    if path.name != "metrics.py" or path.parent.name != "observe"
)


@pytest.mark.parametrize("name", sorted(name for name in vars(Metrics()) if name != "registry"))
def test_somebody_feeds(name: str) -> None:
    fed = rf"(metrics|shared)\.{name}(\.labels\([^)]*\(?[^)]*\)?\))?\s*\.(inc|set|observe|info)\("
    alias = rf"= (self\._gateway\.)?metrics\.shared\.{name}$|shared\.{name}\b"
    assert re.search(fed, SOURCES) or re.search(alias, SOURCES, re.MULTILINE)
