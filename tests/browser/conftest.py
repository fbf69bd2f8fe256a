"""A real Chromium without network for tests of pages. A machine without one skips them and says so.

`pytest tests/browser` runs wherever a Chromium is found (SAGE_GRPO_CHROMIUM=/path names one); install.sh installs Debian's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import needs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no network but this machine's own servers
    "--autoplay-policy=no-user-gesture-required",
    "--disable-background-networking",
)


def find_chromium(driver: Any) -> str | None:
    """The browser that SAGE_GRPO_CHROMIUM names, or the first one on the PATH, or playwright's own."""
    named = os.environ.get("SAGE_GRPO_CHROMIUM") or next(
        (found for name in NAMES if (found := shutil.which(name))), None
    )
    own = driver.chromium.executable_path
    return named or (own if Path(own).is_file() else None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. One for each file of tests: playwright holds an event loop open as long as it runs."""
    api = needs.module("playwright.sync_api", "playwright")
    with api.sync_playwright() as driver:
        program = find_chromium(driver) or needs.lacking("chromium")
        running = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """`open_page(url or file, **context options)` gives a page of its own context (a visitor with no cookies).

    The test fails at its end if any page logged an error or raised one; what a test expects it takes out of `page.faults`.
    """
    pages: list[Any] = []

    def start(where: str | Path, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(120_000)  # a machine may be busy with other tests
        page = context.new_page()
        page.faults = []
        page.on("console", lambda told: page.faults.append(told.text) if told.type == "error" else None)
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        pages.append(page)
        page.goto(where.resolve().as_uri() if isinstance(where, Path) else where)
        return page

    yield start
    faults = [fault for page in pages for fault in page.faults]
    for page in pages:
        page.context.close()
    assert not faults, "\n".join(["the browser reported errors:", *faults])
