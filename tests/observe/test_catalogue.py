"""The pages of metrics and messages are made from the code, and nobody adds a metric without saying what it means."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from mmd_api.contract.metric_table import MetricTable, counter, section
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_workers.observe.metrics import LABELS, Metrics

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TABLES = {"workers": Metrics, "operator": OperatorMetrics}
CATALOGUE = [entry for table in TABLES.values() for entry in table().catalogue]


@pytest.mark.parametrize("program", ["make_metrics_page.py", "make_messages_page.py", "make_api_page.py"])
def test_the_page_matches_the_code(program: str) -> None:
    command = [sys.executable, DOCS / program, "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_a_metric_has_a_description_and_the_values_of_its_labels(entry) -> None:
    assert len(entry.text.split()) >= 2
    assert entry.section
    assert all(values for _, values in entry.labels)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_everything_on_the_registry_is_in_the_catalogue(table: type[MetricTable]) -> None:
    metrics = table()
    registered = set(metrics.registry._names_to_collectors)
    for entry in metrics.catalogue:
        assert entry.name in registered, entry.name
    named = {entry.name for entry in metrics.catalogue}
    for family in metrics.registry.collect():
        full = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        assert full in named or full.startswith("process_"), f"{full} is not in the catalogue"


def test_operator_and_workers_share_no_name() -> None:
    names = [entry.name for entry in CATALOGUE]
    assert len(names) == len(set(names))


QUERIED_IN = ("charts", "cli", "bench", "e2e", "support")
ELSEWHERE = {"mmd_" + name for name in ("api", "workers", "operator", "cli", "dashboards")}
"""What else begins like a metric: our packages."""


def sources() -> list[Path]:
    """Whatever names a metric without serving it: dashboards, alerts, the command line, pages of the documentation."""
    found = [path for folder in QUERIED_IN for path in (ROOT / folder).rglob("*")]
    written = [path for path in found if path.suffix in (".py", ".yaml", ".json")]
    pages = [page for page in DOCS.rglob("*.md") if page.name != "extending.md"]  # adds one that is not there
    return sorted(written) + sorted(pages)


def test_every_queried_metric_is_served_by_that_name() -> None:
    served = {entry.name: entry.kind for entry in CATALOGUE}
    of_histograms = {
        name + end
        for name, kind in served.items()
        if kind == "histogram"
        for end in ("_bucket", "_count", "_sum")
    }
    known = served.keys() | of_histograms | ELSEWHERE
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources()
        for name in re.findall(r"\bmmd_[a-z]\w+", path.read_text())
        if name not in known
    ] == []


UNITS = (
    r"_(seconds|bytes|tokens|sequences|work|blocks|running|jobs|items|requests|pods|replicas|samples|ratio|per_second)(_total)?$"
    r"|_total$|_info$|_(state|connected|leading|condition|limited)$"
)
IN_THE_UNIT_OF_ITS_LABEL = {"mmd_sequences", "mmd_scaling_signal", "mmd_scaling_signal_target"}


def test_names_end_in_their_unit_and_labels_are_few() -> None:
    for entry in CATALOGUE:
        assert entry.name.startswith("mmd_")
        assert re.search(UNITS, entry.name) or entry.name in IN_THE_UNIT_OF_ITS_LABEL, entry.name
        assert (entry.kind == "counter") == entry.name.endswith("_total")
        own = [label for label, _ in entry.labels if label not in ("namespace", "deployment")]
        assert len(own) <= 3


class _TableWithAnUnknownLabel(MetricTable):
    tests = section("Tests")
    fetched = counter("mmd_test_total", "for this test", "url")


def test_a_bare_label_without_known_values_is_refused() -> None:
    with pytest.raises(KeyError, match="url"):
        _TableWithAnUnknownLabel()
    assert "url" not in LABELS


def test_a_scraper_that_asks_for_openmetrics_gets_exemplars() -> None:
    metrics = Metrics()
    metrics.ttft.labels("text").observe(0.3, {"trace_id": "ab" * 16})
    plain, plain_type = metrics.expose("text/plain")
    modern, modern_type = metrics.expose("application/openmetrics-text;version=1.0.0")
    assert b"trace_id" not in plain
    assert plain_type.startswith("text/plain")
    assert f'# {{trace_id="{"ab" * 16}"}} 0.3'.encode() in modern
    assert modern_type.startswith("application/openmetrics-text")
    assert b"_created" not in modern


OPENMETRICS = "application/openmetrics-text;version=1.0.0"
ACCEPTED = {
    "none": "",
    "Prometheus 2": f"{OPENMETRICS},application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": f"{OPENMETRICS};escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5",
    "underscores": f"{OPENMETRICS};escaping=underscores",
    "dots": f"{OPENMETRICS}; escaping=dots",
}


@pytest.mark.parametrize("accept", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_passed_through_keeps_its_names_for_every_scraper(accept: str) -> None:
    metrics, other = Metrics(), CollectorRegistry()
    Counter("other:tokens", "Tokens", ["model"], registry=other).labels("m").inc(2)
    Histogram("other:step_tokens_total", "Tokens of a step", buckets=(1, 2), registry=other).observe(2)
    metrics.pass_through(other)
    text, content_type = metrics.expose(accept)
    modern = content_type.startswith("application/openmetrics-text")
    assert modern == (OPENMETRICS in accept)
    assert "escaping=dots" not in content_type
    read = openmetrics.text_string_to_metric_families if modern else text_string_to_metric_families
    samples = {
        (s.name, s.labels.get("model")): s.value for family in read(text.decode()) for s in family.samples
    }
    assert samples["other:tokens_total", "m"] == 2
    assert samples["other:step_tokens_total_sum", None] == 2
    assert samples["mmd_gateway_sequences", None] == 0


def test_a_pod_accepts_every_metric_and_exposes_those_of_its_roles() -> None:
    encoder = Metrics(("encode",))
    encoder.ttft.labels("text").observe(1)
    exposed = encoder.expose()[0].decode()
    assert "mmd_encode_busy_seconds_total" in exposed
    assert "mmd_nats_connected" in exposed
    for foreign in ("mmd_ttft_seconds", "mmd_prefill_waiting_tokens", "mmd_media_held_bytes"):
        assert foreign not in exposed
