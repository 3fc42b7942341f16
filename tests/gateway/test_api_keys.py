"""Who is let in with API keys, who is not, and what a tenant may do: a gateway that serves, over HTTP."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anthropic
import httpx
import pytest
import yaml
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, AuthenticationError, NotFoundError, RateLimitError

from mmd_api.tenants import hash_of, new_key
from mmd_cli.client import API_KEY, AskError, Client
from tests.support.waiting import until

from .endless import assert_read_within_bounds
from .running import Launch, Running
from .scripted import ScriptedWorker, answer_well

AUTH = {"keysSecret": "demo-keys"}
BODY = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
OPEN = ("/health", "/livez", "/ready", "/readyz", "/", "/page/page.js", "/page/page.css", "/page/icon.svg")
GUARDED = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/builtin/demo"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/messages"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/chat/completions"),
    ("OPTIONS", "/v1/chat/completions"),
    ("POST", "//v1/chat/completions"),
    ("POST", "/health/../v1/chat/completions"),
    ("POST", "/%76%31/chat/completions"),
    ("GET", "/v1/models?/health"),
    ("GET", "/health%2f..%2fv1/models"),
    ("GET", "/unknown"),
)


def tenant(name: str, *keys: str, expires: datetime | None = None, **more) -> dict:
    until = {"expires": expires.isoformat()} if expires else {}
    return {"name": name, "keys": [{"hash": hash_of(key), **until} for key in keys], **more}


def write(file: Path, *tenants: dict) -> None:
    """Replace the file at once, as the kubelet does."""
    part = file.with_suffix(".part")
    part.write_text(yaml.safe_dump({"tenants": list(tenants)}))
    part.replace(file)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("mmd_workers.live.CHECK_SECONDS", 0.02)
    return tmp_path / "keys.yaml"


async def with_key(
    launch: Launch, file: Path, key: str, *more: dict, of: dict | None = None, **gateway
) -> Running:
    write(file, tenant("search", key, **(of or {})), *more)
    return await launch(keys_file=str(file), auth=AUTH, **gateway)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(gateway: Running, *headers: tuple[str, str | bytes], path: str = "/v1/models") -> int:
    return await raw_status(gateway, "GET", path, *headers)


async def raw_status(
    gateway: Running, method: str, path: str, *headers: tuple[str, str | bytes], url: str = ""
) -> int:
    """At `url`, or the port for clients. Over a socket: HTTP clients correct or refuse what a hostile one sends."""
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: 127.0.0.1", b"connection: close"]
    for name, value in headers:
        lines.append(name.encode() + b": " + (value.encode() if isinstance(value, str) else value))
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url or gateway.url).port)
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
    answer = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    return int(answer.split()[1])


async def test_no_path_of_the_api_answers_without_a_key(launch: Launch, file: Path) -> None:
    gateway = await with_key(launch, file, new_key())
    admin = str(gateway.admin.base_url)
    for method, path in GUARDED:
        assert await raw_status(gateway, method, path) == 401, (method, path)
        assert await raw_status(gateway, method, path, url=admin) == 401, (method, path)
    refused = await gateway.http.post("/v1/chat/completions", json=BODY)
    assert refused.headers["www-authenticate"] == 'Bearer realm="mmd"'
    error = refused.json()["error"]
    expected = ("invalid_api_key", "invalid_request_error", None)
    assert (error["code"], error["type"], error["param"]) == expected
    assert "Authorization: Bearer KEY" in error["message"]


SURFACES = {
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": BODY["messages"], "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": BODY["messages"]},
}


async def test_tenants_have_their_models_and_counts_on_every_surface(launch: Launch, file: Path) -> None:
    key = new_key()
    gateway = await with_key(
        launch, file, key, of={"models": ["small"]}, model={"servedName": ["large", "small"]}
    )
    await gateway.worker()
    for path, body in SURFACES.items():
        answer = await gateway.http.post(path, json={**body, "model": "small"}, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        refused = await gateway.http.post(path, json={**body, "model": "large"}, headers=bearer(key))
        assert refused.status_code == 404
        assert "use 'small'" in refused.json()["error"]["message"]
        if not path.endswith("count_tokens"):
            request_id = answer.headers["x-request-id"]
            timeline = (await gateway.admin.get(f"/debug/requests/{request_id}")).json()
            assert timeline["tenant"] == "search"
    metrics = (await gateway.admin.get("/metrics")).text
    for code in (200, 404):
        assert f'mmd_tenant_requests_total{{status="{code}",tenant="search"}} 3.0' in metrics


async def test_anthropics_client_gets_its_own_errors_about_keys_and_limits(
    launch: Launch, file: Path
) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key, of={"limits": {"requestsPerMinute": 1}})
    await gateway.worker()
    asked = {"model": "builtin/demo", **SURFACES["/v1/messages"]}

    def client(api_key: str) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=gateway.url, api_key=api_key, max_retries=0)

    async with client(new_key()) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await stranger.messages.create(**asked)
    assert unknown.value.body["type"] == "error"
    assert unknown.value.body["error"]["type"] == "authentication_error"
    async with client(key) as known:
        assert (await known.messages.create(**asked)).content
        with pytest.raises(anthropic.RateLimitError) as limited:
            await known.messages.create(**asked)
        assert limited.value.body["error"]["type"] == "rate_limit_error"
        assert "its limit requestsPerMinute is 1" in limited.value.message
        assert int(limited.value.response.headers["retry-after"]) >= 1
    nowhere = await gateway.http.post("/v1/messages/batches", json={}, headers={"x-api-key": key})
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
    assert nowhere.json()["type"] == "error"


async def test_health_the_page_and_what_is_for_those_who_run_the_deployment_need_no_key(
    launch: Launch, file: Path
) -> None:
    gateway = await with_key(launch, file, new_key())
    await gateway.worker()
    for path in OPEN:
        assert (await gateway.http.get(path)).status_code == 200, path
    for path in (*OPEN, "/metrics", "/demand", "/debug/state", "/debug/targets", "/debug/requests"):
        assert (await gateway.admin.get(path)).status_code == 200, path
    assert (await gateway.admin.get("/debug/requests/unknown")).status_code == 404
    assert (await gateway.admin.get("/debug/state")).json()["auth"] == {
        "enabled": True,
        "tenants": 1,
        "fault": "",
    }
    assert "data-key" in (await gateway.http.get("/")).text
    assert "data-key" in (await gateway.admin.get("/")).text


async def test_the_admin_port_serves_a_tenant_with_its_key(launch: Launch, file: Path) -> None:
    key = new_key()
    gateway = await with_key(
        launch, file, key, of={"models": ["small"]}, model={"servedName": ["large", "small"]}
    )
    await gateway.worker()
    path, headers = "/v1/chat/completions", bearer(key)
    refused = await gateway.admin.post(path, json={**BODY, "model": "small"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    for model, status_code in (("small", 200), ("large", 404)):
        answer = await gateway.admin.post(path, json={**BODY, "model": model}, headers=headers)
        assert answer.status_code == status_code
    assert (await gateway.admin.get("/debug/requests")).json()["requests"][0]["tenant"] == "search"


async def test_without_the_setting_everybody_is_served_and_the_state_shows_it(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker()
    assert (await gateway.http.post("/v1/chat/completions", json=BODY)).status_code == 200
    assert (await gateway.admin.get("/debug/state")).json()["auth"] == {"enabled": False}
    assert "data-key" not in (await gateway.http.get("/")).text


async def test_clients_of_openai_and_anthropic_send_the_key_each_in_its_way(
    launch: Launch, file: Path
) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key)
    await gateway.worker("the red circle")
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        answer = await client.chat.completions.create(**BODY)
    assert answer.choices[0].message.content == "the red circle"
    answer = await gateway.http.post("/v1/chat/completions", json=BODY, headers={"x-api-key": key})
    assert answer.json()["choices"][0]["message"]["content"] == "the red circle"
    with pytest.raises(AuthenticationError, match="not valid"):
        await gateway.openai.models.list()


async def test_what_may_vary_in_a_valid_header_does_not_matter(launch: Launch, file: Path) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key)
    for headers in (
        [("Authorization", f"Bearer {key}")],
        [("AUTHORIZATION", f"bEARER {key}")],
        [("authorization", f"Bearer   {key}  ")],
        [("X-API-Key", key)],
        [("x-api-key", f" {key} ")],
        [("authorization", f"Bearer {key}"), ("x-api-key", key)],
        [("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")],
        [("authorization", f"Bearer {key}"), ("x-api-key", "")],
    ):
        assert await status(gateway, *headers) == 200, headers


async def test_no_oddity_of_headers_lets_anybody_in(launch: Launch, file: Path) -> None:
    key = new_key()
    digest = hash_of(key).removeprefix("sha256:")
    gateway = await with_key(launch, file, key)
    for headers in (
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "")],
        [("authorization", key)],
        [("authorization", f"Basic {key}")],
        [("authorization", f"Bearer\t{key}")],
        [("authorization", f"Bearer{key}")],
        [("authorization", f"Bearer {key}, Bearer x")],
        [("authorization", f'Bearer "{key}"')],
        [("authorization", f"Bearer {key.upper()}")],
        [("authorization", f"Bearer {key[:-1]}")],
        [("authorization", f"Bearer {key}x")],
        [("authorization", f"Bearer {hash_of(key)}")],
        [("authorization", f"Bearer {digest}")],
        [("authorization", b"Bearer \xff\xfe\x80")],
        [("authorization", b"Bearer " + key.encode() + b"\xa0")],
        [("authorization", "Bearer " + "x" * 12_000)],
        [("authorization", f"Bearer {key}"), ("authorization", "Bearer other")],
        [("authorization", "Bearer other"), ("authorization", f"Bearer {key}")],
        [("authorization", "Basic eDp5"), ("x-api-key", key)],
        [("x-api-key", key), ("x-api-key", "other")],
        [("x-api-key", "other"), ("authorization", f"Bearer {key}")],
        *([("x-api-key", key), ("x-api-key", f"other{number}")] for number in range(20)),
        [("x-api-key", f"{key},{key}")],
        [("x_api_key", key)],
        [("proxy-authorization", f"Bearer {key}")],
        [("cookie", f"x-api-key={key}")],
        [],
    ):
        assert await status(gateway, *headers) == 401, headers
    assert await status(gateway, path=f"/v1/models?api_key={key}") == 401
    assert await status(gateway, ("authorization", f"Bearer {key}")) == 200


async def test_a_head_that_is_too_long_is_refused_by_the_server(launch: Launch, file: Path) -> None:
    gateway = await with_key(launch, file, new_key())
    refused = await gateway.http.get("/v1/models", headers=bearer("x" * 100_000))
    assert refused.status_code == 400


async def test_a_client_without_a_key_is_refused_before_its_body_is_read(launch: Launch, file: Path) -> None:
    gateway = await with_key(launch, file, new_key())
    sizes = [("content-length", str(10**9)), ("content-type", "application/json")]
    path = "/v1/chat/completions"
    assert await raw_status(gateway, "POST", path, *sizes) == 401
    assert await raw_status(gateway, "POST", path, *sizes, ("expect", "100-continue")) == 401
    assert await raw_status(gateway, "POST", path, ("transfer-encoding", "chunked")) == 401


async def test_a_client_without_a_key_or_over_its_limit_cannot_send_without_end(
    launch: Launch, file: Path
) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key, of={"limits": {"requestsPerMinute": 1}})
    path = "/v1/chat/completions"
    await assert_read_within_bounds(gateway, "POST", path, 401)
    asked = await gateway.http.post(path, json={}, headers=bearer(key))
    assert asked.status_code == 400
    await assert_read_within_bounds(gateway, "POST", path, 429, f"x-api-key: {key}")


async def test_an_expired_key_is_refused_with_its_reason(launch: Launch, file: Path) -> None:
    old, key = new_key(), new_key()
    past, future = (datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1))
    gateway = await with_key(
        launch, file, new_key(), tenant("old", old, expires=past), tenant("new", key, expires=future)
    )
    refused = await gateway.http.get("/v1/models", headers=bearer(old))
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "has expired" in refused.json()["error"]["message"]
    assert await status(gateway, ("x-api-key", key)) == 200


async def test_refused_requests_are_counted_by_reason_and_push_no_request_out_of_the_recent_ones(
    launch: Launch, file: Path
) -> None:
    gateway = await with_key(launch, file, new_key())
    await status(gateway)
    await status(gateway, ("x-api-key", "other"))
    await status(gateway, ("authorization", "Basic x"))
    await gateway.http.post("/v1/chat/completions", json=BODY)
    metrics = (await gateway.admin.get("/metrics")).text
    for reason, count in {"missing": 2, "unknown": 1, "malformed": 1, "expired": 0}.items():
        assert f'mmd_gateway_unauthorized_total{{reason="{reason}"}} {count}.0' in metrics
    assert (await gateway.admin.get("/debug/requests")).json() == {"requests": []}
    assert "mmd_requests_total{" not in metrics


async def test_a_tenant_uses_and_sees_its_models_alone(launch: Launch, file: Path) -> None:
    limited, free = new_key(), new_key()
    gateway = await with_key(
        launch,
        file,
        free,
        tenant("limited", limited, models=["small"]),
        model={"servedName": ["large", "small"]},
    )
    await gateway.worker()

    async def listed(key: str) -> list[str]:
        answer = await gateway.http.get("/v1/models", headers=bearer(key))
        return [one["id"] for one in answer.json()["data"]]

    assert (await listed(limited), await listed(free)) == (["small"], ["large", "small"])
    assert await status(gateway, ("x-api-key", limited), path="/v1/models/large") == 404
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=limited, max_retries=0) as client:
        with pytest.raises(NotFoundError) as error:
            await client.chat.completions.create(**{**BODY, "model": "large"})
        assert error.value.code == "model_not_found"
        assert "use 'small'" in error.value.message
        with pytest.raises(NotFoundError):
            await client.completions.create(model="large", prompt="hello")
        assert (await client.chat.completions.create(**{**BODY, "model": "small"})).choices
    tokenized = {"model": "large", "prompt": "hello"}
    assert (await gateway.http.post("/tokenize", json=tokenized, headers=bearer(limited))).status_code == 404
    answer = await gateway.http.post(
        "/v1/chat/completions", json={**BODY, "model": "large"}, headers=bearer(free)
    )
    assert answer.status_code == 200


async def test_an_adapters_entry_does_not_name_a_model_that_the_tenant_may_not_use(
    launch: Launch, file: Path
) -> None:
    limited, free = new_key(), new_key()
    adapters = {"type": "VLLM", "adapters": [{"name": "sql", "id": "org/sql"}]}
    models = tenant("limited", limited, models=["sql"])
    gateway = await with_key(launch, file, free, models, engine=adapters)
    for path in ("/v1/models", "/v1/models/sql"):
        shown = await gateway.http.get(path, headers=bearer(limited))
        assert shown.status_code == 200
        assert "builtin/demo" not in shown.text
        assert '"parent":"builtin/demo"' in (await gateway.http.get(path, headers=bearer(free))).text


async def test_requests_are_counted_for_their_tenant_and_timelines_name_it(
    launch: Launch, file: Path
) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key)
    await gateway.worker()
    done = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
    await gateway.http.post("/v1/chat/completions", json={**BODY, "model": "none"}, headers=bearer(key))
    timeline = (await gateway.admin.get(f"/debug/requests/{done.json()['id']}")).json()
    assert timeline["tenant"] == "search"
    metrics = (await gateway.admin.get("/metrics")).text
    assert 'mmd_tenant_requests_total{status="200",tenant="search"} 1.0' in metrics
    assert 'mmd_tenant_requests_total{status="404",tenant="search"} 1.0' in metrics
    assert 'mmd_tenant_requests_running{tenant="search"} 0.0' in metrics


async def test_series_of_a_tenant_end_with_it(launch: Launch, file: Path) -> None:
    key, other = new_key(), new_key()
    gateway = await with_key(launch, file, key, tenant("other", other))
    await gateway.worker()
    go = asyncio.Event()

    async def held(worker: ScriptedWorker, request) -> None:
        await go.wait()
        await answer_well(worker, request)

    await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(other))
    gateway.workers[0].script = held
    asking = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(other)))
    await gateway.workers[0].until(lambda: len(gateway.workers[0].requests) == 2)
    write(file, tenant("search", key))
    async with asyncio.timeout(30):
        while await status(gateway, ("x-api-key", other)) != 401:
            await asyncio.sleep(0.02)
    assert 'tenant="other"' not in (await gateway.admin.get("/metrics")).text
    go.set()
    assert (await asking).status_code == 200, "a request in flight goes on"
    metrics = (await gateway.admin.get("/metrics")).text
    assert 'tenant="other"' not in metrics
    assert 'mmd_tenant_requests_total{status="200",tenant="(removed)"} 1.0' in metrics


async def test_a_broken_file_keeps_the_keys_in_force_and_shows(
    launch: Launch, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, fresh = new_key(), new_key()
    gateway = await with_key(launch, file, key)
    state = "mmd_gateway_keys_rejected_state"
    assert await gateway.metric(state) == 0
    for content in ("", "tenants:\n- name: search\n", f"tenants: [{fresh}", f"tenants: [{{name: {fresh}}}]"):
        with caplog.at_level(logging.ERROR, logger="mmd_workers.gateway.access"):
            logging.getLogger().addHandler(caplog.handler)
            caplog.clear()
            file.write_text(content)
            await until(lambda: bool(caplog.records))
        await gateway.until_metric(state, 1)
        (record,) = caplog.records
        assert "the last valid keys stay in force" in record.getMessage()
        assert fresh not in record.getMessage()
        assert await status(gateway, ("x-api-key", key)) == 200
        assert await status(gateway) == 401
        assert (await gateway.admin.get("/debug/state")).json()["auth"]["fault"]
    file.unlink()
    await until(lambda: any("No such file" in record.getMessage() for record in caplog.records))
    assert await status(gateway, ("x-api-key", key)) == 200
    write(file, tenant("search", fresh))
    await gateway.until_metric(state, 0)
    assert await status(gateway, ("x-api-key", fresh)) == 200
    assert await status(gateway, ("x-api-key", key)) == 401


@pytest.mark.parametrize("content", [None, "tenants: [", "# nothing\n"], ids=["missing", "broken", "empty"])
async def test_without_any_valid_file_nobody_is_let_in_and_the_gateway_is_not_ready(
    launch: Launch, file: Path, content: str | None
) -> None:
    key = new_key()
    if content is not None:
        file.write_text(content)
    starting = asyncio.create_task(launch(keys_file=str(file), auth=AUTH, webPage=False))
    try:
        _, port = await _listening(starting)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            refused = await http.get("/v1/models", headers=bearer(key))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "keys_unavailable")
            assert refused.headers["retry-after"]
            ready = await http.get("/readyz")
            assert ready.status_code == 503
            assert "no valid API keys" in ready.json()["reason"]
            assert (await http.get("/livez")).status_code == 200
    finally:
        write(file, tenant("search", key))
        gateway = await asyncio.wait_for(starting, 30)
    assert await status(gateway, ("x-api-key", key)) == 200


async def _listening(starting: asyncio.Task[Running]) -> tuple[str, int]:
    """Where the gateway of a launch that is not Ready yet listens for clients."""
    frame = starting.get_stack()[-1]
    while "settings" not in frame.f_locals:
        await asyncio.sleep(0.02)
        frame = starting.get_stack()[-1]
    port = frame.f_locals["settings"].http_port
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return "127.0.0.1", port


async def test_a_gateway_that_needs_keys_and_is_given_no_file_does_not_start(launch: Launch) -> None:
    with pytest.raises(RuntimeError, match="MMD_KEYS_FILE"):
        await launch(auth=AUTH)


async def test_a_tenant_has_as_many_requests_in_flight_as_it_may_and_others_are_not_affected(
    launch: Launch, file: Path
) -> None:
    key, other = new_key(), new_key()
    gateway = await with_key(
        launch, file, key, tenant("other", other), of={"limits": {"concurrentRequests": 2}}
    )
    go = asyncio.Event()

    async def held(worker: ScriptedWorker, request) -> None:
        await go.wait()
        await answer_well(worker, request)

    worker = await gateway.worker(script=held)
    asking = [
        asyncio.create_task(gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key)))
        for _ in range(2)
    ]
    await worker.until(lambda: len(worker.requests) == 2)
    refused = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert "its limit concurrentRequests is 2" in error["message"]
    assert int(refused.headers["retry-after"]) == error["retry_after_seconds"] >= 1
    beside = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(other)))
    await worker.until(lambda: len(worker.requests) == 3)
    assert 'mmd_tenant_requests_running{tenant="search"} 2.0' in (await gateway.admin.get("/metrics")).text
    go.set()
    answers = await asyncio.gather(*asking, beside)
    assert [answer.status_code for answer in answers] == [200] * 3
    answer = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
    assert answer.status_code == 200, "what has ended makes room"


async def test_a_tenant_over_its_limit_pushes_no_request_out_of_the_recent_ones(
    launch: Launch, file: Path
) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key, of={"limits": {"requestsPerMinute": 1}})
    await gateway.worker()
    path = "/v1/chat/completions"
    answered = await gateway.http.post(path, json=BODY, headers=bearer(key))
    refused = await gateway.http.post(path, json=BODY, headers=bearer(key))
    assert refused.status_code == 429
    recent = (await gateway.admin.get("/debug/requests")).json()["requests"]
    assert [one["request_id"] for one in recent] == [answered.json()["id"]]
    metrics = (await gateway.admin.get("/metrics")).text
    assert 'mmd_tenant_requests_total{status="429",tenant="search"} 1.0' in metrics


async def test_a_tenant_has_as_many_requests_in_a_minute_as_it_may(launch: Launch, file: Path) -> None:
    key = new_key()
    gateway = await with_key(
        launch,
        file,
        key,
        of={"limits": {"requestsPerMinute": 2}},
    )
    await gateway.worker()
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        for _ in range(2):
            await client.chat.completions.create(**BODY)
        with pytest.raises(RateLimitError) as error:
            await client.chat.completions.create(**BODY)
    assert "its limit requestsPerMinute is 2" in error.value.message
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 61
    assert await status(gateway, ("x-api-key", key)) == 200, "the list of models is no request"
    write(file, tenant("search", key, limits={"requestsPerMinute": 3}))
    async with asyncio.timeout(30):
        while (
            await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
        ).status_code != 200:
            await asyncio.sleep(0.02)
    refused = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
    assert refused.status_code == 429, "the requests before the change count"


async def test_two_gateways_share_a_tenants_limits(launch: Launch, file: Path) -> None:
    key = new_key()
    first = await with_key(launch, file, key, of={"limits": {"requestsPerMinute": 4}})
    second = await launch(keys_file=str(file), auth=AUTH, pod="gateway-1", beside=first)
    worker = await first.worker()
    second.workers.append(worker)
    await second.until_known()
    second.workers.clear()

    async def allowed(gateway: Running) -> tuple[int, str]:
        count = 0
        while True:
            answer = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
            if answer.status_code == 429:
                return count, answer.json()["error"]["message"]
            count += 1

    for gateway in (first, second):
        count, message = await allowed(gateway)
        assert count == 2
        assert "requestsPerMinute is 4, 2 at each of 2 gateways" in message


async def test_neither_keys_nor_hashes_appear_in_answers_logs_metrics_or_state(
    launch: Launch, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, wrong = new_key(), new_key()
    with caplog.at_level(logging.DEBUG):
        gateway = await with_key(launch, file, key, of={"limits": {"requestsPerMinute": 1}})
        logging.getLogger().addHandler(caplog.handler)
        logging.getLogger().setLevel(logging.DEBUG)
        await gateway.worker()
        answers = []
        for one in (key, key, wrong, f"{key}x"):
            answer = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(one))
            answers += [answer.text, str(answer.headers)]
        request_id = answers[0].split('"id":"')[1].split('"')[0]
        for path in (
            "/metrics",
            "/debug/state",
            "/debug/requests",
            f"/debug/requests/{request_id}",
            "/demand",
        ):
            answers.append((await gateway.admin.get(path)).text)
    shown = "\n".join([*answers, *(record.getMessage() for record in caplog.records)])
    assert "search" in shown
    for secret in (key, wrong):
        assert secret not in shown
        assert hash_of(secret).removeprefix("sha256:") not in shown


async def asked_by_mmd_chat(gateway: Running, monkeypatch: pytest.MonkeyPatch, key: str) -> str:
    """The answer that `mmd chat` prints with this MMD_API_KEY."""
    monkeypatch.setenv(API_KEY, key)

    def ask() -> str:
        return Client(gateway.url).ask(BODY["messages"], temperature=0).text

    return await asyncio.to_thread(ask)


async def test_mmd_chat_uses_a_key_as_a_shell_reads_it_from_a_file(
    launch: Launch, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key)
    await gateway.worker("the red circle")
    assert await asked_by_mmd_chat(gateway, monkeypatch, f"{key}\r\n") == "the red circle"
    with pytest.raises(AskError, match="set MMD_API_KEY to an API key"):
        await asked_by_mmd_chat(gateway, monkeypatch, "")
    for broken in (f"{key}é", f"{key}\n{key}", f"Bearer {key}"):
        with pytest.raises(
            AskError, match="MMD_API_KEY has spaces or characters that no API key has"
        ) as error:
            await asked_by_mmd_chat(gateway, monkeypatch, broken)
        assert key not in str(error.value)


async def test_mmd_chat_reports_a_key_that_allows_no_model(
    launch: Launch, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    gateway = await with_key(launch, file, key, of={"models": ["another"]})
    with pytest.raises(AskError, match="allows no model that is served"):
        await asked_by_mmd_chat(gateway, monkeypatch, key)
