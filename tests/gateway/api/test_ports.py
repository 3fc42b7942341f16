"""What is served where: the API to clients, the rest on the admin port, and neither to pages of other sites."""

from __future__ import annotations

import pytest

from tests.gateway.running import Launch

ADMIN_PATHS = ("/metrics", "/demand", "/debug/state", "/debug/requests", "/debug/targets")
BODY = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("path", ADMIN_PATHS)
async def test_what_is_not_the_api_is_not_on_the_port_of_clients(launch: Launch, path: str) -> None:
    gateway = await launch()
    refused = await gateway.http.get(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    assert (await gateway.admin.get(path)).status_code == 200


async def test_the_admin_port_is_where_the_gateway_is_scraped(launch: Launch) -> None:
    gateway = await launch()
    (own,) = (await gateway.admin.get("/debug/targets")).json()
    assert own["targets"] == [gateway.admin.base_url.netloc.decode()]
    assert (await gateway.admin.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    "limit",
    ["\u00b2", "9" * 5000, "-1", "many", ""],
    ids=["superscript", "too-long", "negative", "word", "empty"],
)
async def test_a_limit_that_is_no_number_means_the_default(launch: Launch, limit: str) -> None:
    gateway = await launch()
    answer = await gateway.admin.get("/debug/requests", params={"limit": limit})
    assert (answer.status_code, answer.json()) == (200, {"requests": []})


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.1.2.3", "127.0.0.1.evil.example", "[fe80::1]", "["]
)
async def test_a_name_that_was_made_to_resolve_to_this_machine_is_refused(launch: Launch, host: str) -> None:
    gateway = await launch()
    for client in (gateway.http, gateway.admin):
        response = await client.get("/v1/models", headers={"host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "me.localhost"]
)
async def test_names_of_this_machine_are_taken(launch: Launch, host: str) -> None:
    gateway = await launch()
    assert (await gateway.http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(("origin", "status"), [
    ("http://evil.example", 403), ("https://localhost.evil.example", 403), ("null", 403), ("", 403),
    ("http://127.0.0.1:8000", 200), ("http://localhost:3000", 200),
])  # fmt: skip
async def test_a_page_of_another_site_cannot_ask(launch: Launch, origin: str, status: int) -> None:
    gateway = await launch()
    worker = await gateway.worker("the red circle")
    response = await gateway.http.post("/v1/chat/completions", json=BODY, headers={"origin": origin})
    assert response.status_code == status
    assert len(worker.requests) == (status == 200)
