"""The page is there, or it is not: `spec.gateway.webPage`."""

from __future__ import annotations

from tests.gateway.running import Launch


async def test_the_page_is_served_with_a_policy_that_lets_nothing_else_in(launch: Launch) -> None:
    gateway = await launch()
    answer = await gateway.http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in ("/page/page.js", "/page/page.css", "/page/icon.svg"):
        assert (await gateway.http.get(path)).status_code == 200
    same = await gateway.http.get("/", headers={"if-none-match": answer.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")


async def test_a_gateway_without_the_page_serves_the_api_alone(launch: Launch) -> None:
    gateway = await launch(webPage=False)
    for path in ("/", "/page/page.js"):
        answer = await gateway.http.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
    assert (await gateway.http.get("/v1/models")).status_code == 200
