"""Alerts in state firing on a real Prometheus after real faults of a real deployment, and no request lost in any of them.

The rules are the chart's with shorter times: windows by 10 (`[5m]` is half a minute, `[1h]` six), `for` by 300. Thresholds are
as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import nats
import pytest

from mmd_api.contract.subjects import Subjects
from mmd_cli.local.pods import LocalPod
from support.harness.waiting import wait_until
from support.servers.prometheus_server import Prometheus, hurried
from support.serving.local_deployment import Deployment
from support.serving.observed_fixture import load, observed_deployment, scrape
from support.serving.under_load import AT_ONCE, about_videos, clients, hung

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("observed"), pytest.mark.timeout(600)]

VIDEOS_AT_ONCE = 4
STORY: dict[str, Any] = {"temperature": 1.0, "extra_body": {"ignore_eos": True}}
LONG_QUESTION = "What is here, what is there, and what is between them? " * 20


@pytest.fixture(scope="module")
def prometheus(observed: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("firing")
    rules = hurried(folder / "rules.yaml", windows=10, waits=300)
    with Prometheus.of_gateway(folder, observed.local.admin_url, rules) as server:
        server.until_scraped(len(observed.local.pods))
        yield server


def until_firing(prometheus: Prometheus, alert: str, since: float) -> dict[str, Any]:
    return wait_until(lambda: prometheus.firing(alert, since), f"{alert} fires")[0]


def until_told(prometheus: Prometheus, alert: str, since: float, **labels: str) -> None:
    """The alert fires with these labels; it may also fire for what an earlier test broke."""
    wait_until(
        lambda: any(labels.items() <= one.items() for one in prometheus.firing(alert, since)),
        f"{alert} fires of {labels}",
    )


def test_in_quiet_no_alert_fires(prometheus: Prometheus, observed: Deployment) -> None:
    begun = time.time()
    load(observed, 12, 95_000, at_once=2)
    prometheus.until_scraped(len(observed.local.pods))
    assert prometheus.all_firing(begun) == []


def test_an_encoder_that_hangs_under_load(prometheus: Prometheus, observed: Deployment) -> None:
    """Scrapes get no answer, work piles up, and when it goes on its requests have missed their promise."""
    (encoder,) = observed.pods("encoder")
    begun = time.time()
    with clients(observed) as submit:
        asked = [submit(about_videos(1))]
        assert asked[0].result(timeout=60)
        known = 'mmd_encode_work_per_second{modality="video"} > 0'
        wait_until(lambda: prometheus.query(known) != [], "an encoder that has encoded says how fast it is")

        def pour(alert: str) -> bool:
            asked.extend(submit(about_videos(VIDEOS_AT_ONCE)) for _ in range(2))
            return bool(prometheus.firing(alert, begun))

        with hung(observed.pid(encoder)):
            wait_until(lambda: pour("MmdPodNotScraped"), "scrapes without an answer are an alert")
            wait_until(lambda: pour("MmdBacklogGrows"), "ten seconds of work that becomes more are an alert")
            assert {one["role"] for one in prometheus.firing("MmdBacklogGrows", begun)} == {"encode"}
            assert prometheus.query('mmd_prefill_waiting_tokens{role="encode"} > 0')
        assert {one["pod"] for one in prometheus.firing("MmdPodNotScraped", begun)} == {encoder.name}
        until_firing(prometheus, "MmdSloBurnsFast", begun)
        until_firing(prometheus, "MmdSloBurnsSlow", begun)
        assert all(job.result(timeout=150) for job in asked)
    nothing_was_lost(prometheus, begun)


def test_a_prefill_pod_that_hangs(prometheus: Prometheus, observed: Deployment) -> None:
    """Requests wait in the gateway until there is one again."""
    (prefill,) = observed.pods("prefill")
    begun = time.time()
    with clients(observed) as submit:
        with hung(observed.pid(prefill)):
            long = "Decode pods compute shorter prompts themselves. " * 8
            asked = [submit(f"{long}What is {number}?") for number in range(4)]
            assert until_firing(prometheus, "MmdNoPodForRole", begun)["role"] == "prefill"
        assert all(job.result(timeout=150) for job in asked)
    nothing_was_lost(prometheus, begun)


def test_nats_is_down(prometheus: Prometheus, observed: Deployment) -> None:
    begun = time.time()
    with clients(observed) as submit:
        stories = [submit(f"Tell story {number}.", max_tokens=200) for number in range(4)]
        with observed.without_nats():
            until_firing(prometheus, "MmdNatsGone", begun)
            until_firing(prometheus, "MmdEncodeQueueUnreadable", begun)
        assert all(job.result(timeout=150) for job in stories)
    nothing_was_lost(prometheus, begun)


def test_a_message_server_that_is_slow(prometheus: Prometheus, observed: Deployment) -> None:
    begun = time.time()

    def stutter() -> bool:
        with hung(observed.local.nats.pid):
            time.sleep(0.7)
        time.sleep(0.1)
        return bool(prometheus.firing("MmdNatsSlow", begun))

    with clients(observed) as submit:
        asked = [submit(f"What is {number}?") for number in range(4)]
        wait_until(stutter, "round trips of a third of a second are an alert")
        assert all(job.result(timeout=150) for job in asked)
    nothing_was_lost(prometheus, begun)


def test_decoders_without_free_kv(prometheus: Prometheus, observed: Deployment) -> None:
    """More long answers than there is KV for: all come, some later."""
    begun = time.time()
    with clients(observed) as submit:
        stories = [
            submit(f"Tell story {number}. {LONG_QUESTION * 4}", max_tokens=1000, **STORY)
            for number in range(14)
        ]
        full = until_firing(prometheus, "MmdKvSaturated", begun)
        assert full["pod"] in {pod.name for pod in observed.pods("decode")}
        assert all(job.result(timeout=240) for job in stories)
    nothing_was_lost(prometheus, begun)


def test_a_drain_without_a_peer_that_takes_over(prometheus: Prometheus, observed: Deployment) -> None:
    """A decoder that is told to go finishes what it writes itself, however long that takes."""
    leaving, other = observed.pods("decode")
    begun = time.time()
    with clients(observed) as submit:
        with hung(observed.pid(other)):
            stories = [submit(f"Tell story {number}.", max_tokens=3900, **STORY) for number in range(12)]
            wait_until(lambda: running(leaving) >= 8, "stories are written there")
            observed.terminate(leaving)
            assert until_firing(prometheus, "MmdDrainTakesLong", begun)["pod"] == leaving.name
        assert all(job.result(timeout=240) for job in stories)
    observed.wait_ready(leaving)
    nothing_was_lost(prometheus, begun)


def running(decoder: LocalPod) -> float:
    """Sequences that it writes tokens of."""
    return scrape([decoder])[("mmd_sequences", (("state", "running"),))]


def test_a_decoder_that_dies_with_kv_on_its_way_to_it(prometheus: Prometheus, observed: Deployment) -> None:
    begun = time.time()
    decoder = observed.pods("decode")[0]
    with clients(observed) as submit:
        with kv_that_does_not_come(observed, [decoder], 2, submit) as asked:
            observed.kill(decoder)
        assert until_firing(prometheus, "MmdTransfersFail", begun)["link"] == "kv"
        assert all(job.result(timeout=150) for job in asked)
    observed.wait_ready(decoder)
    nothing_was_lost(prometheus, begun)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Prometheus]]:
    """A deployment that holds leases for two seconds, calls nobody lost for a minute and tries nothing twice."""
    folder = tmp_path_factory.mktemp("fragile")
    spec = {
        "transfer": {"kv": {"backend": "Gloo", "leaseSeconds": 2, "chunkTimeoutMilliseconds": 500}},
        "observability": {"heartbeatTimeoutMilliseconds": 60_000},
        "gateway": {"maxRetries": 0},
    }
    rules = hurried(folder / "rules.yaml", windows=10, waits=300)
    with (
        Deployment(observed_deployment(folder / "fragile.yaml", "fragile", **spec), gateways=1) as deployment,
        Prometheus.of_gateway(folder, deployment.local.admin_url, rules) as server,
    ):
        server.until_scraped(len(deployment.local.pods))
        yield deployment, server


def test_kv_that_never_comes_to_the_blocks_it_was_granted(fragile: tuple[Deployment, Prometheus]) -> None:
    """A prefill pod hangs after decoders have made room for it: their leases end by themselves."""
    deployment, prometheus = fragile
    decoders = deployment.pods("decode")
    begun = time.time()
    with clients(deployment) as submit:
        with kv_that_does_not_come(deployment, decoders, 1, submit) as asked:
            fired = until_firing(prometheus, "MmdLeasesExpire", begun)
            assert fired["pod"] in {pod.name for pod in decoders}
        wait(asked, timeout=150)


def test_a_request_that_may_not_be_tried_again(fragile: tuple[Deployment, Prometheus]) -> None:
    """What must never happen, made to happen: nobody goes on with the sequences of a decoder that died."""
    deployment, prometheus = fragile
    decoders = deployment.pods("decode")
    begun = time.time()
    with clients(deployment) as submit:
        stories = [submit(f"Tell story {number}.", max_tokens=1000, **STORY) for number in range(8)]
        wait_until(lambda: sum(map(running, decoders)) == len(stories), "stories are written")
        for decoder in decoders:
            deployment.kill(decoder)
        until_told(prometheus, "MmdRequestsLost", begun, code="peer_lost")
        wait(stories, timeout=150)


async def test_a_malformed_message(prometheus: Prometheus, observed: Deployment) -> None:
    """As software of another version would send it, with the gateway's own rights."""
    (gateway,), (prefill,) = observed.pods("gateway"), observed.pods("prefill")
    begun = time.time()
    subjects = Subjects("default", "observed", "{revision}-{identity}".format(**observed.state(prefill)))
    its = gateway.environment
    client = await nats.connect(
        its["MMD_NATS_URL"], user=its["MMD_NATS_USERNAME"], password=its["MMD_NATS_PASSWORD"]
    )
    try:
        await client.publish(subjects.prefill(prefill.name), b"no message of ours")
        await client.flush()
    finally:
        await client.close()
    of = {"pod": prefill.name, "reason": "malformed"}
    await asyncio.to_thread(partial(until_told, prometheus, "MmdMessagesLost", begun, **of))


@contextmanager
def kv_that_does_not_come(
    deployment: Deployment, decoders: list[LocalPod], sequences: int, submit: Callable[..., Future[Any]]
) -> Iterator[list[Future[Any]]]:
    """While the block runs, the prefill pod is frozen, and these decoders wait for the KV of so many sequences at least.

    Yields all that was asked. Whether a freeze came in time shows only afterwards, when what was already sent has come.
    """
    (prefill,) = deployment.pods("prefill")
    asked: list[Future[Any]] = []
    with ExitStack() as until_the_end:

        def freeze_in_time() -> bool:
            if all(job.done() for job in asked):
                numbers = range(len(asked), len(asked) + AT_ONCE // 10)
                asked.extend(submit(f"{number}: {LONG_QUESTION}", max_tokens=4) for number in numbers)
            if sum(map(inbound, decoders)) < sequences:
                return False
            with ExitStack() as attempt:
                attempt.enter_context(hung(deployment.pid(prefill)))
                time.sleep(0.5)
                if sum(map(inbound, decoders)) < sequences:
                    return False
                until_the_end.push(attempt.pop_all())
                return True

        wait_until(freeze_in_time, "the prefill pod hangs after decoders have made room")
        yield asked


def inbound(decoder: LocalPod) -> float:
    """Sequences that have blocks there, and whose KV has not all come."""
    return scrape([decoder])[("mmd_kv_inbound_sequences", ())]


def nothing_was_lost(prometheus: Prometheus, since: float) -> None:
    assert prometheus.firing("MmdRequestsLost", since) == []
