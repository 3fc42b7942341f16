"""What the catalogue promises is what a running deployment feeds: no metric that nobody touches, none that nobody describes."""

from __future__ import annotations

import threading
from contextlib import suppress

import httpx
import pytest

from mmd_cli.samples import draw
from mmd_workers.observe.metrics import Metrics
from support.harness.waiting import DEADLINE_SECONDS, wait_until
from support.serving.local_deployment import Deployment
from support.serving.observed_fixture import ask, content, load, scrape

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]


ROUNDS = 16


class Watch:
    """The highest value that any series of a metric has had since it began."""

    def __init__(self, deployment: Deployment) -> None:
        self.highest: dict[str, float] = {}
        self._deployment = deployment
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        gateway = self._deployment.pods("gateway")
        while not self._over.wait(0.02):
            for pods in (gateway, gateway, gateway, self._deployment.local.pods):
                with suppress(httpx.HTTPError):  # a busy pod answers the next scrape
                    for (name, _), value in scrape(pods).items():
                        self.highest[name] = max(self.highest.get(name, 0.0), value)

    def untouched(self) -> list[str]:
        """Metrics that are said to move with load, and have not."""
        ending = {"histogram": "_count"}
        return [
            entry.name
            for entry in Metrics().catalogue
            if entry.moved_by == "load" and not self.highest.get(entry.name + ending.get(entry.kind, ""))
        ]


def test_served_requests_move_every_metric_declared_to_move_with_load(observed: Deployment) -> None:
    with Watch(observed) as watch:
        for number in range(ROUNDS):  # a gauge of what lasts for milliseconds is not seen in every round
            load(observed, 24, 1000, at_once=24)
            load(observed, 16, 1000 * (2 + number), at_once=16)
            if not watch.untouched():
                break
    assert watch.untouched() == []


def test_every_exposed_metric_is_in_the_catalogue(observed: Deployment) -> None:
    known = {entry.name for entry in Metrics().catalogue}
    endings = ("_bucket", "_count", "_sum")
    exposed = {name for name, _ in scrape(observed.local.pods) if not name.startswith("process_")}
    strangers = {
        n for n in exposed if n not in known and not any(n.removesuffix(e) in known for e in endings)
    }
    assert strangers == set()


def test_label_values_never_come_from_users(observed: Deployment) -> None:
    httpx.post(
        f"{observed.local.gateway_url}/v1/chat/completions",
        json={"model": "marked-by-a-user", "messages": [{"role": "user", "content": "marked-by-a-user"}]},
        headers={"x-client-request-id": "marked-by-a-user"},
        timeout=DEADLINE_SECONDS,
    )
    assert not [series for series in scrape(observed.local.pods) if "marked-by-a-user" in str(series)]
    assert len(scrape(observed.local.pods)) < 2500


def test_a_prompt_that_comes_again_is_counted_as_cached(observed: Deployment) -> None:
    def cached() -> float:
        return scrape(observed.pods("prefill"))[("mmd_prefix_cache_tokens_total", (("outcome", "hit"),))]

    what = content(draw("image", 4711))
    ask(observed, what)
    before = cached()
    ask(observed, what)
    wait_until(lambda: cached() > before, "blocks of the first prompt were found again")
