"""A real Chromium, without a way to anywhere but this machine. Where CI runs, a missing one is a failure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, expect, sync_playwright

from support.harness.needed import lacking
from support.harness.waiting import DEADLINE_SECONDS

PATIENCE_MILLISECONDS = 1000 * DEADLINE_SECONDS
expect.set_options(timeout=PATIENCE_MILLISECONDS)  # its own 5 s are too few where other suites have the cores
FLAGS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    path = shutil.which("chromium")
    if path is None:
        lacking("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """What the browser complained of, and where it went."""

    faults: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
