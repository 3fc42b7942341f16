"""No metric stands in the catalogue that no code speaks of; that served requests move it is proven on a running deployment."""

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
NAMES = sorted(
    name for name in vars(Metrics()) if name not in ("registry", "catalogue", "families") and name[0] != "_"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_is_fed(name: str) -> None:
    assert re.search(rf"metrics\.{name}\b", SOURCES)
