"""Every query of every panel asks a real Prometheus about a real deployment under load, and gets an answer."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import openai
import psutil
import pytest

from mmd_cli.local.pods import LocalPod
from mmd_cli.samples import draw
from mmd_dashboards import grafana
from mmd_dashboards.boards import BOARDS
from mmd_dashboards.queries import OURS, ROLLOUT, STARTED, filled
from support.harness.waiting import DEADLINE_SECONDS, wait_until
from support.servers.prometheus_server import Prometheus
from support.serving.local_deployment import Deployment
from support.serving.observed_fixture import ask, content, load

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]


def here(expr: str) -> str:
    return filled(expr, "default", "observed", "2m")


@pytest.fixture(scope="module")
def prometheus(observed: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With half a minute of load behind it."""
    folder = tmp_path_factory.mktemp("prometheus")
    with Prometheus.of_gateway(folder, observed.local.admin_url) as server:
        server.until_scraped(len(observed.local.pods))
        for number in range(3):
            load(observed, 16, 30_000 + 100 * number)
            load(observed, 4, 30_000)
        server.until_scraped(len(observed.local.pods))
        yield server


def answered(prometheus: Prometheus, expr: str) -> bool:
    return prometheus.answers(here(expr))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_query_of_every_panel_returns_data(prometheus: Prometheus, board: Any) -> None:
    queries = {
        query.expr: panel.title
        for panel in board.panels()
        for query in panel.queries
        if query.moves == "load"
    }

    def are_answered() -> bool:
        silent = [f"{title}: {expr}" for expr, title in queries.items() if not answered(prometheus, expr)]
        assert silent == []
        return True

    wait_until(are_answered, "every query returns data", pause_seconds=0.5)


def test_the_annotations_of_starts_and_rollouts_can_be_queried(prometheus: Prometheus) -> None:
    assert answered(prometheus, STARTED)
    assert not answered(prometheus, ROLLOUT)


def test_the_numbers_are_those_of_the_requests_that_were_made(
    prometheus: Prometheus, observed: Deployment
) -> None:
    served = 'sum(mmd_requests_total{code="ok"})'
    before = prometheus.value(served)
    load(observed, 8, 60_000)
    wait_until(lambda: prometheus.value(served) == before + 8, "eight more requests")


def test_the_slowest_requests_can_be_found_by_their_trace(prometheus: Prometheus) -> None:
    asked = {"query": "mmd_ttft_seconds_bucket", "start": time.time() - 300}
    url = f"{prometheus.url}/api/v1/query_exemplars"

    def found() -> set[str]:
        data = httpx.get(url, params=asked | {"end": time.time()}, timeout=DEADLINE_SECONDS).json()["data"]
        return {one["labels"]["trace_id"] for series in data for one in series["exemplars"]}

    traces = wait_until(found, "exemplars were scraped")
    assert all(re.fullmatch("[0-9a-f]{32}", trace) for trace in traces)


def test_rules_are_loaded_and_nothing_is_wrong_while_all_is_well(prometheus: Prometheus) -> None:
    answer = httpx.get(f"{prometheus.url}/api/v1/rules", timeout=DEADLINE_SECONDS)
    rules = answer.json()["data"]["groups"]
    assert sum(len(group["rules"]) for group in rules) > 20
    assert [rule["name"] for group in rules for rule in group["rules"] if rule["health"] == "err"] == []
    wait_until(lambda: prometheus.query('ALERTS{alertstate="firing"}') == [], "no alert fires")
    wait_until(lambda: bool(prometheus.query("mmd:kv_used:ratio")), "recording rules are evaluated")


def test_trouble_shows_where_the_dashboards_say_it_does(prometheus: Prometheus, observed: Deployment) -> None:
    """An encoder and a decoder are killed with work in their hands, the message server restarts, a picture is half there, and a file is
    uploaded to a deployment that stores none."""
    encoder, decoder = observed.pods("encoder")[0], observed.pods("decode")[0]
    enough, seeds = threading.Event(), itertools.count(71_000)

    def keep_asking(one: Callable[[], str]) -> bool:
        answered = [one()]
        while not enough.is_set():
            answered.append(one())
        return all(answered)

    def about_a_video() -> str:
        return str(ask(observed, content(draw("video", next(seeds)))).id)

    def in_their_hands() -> bool:
        """Twice in a row: a medium that was decoded before and is in the tower ends in between, the others do not."""
        for _ in range(2):
            loads = [observed.state(pod)["load"] for pod in (encoder, decoder)]
            if not (loads[0]["encode_running"] > 0 and loads[1]["decode_running"] > 0):
                return False
            time.sleep(1)
        return True

    with ThreadPoolExecutor(20) as threads:
        asked = [threads.submit(keep_asking, lambda: ask_long(observed)) for _ in range(4)]
        asked += [threads.submit(keep_asking, about_a_video) for _ in range(16)]
        try:
            with no_medium_decoded(observed, encoder):
                wait_until(in_their_hands, "both have work in their hands")
                observed.kill(decoder)
                observed.kill(encoder)
            wait_until(
                lambda: bool(prometheus.query('ALERTS{alertname="MmdPodNotScraped"}')),
                "pods that do not answer are news",
            )
            observed.wait_ready(encoder)
            observed.wait_ready(decoder)
            redelivered = "sum(mmd_encode_redeliveries_total)"
            wait_until(lambda: prometheus.value(redelivered) > 0, "what it had in hand is begun anew")
        finally:
            enough.set()
        assert all(job.result(timeout=150) for job in asked)
    observed.restart_nats()
    wait_until(lambda: prometheus.value("sum(mmd_nats_reconnects_total)") > 0, "connections were made anew")
    whole = draw("image", 70_000, "image/jpeg")
    half = replace(whole, bytes=whole.bytes[: len(whole.bytes) * 2 // 3])
    with pytest.raises(openai.APIStatusError):
        ask(observed, content(half))
    with pytest.raises(openai.NotFoundError, match=r"spec\.gateway\.files"):
        observed.client().files.create(file=("whole.jpg", whole.bytes), purpose="vision")
    for seed in (72_000, 73_000):  # what has been counted once has no rate yet
        load(observed, 8, seed)
        prometheus.until_scraped(len(observed.local.pods))
    prometheus.until_scraped(len(observed.local.pods))
    silent = [
        f"{panel.title}: {query.expr}"
        for board in BOARDS
        for panel in board.panels()
        for query in panel.queries
        if query.moves in ("load", "trouble") and not answered(prometheus, query.expr)
    ]
    assert silent == []
    since = "[10m]"
    assert prometheus.value(f"sum(increase(mmd_retries_total{since}))") > 0
    assert prometheus.value(f"sum(increase(mmd_migrations_total{since}))") > 0
    assert prometheus.value(f"sum(increase(mmd_media_decode_failures_total{since}))") > 0
    lost = 'sum(mmd_requests_total{code=~"internal|peer_lost|link_failed|lease_ended|feature_lost|drained"})'
    assert prometheus.value(lost) == 0, "a request was lost"


@contextmanager
def no_medium_decoded(deployment: Deployment, encoder: LocalPod) -> Iterator[None]:
    """An encoder whose decode processes stand still: every job that it takes stays in its hands."""
    decoders = psutil.Process(deployment.pid(encoder)).children()
    assert decoders
    for process in decoders:
        process.suspend()
    try:
        yield
    finally:
        for process in decoders:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def ask_long(deployment: Deployment) -> str:
    options = {"max_tokens": 1500, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    return str(ask(deployment, "Tell a story.", **options).id)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_the_committed_dashboard_matches_the_code(board: Any) -> None:
    assert (grafana.FOLDER / f"{board.name}.json").read_text() == grafana.grafana(board), "run `make crds`"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_dashboard_can_be_read_and_pointed_at_any_deployment(board: Any) -> None:
    made = json.loads(grafana.grafana(board))
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert all(len(panel["description"]) > 5 and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert {variable["name"] for variable in made["templating"]["list"]} == {
        "datasource",
        "namespace",
        "deployment",
    }
    for panel in panels:
        assert panel["datasource"]["uid"] == "$datasource"
        for target in panel["targets"]:
            expr = target["expr"]
            if "mmd_operator_" in expr:
                assert "{" not in expr, "the operators themselves belong to no deployment"
                continue
            selectors = re.findall(r"\b(?:mmd|process)_\w+(\{[^}]*\})?", expr)
            assert selectors
            assert all(OURS in selector for selector in selectors), expr
    cells = {(x, y) for p in panels for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
             for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])}  # fmt: skip
    assert len(cells) == sum(p["gridPos"]["w"] * p["gridPos"]["h"] for p in panels), (
        "panels lie on one another"
    )
