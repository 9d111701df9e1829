"""The dashboard in a browser at 1,000 topics and a day: first content, updates, sorting, its size, delay of a finding.

The audit's state is a real SQLite file, filled by the auditors' own store; the topics are a real broker's. Times are
the browser's own (`performance`), up to the moment behind the frame in which the change was painted.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
from playwright.sync_api import Browser, Page

import memq
from benchmarks.audit_state import MINUTES, TOPICS, fill, topic_name
from benchmarks.dev import MEMQ, dev_broker
from benchmarks.results import Figure, Options, median
from benchmarks.servers import load
from memq.audit.dashboard.audited import LiveSource
from memq.audit.dashboard.view import TopicRow
from memq.audit.live.storage.database import SqliteDatabase
from memq.runtime.clock import SystemClock
from memq.testing import Cluster
from tests.browsers import chromium
from tests.dashboards import Served, served

NAME = "dashboard"
FIRST_CONTENT_MS_MAX, UPDATE_MS_MAX, BYTES_MAX, FINDING_S_MAX = 500, 100, 100_000, 10
HEAP_GROWTH_MAX = 1.2  # after as many updates of all topics
UPDATES = 60
WAIT_MS = 120_000

# Puts into `window.seen` a promise of the time (Unix ms) behind the first frame in which FOUND was true.
_WATCH = """() => {
  const holds = () => FOUND;
  window.seen = new Promise((resolve) => {
    const tell = () => resolve(performance.timeOrigin + performance.now());
    const painted = () => requestAnimationFrame(() => setTimeout(tell));
    if (holds()) { painted(); return; }
    const observer = new MutationObserver(() => { if (holds()) { observer.disconnect(); painted(); } });
    observer.observe(document, { childList: true, subtree: true, characterData: true, attributes: true });
  });
}"""
# Returns the ms from ACT to behind the next frame, in which FOUND must be true.
_ACT = """async () => {
  const begun = performance.now();
  ACT;
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  if (!(FOUND)) throw new Error("it does not show what was asked for");
  return performance.now() - begun;
}"""
_ROWS = "document.querySelectorAll('tbody tr.open').length > 10"
_DAY = "document.querySelectorAll('.plot').length > 2"
_FIRST_NAME = "document.querySelector('tbody tr.open .name').textContent"
_FILTER = """const field = document.querySelector('input[type=search]');
field.value = '%s';
field.dispatchEvent(new Event('input'));"""


def run(options: Options) -> list[Figure]:
    """Measure all of it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memq-bench-")))
        state = folder / "audit.sqlite"
        began_s, minutes = time.monotonic(), MINUTES // (12 if options.quick else 1)
        fill(state, minutes)
        os.sync()  # else the disk still takes what was filled while pages are loaded
        size = sum(file.stat().st_size for file in folder.glob("audit.sqlite*"))
        options.say(f"state of {TOPICS * minutes:,} rows, {size / 1e6:.0f} MB, in {time.monotonic() - began_s:.0f} s")
        detail: dict[str, float | str] = {"state MB": size / 1e6, "rows": TOPICS * minutes, "load": load()}
        browser = stack.enter_context(chromium())
        figures = [_finding(folder, browser, options)]
        dev = stack.enter_context(dev_broker(folder / "data"))
        with memq.Admin(dev.address) as admin:
            for number in range(TOPICS):
                admin.create_topic(topic_name(number))
        pages = stack.enter_context(served(dev.address, LiveSource(SqliteDatabase(state), SystemClock())))
        figures += _measure(pages, browser, options, detail)
    for figure in figures:
        options.say(figure.line())
    return figures


def _measure(pages: Served, browser: Browser, options: Options, detail: dict[str, float | str]) -> list[Figure]:
    messages: list[str] = []
    with _page(browser, messages) as page:  # until all verdicts are there
        page.goto(pages.url)
        page.get_by_text(f"{TOPICS:,} of {TOPICS:,}").wait_for()
        page.get_by_text(f"{TOPICS:,} ok").wait_for()
    first, day = [], []
    for _ in range(options.rounds):
        first.append(_first(browser, pages.url, _ROWS, messages))
        day.append(_first(browser, f"{pages.url}#/topic/{topic_name(7)}", _DAY, messages))
    with _page(browser, messages) as page:
        page.goto(pages.url)
        page.get_by_text(f"{TOPICS:,} ok").wait_for()
        size = page.evaluate(
            "performance.getEntries().filter((each) => each.decodedBodySize && !each.name.includes('/api/'))"
            ".reduce((sum, each) => sum + each.decodedBodySize, 0)"
        )
        one = [_update(page, pages, 1) for _ in range(4 * options.rounds)]
        every = [_update(page, pages, TOPICS) for _ in range(4 * options.rounds)]
        acts = [act for _ in range(options.rounds) for act in _acts(page)]
        before = _heap_bytes(page)
        for _ in range(UPDATES):
            _update(page, pages, TOPICS)
        growth = _heap_bytes(page) / before
    heap: dict[str, float | str] = {"heap MB": before / 1e6, "updates": UPDATES}
    return [
        Figure(NAME, "first content, overview", median(first), "ms", FIRST_CONTENT_MS_MAX, detail=detail),
        Figure(NAME, "first content, a topic's page", median(day), "ms", FIRST_CONTENT_MS_MAX),
        Figure(NAME, "update of one topic", median(one), "ms", UPDATE_MS_MAX, detail={"most": max(one)}),
        Figure(NAME, "update of all topics", median(every), "ms", UPDATE_MS_MAX, detail={"most": max(every)}),
        Figure(NAME, "sort, filter", max(acts), "ms", UPDATE_MS_MAX, detail={"median": median(acts)}),
        Figure(NAME, "size of all files", size, "bytes", BYTES_MAX),
        Figure(NAME, "heap after updates", growth, "x", HEAP_GROWTH_MAX, detail=heap),
        Figure(NAME, "messages on the console", len(messages), "", 0),
    ]


@contextmanager
def _page(browser: Browser, messages: list[str], script: str = "") -> Iterator[Page]:
    """Open a page of a new user, with nothing cached."""
    context = browser.new_context(viewport={"width": 1360, "height": 850})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    if script:
        page.add_init_script(script)
    yield page
    context.close()


def _first(browser: Browser, url: str, found: str, messages: list[str]) -> float:
    """Return the ms from the beginning of a page to the frame that shows the selector `found`."""
    with _page(browser, messages, f"({_WATCH.replace('FOUND', found)})()") as page:
        page.goto(url)
        return float(page.evaluate("window.seen.then((moment) => moment - performance.timeOrigin)"))


def _update(page: Page, pages: Served, topics: int) -> float:
    """Return the ms from a change of the first `topics` topics to the frame that shows it."""
    board = pages.dashboard.feed.board
    began_ms: list[float] = []

    def change(lag: int) -> None:
        began_ms.append(time.time() * 1e3)
        for number in range(topics):
            row = board.get("topic", topic_name(number))
            assert isinstance(row, TopicRow)
            board.put("topic", row.name, msgspec.structs.replace(row, lag_records=lag))

    while True:
        lag = int(time.time() * 1e6) % 10_000_000
        shown = f"document.querySelector('tbody tr.open').textContent.includes('{lag:,}')"
        page.evaluate(_WATCH.replace("FOUND", shown))
        pages.call(partial(change, lag))
        seen = page.evaluate("Promise.race([window.seen, new Promise((resolve) => setTimeout(resolve, 3000, null))])")
        if seen is not None:  # else a round of the dashboard's own came between, and took it back
            return float(seen) - began_ms[-1]


def _acts(page: Page) -> list[float]:
    """Return the ms of sorting by lag and lost, both ways, and of filtering."""
    press = "[...document.querySelectorAll('th button')].find((each) => each.textContent === '%s').click()"
    acts = [(press % title, f"{_FIRST_NAME} !== ''") for title in ("Lag", "Lag", "Lost", "Lost", "Topic")]
    acts.append((_FILTER % "0042", f"{_FIRST_NAME} === '{topic_name(42)}'"))
    acts.append((_FILTER % "", f"{_FIRST_NAME} === '{topic_name(0)}'"))
    return [float(page.evaluate(_ACT.replace("ACT", act).replace("FOUND", found))) for act, found in acts]


def _heap_bytes(page: Page) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return float(metrics["JSHeapUsedSize"])


def _finding(folder: Path, browser: Browser, options: Options) -> Figure:
    """Measure from a reader's commit behind a damaged block to the finding on the page, with the default settings."""
    messages: list[str] = []
    seconds = []
    state = f"sqlite:{folder / 'finding.sqlite'}"
    log = folder / "auditor.log"
    with Cluster(audit=True) as cluster, log.open("w") as errors:
        command = [*MEMQ, "auditor", "-b", cluster.address, "--audit-state", state, "--dashboard-port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as auditor:
            try:
                assert auditor.stdout is not None, "started with a pipe"
                auditor.stdout.readline()
                with _page(browser, messages) as page:
                    page.goto(_url_in(log))
                    seconds += [_damaged(cluster, page, f"damaged-{number}") for number in range(options.rounds)]
            finally:
                auditor.terminate()
    detail: dict[str, float | str] = {"most": max(seconds), "messages on the console": len(messages)}
    return Figure(NAME, "finding, from commit to page", median(seconds), "s", FINDING_S_MAX, detail=detail)


def _damaged(cluster: Cluster, page: Page, topic: str) -> float:
    cluster.create_topic(topic)
    with memq.Producer(cluster.address) as producer:
        producer.send_many(topic, ["value"] * 50)
        producer.flush(60)
    page.get_by_role("link", name=topic).wait_for()
    cluster.damage(cluster.records(topic)[0].position, topic)
    page.evaluate(_WATCH.replace("FOUND", f"document.querySelector('#main').textContent.includes('{topic}corrupt')"))
    with memq.Consumer(cluster.address, [topic], group="g", end="end", on_damaged="skip") as consumer:
        for _ in consumer:
            pass
        consumer.commit()
        began_ms = time.time() * 1e3
        return (float(page.evaluate("window.seen")) - began_ms) / 1e3


def _url_in(log: Path) -> str:
    deadline_s = time.monotonic() + WAIT_MS / 1e3
    while time.monotonic() < deadline_s:
        _, found, rest = log.read_text().partition("dashboard.ready: ")
        if found and "\n" in rest:
            return rest.split("\n", 1)[0]
        time.sleep(0.1)
    raise RuntimeError(f"no dashboard: {log.read_text()}")
