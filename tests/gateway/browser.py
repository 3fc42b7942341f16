"""The browser that tests drive; where CI runs, a missing one is a failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright


def chromium() -> str:
    path = shutil.which("chromium")
    if path is None and os.environ.get("CI"):
        pytest.fail("there is no chromium: apt-get install chromium")
    return path or pytest.skip("there is no chromium: apt-get install chromium")


@asynccontextmanager
async def visit(url: str) -> AsyncIterator[tuple[Page, list[str]]]:
    """The page at a URL, and what the browser complained of so far."""
    path = chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            page.set_default_timeout(30_000)
            faults: list[str] = []
            page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: faults.append(str(error)))
            await page.goto(url)
            yield page, faults
        finally:
            await browser.close()
