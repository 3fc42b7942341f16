"""A browser for one module at a time (its event loop must not outlive the tests that use it), a fresh page for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from support.serving.local_deployment import Deployment

from .browser import PATIENCE_MILLISECONDS, Seen, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Browser, observed: Deployment, seen: Seen) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1180, "height": 900}, reduced_motion="reduce")
    one = context.new_page()
    one.set_default_timeout(PATIENCE_MILLISECONDS)
    one.on("console", lambda said: seen.faults.append(said.text) if said.type == "error" else None)
    one.on("pageerror", lambda error: seen.faults.append(str(error)))
    one.on("request", lambda request: seen.requested.append(request.url))
    one.goto(f"{observed.local.admin_url}/")
    one.get_by_text("builtin/demo accepts").wait_for()
    yield one
    context.close()
