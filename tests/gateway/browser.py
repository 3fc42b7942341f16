"""The browser that tests drive; where CI runs, a missing one is a failure."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Page, async_playwright, expect

from support.harness.needed import lacking
from support.harness.waiting import DEADLINE_SECONDS

PATIENCE_MILLISECONDS = 1000 * DEADLINE_SECONDS
expect.set_options(timeout=PATIENCE_MILLISECONDS)  # its own 5 s are too few where other suites have the cores


def chromium() -> str:
    return shutil.which("chromium") or lacking("there is no chromium: apt-get install chromium")


@asynccontextmanager
async def visit(url: str) -> AsyncIterator[tuple[Page, list[str]]]:
    """The page at a URL, and what the browser complained of so far."""
    path = chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = await browser.new_page()
            page.set_default_timeout(PATIENCE_MILLISECONDS)
            faults: list[str] = []
            page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: faults.append(str(error)))
            await page.goto(url)
            yield page, faults
        finally:
            await browser.close()
