"""One log of several fails or hangs: lag, ends, totals and dashboard have the others, and name it as unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from memq.audit.dashboard.history import TopicRates
from memq.audit.dashboard.poller import Poller
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import About, GroupRow, TopicRow
from memq.audit.minutes import MINUTE_MS
from memq.broker.api import reader_requests
from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.offset_resolver import Lag
from memq.client.log_answers import LOG_S, LOGS_AT_ONCE_MAX, LogAnswers, ask_logs
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError, NotFoundError, QueueError, ThrottledError
from memq.groups.coordinator import GroupCoordinator
from memq.notification import Span
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition, Totals
from tests.brokers import run, running_broker
from tests.skipping_loop import run_skipping, skip

FAILING = 1
PARTITIONS = 3
ABOUT = About(cluster="", audited=False, acknowledge=False, contents=False)
LOGS = [ReadPartition("clicks", "0a" * 16, number) for number in range(LOGS_AT_ONCE_MAX + 4)]


class FailingLog:
    """A broker whose queue fails, or is silent, about the log of one partition of topic 'clicks'."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = broker
        self.hangs = False
        self.logs: frozenset[int] = frozenset()
        self._span = broker.services.queue.span
        monkeypatch.setattr(broker.services.queue, "span", self.span)
        monkeypatch.setattr(reader_requests, "LOG_S_MAX", 0.05)

    async def span(self, partition: ReadPartition) -> Span:
        if partition.topic == "clicks" and partition.partition in self.logs:
            if self.hangs:
                await asyncio.get_running_loop().create_future()
            raise QueueError("no leader")
        return await self._span(partition)

    async def fill(self, topic: str, records: int) -> None:
        """Send records to each partition."""
        async with AsyncProducer(self.broker.address, audit=False, codec="none") as producer:
            for partition in range(PARTITIONS):
                for number in range(records):
                    await (await producer.send(topic, b"%d" % number, partition=partition))


def with_sick(test: Callable[[FailingLog, AsyncAdmin], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            failing = FailingLog(broker, monkeypatch)
            for name in ("clicks", "views"):
                await admin.create_topic(name, partitions=PARTITIONS)
                await failing.fill(name, 2)
            await test(failing, admin)

    run(main())


async def rounds(poller: Poller) -> tuple[str, str]:
    """Let a poller ask for topics, groups and totals, and return what was unknown of the last two."""
    await poller.poll_topics()
    troubles = await poller.poll_groups(), await poller.poll_totals()
    await poller.poll_topics()
    return troubles


@pytest.mark.parametrize("hangs", [False, True])
def test_the_lag_of_a_consumer_names_the_partition_that_is_unknown(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(failing: FailingLog, admin: AsyncAdmin) -> None:
        async with AsyncConsumer(failing.broker.address, ["clicks", "views"], audit=False) as consumer:
            while len(consumer.position()) < 2 * PARTITIONS:
                await consumer.poll(0.01)
            known = await consumer.lag()
            whole = {each: lag.records for each, lag in known.items()}
            assert (len(whole), known.unknown) == (2 * PARTITIONS, {})
            failing.logs, failing.hangs = frozenset({FAILING}), hangs
            lags, place = await consumer.lag(), TopicPartition("clicks", FAILING)
            assert {each: lag.records for each, lag in lags.items()} == {
                each: whole[each] for each in whole if each != place
            }
            assert list(lags.unknown) == [place]
            with pytest.raises(QueueError, match="did not answer" if hangs else "no leader"):
                lags[place]
            assert "unknown={TopicPartition(topic='clicks', partition=1): QueueError" in repr(lags)
            failing.logs = frozenset()
            assert {each: lag.records for each, lag in (await consumer.lag()).items()} == whole

    with_sick(test, monkeypatch)


def test_a_lag_of_which_nothing_is_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(failing: FailingLog, admin: AsyncAdmin) -> None:
        async with AsyncConsumer(failing.broker.address, "clicks", audit=False) as consumer:
            while len(consumer.position()) < PARTITIONS:
                await consumer.poll(0.01)
            failing.logs = frozenset(range(PARTITIONS))
            with pytest.raises(QueueError, match="no leader"):
                await consumer.lag()

    with_sick(test, monkeypatch)


def test_ends_and_totals_of_the_other_logs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(failing: FailingLog, admin: AsyncAdmin) -> None:
        topics = await admin.topics()
        before = await admin.ends(topics)
        failing.logs = frozenset({FAILING})
        ends = await admin.ends(topics)
        assert ends["views"] == before["views"]
        assert ends["clicks"] == {each: before["clicks"][each] for each in (0, 2)}
        assert isinstance(ends["clicks"].unknown[FAILING], QueueError)
        clicks = await admin.topic("clicks")
        totals = await admin.end_totals(clicks.topic)
        assert {each: found.records for each, found in totals.items()} == {0: 2, 2: 2}
        assert list(totals.unknown) == [FAILING]
        assert list(await admin.end_totals(clicks.topic, [2])) == [2]
        failing.logs = frozenset(range(PARTITIONS))
        assert (await admin.ends(topics))["clicks"] == {}
        for ask in (admin.ends([clicks.topic]), admin.end_totals(clicks.topic)):
            with pytest.raises(QueueError, match="no leader"):
                await ask
        failing.logs = frozenset({FAILING})
        await admin.delete_topic("views")
        with pytest.raises(NotFoundError):
            await admin.ends(topics)

    with_sick(test, monkeypatch)


def test_the_dashboard_shows_the_other_partitions_and_why_one_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(failing: FailingLog, admin: AsyncAdmin) -> None:
        feed = Feed("test")
        poller = Poller(admin, None, feed, Runtime(), ABOUT)
        for name in ("clicks", "views"):
            await admin.reset_group("readers", name, "beginning", new_ok=True)

        async def look() -> tuple[str, str]:
            return await rounds(poller)

        async def records(name: str) -> list[int | None]:
            return [part.records for part in (await poller.topic_page(name, 60, None)).partitions]

        def row(kind: str, key: str) -> TopicRow | GroupRow:
            found = feed.board.get(kind, key)
            assert isinstance(found, TopicRow | GroupRow)
            return found

        assert await look() == ("", "")
        assert await records("clicks") == [2, 2, 2]
        failing.logs = frozenset({FAILING})
        for name in ("clicks", "views"):
            await failing.fill(name, 1)
        lag, log = await look()
        assert (lag, log) == ("lag of group 'readers' in 'clicks': partition 1: no leader", "'clicks'/1: no leader")
        assert (await records("clicks"), await records("views")) == ([3, None, 3], [3, 3, 3])
        page = await poller.topic_page("clicks", 60, None)
        assert [part.error for part in page.partitions] == ["", "no leader", ""]
        behind = [row("group", f"{name}\nreaders") for name in ("clicks", "views")]
        assert [each.lag_records for each in behind] == [None, 3 * PARTITIONS]
        assert isinstance(behind[0], GroupRow)
        assert behind[0].error == "partition 1: no leader"
        assert (row("topic", "clicks").lag_records, row("topic", "views").lag_records) == (None, 3 * PARTITIONS)
        failing.logs = frozenset()
        assert await look() == ("", "")
        assert await records("clicks") == [3, 3, 3]
        assert row("topic", "clicks").lag_records == 3 * PARTITIONS

    with_sick(test, monkeypatch)


@pytest.mark.parametrize("logs", [frozenset({FAILING}), frozenset(range(PARTITIONS))])
def test_the_dashboard_knows_a_log_again_that_has_nothing_new(
    logs: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(failing: FailingLog, admin: AsyncAdmin) -> None:
        await admin.delete_topic("views")
        poller = Poller(admin, None, Feed("test"), Runtime(), ABOUT)

        async def look() -> tuple[str, list[int | None]]:
            _, trouble = await rounds(poller)
            return trouble, [part.records for part in (await poller.topic_page("clicks", 60, None)).partitions]

        whole = ("", [2] * PARTITIONS)
        assert await look() == whole
        assert await look() == whole
        failing.logs = logs
        trouble, records = await look()
        assert all(f"'clicks'/{number}: no leader" in trouble for number in logs)
        assert records == [None if number in logs else 2 for number in range(PARTITIONS)]
        failing.logs = frozenset()
        assert await look() == whole

    with_sick(test, monkeypatch)


def test_a_lag_is_unknown_while_the_queue_does_not_name_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(failing: FailingLog, admin: AsyncAdmin) -> None:
        feed = Feed("test")
        poller = Poller(admin, None, feed, Runtime(), ABOUT)
        await admin.reset_group("readers", "clicks", "beginning", new_ok=True)

        def lag() -> int | None:
            row = feed.board.get("group", "clicks\nreaders")
            assert isinstance(row, GroupRow)
            return row.lag_records

        async def silent(_: GroupCoordinator, *, proven: bool) -> list[str]:
            raise QueueError("no coordinator")

        await rounds(poller)
        assert lag() == 2 * PARTITIONS
        with monkeypatch.context() as patch:
            patch.setattr(GroupCoordinator, "groups", silent)
            trouble, _ = await rounds(poller)
            assert "lag of group 'readers' in 'clicks': " in trouble
            assert trouble.endswith("no coordinator")
            assert lag() is None
        assert (await rounds(poller))[0] == ""
        assert lag() == 2 * PARTITIONS

    with_sick(test, monkeypatch)


def test_a_rate_without_all_logs_is_unknown_and_so_are_the_minutes_of_the_silent_one() -> None:
    rates, minute = TopicRates(), 1_000
    rates.take("t", "id", {0: Totals(10, 100), 1: Totals(10, 100)}, 0, minute * MINUTE_MS)
    rates.take("t", "id", {0: Totals(12, 120), 1: Totals(13, 130)}, 2_000, minute * MINUTE_MS)
    rates.take("t", "id", {0: Totals(20, 200)}, 4_000, (minute + 1) * MINUTE_MS, frozenset({1}))
    assert (rates.records_s("t"), rates.bytes_s("t")) == (None, None)
    assert (rates.total("t", 0), rates.total("t", 1)) == (20, None)
    rates.repeat_last("t", 6_000, (minute + 2) * MINUTE_MS)
    assert rates.records_s("t") is None
    rates.take("t", "id", {0: Totals(21, 210), 1: Totals(99, 990)}, 8_000, (minute + 3) * MINUTE_MS)
    assert (rates.records_s("t"), rates.total("t", 1)) == (None, 99)
    rates.take("t", "id", {0: Totals(21, 210), 1: Totals(103, 1_030)}, 10_000, (minute + 4) * MINUTE_MS)
    assert (rates.records_s("t"), rates.bytes_s("t")) == (2.0, 20.0)
    assert rates.minutes("t", minute, 5) == {0: [2, 8, 0, 1, 0], 1: [None, None, None, None, 4]}
    assert rates.spark("t", minute + 4)[-5:] == (None, None, None, None, 4)
    rates.take("t", "id", {0: Totals(21, 210)}, 10_000, (minute + 4) * MINUTE_MS, frozenset({1}))  # in the same ms
    assert (rates.records_s("t"), rates.total("t", 1)) == (None, None)


def test_logs_are_asked_some_at_once_and_one_that_hangs_ends_in_time() -> None:
    asking = most = 0

    async def ask(log: ReadPartition) -> int:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        try:
            if log is LOGS[3]:
                await asyncio.get_running_loop().create_future()
            await skip(1)
            return log.partition
        finally:
            asking -= 1

    async def work() -> None:
        begin_s = asyncio.get_running_loop().time()
        found = await ask_logs(LOGS, ask)
        assert asyncio.get_running_loop().time() - begin_s == LOG_S
        assert list(found) == LOGS
        assert {each: answer for each, answer in found.items() if each is not LOGS[3]} == {
            each: each.partition for each in LOGS if each is not LOGS[3]
        }
        assert "partition 3 of topic 'clicks' did not answer within 15 s" in str(found[LOGS[3]])
        assert most == LOGS_AT_ONCE_MAX

    run_skipping(work())


def test_a_broker_with_too_many_requests_is_asked_again() -> None:
    asked = dict.fromkeys(LOGS[:3], 0)
    refused = ThrottledError("8 requests of this connection are waiting for their answers")

    async def ask(log: ReadPartition) -> int:
        asked[log] += 1
        if log is LOGS[2] or (log is LOGS[1] and asked[log] < 3):
            raise refused
        return log.partition

    async def work() -> None:
        assert await ask_logs(LOGS[:3], ask) == {LOGS[0]: 0, LOGS[1]: 1, LOGS[2]: refused}
        assert (asked[LOGS[0]], asked[LOGS[1]]) == (1, 3)

    run_skipping(work())


def test_log_that_was_not_asked_is_not_unknown() -> None:
    failed: dict[str, Lag | MemqError] = {"a": QueueError("failing")}
    answers = LogAnswers(failed)
    with pytest.raises(KeyError):
        answers["b"]
    with pytest.raises(QueueError):
        answers.one_known()
    assert answers.get("a") is None
    assert LogAnswers[str, int]({}).one_known() == {}
