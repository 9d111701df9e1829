"""The dashboard in a real browser: against a running `memq dev`, a `memq auditor` next to a broker, and 1,000 topics.

Pictures of every page are kept (tests/browsers.py). Waits are for what is to be seen, with generous bounds; the console
must stay empty, which also shows that the security policy holds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import memq
from memq.audit.dashboard.audited import AuditedHour
from memq.audit.dashboard.view import TopicRow
from memq.audit.finding import Finding, Kind
from memq.audit.live.view import Minute
from memq.testing import Cluster
from tests.browsers import WAIT_MS, Tab, need_chromium
from tests.dashboards import WrittenAudit, served, stored_minute
from tests.servers import DevServer

MINUTE_MS = 60_000
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

need_chromium()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.create_topic("clicks", partitions=2)
        with memq.Producer(cluster.address) as producer:
            for number in range(50):
                producer.send("clicks", f"value {number}", key=f"key-{number % 5}", tag="web")
            producer.flush(60)
        yield cluster


def test_search_tail_keyboard_and_dark_on_memq_dev(browser: Browser, tmp_path: Path) -> None:
    server = DevServer(tmp_path / "data", "--dashboard-port", "0", "--dashboard-contents")
    try:
        server.start()
        with memq.Producer(server.address, connect_timeout_ms=WAIT_MS) as producer:
            producer.send("clicks", "<img src=x onerror=alert(1)>", key="ada", tag="web")
            producer.send("clicks", "second", key="bob", headers=[("trace", "7")])
            producer.flush(60)
            tab = Tab(browser, url_of(server.process, server.log))
            tab.open()
            tab.page.get_by_role("link", name="clicks").wait_for()
            tab.keep("overview")
            tab.page.keyboard.press("j")
            tab.page.keyboard.press("Enter")
            tab.page.get_by_role("heading", name="clicks").wait_for()
            tab.see("Records by partition")
            tab.keep("topic")
            tab.page.keyboard.press("3")
            tab.see("governor")
            tab.keep("cluster")
            see_waiting_records(tab, producer, server.address)
            tab.page.keyboard.press("4")
            key = tab.page.get_by_role("textbox", name="Key")
            key.wait_for()  # else "/" is pressed on the page before
            tab.page.keyboard.press("/")
            tab.page.keyboard.type("clicks")
            key.fill("ada")
            key.press("Enter")
            tab.see("<img src=x onerror=alert(1)>")  # as text
            tab.see("1 found in 2 records")
            key.fill("")
            condition = tab.page.get_by_role("textbox", name="Condition on headers")
            condition.fill("trace = 8 OR trace = 7")
            condition.press("Enter")
            tab.page.get_by_role("cell", name="second").wait_for()
            tab.page.get_by_role("textbox", name="Tags").fill("web")
            condition.fill("trace IS NULL")
            condition.press("Enter")
            tab.see("<img src=x onerror=alert(1)>")
            tab.keep("search")
            tab.page.keyboard.press("Escape")
            tab.open("#/tail/clicks")
            tab.page.get_by_role("button", name="Start").click()
            tab.see("waiting for records")
            row = tab.page.get_by_role("cell", name="fresh value").first
            for _ in range(200):  # the tail begins at the end as it is once it has connected
                producer.send("clicks", "fresh value")
                producer.flush(60)
                if row.is_visible():
                    break
                tab.page.wait_for_timeout(300)
            row.wait_for()
            tab.keep("tail")
            background = "getComputedStyle(document.body).backgroundColor"
            light = tab.page.evaluate(background)
            tab.page.get_by_role("button", name="Theme: auto").press("t")
            tab.page.keyboard.press("t")
            assert tab.page.evaluate(background) != light
            tab.keep("tail-dark")
            tab.close()
    finally:
        server.close()


def see_waiting_records(tab: Tab, producer: memq.Producer, address: str) -> None:
    """See a delayed record, an open transaction, and a dead letter with its cause."""
    producer.send("reminders", "later", deliver_after=3_600).result(60)
    producer.send("orders", "bad <b>order</b>", key="ada")
    producer.flush(60)
    with memq.Listener(address, "orders", "billing", lambda message: memq.DeadLetter("no <i>card</i>")) as listener:
        listener.start()
        tab.page.keyboard.press("6")
        tab.page.get_by_role("heading", name="Waiting").wait_for()
        tab.page.get_by_role("link", name="reminders").wait_for()
        tab.page.get_by_role("row", name="billing 1").wait_for()
    with memq.Queue(address) as queue:
        queue.enqueue("mails", b"x", deliver_after=3_600)
        tab.page.get_by_role("row", name="mails 0 0 1 0").wait_for()
    with (
        memq.Producer(address, transactional_id="pay", connect_timeout_ms=WAIT_MS) as payer,
        payer.transaction() as transaction,
    ):
        transaction.send("orders", "paid")
        transaction.flush()
        tab.see("orders: 1")
        tab.page.get_by_role("link", name="billing").click()
        tab.see("no <i>card</i>")  # as text
        tab.see("bad <b>order</b>")
        tab.keep("waiting")


def url_of(process: subprocess.Popen[str], log: Path) -> str:
    """Return where the log of a process says that the dashboard is."""
    with log.open() as lines:
        while True:
            line = lines.readline()
            found = re.search(r"dashboard\.ready: (\S+)\n", line)
            if found is not None:
                return found[1]
            assert line or process.poll() is None, f"ended:\n{log.read_text()}"


def test_a_loss_a_doubling_and_damage_on_memq_dev_are_seen(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    inject = import_module("faults").inject_faults
    options = ("--audit-interval-ms", "200", "--dashboard-port", "0")
    server = DevServer(tmp_path / "data", *options)
    try:
        server.start()
        with memq.Admin(server.address, connect_timeout_ms=WAIT_MS) as admin:
            admin.create_topic("flights", partitions=2)
            with memq.Producer(server.address, connect_timeout_ms=WAIT_MS) as producer:
                for _ in range(6):
                    producer.send_many("flights", [b"flight"] * 100, keys=[f"{key}" for key in range(100)])
                    producer.flush(60)
            tab = Tab(browser, url_of(server.process, server.log))
            tab.open("#/topic/flights")
            tab.page.locator(".funnel b", has_text="600").nth(2).wait_for()  # sent, acked, committed
            topic = admin.topic("flights").topic
        with ThreadPoolExecutor(1) as aside:  # it runs a loop of its own, and this thread has the browser's
            injected = aside.submit(inject, server.data, topic).result()
        with memq.Consumer(
            server.address, ["flights"], group="demo", end="end", on_damaged="skip", read="direct"
        ) as consumer:
            assert sum(len(batch.values()) for batch in consumer)
            consumer.commit()
        tab.open("#/loss")
        for fault in injected:
            tab.page.get_by_role("row", name=re.compile(f"^{fault.what} open")).first.wait_for()
        tab.keep("findings")
        tab.page.get_by_role("row", name=re.compile("^corrupt open")).first.click()
        (damaged,) = (fault for fault in injected if fault.what == "corrupt")
        tab.see(f"{damaged.producer:016x}")
        tab.page.get_by_role("link", name=damaged.object).click()
        tab.page.get_by_text("1 damaged").wait_for()
        tab.keep("damaged-object")
        tab.page.go_back()
        tab.page.get_by_role("button", name="Verify").click()
        tab.see(re.compile("1 of 1 blocks are damaged; sound blocks hold 0 of the"))
        tab.keep("verified")
        tab.close()
    finally:
        server.close()


def test_an_auditor_next_to_a_broker_shows_what_it_finds(browser: Browser, tmp_path: Path) -> None:
    log = tmp_path / "auditor.log"
    command = [sys.executable, "-m", "memq", "auditor", "--audit-state", f"sqlite:{tmp_path / 'audit.sqlite'}"]
    with Cluster(audit=True, audit_interval_ms=100) as cluster:
        with memq.Producer(cluster.address) as producer:
            producer.send_many("clicks", ["value"] * 50)
            producer.flush(60)
        with log.open("w") as errors:
            auditor = subprocess.Popen(
                [*command, "-b", cluster.address, "--dashboard-port", "0", "--dashboard-acknowledge"],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )
        try:
            tab = Tab(browser, url_of(auditor, log))
            tab.open()
            tab.page.get_by_role("row", name=re.compile("^clicks ok")).wait_for()
            cluster.damage(cluster.records("clicks")[0].position, "clicks")
            with memq.Consumer(cluster.address, ["clicks"], group="g", end="end", on_damaged="skip") as consumer:
                assert not sum(len(batch.values()) for batch in consumer)
                consumer.commit()
                tab.page.get_by_role("row", name=re.compile("^clicks corrupt")).wait_for()
                tab.page.keyboard.press("3")
                tab.page.get_by_role("region", name="Clients").get_by_text("consumer").first.wait_for()
                tab.keep("auditor-cluster")
            tab.page.keyboard.press("2")
            tab.page.get_by_role("row", name=re.compile("^corrupt open")).click()
            tab.page.get_by_role("button", name="Verify").click()
            tab.see(re.compile("1 of 1 blocks are damaged"))
            tab.page.get_by_role("button", name="Acknowledge").click()
            tab.see(re.compile("by anonymous"))
            tab.close()
        finally:
            auditor.kill()
            auditor.wait()


def test_a_finding_is_seen_and_leads_down_to_its_record(browser: Browser, cluster: Cluster) -> None:
    key = next(iter(cluster.store.objects))
    finding = Finding(
        id="00aa",
        kind=Kind.LOST,
        topic="clicks",
        partition=0,
        minute=29_000_000,
        producer=0xAB,
        records=5,
        cause="acked with all, in no pointer",
        ranges=((10, 14), (20, 21)),
        object=key,
        first_seen_ms=29_000_000 * MINUTE_MS,
    )
    audit = WrittenAudit({"clicks": AuditedHour("lost", 5, 0, 0, 12.5)}, {"00aa": finding})
    with served(cluster.address, audit, dashboard_acknowledge=True, dashboard_contents=True) as pages:
        audit.rows["clicks"] = minutes(pages.dashboard)
        tab = Tab(browser, pages.url)
        tab.open()
        tab.page.get_by_label("1 open").wait_for()
        tab.page.get_by_role("button", name="With findings").click()
        tab.page.get_by_role("link", name="clicks").click()
        tab.see("something is wrong")
        tab.see("Latency until")
        tab.keep("topic-audited")
        tab.page.keyboard.press("2")
        tab.see("00000000000000ab")
        tab.page.keyboard.press("j")
        tab.page.keyboard.press("Enter")
        tab.see("10 to 13, 20")
        tab.keep("finding")
        tab.page.get_by_role("button", name="Acknowledge").click()
        tab.see(re.compile("by anonymous"))
        tab.page.get_by_role("link", name="Open the object").click()
        tab.page.get_by_text("sound").first.wait_for()
        tab.see(re.compile("value 0"))
        tab.keep("object")
        tab.close()
        dark = Tab(browser, pages.url, "dark")
        dark.open("#/topic/clicks")
        dark.see("Latency until")
        dark.keep("topic-audited-dark")
        dark.close()


def minutes(dashboard: object) -> list[Minute]:
    """Return an hour of two partitions, with a loss in it."""
    from memq.runtime.clock import SystemClock

    now = SystemClock().wall_ms() // MINUTE_MS
    rows = []
    for ago in range(55):
        for partition in (0, 1):
            sent = 400 + 37 * (ago % 9) + 120 * partition
            lost = 5 if (ago, partition) == (20, 0) else 0
            latency = {"acked": {2: sent // 2, 3: sent // 3, 5: 20, 6: ago % 4}}
            counts = {"sent": sent, "acked": sent - 2, "committed": sent - lost - 2, "lost": lost}
            rows.append(stored_minute(partition, now - ago, counts, latency))
    return rows


def test_a_thousand_topics_are_shown_sorted_filtered_and_updated(browser: Browser) -> None:
    rows = {f"topic-{number:04}": topic(number) for number in range(1_000)}
    with served("127.0.0.1:1") as pages:  # nobody answers there: what the board has is the test's
        board = pages.dashboard.feed.board
        pages.call(lambda: board.put_all("topic", rows))
        tab = Tab(browser, pages.url)
        tab.open()
        tab.see("1,000 of 1,000")
        lines = tab.page.locator("tbody tr.open")
        assert lines.count() < 100  # only those in view exist
        tab.page.get_by_role("button", name="Lag", exact=True).click()
        tab.page.locator("tbody tr.open", has_text="topic-0999").first.wait_for()
        assert "topic-0999" in lines.first.inner_text()
        tab.page.get_by_role("button", name="Lost", exact=True).click()
        assert "topic-0990" in lines.first.inner_text()
        tab.keep("thousand-topics")
        tab.page.get_by_label("Filter topics by name").fill("0042")
        tab.see("1 of 1,000")
        pages.call(lambda: board.put("topic", "topic-0042", topic(42, lost=77_777)))
        tab.see("77,777")
        tab.page.get_by_label("Filter topics by name").fill("")
        for _ in range(30):
            tab.page.keyboard.press("Escape")
            tab.page.keyboard.press("j")
        assert "topic-" in tab.page.evaluate("document.activeElement.innerText")
        tab.close()


def topic(number: int, lost: int | None = None) -> TopicRow:
    return TopicRow(
        name=f"topic-{number:04}",
        partitions=4,
        records_s=number * 1.5,
        bytes_s=number * 900.0,
        lag_records=number * 10,
        lag_seconds=number / 10,
        lost=(number if number % 90 == 0 else 0) if lost is None else lost,
        doubled=0,
        corrupt=None if number % 7 == 0 else 0,
        word="lost" if number % 90 == 0 else "ok",
        p99_ms=number / 5,
        spark=tuple((number * minute) % 97 for minute in range(60)),
    )
