"""Chromium for tests of the pages: patient on a busy machine, and strict about errors on the console and requests elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.harness.server_process import PATIENCE_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SERVERS = ("http://127.0.0.1:",)
NASTY = "<img src=x onerror=\"document.title='pwned'\">"  # text of a producer that must stay text


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium here: `make browser` installs it where that is allowed (Debian: apt-get install chromium)")
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE_S * 1000)
        yield started
        started.close()


@contextmanager
def window(browser: Browser, width: int = 1280, height: int = 900, **more: Any) -> Iterator[BrowserContext]:
    """A window without cookies or storage of others."""
    found = browser.new_context(viewport={"width": width, "height": height}, **more)
    found.set_default_timeout(PATIENCE_S * 1000)
    yield found
    found.close()


@contextmanager
def watched_page(context: BrowserContext, expected: str = "", ours: tuple[str, ...] = SERVERS) -> Iterator[Page]:
    """Fails the test for any error on the console, unless its text has `expected`, and any request to an address that does not
    begin as one of `ours`."""
    found = context.new_page()
    wrong: list[str] = []
    found.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda asked: None if asked.url.startswith(ours) else wrong.append(asked.url))
    yield found
    found.unroute_all(behavior="ignoreErrors")  # a handler may be at work
    assert [text for text in wrong if not expected or expected not in text] == []
