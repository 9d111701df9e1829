"""The page of waiting records: delayed ones, open transactions, and the dead letters of listeners."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest

import memq
from memq.audit.dashboard.poller import Poller
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import About, DeadLetterRow
from memq.client.admin import AsyncAdmin
from memq.client.group_admin import GroupDescription
from memq.errors import UnreachableError
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.testing import Cluster
from tests.dashboards import Served, events, served

WAIT_S = 30.0
LETTERS = "billing.dead-letters"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster with two dead letters and a parked record."""
    with Cluster() as cluster:
        cluster.create_topic("orders", partitions=2)
        with memq.Producer(cluster.address, audit=False) as producer:
            for value in ("bad", "worse", "parked", "good"):
                producer.send("orders", value, key="k", tag="web", partition=0)
        with memq.Listener(cluster.address, "orders", "billing", handle, retry_delays_s=[], audit=False) as listener:
            listener.start()
            pause, tries = threading.Event(), int(WAIT_S / 0.02)
            assert any(len(cluster.records(LETTERS)) == 3 or pause.wait(0.02) for _ in range(tries))
        yield cluster


def handle(message: memq.Message) -> object:
    """Handle one record; only `good` succeeds."""
    if message.value == b"bad":
        raise ValueError("the card 4242 was refused")
    return {b"worse": memq.DeadLetter("no card 4242"), b"parked": memq.Park("later")}.get(message.value or b"")


def seen(pages: Served, kind: str, key: str, holds: Callable[[Any], bool]) -> Any:
    """Return a value of the stream as soon as it is as expected."""
    with events(pages.url, "/api/events") as stream:
        for _, report in stream:
            for found_kind, found_key, value in report["values"]:
                if (found_kind, found_key) == (kind, key) and value is not None and holds(value):
                    return value
    raise AssertionError("the stream ended")


def test_the_stream_shows_delayed_records_and_open_transactions(cluster: Cluster) -> None:
    with (
        served(cluster.address) as pages,
        memq.Producer(cluster.address) as producer,
        memq.Producer(cluster.address, transactional_id="pay") as payer,
    ):
        empty = seen(pages, "delayed", "", lambda value: True)
        assert empty == {"total": 0, "records": 0, "shown": []}
        assert seen(pages, "transactions", "", lambda value: True) == {"total": 0, "shown": []}
        first_ms = SystemClock().wall_ms() + 3_600_000
        for number in range(3):
            producer.send("orders", "x", deliver_at=first_ms + number, partition=number % 2).result(WAIT_S)
        found = seen(pages, "delayed", "", lambda value: value["records"])
        assert found == {
            "total": 1,
            "records": 3,
            "shown": [{"topic": "orders", "records": 3, "next_ms": first_ms}],
        }
        with payer.transaction() as transaction:
            transaction.send("orders", "x", partition=0)
            transaction.send("orders", "x", partition=1)
            transaction.flush()
            found = seen(pages, "transactions", "", lambda value: value["total"])
            (row,) = found["shown"]
            assert (row["transactional_id"], row["group"], row["blocks"]) == ("pay", "", {"orders": 2})
            assert (row["state"], row["tries"]) == ("open", 0)
            assert (row["open_s"] <= WAIT_S, row["timeout_s"]) == (True, 60)
        seen(pages, "transactions", "", lambda value: not value["total"])


def test_the_stream_shows_queues_the_oldest_ready_item_first(cluster: Cluster) -> None:
    with served(cluster.address) as pages, memq.Queue(cluster.address) as queue:
        nothing = {"total": 0, "ready": 0, "leased": 0, "delayed": 0, "dead": 0, "shown": []}
        assert seen(pages, "queues", "", lambda value: True) == nothing
        queue.enqueue("later", b"x", deliver_after=3_600)
        queue.enqueue_many("old", [b"x", b"y"])
        queue.enqueue("new", b"x")
        queue.nack(queue.dequeue("old")[0], kind="dead")
        found = seen(pages, "queues", "", lambda value: value["total"] == 3 and value["dead"])
        assert [row["queue"] for row in found["shown"]] == ["old", "new", "later"]
        assert {name: found[name] for name in nothing if name != "shown"} == {
            "total": 3,
            "ready": 2,
            "leased": 0,
            "delayed": 1,
            "dead": 1,
        }
        old, new, later = found["shown"]
        assert (old["ready"], old["dead"], later["delayed"], later["oldest_ms"]) == (1, 1, 1, None)
        assert old["oldest_ms"] <= new["oldest_ms"] <= SystemClock().wall_ms()

        def enqueued(value: dict[str, Any]) -> bool:
            queue.enqueue("busy", b"x")
            return any(row["queue"] == "busy" and row["rates"].get("enqueued") for row in value["shown"])

        found = seen(pages, "queues", "", enqueued)
        assert next(row["rates"] for row in found["shown"] if row["queue"] == "later") == {}, "it is idle"


def test_the_stream_counts_dead_letters_before_and_after_some_were_handled(cluster: Cluster) -> None:
    with served(cluster.address) as pages, memq.DeadLetterQueue(cluster.address, "billing") as queue:
        found = seen(pages, "letters", "billing", lambda value: value["waiting"] is not None)
        assert found == {"group": "billing", "waiting": 3, "error": ""}
        queue.purge(2)
        seen(pages, "letters", "billing", lambda value: value["waiting"] == 1)
        queue.purge()
        seen(pages, "letters", "billing", lambda value: value["waiting"] == 0)
        assert pages.json("/api/letters?group=billing") == {"group": "billing", "letters": [], "complete": True}


def test_a_dead_letter_has_its_cause_and_its_contents_where_they_are_allowed(cluster: Cluster) -> None:
    origins = [str(record.position) for record in cluster.records("orders")]
    with served(cluster.address, dashboard_contents=True) as pages:
        page = pages.json("/api/letters?group=billing")
    assert page["complete"]
    assert [each["position"] for each in page["letters"]] == [str(each.position) for each in cluster.records(LETTERS)]
    bad, worse, parked = sorted(page["letters"], key=itemgetter("origin"))
    assert (bad["topic"], bad["origin"], bad["state"], bad["attempts"]) == ("orders", origins[0], "dead", 1)
    assert (bad["cause"], bad["key"], bad["value"]) == ("ValueError: the card 4242 was refused", "k", "bad")
    assert (worse["cause"], parked["state"], parked["cause"]) == ("no card 4242", "parked", "later")


def test_a_masked_dead_letter_shows_the_class_of_the_exception_only(cluster: Cluster) -> None:
    with served(cluster.address) as pages:
        answer, body = pages.ask("/api/letters?group=billing")
        assert answer.status == 200
        assert b"4242" not in body
        bad, worse, _ = sorted(pages.json("/api/letters?group=billing")["letters"], key=itemgetter("origin"))
        answer, body = pages.ask("/api/letters?group=nobody")
        assert (answer.status, b"has no dead-letter topic" in body) == (404, True)
    assert (bad["cause"], worse["cause"]) == ("ValueError", None)
    assert (bad["key"], bad["value"], bad["key_bytes"], bad["value_bytes"]) == (None, None, 1, 3)


class Failing(AsyncAdmin):
    """An admin whose groups do not answer while `fails`."""

    fails = False

    async def group(self, name: str, *, proven: bool = True) -> GroupDescription:
        if self.fails:
            raise UnreachableError("no answer")
        return await super().group(name, proven=proven)


def test_the_number_of_dead_letters_is_unknown_while_their_group_does_not_answer(cluster: Cluster) -> None:
    async def run() -> None:
        admin, feed = Failing(cluster.address), Feed("test")
        about = About(cluster="", audited=False, acknowledge=False, contents=False)
        poller = Poller(admin, None, feed, Runtime(), about)
        async with admin:
            await poller.poll_topics()
            assert feed.board.get("letters", "billing") is None, "groups are not known yet"
            await poller.poll_groups()
            assert feed.board.get("letters", "billing") == DeadLetterRow(group="billing", waiting=2)
            admin.fails = True
            await poller.poll_groups()
            assert feed.board.get("letters", "billing") == DeadLetterRow(
                group="billing", waiting=None, error="no answer"
            )

    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        queue.purge(1)
    asyncio.run(run())
