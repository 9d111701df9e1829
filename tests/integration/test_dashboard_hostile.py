"""Records, names and headers of a stranger are text on the dashboard, in a real browser."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

import memq
from tests.browsers import WAIT_MS, Tab, need_chromium
from tests.integration.test_dashboard_browser import url_of
from tests.servers import DevServer

MARK = "document.documentElement.dataset.owned='1'"
SCRIPTS = (
    f"<img src=x onerror={MARK}>",
    f"<script>{MARK}</script>",
    f'"><svg onload={MARK}>',
    f"javascript:{MARK}",
    "{{constructor.constructor('alert(1)')()}}",
)
CONTROLS = "a\x1b[31m\x9b31m\u202egnp.exe\u2066b"

need_chromium()


def test_hostile_keys_values_headers_tags_and_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    server = DevServer(tmp_path / "data", "--dashboard-port", "0", "--dashboard-contents")
    try:
        server.start()
        producer = memq.Producer(server.address, connect_timeout_ms=WAIT_MS)
        with producer:
            for text in (*SCRIPTS, CONTROLS):
                producer.send("clicks", text, key=text, headers=[(text, text)], tag=text)
            producer.flush(60)
            tab = Tab(browser, url_of(server.process, server.log))
            for page in ("", "#/topics/clicks", "#/cluster", "#/waiting"):
                tab.open(page)
            tab.open()
            tab.page.get_by_role("link", name="clicks").first.wait_for()
            tab.open("#/search")
            tab.page.keyboard.press("4")
            tab.page.get_by_role("textbox", name="Key").wait_for()
            tab.page.keyboard.press("/")
            tab.page.keyboard.type("clicks")
            for text in SCRIPTS:
                key = tab.page.get_by_role("textbox", name="Key")
                key.fill(text)
                key.press("Enter")
                tab.see(text)
                tab.see(f"1 found in {len(SCRIPTS) + 1} records")
            tab.page.get_by_role("textbox", name="Key").fill("")
            tab.page.get_by_role("textbox", name="Key").press("Enter")
            tab.see(f"{len(SCRIPTS) + 1} found")
            shown = tab.page.inner_text("body")
            assert "\\u202e" in shown
            assert not {"\x1b", "\x9b", "\u202e", "\u2066"} & set(shown)
            assert tab.page.evaluate("document.documentElement.dataset.owned") is None
            tab.close()
    finally:
        server.close()
