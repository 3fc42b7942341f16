"""Alerts in state firing on a real Prometheus after real faults of a real deployment, and no request lost in any of them.

The rules are the chart's with shorter times: windows by 10 (`[5m]` is half a minute, `[1h]` six), `for` by 300. Thresholds are
as they are.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from local_deployment import Deployment, until
from observed_fixture import content, load, scrape
from prometheus_server import Prometheus, hurried

from mmd_workers.local.pods import LocalPod
from mmd_workers.local.samples import Sample, draw

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]

AT_ONCE = 400
LONG_QUESTION = "What is here, what is there, and what is between them? " * 20
VIDEO = draw("video", 90_000)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def prometheus(observed: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("firing")
    rules = hurried(folder / "rules.yaml", windows=10, waits=300)
    with Prometheus.of_gateway(folder, observed.local.gateway_url, rules) as server:
        server.until_scraped(len(observed.local.pods))
        yield server


def another_video() -> Sample:
    """The same pictures in a file of its own: nobody has encoded it before."""
    note = f"{time.time_ns()} {next(NUMBERS)}".encode()
    return replace(VIDEO, bytes=VIDEO.bytes + struct.pack(">I4s", 8 + len(note), b"free") + note)


@contextmanager
def frozen(deployment: Deployment, pod: LocalPod) -> Iterator[None]:
    """As a process that hangs: it is there and does nothing."""
    pid = deployment.pid(pod)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def clients(deployment: Deployment) -> Iterator[Callable[..., Future[Any]]]:
    """Many clients at once; the block ends when all have their answer."""
    client = deployment.client()
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 24}

    def one(what: list[dict[str, Any]] | str, options: dict[str, Any]) -> Any:
        messages: Any = [{"role": "user", "content": what}]
        return client.chat.completions.create(model="builtin/demo", messages=messages, **defaults | options)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield lambda what, **options: threads.submit(one, what, options)


def until_firing(prometheus: Prometheus, alert: str, since: float, seconds: float = 30) -> dict[str, Any]:
    until(lambda: bool(prometheus.firing(alert, since)), seconds, f"{alert} fires")
    labels: dict[str, Any] = prometheus.firing(alert, since)[0]
    return labels


def test_in_quiet_no_alert_fires(prometheus: Prometheus, observed: Deployment) -> None:
    begun = time.time()
    load(observed, 12, 95_000, at_once=2)
    prometheus.until_scraped(len(observed.local.pods))
    assert (
        prometheus.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{int(time.time() - begun) + 1}s])')
        == []
    )


def test_an_encoder_that_hangs_under_load(prometheus: Prometheus, observed: Deployment) -> None:
    """Scrapes get no answer, and when it goes on its requests have missed their promise. Whether the queue is a backlog depends on how
    fast the machine is: ten seconds of work are more videos than there are clients here."""
    (encoder,) = observed.pods("encoder")
    begun = time.time()
    with clients(observed) as submit:
        asked: list[Future[Any]] = []

        def pour(alert: str) -> bool:
            asked.extend(submit(content(another_video())) for _ in range(4))
            return bool(prometheus.firing(alert, begun))

        with frozen(observed, encoder):
            until(lambda: pour("MmdPodNotScraped"), 60, "scrapes without an answer are an alert")
        assert {one["pod"] for one in prometheus.firing("MmdPodNotScraped", begun)} == {encoder.name}
        assert {one["role"] for one in prometheus.firing("MmdBacklogGrows", begun)} <= {"encode"}
        until_firing(prometheus, "MmdSloBurnsFast", begun, 90)
        assert all(job.result(timeout=150) for job in asked)
    nothing_was_lost(prometheus, begun)


def test_decoders_without_free_kv(prometheus: Prometheus, observed: Deployment) -> None:
    """More long answers than there is KV for: all come, some later."""
    begun = time.time()
    story = {"max_tokens": 1000, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    with clients(observed) as submit:
        stories = [submit(f"Tell story {number}.", **story) for number in range(36)]
        full = until_firing(prometheus, "MmdKvSaturated", begun)
        assert full["pod"] in {pod.name for pod in observed.pods("decode")}
        assert all(job.result(timeout=240) for job in stories)
    nothing_was_lost(prometheus, begun)


def test_a_decoder_that_dies_with_kv_on_its_way_to_it(prometheus: Prometheus, observed: Deployment) -> None:
    begun = time.time()
    decoder = observed.pods("decode")[0]
    with clients(observed) as submit:
        asked = [submit(f"{number}: {LONG_QUESTION}", max_tokens=4) for number in range(AT_ONCE // 10)]
        until(lambda: inbound(decoder) >= 2, 30, "KV is on its way there")
        observed.kill(decoder)
        assert until_firing(prometheus, "MmdTransfersFail", begun)["link"] == "kv"
        assert all(job.result(timeout=150) for job in asked)
    observed.wait_ready(decoder, 120)
    nothing_was_lost(prometheus, begun)


def inbound(decoder: LocalPod) -> float:
    """Sequences that have blocks there, and whose KV has not all come."""
    return scrape([decoder])[("mmd_kv_inbound_sequences", ())]


def nothing_was_lost(prometheus: Prometheus, since: float) -> None:
    assert prometheus.firing("MmdRequestsLost", since) == []
