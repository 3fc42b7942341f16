"""The page asks for an API key where the gateway needs one, in a real browser."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml
from playwright.async_api import async_playwright, expect

from mmd_api.tenants import hash_of, new_key

from .running import Launch

pytestmark = pytest.mark.processes


def chromium() -> str:
    path = shutil.which("chromium")
    if path is None and os.environ.get("CI"):
        pytest.fail("there is no chromium: apt-get install chromium")
    return path or pytest.skip("there is no chromium: apt-get install chromium")


async def test_a_visitor_enters_a_key_and_asks_with_it(launch: Launch, tmp_path: Path) -> None:
    path, key = chromium(), new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump({"tenants": [{"name": "search", "keys": [{"hash": hash_of(key)}]}]}))
    gateway = await launch(keys_file=str(file), auth={"keysSecret": "demo-keys"})
    await gateway.worker("the red circle")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            page.set_default_timeout(30_000)
            await page.goto(gateway.url)
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
        finally:
            await browser.close()
    refused = await gateway.metric("mmd_gateway_unauthorized_total")
    assert refused == 1, "a key that was refused is not tried again"


async def test_a_page_that_needs_no_key_says_who_can_use_the_gateway(launch: Launch) -> None:
    path = chromium()
    gateway = await launch()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            for base in (gateway.http.base_url, gateway.admin.base_url):
                await page.goto(str(base))
                await expect(page.locator("#access")).to_contain_text("anyone who can reach this gateway")
                await expect(page.get_by_label("API key")).to_be_hidden()
                await expect(page.locator("#served")).to_contain_text("builtin/demo accepts")
        finally:
            await browser.close()
