"""Logs are bounded and carry their request, metrics have help and units, the server tells stuck from busy."""

import asyncio
import io
import json
import logging
import re

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mmd_workers.observe import logs
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import HttpServer, Progress, routes


@pytest.fixture
def json_log():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()
    logs.configure("encoder-0", "Info", out)
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


HOSTILE = "a\x1b[2Jb\r\nc\x9b1A\x07\x7f\u202e\u2028d é ☃"
SHOWN = r"a\x1b[2Jb\x0d\x0ac\x9b1A\x07\x7f\u202e\u2028d é ☃"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_of_clients_reach_no_terminal(json_log):
    logging.getLogger("mmd.test").info("said %s", HOSTILE)
    (line,) = json_log()
    assert line["message"] == f"said {HOSTILE}"  # as a program reads it
    terminal = _Terminal()
    logs.configure("encoder-0", "Info", terminal)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("mmd.test").exception("said %s", HOSTILE)
    head, *traceback = terminal.getvalue().splitlines()
    assert head.endswith(f"said {SHOWN}")
    assert not any(character in terminal.getvalue() for character in "\x1b\x9b\x07\r\x7f\u202e")
    assert traceback[0].startswith("Traceback")


def test_a_json_line_can_be_shown_on_a_terminal():
    out = io.StringIO()
    root = logging.getLogger()
    handlers = root.handlers[:]
    logs.configure("encoder-0", "Info", out)
    logging.getLogger("mmd.test").info(HOSTILE)
    root.handlers[:] = handlers
    assert out.getvalue().rstrip("\n").isprintable()


async def test_json_lines_carry_pod_and_request_ids_even_in_tasks(json_log):
    log = logging.getLogger("mmd.test")

    async def work():
        log.info("inside %d", 7)

    with logs.request_context("req-1", "trace-9"):
        task = asyncio.create_task(work())
    await task
    log.info("outside")
    inside, outside = json_log()
    assert (inside["message"], inside["pod"], inside["level"]) == ("inside 7", "encoder-0", "info")
    assert (inside["request_id"], inside["trace_id"]) == ("req-1", "trace-9")
    assert "request_id" not in outside


def test_a_line_is_bounded_and_is_one_line(json_log):
    log = logging.getLogger("mmd.test")
    log.info("a\nb" + "x" * 100_000)
    try:
        raise ValueError("y" * 100_000)
    except ValueError:
        log.exception("failed")
    long, failed = json_log()
    assert len(long["message"]) < 5000
    assert "more characters" in long["message"]
    assert len(failed["exception"]) < 10_000


def test_on_a_terminal_lines_are_for_people():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = Terminal()
    try:
        logs.configure("decode-1", "Warning", out)
        with logs.request_context("r7"):
            logging.getLogger("mmd_workers.kv.link").warning("peer lost")
            logging.getLogger("mmd_workers.kv.link").info("hidden")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} W decode-1 link \[r7\]: peer lost\n", out.getvalue())


def test_a_repeated_warning_is_logged_once_per_interval_with_the_number_suppressed(caplog):
    warn = logs.RepeatedWarning(logging.getLogger("mmd.test"), interval_seconds=10, max_keys=2)
    logged = [warn("peer", "no answer from %s", "d-0", now=t) for t in (0, 1, 9.9, 10, 11)]
    assert logged == [True, False, False, True, False]
    assert warn("other", "another", now=11)
    assert [r.getMessage() for r in caplog.records] == [
        "no answer from d-0", "no answer from d-0 (2 similar suppressed)", "another"
    ]  # fmt: skip
    for key in map(str, range(100)):
        warn(key, "many", now=20)
    assert len(warn._last) <= 2


def test_what_is_counted_is_what_prometheus_reads():
    metrics = Metrics()
    metrics.requests.labels("image", "ok").inc()
    metrics.phase.labels("encode", "image").observe(0.02)
    metrics.build.info({"version": "1"})
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(metrics.expose()[0].decode())
        for s in family.samples
    }
    assert samples["mmd_requests_total", (("code", "ok"), ("modality", "image"))] == 1
    assert samples["mmd_phase_seconds_count", (("modality", "image"), ("phase", "encode"))] == 1
    assert samples["mmd_build_info", (("version", "1"),)] == 1


async def test_the_server_reports_alive_ready_metrics_and_state():
    age, reason, metrics = [0.0], ["loading weights"], Metrics()
    table = routes(
        metrics,
        lambda: {"engine": Progress(lambda: age[0], 5)},
        lambda: reason[0],
        lambda: {"pod": "p-0", "sent": 1.5},
    )
    server = HttpServer.of_routes(table, "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert (await client.get("/livez")).status_code == 200
        not_ready = await client.get("/readyz")
        assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "loading weights")
        reason[0] = ""
        assert (await client.get("/readyz")).status_code == 200
        for stuck_age in (5.1, float("inf"), float("nan")):
            age[0] = stuck_age
            stuck = await client.get("/livez")
            assert (stuck.status_code, stuck.json()["stuck"]) == (503, ["engine"])
        assert (await client.get("/state")).json() == {"pod": "p-0", "sent": 1.5}
        scraped = await client.get("/metrics")
        assert scraped.headers["content-type"].startswith("text/plain")
        assert "mmd_ttft_seconds" in scraped.text
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.get("/state/")).status_code == 404, "and no redirect to what Host names"
    async with asyncio.timeout(30):
        await server.stop()
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{server.port}/livez")


async def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs() -> None:
    """Or a request that leaves when the server closes is lost."""
    server = HttpServer.of_routes([], "127.0.0.1", 0)
    await server.start()
    assert server._server is not None
    assert server._server.config.timeout_keep_alive > openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    await server.stop()


async def test_a_port_that_is_taken_is_an_error_at_start():
    first = HttpServer.of_routes([], "127.0.0.1", 0)
    await first.start()
    with pytest.raises(OSError, match="in use"):
        await HttpServer.of_routes([], "127.0.0.1", first.port).start()
    await first.stop()
