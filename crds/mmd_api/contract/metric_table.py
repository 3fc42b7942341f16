"""How the operator and the workers declare their metrics: one table that Prometheus reads and `docs/metrics.md` is made from.

Independent of the metrics: names are declared in `mmd_workers/observe/metrics.py` and `mmd_operator/metrics.py`. Queries are PromQL, so they
spell names as text; `tests/observe/test_catalogue.py` fails for one that no process serves. Only processes that serve metrics import
this module: prometheus-client comes with their extras.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_ESCAPING = re.compile(r";\s*escaping=[^;,]*")  # what a scraper asks for in its Accept header

MovedBy = Literal["load", "tenants", "deployment", "scaling", "trouble"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric as the docs list it. `moved_by`: what makes it change; with trouble, something must go wrong."""

    name: str
    kind: str
    text: str
    labels: tuple[tuple[str, str], ...]  # name, values
    section: str
    moved_by: MovedBy


class MetricTable:
    """A separate registry, and the catalogue of what is on it. One object per process."""

    LABELS: ClassVar[Mapping[str, str]] = {}
    """Values of labels that several metrics have."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.catalogue: list[Entry] = []
        self._section = ""
        self._exposed = True

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The text that a Prometheus server scrapes, and its content type; OpenMetrics, with exemplars, if it asks for that.

        Names are valid for every scraper, so none is escaped: prometheus-client would replace the colons that vLLM's have.
        """
        encode: Any
        encode, content_type = choose_encoder(_ESCAPING.sub("", accept))
        return encode(self.registry, escaping=ALLOWUTF8), content_type

    def pass_through(self, registry: CollectorRegistry) -> None:
        """Expose what is on another registry, too, under the names that it has there."""
        self.registry.register(registry)

    def _open(self, section: str, *, exposed: bool = True) -> None:
        """What follows belongs to `section`; what is not exposed can be fed all the same."""
        self._section, self._exposed = section, exposed

    @property
    def _here(self) -> CollectorRegistry | None:
        return self.registry if self._exposed else None

    def _enter(
        self, name: str, kind: str, text: str, labels: tuple[tuple[str, str], ...], moved_by: MovedBy
    ) -> list[str]:
        self.catalogue.append(Entry(name, kind, text, labels, self._section, moved_by))
        return [label for label, _ in labels]

    def _counter(self, name: str, text: str, *labels: str, moved_by: MovedBy = "load") -> Counter:
        known = self._labels(labels)
        made = Counter(name, text, self._enter(name, "counter", text, known, moved_by), registry=self._here)
        closed = [_closed(values) for _, values in known]
        if known and all(closed):
            # A series that begins at 1 has no rate: what is rare must be there, at 0, before it happens.
            for values in product(*closed):
                made.labels(*values)
        return made

    def _gauge(self, name: str, text: str, *labels: str, moved_by: MovedBy = "load") -> Gauge:
        names = self._enter(name, "gauge", text, self._labels(labels), moved_by)
        return Gauge(name, text, names, registry=self._here)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], *labels: str, moved_by: MovedBy = "load"
    ) -> Histogram:
        names = self._enter(name, "histogram", text, self._labels(labels), moved_by)
        return Histogram(name, text, names, buckets=buckets, registry=self._here)

    def _process(self) -> None:
        """CPU time, memory and file descriptors of this process, under the names that every program uses."""
        ProcessCollector(registry=self.registry)

    def _labels(self, labels: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """`"outcome: hit, miss"` is a label with its values; a bare name takes them from `LABELS`."""
        parts = [label.partition(": ") for label in labels]
        return tuple((name, values or self.LABELS[name]) for name, _, values in parts)


def _closed(values: str) -> list[str]:
    """The values one by one, if that is all they can be."""
    listed = values.partition(": ")[0]
    return [] if set(listed) & set("`(…") else listed.split(", ")
