"""The page asks for an API key where the gateway needs one, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from playwright.async_api import expect

from mmd_api.tenants import hash_of, new_key
from tests.gateway.browser import visit
from tests.gateway.running import Launch

pytestmark = pytest.mark.processes


async def test_a_visitor_enters_a_key_and_asks_with_it(launch: Launch, tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"name": "search", "keys": [{"hash": hash_of(key)}]}]}))
    gateway = await launch(keys_file=str(file), auth={"keysSecret": "demo-keys"})
    await gateway.worker("the red circle")
    async with visit(gateway.url) as (page, _):
        await expect(page.locator("#served")).to_have_text("Enter an API key to begin.")
        await expect(page.locator("#access")).to_be_empty()
        await page.get_by_role("button", name="Ask").click()
        await expect(page.get_by_role("alert")).to_have_text("Enter a valid API key first.")
        field = page.get_by_label("API key")
        await field.fill(new_key())
        await field.press("Enter")
        await expect(page.locator("#served")).to_have_text("The gateway does not accept this API key.")
        await field.fill(key)
        await field.press("Enter")
        await expect(page.locator("#served")).to_contain_text("builtin/demo accepts")
        await page.get_by_role("button", name="Ask").click()
        await expect(page.locator("#answer")).to_have_text("the red circle")
        assert key not in str(await page.evaluate("JSON.stringify([localStorage, sessionStorage])"))
        assert key not in page.url
    refused = await gateway.metric("mmd_gateway_unauthorized_total")
    assert refused == 1, "a key that was refused is not tried again"


async def test_a_page_that_needs_no_key_says_who_can_use_the_gateway(launch: Launch) -> None:
    gateway = await launch()
    for base in (gateway.url, str(gateway.admin.base_url)):
        async with visit(base) as (page, _):
            await expect(page.locator("#access")).to_contain_text("anyone who can reach this gateway")
            await expect(page.get_by_label("API key")).to_be_hidden()
            await expect(page.locator("#served")).to_contain_text("builtin/demo accepts")
