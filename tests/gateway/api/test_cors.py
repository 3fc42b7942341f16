"""Pages of other origins: which may call the gateway from a browser, and which a browser keeps from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from playwright.async_api import Page

from mmd_api.tenants import hash_of, new_key
from tests.gateway.browser import visit
from tests.gateway.running import Launch, Running

APP = "https://app.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}
BODY = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
KEY = new_key()


async def with_origins(launch: Launch, tmp_path: Path, *origins: str) -> Running:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"name": "search", "keys": [{"hash": hash_of(KEY)}]}]}))
    cors = {"cors": {"allowedOrigins": list(origins)}} if origins else {}
    return await launch(keys_file=str(file), auth={"keysSecret": "keys"}, **cors)


async def test_a_preflight_of_a_listed_origin_is_answered_without_a_key(
    launch: Launch, tmp_path: Path
) -> None:
    gateway = await with_origins(launch, tmp_path, APP)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/unknown"):
        answer = await gateway.http.options(path, headers={"origin": APP, **PREFLIGHT})
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-origin"] == APP
        assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE"
        allowed = answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
        assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed)
        assert "access-control-allow-credentials" not in answer.headers
        assert "Origin" in answer.headers["vary"]
    other = {"origin": "http://127.0.0.1:1", **PREFLIGHT}
    refused = await gateway.http.options("/v1/chat/completions", headers=other)
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    method = {"origin": APP, "access-control-request-method": "PUT"}
    assert (await gateway.http.options("/v1/models", headers=method)).status_code == 400


async def test_only_pages_of_listed_origins_can_read_answers_and_errors(
    launch: Launch, tmp_path: Path
) -> None:
    gateway = await with_origins(launch, tmp_path, APP)
    await gateway.worker("the red circle")
    bearer = {"authorization": f"Bearer {KEY}"}
    for headers, body, status in (
        (bearer, BODY, 200),
        (bearer, {**BODY, "stream": True}, 200),
        (bearer, {**BODY, "model": "none"}, 404),
        ({}, BODY, 401),
    ):
        answer = await gateway.http.post(
            "/v1/chat/completions", json=body, headers={**headers, "origin": APP}
        )
        assert answer.status_code == status, answer.text
        assert answer.headers["access-control-allow-origin"] == APP
        shown = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after"} <= set(shown)
        assert answer.headers["vary"] == "Origin"
        hidden = await gateway.http.post(
            "/v1/chat/completions", json=body, headers={**headers, "origin": "http://127.0.0.1:1"}
        )
        assert "access-control-allow-origin" not in hidden.headers
    for odd in ("null", APP.upper(), APP + ".evil.com", APP + ":8443", "https://example.com"):
        answer = await gateway.http.get("/v1/models", headers={**bearer, "origin": odd})
        assert "access-control-allow-origin" not in answer.headers, odd


async def test_without_cors_nothing_is_allowed_and_preflights_need_a_key(
    launch: Launch, tmp_path: Path
) -> None:
    gateway = await with_origins(launch, tmp_path)
    local = "http://127.0.0.1:1"
    refused = await gateway.http.options("/v1/chat/completions", headers={"origin": local, **PREFLIGHT})
    assert refused.status_code == 401
    answer = await gateway.http.get("/v1/models", headers={"x-api-key": KEY, "origin": local})
    assert answer.status_code == 200
    for found in (refused, answer):
        assert not [name for name in found.headers if name.startswith("access-control")]


async def test_the_admin_port_allows_no_other_origin(launch: Launch, tmp_path: Path) -> None:
    gateway = await with_origins(launch, tmp_path, "http://127.0.0.1:1")
    for path in ("/metrics", "/debug/state", "/v1/models"):
        answer = await gateway.admin.get(path, headers={"origin": "http://127.0.0.1:1"})
        assert not [name for name in answer.headers if name.startswith("access-control")]


@contextmanager
def site() -> Iterator[str]:
    """An origin of its own, with an empty page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


ASK = """async ([url, key, body]) => {
    try {
        const answer = await fetch(url, {
            method: "POST",
            headers: {"content-type": "application/json", "authorization": `Bearer ${key}`},
            body: JSON.stringify(body),
        });
        return [answer.status, answer.headers.get("x-request-id"), await answer.json()];
    } catch (error) {
        return [0, null, String(error)];
    }
}"""


@pytest.mark.processes
async def test_a_browser_lets_only_pages_of_listed_origins_ask(launch: Launch, tmp_path: Path) -> None:
    with site() as listed, site() as other:
        gateway = await with_origins(launch, tmp_path, listed)
        worker = await gateway.worker("the red circle")
        async with visit(listed) as (page, _):

            async def ask(at: Page, key: str) -> list:
                arguments = [f"{gateway.url}/v1/chat/completions", key, BODY]
                return await at.evaluate(ASK, arguments)

            status, request_id, answer = await ask(page, KEY)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "the red circle")
            assert request_id.startswith("chatcmpl-")
            status, _, answer = await ask(page, "wrong")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            await page.goto(other)
            status, _, answer = await ask(page, KEY)
            assert (status, "Failed to fetch" in answer) == (0, True)
            assert len(worker.requests) == 1, "the request was not even sent"
