"""A consumer on a broker in this process: results of poll, positions, counts, and damage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import (
    ClosedError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    QueueError,
    UnreachableError,
)
from memq.groups.remote import RemoteGroups
from memq.limits import BLOCK_HEADER_BYTES
from memq.notification.remote import RemoteQueue
from memq.protocol.frames import AckLevel, Api
from memq.topic import Position
from tests.brokers import BareClient, block_of, run, running_broker, write_frame
from tests.unit.toy_broker import turns

NOBODY = "127.0.0.1:1"
CLICKS = TopicPartition("clicks", 0)
WAIT_S = 20.0


def with_broker(test: Callable[[Broker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_broker() as broker:
            await test(broker)

    run(main())


async def fill(broker: Broker, records: int, topic: str = "clicks", partitions: int = 1) -> None:
    """Send records one by one, each a batch of its own, to the partitions in turn."""
    async with AsyncProducer(broker.address, audit=False, codec="none") as producer:
        for number in range(records):
            await (await producer.send(topic, b"%d" % number, partition=number % partitions))


def reader(broker: Broker, *topics: str, **settings: Any) -> AsyncConsumer:
    return AsyncConsumer(broker.address, topics or "clicks", **({"audit": False} | settings))


async def values_of(consumer: AsyncConsumer, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    while len(found) < count:
        batch = await consumer.poll(WAIT_S)
        assert batch is not None
        found += batch.values()
    return found


# ---- poll ----------------------------------------------------------------------------------------


def test_a_poll_brings_what_is_there_waits_for_its_time_and_ends_at_the_end() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 3)
        async with reader(broker) as consumer:
            assert await values_of(consumer, 3) == [b"0", b"1", b"2"]
            assert await consumer.poll(0) is None
            assert await consumer.poll(0.01) is None
            waiting = asyncio.create_task(consumer.poll())
            await turns()
            assert not waiting.done()
            await fill(broker, 1)
            batch = await waiting
            assert batch is not None
            assert batch.values() == [b"0"]
        async with reader(broker, end="end") as ranged:
            assert [len(batch) async for batch in ranged] == [1] * 4
            assert await ranged.poll() is None

    with_broker(test)


def test_a_wakeup_ends_one_poll_the_one_under_way_or_the_next() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 1)
        early = reader(broker)
        early.wakeup()
        assert await early.poll() is None
        assert await values_of(early, 1) == [b"0"]
        waiting = asyncio.create_task(early.poll())
        await turns()
        early.wakeup()
        assert await waiting is None
        assert await early.poll(0) is None
        await fill(broker, 1)
        assert await values_of(early, 1) == [b"0"]
        await early.close()

    with_broker(test)


def test_a_wakeup_comes_before_the_batches_that_are_at_hand() -> None:
    """A busy consumer never noticed it: its iteration went on as long as there was a batch."""

    async def test(broker: Broker) -> None:
        await fill(broker, 5)
        async with reader(broker, end="end") as consumer:
            assert await values_of(consumer, 1) == [b"0"]
            consumer.wakeup()
            await turns()
            assert await consumer.poll(WAIT_S) is None
            assert await values_of(consumer, 4) == [b"1", b"2", b"3", b"4"]

    with_broker(test)


def test_a_closed_consumer_says_so_and_closes_again() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 2)
        consumer = reader(broker)
        await values_of(consumer, 1)
        waiting = asyncio.create_task(values_of(consumer, 3))
        await turns()
        await consumer.close()
        with pytest.raises(ClosedError, match="the consumer is closed"):
            await waiting
        await consumer.close()
        for use in (consumer.poll(), consumer.commit(), consumer.seek("clicks", 0, "end")):
            with pytest.raises((ClosedError, InvalidRequestError)):
                await use
        with pytest.raises(ClosedError):
            await consumer.poll(0)
        never = reader(broker)
        await never.close()
        with pytest.raises(ClosedError):
            await never.poll(0)

    with_broker(test)


def test_an_error_in_the_users_code_is_not_hidden_by_that_of_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 1)
        denied = InvalidRequestError("no more commits")

        async def deny(*arguments: object) -> None:
            raise denied

        async def use(own: Exception | None, patched: pytest.MonkeyPatch) -> None:
            async with reader(broker, group="billing") as consumer:
                assert await values_of(consumer, 1) == [b"0"]
                await consumer.poll(0.01)
                patched.setattr(RemoteGroups, "commit", deny)
                if own:
                    raise own

        for own in (KeyError("mine"), None):
            with monkeypatch.context() as patched, pytest.raises(KeyError if own else InvalidRequestError) as caught:
                await use(own, patched)
            assert caught.value is (own or denied)

    with_broker(test)


def test_consumer_without_a_group_refuses_group_calls_without_a_request() -> None:
    async def work() -> None:
        consumer = AsyncConsumer(NOBODY, "clicks", connect_timeout_ms=1)
        for ask in (consumer.committed(), consumer.commit()):
            with pytest.raises(InvalidRequestError, match="a consumer without a group commits nothing"):
                await ask
        with pytest.raises(InvalidRequestError, match="partition 0 of topic 'clicks' is not assigned"):
            consumer.pause("clicks", 0)
        for unreachable in (consumer.poll(), consumer.lag()):
            with pytest.raises(UnreachableError):
                await unreachable
        assert consumer.position() == {}
        await consumer.close()
        grouped = AsyncConsumer(NOBODY, "clicks", group="billing", connect_timeout_ms=1)
        with pytest.raises(UnreachableError):
            await grouped.committed()
        await grouped.close()

    asyncio.run(work())


def test_a_topic_that_is_not_there_is_said_at_once() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 1)
        with pytest.raises(NotFoundError, match="topic 'nothing' does not exist"):
            async with reader(broker, "clicks", "nothing"):
                pass

    with_broker(test)


@pytest.mark.parametrize(
    "positions",
    [
        {"start": Position(1, 0, 0)},
        {"start": [Position(0, 0, 0), Position(1, 0, 0)]},
        {"end": {("clicks", 1): Position(1, 0, 0)}},
    ],
)
def test_a_position_of_a_partition_that_is_not_there_is_refused(positions: dict[str, Any]) -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 1)
        with pytest.raises(NotFoundError, match="topic 'clicks' has no partition 1") as caught:
            async with reader(broker, **positions):
                pass
        assert caught.value.hint == "it has 1, from 0 on"

    with_broker(test)


# ---- positions -----------------------------------------------------------------------------------


def test_a_position_is_behind_what_was_handed_out_and_before_what_was_made_ahead() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 4)
        async with reader(broker, end="end") as consumer:
            first = await consumer.poll(WAIT_S)
            assert first is not None
            positions = [consumer.position()[CLICKS]]
            lags = [(await consumer.lag())[CLICKS].records]
            counts = [consumer.stats().counts.records]
            while (batch := await consumer.poll(WAIT_S)) is not None:
                assert batch.first == positions[-1]
                positions.append(consumer.position()[CLICKS])
                lags.append((await consumer.lag())[CLICKS].records)
                counts.append(consumer.stats().counts.records)
            assert positions[:3] == [Position(0, offset) for offset in (2, 3, 4)]
            assert lags == [3, 2, 1, 0]
            assert counts == [1, 2, 3, 4], "what is ahead was not delivered yet"

    with_broker(test)


def test_a_seek_drops_what_was_made_ahead() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 4)
        async with reader(broker) as consumer:
            assert await values_of(consumer, 2) == [b"0", b"1"]
            await consumer.seek("clicks", 0, "beginning")
            assert await values_of(consumer, 4) == [b"0", b"1", b"2", b"3"]
            await consumer.seek("clicks", 0, Position(0, 3))
            assert consumer.position() == {CLICKS: Position(0, 3)}
            assert await values_of(consumer, 2) == [b"2", b"3"]
            await consumer.seek("clicks", 0, "end")
            assert await consumer.poll(0.05) is None
            with pytest.raises(InvalidRequestError, match="partition 1 of topic 'clicks' is not assigned"):
                await consumer.seek("clicks", 1, "end")
            with pytest.raises(InvalidRequestError, match="not assigned"):
                await consumer.seek("other", 0, "end")
            with pytest.raises(InvalidRequestError, match="belongs to partition 1"):
                await consumer.seek("clicks", 0, Position(1, 0))

    with_broker(test)


def test_a_paused_partition_waits_with_what_was_made_ahead_of_it() -> None:
    async def test(broker: Broker) -> None:
        async with AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks", partitions=2)
        await fill(broker, 8, partitions=2)
        async with reader(broker) as consumer:
            first = await consumer.poll(WAIT_S)
            assert first is not None
            consumer.pause("clicks", first.partition)
            others: list[bytes | None] = []
            while (batch := await consumer.poll(0.2)) is not None:
                assert batch.partition != first.partition
                others += batch.values()
            assert len(others) == 4
            consumer.resume("clicks", first.partition)
            assert len(await values_of(consumer, 3)) == 3

    with_broker(test)


def test_a_group_knows_what_it_has_stored() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 3)
        async with reader(broker, group="billing", auto_commit=False) as consumer:
            assert await consumer.committed() == {}
            batch = await consumer.poll(WAIT_S)
            assert batch is not None
            await consumer.commit()
            before = (await consumer.committed()).get(CLICKS, Position(0, 0))
            assert before < batch.next, "it is not done: neither read nor followed by another poll"
            await consumer.commit(batch)
            assert await consumer.committed() == {CLICKS: Position(0, 2)}
            commits = consumer.stats().commits
            assert commits >= 1
            await values_of(consumer, 2)
            await consumer.commit()
            assert (await consumer.committed())[CLICKS] >= Position(0, 4)
            assert consumer.stats().commits == commits + 1
        async with reader(broker, group="billing") as later:
            assert later.stats().commits == 0
            await fill(broker, 1)
            assert await values_of(later, 1) == [b"0"]

    with_broker(test)


@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_close_commits_what_is_done_with_auto_commit_only(auto_commit: bool) -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 3)
        async with reader(broker, group="billing", auto_commit=auto_commit, auto_commit_interval_ms=60_000) as consumer:
            for _ in range(3):
                assert await consumer.poll(WAIT_S) is not None
        async with reader(broker, group="billing", auto_commit=False) as later:
            assert await later.committed() == ({CLICKS: Position(0, 3)} if auto_commit else {})

    with_broker(test)


# ---- topics that go ------------------------------------------------------------------------------


def test_a_topic_that_goes_is_an_error_and_the_others_continue() -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 1)
        await fill(broker, 1, topic="orders")
        async with reader(broker, "clicks", "orders") as consumer, AsyncAdmin(broker.address) as admin:
            await values_of(consumer, 2)
            await admin.delete_topic("orders")
            assert "topic 'orders' does not exist" in await errors_of(consumer, 1)
            await fill(broker, 1)
            await errors_of(consumer, 0, records=1)
            assert list(consumer.position()) == [CLICKS]
            await admin.delete_topic("clicks")
            await errors_of(consumer, 1, "none of the topics clicks, orders exists any more")

    with_broker(test)


async def errors_of(consumer: AsyncConsumer, count: int, text: str = "", records: int = 0) -> list[str]:
    """Poll until so many topics were missing, with this text, and so many records came."""
    found: list[str] = []
    while sum(text in each for each in found) < count or records > 0:
        try:
            batch = await consumer.poll(1)
            records -= 0 if batch is None else len(batch.values())
        except NotFoundError as error:
            found.append(str(error).partition("\n")[0])
    return found


# ---- failures ------------------------------------------------------------------------------------


def test_an_error_that_does_not_pass_is_raised_once_and_reading_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(broker: Broker) -> None:
        await fill(broker, 2)
        async with reader(broker) as consumer:
            assert await values_of(consumer, 2) == [b"0", b"1"]
            poll = RemoteQueue.poll
            errors: list[MemqError] = [DeniedError("not now"), QueueError("away")]

            async def fail(*arguments: Any) -> Any:
                if errors:
                    raise errors.pop(0)
                return await poll(*arguments)

            monkeypatch.setattr(RemoteQueue, "poll", fail)  # a broker that answers so
            await fill(broker, 1)
            with pytest.raises(DeniedError):
                await values_of(consumer, 2)
            assert await values_of(consumer, 1) in ([b"0"], [b"1"])
            assert consumer.stats().retries >= 1

    with_broker(test)


# ---- damage that shows while the user reads --------------------------------------------------------


async def send_poisoned(broker: Broker, blocks: int = 3, poisoned: int = 1) -> None:
    """Store some blocks; the payload of one makes no sense though its checksum is right."""
    client = await BareClient.connect(broker)
    topic = await client.topic()
    await client.open(topic)
    for number in range(blocks):
        block = bytearray(block_of(topic, 2 * number, [b"%d" % number] * 2))
        if number == poisoned:
            block[BLOCK_HEADER_BYTES] ^= 0x40  # the length of the first value
            block[4:8] = crc32c(bytes(block[8:])).to_bytes(4, "little")
        client.write(write_frame(bytes(block)))
        frame = await client.frame()
        assert (frame.api, frame.flags) == (Api.ACK, AckLevel.ALL)
    await client.close()


@pytest.mark.parametrize("policy", ["fail", "skip", "dead-letter"])
def test_damage_that_shows_while_it_is_read_follows_the_policy(policy: Any) -> None:
    async def test(broker: Broker) -> None:
        await send_poisoned(broker)
        async with reader(broker, end="end", on_damaged=policy) as consumer:
            batches = [batch async for batch in consumer]
        found: list[bytes | None] = []
        async with reader(broker, end="end", on_damaged=policy) as consumer:
            async for batch in consumer:
                found += batch.values()  # a consumer that stops at damage passes over this, too: no copy is better
            stats = consumer.stats()
        assert len(batches) == 3
        assert found == [b"0", b"0", b"2", b"2"]
        assert (stats.counts.damaged_blocks, stats.counts.damaged_records) == (1, 2)
        assert stats.dead_letters == int(policy == "dead-letter")
        if policy == "dead-letter":
            async with reader(broker, "clicks.dlq", end="end") as letters:
                (letter,) = [record async for batch in letters for record in batch]
            assert dict(letter.headers)["memq-topic"] == b"clicks"
            assert (letter.value or b"").startswith(b"mqB1")

    with_broker(test)


@pytest.mark.parametrize("policy", ["skip", "dead-letter"])
def test_damage_that_shows_while_it_is_read_is_dealt_with_before_its_batch_is_committed(policy: Any) -> None:
    """The batch behind it was made ahead: a consumer that was closed then had committed it, and counted nothing."""

    async def test(broker: Broker) -> None:
        await send_poisoned(broker, blocks=40, poisoned=30)
        async with reader(broker, group="g", on_damaged=policy) as consumer:
            for number in range(32):
                batch = await consumer.poll(WAIT_S)
                assert batch is not None
                assert batch.values() == ([] if number == 30 else [b"%d" % number] * 2)
            stats = consumer.stats()
        assert (stats.counts.damaged_blocks, stats.counts.damaged_records) == (1, 2)
        assert stats.dead_letters == int(policy == "dead-letter")
        async with reader(broker, group="g", end="end") as consumer:
            first = await consumer.poll(WAIT_S)
            assert first is not None
            assert first.values() == [b"31"] * 2, "the last batch was not done, the damaged one was"

    with_broker(test)
