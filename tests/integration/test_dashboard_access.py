"""Accessibility of the dashboard: keyboard, screen readers, both themes, narrow screens, empty pages.

What is checked are rules of WCAG 2.2 that a program can check: contrast of all text that is to be seen (1.4.3), names
and roles (4.1.2), heads of tables (1.3.1), the way of the keyboard and a visible focus (2.1.1, 2.4.7), motion (2.3.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser

from memq.audit.dashboard.audited import AuditedHour
from memq.audit.finding import Finding, Kind
from memq.audit.live.report_partition import Client
from memq.audit.live.view import Minute, ReportingClient
from memq.runtime.clock import SystemClock
from memq.testing import Cluster
from tests.browsers import Tab, need_chromium
from tests.dashboards import Served, WrittenAudit, served, stored_minute

MINUTE_MS = 60_000
CONTRAST_MIN = 4.5
TABS_MAX = 80  # stops of the Tab key that a page may have
PAGES = ("", "#/topic/clicks", "#/loss/00aa", "#/cluster", "#/search/clicks", "#/tail/clicks")

CHECKS = Path(__file__).with_name("access.js").read_text(encoding="utf-8")

need_chromium()


@pytest.fixture(scope="module")
def pages() -> Iterator[Served]:
    """A dashboard with something on each of its pages."""
    now_ms = SystemClock().wall_ms()
    audit = WrittenAudit({"clicks": AuditedHour("lost", 5, 0, 0, 12.5)}, {"00aa": finding(now_ms)})
    audit.rows["clicks"] = [minute(now_ms // MINUTE_MS - ago) for ago in range(50)]
    audit.heard = [client("reports", False, now_ms), client("silent", True, now_ms)]
    with Cluster() as cluster:
        cluster.create_topic("clicks", partitions=2)
        with served(cluster.address, audit, dashboard_acknowledge=True) as pages:
            yield pages


def finding(now_ms: int) -> Finding:
    return Finding(
        id="00aa",
        kind=Kind.LOST,
        topic="clicks",
        partition=0,
        minute=now_ms // MINUTE_MS,
        producer=0xAB,
        records=5,
        cause="acked with all, in no pointer",
        ranges=((10, 15),),
        object="memq/object",
        offset=7,
        first_seen_ms=now_ms,
    )


def minute(number: int) -> Minute:
    counts = {"sent": 400 + number % 90, "acked": 390, "committed": 380, "lost": 5 if number % 20 == 0 else 0}
    return stored_minute(0, number, counts, {"acked": {2: 200, 5: 20}})


def client(name: str, silent: bool, now_ms: int) -> ReportingClient:
    return ReportingClient(
        0, 0xAB, Client("consumer", name, "here", 1, 0, 0, heard_ms=now_ms, skew_ms=40, silent=silent)
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_and_all_has_a_name(browser: Browser, pages: Served, scheme: Literal["light", "dark"]) -> None:
    tab = Tab(browser, pages.url, scheme)
    for path in PAGES:
        tab.open(path)
        settled(tab, path)
        contrasts = checked(tab, "contrasts")
        assert len(contrasts) > 10
        assert [what for contrast, what in contrasts if contrast < CONTRAST_MIN] == [], path
        assert checked(tab, "faults") == [], path
    tab.close()


def checked(tab: Tab, name: str) -> Any:
    """Return what a function of `access.js` finds on the page."""
    return tab.page.evaluate(f"{CHECKS}.{name}()")


def settled(tab: Tab, path: str) -> None:
    """Wait until a page has what it is about."""
    shown = {
        "": "1 of 1",
        "#/topic/clicks": "something is wrong",
        "#/loss/00aa": "10 to 14",
        "#/cluster": "silent: what they do is unknown",
    }
    tab.see(shown.get(path, "Topic"))


def test_every_page_is_walked_by_the_keyboard(browser: Browser, pages: Served) -> None:
    tab = Tab(browser, pages.url)
    for path in PAGES:
        tab.open(path)
        settled(tab, path)
        tab.page.evaluate("document.querySelector('.skip').focus()")  # the first stop
        walked: list[str] = []
        for _ in range(TABS_MAX):
            tag, name, visible = checked(tab, "focus")
            if tag == "BODY":
                break
            walked.append(name)
            assert visible, f"the focus is not to be seen at {tag} '{name}' of {path}"
            tab.page.keyboard.press("Tab")
        assert len(walked) < TABS_MAX, f"{path}: {walked}"
        links = tab.page.locator("main a[href], main button, main input, main select, main [role=slider]")
        skipped = "main tr a"  # a line is a stop itself, and leads there by Enter
        stops = links.filter(visible=True).count() - tab.page.locator(skipped).filter(visible=True).count()
        assert len(walked) >= stops, f"{path}: {walked}"
    tab.open("#/topic/clicks")
    settled(tab, "#/topic/clicks")
    chart = tab.page.get_by_role("slider", name="Records by stage over time")
    chart.focus()
    before = chart.get_attribute("aria-valuetext")
    tab.page.keyboard.press("Home")
    assert tab.page.get_by_role("slider", name="Records by stage").get_attribute("aria-valuetext") != before
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("heading", name="From sent to processed, the whole time").wait_for(state="detached")
    tab.close()


def test_narrow_screens_scroll_in_one_direction(browser: Browser, pages: Served) -> None:
    tab = Tab(browser, pages.url, width=400)
    for path in PAGES:
        tab.open(path)
        settled(tab, path)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400, path
    tab.open("#/topic/clicks")
    settled(tab, "#/topic/clicks")
    tab.keep("topic-narrow")
    tab.close()


def test_without_a_topic_and_without_an_answer_it_says_so(browser: Browser) -> None:
    with served("127.0.0.1:1") as pages:
        tab = Tab(browser, pages.url)
        tab.open()
        tab.see("Waiting for a broker's answer")
        tab.keep("no-broker")
        tab.close()
    with Cluster() as cluster, served(cluster.address) as pages:
        tab = Tab(browser, pages.url, "dark")
        tab.open()
        tab.see("No topic exists yet")
        tab.keep("no-topics")
        tab.open("#/loss")
        tab.see("No auditor runs here")
        tab.close()
