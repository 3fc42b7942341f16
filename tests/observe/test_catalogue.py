"""The page of metrics is made from the code, and nobody adds a metric without saying what it means."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmd_api.metric_table import MetricTable
from mmd_operator.metrics import OperatorMetrics
from mmd_workers.observe.metrics import LABELS, Metrics

PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "make_metrics_page.py"
TABLES = {"workers": Metrics, "operator": OperatorMetrics}
CATALOGUE = [entry for table in TABLES.values() for entry in table().catalogue]


def test_the_page_is_what_the_code_says() -> None:
    ran = subprocess.run([sys.executable, PROGRAM, "--check"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_a_metric_says_what_it_means_and_what_its_labels_may_be(entry) -> None:
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


def test_a_bare_label_without_known_values_is_refused() -> None:
    with pytest.raises(KeyError):
        Metrics()._counter("mmd_test_total", "for this test", "url")
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


def test_a_pod_exposes_what_belongs_to_its_roles_and_can_be_fed_the_rest() -> None:
    encoder = Metrics(("encode",))
    encoder.ttft.labels("text").observe(1)
    exposed = encoder.expose()[0].decode()
    assert "mmd_encode_busy_seconds_total" in exposed
    assert "mmd_nats_connected" in exposed
    for foreign in ("mmd_ttft_seconds", "mmd_prefill_waiting_tokens", "mmd_media_held_bytes"):
        assert foreign not in exposed
