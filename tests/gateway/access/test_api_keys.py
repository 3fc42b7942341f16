"""Who is let in with API keys, who is not, and what a tenant may do: a gateway that serves, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, AuthenticationError, NotFoundError, RateLimitError

from mmd_api.contract.errors import InvalidApiKeyError
from mmd_api.tenants import Tenant, hash_of, new_key
from mmd_cli.client import API_KEY, AskError, Client
from mmd_workers.gateway.access.keys import Access
from mmd_workers.observe.metrics import Metrics
from support.harness.waiting import until
from tests.gateway.endless import assert_read_within_bounds
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import ScriptedWorker, answer_well
from tests.gateway.tenancy import AUTH, bearer, tenant, write

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
    ("GET", "/openapi.json"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/chat/completions"),
    ("OPTIONS", "/v1/chat/completions"),
    ("POST", "//v1/chat/completions"),
    ("POST", "/health/../v1/chat/completions"),
    ("POST", "/%76%31/chat/completions"),
    ("GET", "/v1/models?/health"),
    ("GET", "/health%2f..%2fv1/models"),
    ("GET", "/unknown"),
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("mmd_workers.process.live.CHECK_SECONDS", 0.02)
    return tmp_path / "keys.yaml"


async def with_key(
    launch: Launch, file: Path, key: str, *more: dict, of: dict | None = None, **gateway
) -> Running:
    write(file, tenant("search", key, **(of or {})), *more)
    return await launch(keys_file=str(file), auth=AUTH, **gateway)


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


async def test_health_the_page_and_the_admin_port_need_no_key(launch: Launch, file: Path) -> None:
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


class Unseen(bytes):
    """A key of which nothing but a hash may be made: it compares with nothing and shows none of its bytes to Python."""

    def _looked_at(self, *_: object) -> NoReturn:
        raise AssertionError("the key itself was looked at")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _looked_at  # type: ignore[assignment]
    __getitem__ = __iter__ = __len__ = __contains__ = __add__ = __bytes__ = _looked_at  # type: ignore[assignment]
    startswith = endswith = find = index = decode = hex = _looked_at  # type: ignore[assignment]


def instructions(access: Access, key: bytes) -> list[tuple[str, int]]:
    """All that Python executes to look a key up: functions, and instructions in them."""
    executed: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        frame.f_trace_opcodes = True
        if event == "opcode":
            executed.append((frame.f_code.co_qualname, frame.f_lasti))
        return trace

    gc.disable()  # a collection runs callbacks, in Python
    sys.settrace(trace)
    try:
        with contextlib.suppress(InvalidApiKeyError):
            access.holder(key)
    finally:
        sys.settrace(None)
        gc.enable()
    return executed


def test_refusing_any_wrong_key_takes_the_same_number_of_instructions() -> None:
    keys = [new_key() for _ in range(20)]
    access, right = Access(Metrics()), keys[7].encode()
    access.take(Tenant.model_validate(tenant(f"t{number}", key)) for number, key in enumerate(keys))
    other = b"#" if right[-1:] != b"#" else b"+"
    middle = len(right) // 2
    wrong = [
        right[:-1] + other,
        other + right[1:],
        right[:middle] + other + right[middle + 1 :],
        right[:middle] + other * (len(right) - middle),
        right.swapcase(),
        right[::-1],
        new_key().encode(),
        other * len(right),
    ]
    assert {len(key) for key in wrong} == {len(right)}
    with pytest.raises(InvalidApiKeyError):
        access.holder(wrong[0])  # what is made once has been made
    expected = instructions(access, wrong[0])
    assert len(expected) > 10
    for key in wrong:
        assert instructions(access, key) == expected
    assert access.holder(Unseen(right)).name == "t7"
    for key in wrong:
        with pytest.raises(InvalidApiKeyError):
            access.holder(Unseen(key))


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


async def test_bodies_of_refused_clients_are_read_within_bounds(launch: Launch, file: Path) -> None:
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


async def test_unauthorized_requests_are_counted_but_not_listed_as_recent(launch: Launch, file: Path) -> None:
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


@pytest.mark.parametrize("per_tenant", [False, True])
async def test_prefix_sharing_stops_at_salts_and_if_configured_at_tenants(
    launch: Launch, file: Path, per_tenant: bool
) -> None:
    one, again, other = new_key(), new_key(), new_key()
    write(file, tenant("one", one, again), tenant("other", other))
    auth = {**AUTH, **({"prefixCache": "PerTenant"} if per_tenant else {})}
    gateway = await launch(keys_file=str(file), auth=auth)
    worker = await gateway.worker()
    asked = [(key, salt) for salt in (None, "mine") for key in (one, again, other)]
    for key, salt in asked:
        for path, fields in (
            ("/v1/chat/completions", BODY),
            ("/v1/responses", {**SURFACES["/v1/responses"], "model": BODY["model"]}),
        ):
            body = {**fields, **({"cache_salt": salt} if salt else {})}
            answer = await gateway.http.post(path, json=body, headers=bearer(key))
            assert answer.status_code == 200, answer.text
    salts = [request.cache_salt for request in worker.requests]
    assert salts[::2] == salts[1::2], "chats and responses"
    plain, own = salts[:6:2], salts[6::2]
    assert plain[0] == plain[1]
    assert own[0] == own[1]
    assert [plain[0] == plain[2], own[0] == own[2]] == [not per_tenant] * 2
    assert not set(plain) & set(own)
    assert [bool(salt) for salt in plain] == [per_tenant] * 3
    assert not any(text in salt for text in ("mine", "one", "other") for salt in salts)


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


async def test_an_adapters_entry_hides_a_base_model_forbidden_to_the_tenant(
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

    async def is_refused() -> bool:
        return await status(gateway, ("x-api-key", other)) == 401

    await until(is_refused)
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
        with caplog.at_level(logging.ERROR, logger="mmd_workers.gateway.access.keys"):
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
async def test_without_a_valid_key_file_the_gateway_admits_nobody(
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
    _, writer = await until(lambda: asyncio.open_connection("127.0.0.1", port), retried=(OSError,))
    writer.close()
    return "127.0.0.1", port


async def test_a_gateway_that_needs_keys_does_not_start_without_a_file(launch: Launch) -> None:
    with pytest.raises(RuntimeError, match="MMD_KEYS_FILE"):
        await launch(auth=AUTH)


async def test_a_limit_on_concurrent_requests_affects_only_its_tenant(launch: Launch, file: Path) -> None:
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


async def test_requests_over_a_tenants_limit_are_not_listed_as_recent(launch: Launch, file: Path) -> None:
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

    async def is_answered() -> bool:
        answer = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
        return answer.status_code == 200

    await until(is_answered)
    refused = await gateway.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
    assert refused.status_code == 429, "the requests before the change count"


SPELLED_KEYS = (
    lambda key, _: {"authorization": f"Bearer {key}"},
    lambda key, _: {"AUTHORIZATION": f"bEARER   {key}"},
    lambda key, _: {"x-api-key": key},
    lambda _, second: {"authorization": f"Bearer {second}"},
    lambda _, second: {"X-API-KEY": second},
    lambda key, second: {"authorization": f"Bearer {key}", "x-api-key": second},
    lambda key, _: [("x-api-key", key), ("authorization", f"Bearer {key}"), ("x-api-key", key)],
    lambda _, second: {"x-api-key": second, "idempotency-key": "another"},
    lambda key, _: {"x-api-key": key, "x-forwarded-for": "1.2.3.4", "forwarded": "for=1.2.3.4"},
    lambda key, _: {"x-api-key": key, "x-original-url": "/health", "x-rewrite-url": "/health"},
    lambda key, _: {"x-api-key": key, "x-http-method-override": "GET"},
    lambda key, _: {"x-api-key": key, "traceparent": f"00-{'1' * 32}-{'2' * 16}-01"},
)
"""How a request may show one of two keys of its tenant."""
CHAT = "/v1/chat/completions"
SPELLED_PATHS = (
    *(CHAT, f"{CHAT}/", f"{CHAT}//", f"/{CHAT}", f"{CHAT}?model=other", f"{CHAT}?", f"{CHAT};x=1"),
    *("/V1/chat/completions", "/v1/CHAT/completions", "/v1//chat/completions", "/v1/./chat/completions"),
    *(
        "/v1/chat%2fcompletions",
        "/%76%31/chat/completions",
        "/v1/chat/completion%73",
        "/v1/chat/completions%20",
    ),
    *("/v1/chat/completions%00", "/v1/chat/completions%2f", "/health/../v1/chat/completions"),
    *("/health/..%2fv1/chat/completions", "/page/../v1/chat/completions", "/v1%5cchat%5ccompletions"),
)
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": BODY["messages"], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": BODY["messages"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("limit", ["requestsPerMinute", "tokensPerDay"])
async def test_no_spelling_of_a_request_gets_past_a_limit(launch: Launch, file: Path, limit: str) -> None:
    key, second = new_key(), new_key()
    write(file, tenant("search", key, second, limits={limit: 1}))
    gateway = await launch(keys_file=str(file), auth=AUTH)
    worker = await gateway.worker()
    assert (await gateway.http.post(CHAT, json=BODY, headers=bearer(key))).status_code == 200
    tried = 0
    for port in (gateway.http, gateway.admin):
        for spell in SPELLED_KEYS:
            for path in (*SPELLED_PATHS, *BODIES):
                url = port.base_url.copy_with(raw_path=path.encode())  # as it is written here
                body = {"model": BODY["model"], **BODIES.get(path, BODY)}
                answer = await port.post(url, json=body, headers=spell(key, second))
                assert answer.status_code in (401, 404, 429), (path, answer.status_code, answer.text)
                tried += answer.status_code == 429
    for model in ("BUILTIN/DEMO", "builtin/demo ", "builtin%2Fdemo", "./builtin/demo"):
        answer = await gateway.http.post(CHAT, json={**BODY, "model": model}, headers=bearer(second))
        assert answer.status_code in (404, 429), model
    assert tried > 200, "most spellings reach the API"
    assert len(worker.requests) == 1


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


async def test_mmd_chat_ignores_a_line_ending_after_its_key(
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


async def test_the_idempotency_keys_of_two_tenants_are_not_the_same(launch: Launch, file: Path) -> None:
    own, others = new_key(), new_key()
    gateway = await with_key(launch, file, own, tenant("other", others))
    worker = await gateway.worker()
    ids = []
    for key in (own, others, own, others):
        headers = bearer(key) | {"idempotency-key": "one"}
        answer = await gateway.http.post("/v1/chat/completions", json=BODY, headers=headers)
        assert answer.status_code == 200
        ids.append(answer.json()["id"])
    assert (ids[0], ids[1]) == (ids[2], ids[3])
    assert ids[0] != ids[1]
    assert len(worker.requests) == 2
    wrong = bearer(new_key()) | {"idempotency-key": "one"}
    assert (await gateway.http.post("/v1/chat/completions", json=BODY, headers=wrong)).status_code == 401


async def test_a_stream_is_resumed_by_its_own_tenant_alone(launch: Launch, file: Path) -> None:
    own, others = new_key(), new_key()
    gateway = await with_key(launch, file, own, tenant("other", others))
    worker = await gateway.worker()
    body = BODY | {"stream": True}

    async def ask(key: str, **more: str) -> httpx.Response:
        headers = bearer(key) | {"idempotency-key": "one"} | more
        return await gateway.http.post("/v1/chat/completions", json=body, headers=headers)

    whole = await ask(own)
    first, _, rest = whole.text.partition("\n\n")
    last = {"last-event-id": first.partition("\n")[0].removeprefix("id: ")}
    assert (await ask(own, **last)).text == rest
    assert (await ask(new_key(), **last)).status_code == 401
    refused = await ask(others, **last)
    assert refused.status_code == 410
    assert rest not in refused.text
    assert (await ask(others)).text != whole.text
    assert (await ask(others, **last)).status_code == 410
    assert len(worker.requests) == 2
