"""Listeners on a broker: handlers, retries, dead letters, order by key, commits and closing."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import memq
from memq.audit.live.service import live_audit
from memq.client.listener.retry_records import read_letter, read_retry
from memq.errors import CorruptDataError, InvalidRequestError, InvalidSettingError, NotFoundError
from memq.limits import MIB
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.testing import Cluster
from memq.topic import Position
from tests.component.live_reports import KEEP_MS, with_database
from tests.component.live_reports import until as audited
from tests.shell import until

WAIT_S = 30.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.create_topic("orders")
        yield cluster


def send(cluster: Cluster, *values: str, key: str | None = None, topic: str = "orders") -> None:
    with memq.Producer(cluster.address, audit=False) as producer:
        for value in values:
            producer.send(topic, value, key=key, headers={"n": value}, tag="web")


class Handler:
    """Collects messages; `answer` decides on each."""

    def __init__(self, answer: Callable[[memq.Message], object] = lambda message: None) -> None:
        self.messages: list[memq.Message] = []
        self._answer = answer
        self._changed = threading.Condition()

    def __call__(self, message: memq.Message) -> object:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
        return self._answer(message)

    def wait(self, calls: int) -> list[memq.Message]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= calls, WAIT_S), self.messages
        return self.messages

    @property
    def values(self) -> list[str]:
        return [(message.value or b"").decode() for message in self.messages]


def listener(cluster: Cluster, handler: Callable[[memq.Message], object], **options: object) -> memq.Listener:
    options = {"retry_delays_s": [0.05], "commit_interval_ms": 50, "audit": False, "drain_s": 20} | options
    return memq.Listener(cluster.address, "orders", "billing", handler, **options)  # type: ignore[arg-type]


def committed(cluster: Cluster, topic: str = "orders") -> Position | None:
    with memq.Admin(cluster.address) as admin:
        parts = admin.group("billing").partitions
    return next(part.position for part in parts if part.topic_partition == (topic, 0))


def fails_shortly(message: memq.Message) -> None:
    raise ValueError("too large")


def fails(message: memq.Message) -> None:
    raise ValueError(f"no {(message.value or b'').decode()}")


def test_a_handler_gets_each_record_once_with_all_its_fields(cluster: Cluster) -> None:
    send(cluster, *map(str, range(100)))
    handler = Handler()
    with listener(cluster, handler, concurrency=4) as running:
        running.start()
        handler.wait(100)
    assert Counter(handler.values) == Counter(map(str, range(100)))
    first = min(handler.messages, key=lambda message: message.position)
    record = cluster.records("orders")[0]
    assert (first.topic, first.position, first.attempt, first.error) == ("orders", record.position, 1, "")
    assert (first.value, first.headers, first.tag, first.timestamp_ms) == (
        *(record.value, record.headers, record.tag, record.timestamp_ms),
    )
    again = Handler()
    send(cluster, "next")
    with listener(cluster, again) as running:
        running.start()
        again.wait(1)
    assert again.values == ["next"], "all others were committed at the close"


def test_a_record_that_fails_is_retried_and_then_a_dead_letter_with_its_cause(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    send(cluster, "bad", "good")
    handler = Handler(lambda message: fails(message) if message.value == b"bad" else None)
    with listener(cluster, handler, retry_delays_s=[0.05, 0.05]) as running:
        running.start()
        handler.wait(4)
        until(lambda: cluster.records("billing.dead-letters"))
        assert running.stats().dead_letters == 1
    bad = [message for message in handler.messages if message.value == b"bad"]
    assert [(message.attempt, message.error) for message in bad] == [
        *((1, ""), (2, "ValueError: no bad"), (3, "ValueError: no bad")),
    ]
    origin = cluster.records("orders")[0]
    assert {(m.topic, m.position, m.headers, m.timestamp_ms, m.tag) for m in bad} == {
        ("orders", origin.position, origin.headers, origin.timestamp_ms, "web")
    }
    (letter,) = cluster.records("billing.dead-letters")
    note, headers = read_letter(letter.headers)
    assert (note.origin.topic, note.origin.position) == ("orders", origin.position)
    assert (note.state, note.attempts, note.cause) == ("dead", 3, "ValueError: no bad")
    assert (letter.value, letter.tag, headers) == (b"bad", "web", origin.headers)
    gave_up = f"listener.gave-up: record at {origin.position} of topic 'orders' is dead after 3 attempts: ValueError"
    assert gave_up in caplog.text


def test_a_retry_is_not_before_its_time_and_does_not_delay_others(cluster: Cluster) -> None:
    send(cluster, "slow", "fast", "other")
    delays = {b"slow": 2.5, b"fast": 0.2}
    called_ms: dict[tuple[bytes, int], int] = {}

    def answer(message: memq.Message) -> object:
        value = message.value or b""
        called_ms[value, message.attempt] = SystemClock().wall_ms()
        return memq.Retry(after=delays[value]) if message.attempt == 1 and value in delays else None

    handler = Handler(answer)
    with listener(cluster, handler) as running:
        running.start()
        handler.wait(5)
    assert handler.values == ["slow", "fast", "other", "fast", "slow"]
    for record in cluster.records("billing.retry"):
        value, due_ms = record.value or b"", read_retry(record.headers)[0].due_ms
        assert called_ms[value, 1] + delays[value] * 1000 <= due_ms <= called_ms[value, 2]


def test_retries_and_letters_stay_until_their_group_has_handled_them(cluster: Cluster) -> None:
    with listener(cluster, Handler()) as running:
        running.start()
    with memq.Admin(cluster.address) as admin:
        for name, partitions in (("billing.retry", 8), ("billing.dead-letters", 1)):
            topic = admin.topic(name).topic
            assert (topic.settings.waits_for, topic.read_partitions) == ((name,), partitions)
            assert topic.settings.retention_groups_ms_max == 366 * 86_400_000


def test_other_groups_see_neither_retries_nor_dead_letters(cluster: Cluster) -> None:
    send(cluster, "bad")
    handler = Handler(lambda message: memq.DeadLetter("bad") if message.attempt == 2 else memq.Retry())
    with listener(cluster, handler) as running:
        running.start()
        handler.wait(2)
    assert [record.value for record in cluster.records("orders")] == [b"bad"]
    other = Handler()
    with memq.Listener(cluster.address, "orders", "shipping", other, audit=False) as running:
        running.start()
        other.wait(1)
    assert [message.attempt for message in other.messages] == [1]
    assert not cluster.records("shipping.retry")


def test_nothing_is_committed_above_a_record_at_work(cluster: Cluster) -> None:
    send(cluster, "held", *map(str, range(20)))
    release = threading.Event()
    handler = Handler(lambda message: release.wait(WAIT_S) if message.value == b"held" else None)
    with listener(cluster, handler, concurrency=2) as running:
        running.start()
        handler.wait(21)
        send(cluster, "later")
        handler.wait(22)
        before = cluster.records("orders")[0].position
        assert committed(cluster) in (None, before)
        release.set()
    assert (committed(cluster) or before) > cluster.records("orders")[-1].position


def test_a_close_waits_for_handlers_at_most_for_the_drain_time(cluster: Cluster) -> None:
    send(cluster, "done", "held", "after")
    release = threading.Event()
    handler = Handler(lambda message: release.wait(WAIT_S) if message.value == b"held" else None)
    with listener(cluster, handler, concurrency=3, drain_s=0.2) as running:
        running.start()
        handler.wait(3)
    release.set()
    held = cluster.records("orders")[1].position
    assert committed(cluster) == held, "the floor is exact also within a batch"
    again = Handler()
    with listener(cluster, again) as running:
        running.start()
        again.wait(2)
    assert again.values == ["held", "after"]


def test_a_parked_record_waits_among_the_dead_letters(cluster: Cluster) -> None:
    send(cluster, "odd", "good")
    handler = Handler(lambda message: memq.Park() if message.value == b"odd" else None)
    with listener(cluster, handler) as running:
        running.start()
        handler.wait(2)
    (letter,) = cluster.records("billing.dead-letters")
    assert (read_letter(letter.headers)[0].state, letter.value) == ("parked", b"odd")


def test_a_record_that_is_too_large_for_a_retry_is_retried_in_memory_and_its_letter_is_cut(cluster: Cluster) -> None:
    most = 16 * MIB - 64
    cluster.create_topic("large", settings={"record_bytes_max": most})
    with memq.Producer(cluster.address, audit=False, codec="none") as producer:
        producer.send("large", bytes(most - 100), key="k").result(WAIT_S)
    handler = Handler(fails_shortly)
    with memq.Listener(
        cluster.address, "large", "billing", handler, retry_delays_s=[0.05], drain_s=20, audit=False
    ) as running:
        running.start()
        handler.wait(2)
    assert [message.attempt for message in handler.messages] == [1, 2]
    assert not cluster.records("billing.retry")
    (letter,) = cluster.records("billing.dead-letters")
    note, headers = read_letter(letter.headers)
    assert (letter.value, letter.key, headers) == (None, b"k", ())
    assert (note.cut, note.attempts, note.cause) == (True, 2, "ValueError: too large")
    assert memq.read_record(cluster.address, "large", note.origin.position).value == bytes(most - 100)


def test_retries_and_letters_survive_failures_of_the_store(cluster: Cluster) -> None:
    send(cluster, "bad")
    handler = Handler(fails)
    with listener(cluster, handler) as running:
        cluster.fail("store.put", 5)
        running.start()
        handler.wait(2)
        until(lambda: running.stats().dead_letters)
    assert [record.value for record in cluster.records("billing.dead-letters")] == [b"bad"]


def test_records_of_one_key_are_in_order_while_one_of_them_fails(cluster: Cluster) -> None:
    send(cluster, *(f"a{number}" for number in range(5)), key="a")
    send(cluster, *(f"b{number}" for number in range(5)), key="b")
    handler = Handler(lambda message: fails(message) if message.value == b"a1" and message.attempt < 4 else None)
    with listener(cluster, handler, concurrency=4, ordered=True, when_failing="block") as running:
        running.start()
        handler.wait(13)
    assert [value for value in handler.values if value[0] == "a"] == ["a0", "a1", "a1", "a1", "a1", "a2", "a3", "a4"]
    assert [value for value in handler.values if value[0] == "b"] == [f"b{number}" for number in range(5)]
    assert handler.values.index("b4") < len(handler.values) - 4, "the other key did not wait"
    assert not cluster.records("billing.retry"), "a record that waits for its order is no retry of another member"


def test_an_ordered_record_that_always_fails_becomes_a_dead_letter_and_its_key_continues(cluster: Cluster) -> None:
    send(cluster, "a0", "a1", "a2", key="a")
    handler = Handler(lambda message: fails(message) if message.value == b"a1" else None)
    with listener(cluster, handler, ordered=True) as running:
        running.start()
        handler.wait(4)
    assert handler.values == ["a0", "a1", "a1", "a2"]
    assert [record.value for record in cluster.records("billing.dead-letters")] == [b"a1"]


def test_a_parked_key_waits_also_after_a_new_start_and_other_keys_continue(cluster: Cluster) -> None:
    send(cluster, "a0", "a1", key="a")
    handler = Handler(lambda message: fails(message) if message.value == b"a0" else None)
    options = {"ordered": True, "when_failing": "park"}
    with listener(cluster, handler, **options) as running:
        running.start()
        handler.wait(2)
        until(lambda: len(cluster.records("billing.dead-letters")) == 2)
    assert handler.values == ["a0", "a0"]
    send(cluster, "a2", key="a")
    send(cluster, "b0", key="b")
    again = Handler()
    with listener(cluster, again, **options) as running:
        running.start()
        again.wait(1)
    assert again.values == ["b0"]
    letters = cluster.records("billing.dead-letters")
    assert [letter.value for letter in letters] == [b"a0", b"a1", b"a2"]
    causes = [read_letter(letter.headers)[0].cause for letter in letters]
    assert causes == ["ValueError: no a0", *["an earlier record of the key is parked"] * 2]


def test_a_parked_key_that_is_sent_back_is_handled_in_order_and_is_free_then(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.client.listener.core.PARKED_CHECK_S", 0.02)
    send(cluster, "a0", "a1", key="a")
    broken = threading.Event()
    broken.set()
    handler = Handler(lambda message: fails(message) if broken.is_set() else None)
    with (
        listener(cluster, handler, ordered=True, when_failing="park") as running,
        memq.DeadLetterQueue(cluster.address, "billing") as queue,
    ):
        running.start()
        until(lambda: running.stats().parked == 2)
        broken.clear()
        assert queue.redrive() == 2
        handler.wait(4)
        for sent in range(2, 99):
            send(cluster, f"a{sent}", key="a")
            until(lambda: running.stats().parked + running.stats().done >= sent + 3)  # noqa: B023 - called at once
            if len(handler.messages) == sent + 3:
                break
            queue.redrive()  # the listener did not know yet that the key is free
            handler.wait(sent + 3)
        assert not queue.letters()
    assert handler.values == ["a0", "a0", *(f"a{number}" for number in range(sent + 1))]


def test_a_retry_of_a_topic_that_the_listener_does_not_read_stays_a_retry(cluster: Cluster) -> None:
    cluster.create_topic("refunds")
    send(cluster, "refund", topic="refunds")
    failing = Handler(fails)
    with memq.Listener(
        cluster.address, "refunds", "billing", failing, retry_delays_s=[0.1] * 9, drain_s=9, audit=False
    ) as running:
        running.start()
        failing.wait(1)
        until(lambda: cluster.records("billing.retry"))
    handler = Handler()
    with listener(cluster, handler) as running:
        running.start()
        until(lambda: running.stats().retried)
    assert not handler.messages
    notes = [read_retry(record.headers)[0] for record in cluster.records("billing.retry")]
    assert (notes[-1].origin.topic, notes[-1].attempt) == ("refunds", notes[-2].attempt)


def test_a_listener_that_meets_damage_stops_with_the_error_and_commits_what_is_done(cluster: Cluster) -> None:
    send(cluster, "0")
    send(cluster, "1")
    first, second = (record.position for record in cluster.records("orders"))
    cluster.damage(second)
    handler = Handler()
    with listener(cluster, handler) as running, pytest.raises(CorruptDataError):
        running.run()
    assert handler.values == ["0"]
    assert first < (committed(cluster) or first) <= second


def test_a_listener_in_the_background_shows_the_error_that_stopped_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """It handled no more, and neither its methods nor the log said why."""
    with listener(cluster, Handler()) as working:
        working.start()
        with memq.Admin(cluster.address) as admin:
            admin.delete_topic("orders")
        until(lambda: "listener.ended" in caplog.text)
        with pytest.raises(NotFoundError, match="'orders'"):
            working.start()
    assert "group 'billing' is handled here no more: NotFoundError" in caplog.text


def test_a_listener_whose_start_has_failed_handles_records_after_another_start(cluster: Cluster) -> None:
    handler = Handler()
    with memq.Listener(cluster.address, "later", "billing", handler, audit=False) as running:
        with pytest.raises(NotFoundError, match="'later'"):
            running.start()
        cluster.create_topic("later")
        send(cluster, "a", topic="later")
        running.start()
        running.start()
        handler.wait(1)
    assert handler.values == ["a"]


def test_a_listener_that_starts_at_the_end_reads_retries_from_their_beginning(cluster: Cluster) -> None:
    send(cluster, "before")
    failing = Handler(fails)
    with listener(cluster, failing, retry_delays_s=[0.5] * 99) as running:
        running.start()
        failing.wait(1)
        until(lambda: cluster.records("billing.retry"))
    with memq.Admin(cluster.address) as admin:
        admin.delete_group("billing")
    handler = Handler()
    with listener(cluster, handler, start="end") as running:
        running.start()
        handler.wait(1)
        send(cluster, "after")
        handler.wait(2)
    assert sorted(handler.values) == ["after", "before"]
    assert {message.attempt > 1 for message in handler.messages if message.value == b"before"} == {True}


def test_the_live_audit_counts_dead_letters_as_passed() -> None:
    with Cluster(audit=True, audit_interval_ms=100) as cluster:
        cluster.create_topic("clicks")
        with memq.Producer(cluster.address) as producer:
            for value in ("0", "bad", "2", "odd", "4"):
                producer.send("clicks", value)
        answers = {b"bad": memq.DeadLetter("bad"), b"odd": memq.Park()}
        handler = Handler(lambda message: answers.get(message.value or b""))
        with memq.Listener(cluster.address, "clicks", "billing", handler) as running:
            running.start()
            handler.wait(5)

        async def judge(database: Any) -> None:
            async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
                summary = await audited([audit], database, lambda each: each.row.side("billing")["passed"] == 2)
            assert summary.row.side("billing")["processed"] == 3
            assert (summary.row.word("billing"), summary.findings) == ("ok", 0)

        with_database("sqlite::memory:", judge)


def test_a_handler_may_stop_its_listener(cluster: Cluster) -> None:
    send(cluster, "last")
    found: list[memq.Listener] = []
    with listener(cluster, lambda message: found[0].stop()) as running:
        found.append(running)
        running.run()
    at = cluster.records("orders")[0].position
    assert (committed(cluster) or at) > at


def test_an_asyncio_listener_runs_handlers_in_tasks(cluster: Cluster) -> None:
    send(cluster, *map(str, range(10)))

    async def test() -> None:
        most, now, done = 0, 0, 0

        async def handle(message: memq.Message) -> object:
            nonlocal most, now, done
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1
            done += 1
            if message.value == b"5" and message.attempt == 1:
                raise ValueError("no")
            if done == 11:
                running.stop()
            return None

        async with memq.aio.Listener(
            cluster.address, "orders", "billing", handle, concurrency=3, retry_delays_s=[0.05], audit=False
        ) as running:
            await asyncio.wait_for(running.run(), WAIT_S)
        assert most == 3
        assert running.stats().done == 10

    asyncio.run(test())


def test_an_asyncio_handler_that_does_not_end_is_cancelled_at_the_close_and_its_record_comes_again(
    cluster: Cluster,
) -> None:
    send(cluster, "0")

    async def test() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def handle(message: memq.Message) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with memq.aio.Listener(
            cluster.address, "orders", "billing", handle, drain_s=0.05, audit=False
        ) as running:
            await running.start()
            await asyncio.wait_for(began.wait(), WAIT_S)
        assert cancelled.is_set()

    asyncio.run(test())
    handler = Handler()
    with listener(cluster, handler) as running:
        running.start()
        handler.wait(1)


def test_two_listeners_share_a_topic_and_hand_it_over(cluster: Cluster) -> None:
    cluster.create_topic("wide", partitions=4)
    first, second = Handler(), Handler()
    options = {"retry_delays_s": [0.05], "commit_interval_ms": 50, "audit": False, "session_timeout_ms": 2_000}
    one, two = (
        memq.Listener(cluster.address, "wide", "g", handler, **options)  # type: ignore[arg-type]
        for handler in (first, second)
    )
    with memq.Producer(cluster.address, audit=False) as producer, one:
        one.start()
        for number in range(40):
            producer.send("wide", str(number), key=str(number)).result(WAIT_S)
        first.wait(40)
        with two:
            two.start()
            sent = 40
            while not second.messages:
                producer.send("wide", str(sent), key=str(sent)).result(WAIT_S)
                sent += 1
        producer.send("wide", "last").result(WAIT_S)
        everything = {*map(str, range(sent)), "last"}
        until(lambda: {*first.values, *second.values} == everything)


def test_mistakes_get_an_error_that_names_them(cluster: Cluster) -> None:
    for options, error in (
        ({"concurrency": 0}, "concurrency"),
        ({"when_failing": "skip", "ordered": True}, "when_failing"),
        ({"when_failing": "park"}, "ordered=True"),
        ({"retry_delays_s": [-1]}, "retry_delays_s"),
        ({"drain_s": -1}, "drain_s"),
        ({"session_timeout_ms": 1}, "session_timeout_ms"),
    ):
        with pytest.raises(InvalidSettingError) as caught:
            listener(cluster, Handler(), **options)
        assert error in f"{caught.value} {caught.value.hint}"
    with pytest.raises(InvalidRequestError, match="retry topic"):
        memq.Listener(cluster.address, "billing.retry", "billing", Handler())

    async def coroutine(message: memq.Message) -> None: ...

    with pytest.raises(InvalidRequestError, match="coroutine"):
        memq.Listener(cluster.address, "orders", "billing", coroutine)
    with pytest.raises(TypeError, match="handler"):
        memq.Listener(cluster.address, "orders", "billing", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="handler"):
        memq.Listener(cluster.address, "orders", "billing", "print")  # type: ignore[arg-type]
    with memq.Listener(cluster.address, "nowhere", "billing", Handler()) as running, pytest.raises(NotFoundError):
        running.run()
