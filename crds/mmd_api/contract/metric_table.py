"""Declarations of the operator's and the workers' metrics, in a table that Prometheus and `docs/metrics.md`
read.

Independent of the metrics: names are declared in `mmd_workers/observe/metrics.py` and
`mmd_operator/kube/metrics.py`. Queries are PromQL, so they spell names as text; `tests/observe/test_catalogue.py`
fails for one that no process serves. Only processes that serve metrics import this module: prometheus-client
comes with their extras.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_ESCAPING = re.compile(r";\s*escaping=[^;,]*")  # part of a scraper's Accept header

MovedBy = Literal["load", "tenants", "deployment", "scaling", "trouble"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One metric as the docs list it.

    `moved_by`: the cause of changes; with trouble, something must go wrong.
    """

    name: str
    kind: str
    text: str
    labels: tuple[tuple[str, str], ...]  # name, values
    section: str
    moved_by: MovedBy


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of the docs.

    The metrics declared after it in a table belong to processes with one of `roles`; without roles, to all.
    """

    title: str
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Declaration:
    """One metric as a table declares it."""

    kind: Literal["counter", "gauge", "histogram", "info", "family"]
    name: str
    text: str
    labels: tuple[str, ...]
    moved_by: MovedBy = "load"
    buckets: Sequence[float] = ()


def section(title: str, *roles: str) -> Section:
    """Begin a section of the table."""
    return Section(title, roles)


def counter(name: str, text: str, *labels: str, moved_by: MovedBy = "load") -> Counter:
    """Declare a counter. `labels`: `"outcome: hit, miss"` is a label with its values; a bare name takes them from `MetricTable.LABELS`."""
    return cast(Counter, Declaration("counter", name, text, labels, moved_by))


def gauge(name: str, text: str, *labels: str, moved_by: MovedBy = "load") -> Gauge:
    """Declare a gauge; see `counter`."""
    return cast(Gauge, Declaration("gauge", name, text, labels, moved_by))


def histogram(
    name: str, text: str, buckets: Sequence[float], *labels: str, moved_by: MovedBy = "load"
) -> Histogram:
    """Declare a histogram; see `counter`."""
    return cast(Histogram, Declaration("histogram", name, text, labels, moved_by, buckets))


def info(name: str, text: str, *labels: str) -> Info:
    """Declare an info metric, whose name ends in `_info`; see `counter`."""
    return cast(Info, Declaration("info", name, text, labels))


def family(name: str, text: str, *labels: str, moved_by: MovedBy = "deployment") -> str:
    """Declare a metric that its table fills at every scrape. The attribute is its name.

    It is a counter if the name ends in `_total`, else a gauge.
    """
    return cast(str, Declaration("family", name, text, labels, moved_by))


class MetricTable:
    """A separate registry with the metrics that a subclass declares as its attributes, and their catalogue.

    One object per process. `roles`: the roles of this process. Metrics in sections of other roles can be fed
    and are not exposed; without roles all are exposed.
    """

    LABELS: ClassVar[Mapping[str, str]] = {}
    """Values of labels that several metrics have."""

    def __init__(self, roles: Collection[str] = ()) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.catalogue: list[Entry] = []
        self.families: dict[str, tuple[str, list[str]]] = {}
        """Text and labels of the families, by name."""
        title, registry = "", self.registry
        exposed: CollectorRegistry | None = registry
        tables = [vars(kind) for kind in reversed(type(self).__mro__)]
        for attribute, declared in [item for table in tables for item in table.items()]:
            if isinstance(declared, Section):
                title = declared.title
                belongs = not roles or not declared.roles or not set(roles).isdisjoint(declared.roles)
                exposed = registry if belongs else None
            elif isinstance(declared, Declaration):
                setattr(self, attribute, self._build(declared, title, exposed))
        # CPU time, memory and file descriptors, named as in every program.
        ProcessCollector(registry=registry)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The text that a Prometheus server scrapes, and its content type.

        It is OpenMetrics, with exemplars, if the server asks for that. Names are valid for every scraper, so
        none is escaped: prometheus-client would replace the colons that vLLM's have.
        """
        encode: Any
        encode, content_type = choose_encoder(_ESCAPING.sub("", accept))
        return encode(self.registry, escaping=ALLOWUTF8), content_type

    def pass_through(self, registry: CollectorRegistry) -> None:
        """Expose the metrics of another registry too, under the names that they have there."""
        self.registry.register(registry)

    def _build(self, declared: Declaration, title: str, registry: CollectorRegistry | None) -> object:
        name, text = declared.name, declared.text
        parts = [label.partition(": ") for label in declared.labels]
        labels = tuple((label, values or self.LABELS[label]) for label, _, values in parts)
        names = [label for label, _ in labels]
        kind = declared.kind
        if kind == "family":
            self.families[name] = (text, names)
            kind = "counter" if name.endswith("_total") else "gauge"
        self.catalogue.append(Entry(name, kind, text, labels, title, declared.moved_by))
        match declared.kind:
            case "counter":
                metric = Counter(name, text, names, registry=registry)
                closed = [_closed(values) for _, values in labels]
                if labels and all(closed):
                    # A series that begins at 1 has no rate: rare events need a series at 0 before they happen.
                    for values in product(*closed):
                        metric.labels(*values)
                return metric
            case "gauge":
                return Gauge(name, text, names, registry=registry)
            case "histogram":
                return Histogram(name, text, names, buckets=declared.buckets, registry=registry)
            case "info":
                return Info(name.removesuffix("_info"), text, registry=registry)
            case "family":
                return name


def _closed(values: str) -> list[str]:
    """The values one by one, if the list of them is complete."""
    listed = values.partition(": ")[0]
    return [] if set(listed) & set("`(…") else listed.split(", ")
