"""`mmd` on machines whose environment names a proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.harness.waiting import DEADLINE_SECONDS

TIMELINE = {"request_id": "chatcmpl-1"}


class Recorder(BaseHTTPRequestHandler):
    """Answers every request with a timeline, and records whether a proxy was asked."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = json.dumps(TIMELINE).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[ThreadingHTTPServer, list[str]]]:
    handler = type("Own", (Recorder,), {"asked": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield running, handler.asked
    finally:
        running.shutdown()
        running.server_close()


def trace(url: str, proxy: str, **more: str) -> subprocess.CompletedProcess[str]:
    names = {name for name in os.environ if name.lower().endswith("_proxy")}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"http_proxy": proxy, "HTTP_PROXY": proxy, "all_proxy": proxy, **more}
    return subprocess.run(
        [sys.executable, "-m", "mmd_cli", "trace", "chatcmpl-1", "--url", url, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("others", ["", "hub.example.com, .corp.example.com"])
def test_this_machine_is_reached_without_a_proxy(
    server: tuple[ThreadingHTTPServer, list[str]], host: str, others: str
) -> None:
    running, asked = server
    more = {"no_proxy": others} if others else {}
    done = trace(f"http://{host}:{running.server_port}", "http://127.0.0.1:9", **more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == TIMELINE
    assert [path.startswith("/debug/requests/") for path in asked] == [True]


@pytest.mark.parametrize(
    ("given", "is_direct"),
    [
        ({"NO_PROXY": ".example.com"}, True),
        ({"no_proxy": "gateway.example.com"}, True),
        ({"NO_PROXY": "*"}, True),
        ({"no_proxy": "*"}, True),
        ({"NO_PROXY": "hub.example.com"}, False),
    ],
    ids=str,
)
def test_exceptions_of_the_environment_hold_in_either_spelling(
    given: dict[str, str], is_direct: bool
) -> None:
    """What starts from `mmd` asks the API server, hubs and S3, often by exceptions of the proxy."""
    code = """
import os, urllib.request
from mmd_cli import program
program._reach_loopback_directly()
print(bool(urllib.request.proxy_bypass("gateway.example.com")), bool(urllib.request.proxy_bypass("127.0.0.1")))
print(os.environ["no_proxy"] == os.environ["NO_PROXY"])
"""
    names = {name for name in os.environ if name.lower().endswith("_proxy")}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "https_proxy": "http://127.0.0.1:9", **given},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    assert done.stdout.split() == [str(is_direct), "True", "True"]


def test_other_machines_are_reached_through_the_proxy(server: tuple[ThreadingHTTPServer, list[str]]) -> None:
    running, asked = server
    done = trace("http://gateway.example.com", f"http://127.0.0.1:{running.server_port}")
    assert done.returncode == 0, done.stderr
    assert asked == ["http://gateway.example.com/debug/requests/chatcmpl-1"]
