"""Debian's chromium for tests of the dashboard: tabs with an empty console, and screenshots.

Pictures lie in `tests/screenshots`, which git ignores and CI may collect.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, sync_playwright

WAIT_MS = 90_000
SCREENSHOTS = Path(__file__).resolve().parent / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]  # as root, and in small containers


def need_chromium() -> None:
    """Skip a module of tests where there is no chromium; where servers are required, its tests fail."""
    if CHROMIUM is None and not os.environ.get("MEMQ_REQUIRE_SERVERS"):
        pytest.skip("there is no chromium on the path", allow_module_level=True)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser, and end it."""
    assert CHROMIUM is not None, "there is no chromium on the path: apt-get install chromium"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Tab:
    """A page of the browser with the dashboard in it, and what its console said."""

    def __init__(
        self, browser: Browser, url: str, scheme: Literal["light", "dark"] = "light", width: int = 1360
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 850}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.asked: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = url

    def open(self, path: str = "") -> None:
        """Go to a page of the dashboard."""
        self.page.goto(f"{self.url}{path}")

    def see(self, text: str | re.Pattern[str]) -> None:
        """Wait until a text is to be seen."""
        self.page.get_by_text(text).first.wait_for()

    def keep(self, name: str) -> None:
        """Keep a picture."""
        SCREENSHOTS.mkdir(exist_ok=True)
        (SCREENSHOTS / f"{name}.png").write_bytes(self.page.screenshot(full_page=True))

    def close(self) -> None:
        """Close it; nothing may have gone wrong, and nobody else have been asked."""
        self.context.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(self.url)] == []
