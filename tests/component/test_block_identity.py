"""One identity, one content: a block with other bytes under the sequences of a known one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from memq.broker.broker import Broker
from memq.broker.partition import known_blocks
from memq.broker.partition.known_blocks import RECENT_BATCHES, KnownBlocks
from memq.broker.partition.pointer_resolver import search_of
from memq.client.consumer.consumer import AsyncConsumer
from memq.errors import DeniedError, ObjectExistsError, QueueError, ThrottledError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import StoredBlock, check_block, parse_header, scope_of
from memq.limits import BLOCK_HEADER_BYTES
from memq.notification.stored_blocks import Claim, claim_of
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import Nack, decode_message
from memq.runtime.tasks import TaskOwner
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, TopicSettings, read_partitions
from tests.brokers import PRODUCER, BareClient, block_of, run, running_broker, until, write_frame
from tests.partition_owners import connected, control, gated, pointers, processor_of, until_sealed


def code_of(frame: Frame) -> str:
    """Return the code of the error that a frame carries, "" for another frame."""
    return decode_message(frame.body, Nack).code if frame.api == Api.NACK else ""


async def values_of(broker: Broker, conflicts: int = 0, copies: int = 0) -> list[bytes]:
    """Return what a consumer reads, which counts so many blocks in conflict and records that were dropped."""
    async with AsyncConsumer(broker.address, ["clicks"], start="beginning", end="end") as consumer:
        found = [record.value or b"" async for batch in consumer for record in batch]
        assert (consumer.stats().counts.conflicting_blocks, consumer.stats().counts.duplicate_records) == (
            conflicts,
            copies,
        )
    return found


async def sent(client: BareClient, topic: Topic, first: int, values: list[bytes]) -> None:
    client.write(write_frame(block_of(topic, first, values)))
    assert (await client.frame()).argument == first + len(values)


OTHERS: dict[str, tuple[int, list[bytes]]] = {
    "other bytes": (2, [b"c", b"x"]),
    "begins before": (1, [b"b", b"c"]),
    "ends behind": (3, [b"d", b"e"]),
    "shorter": (2, [b"c"]),
    "longer": (0, [b"a", b"b", b"c", b"d", b"e"]),
}


@pytest.mark.parametrize("where", ["in the ring", "just published", "published by an earlier owner"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_block_under_sequences_that_are_known_is_refused(
    other: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, values = OTHERS[other]

    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            for at, pair in ((0, [b"a", b"b"]), (2, [b"c", b"d"])):
                client.write(write_frame(block_of(topic, at, pair)))
            await until_sealed(processor_of(broker, topic))
            if where != "in the ring":
                store.gate.set()
                while (await client.frame()).argument < 4:
                    pass
            if where == "published by an earlier owner":
                processor_of(broker, topic).fence(ObjectExistsError("in a test"))
                while (await client.frame()).api != Api.REDIRECT:
                    pass
            again = await BareClient.connect(broker)
            answer = await again.send_again(topic, block_of(topic, first, values))
            assert (code_of(answer), answer.argument) == ("identity-conflict", first)
            assert broker.services.counters.conflicting_blocks == 1
            store.gate.set()
            copy = await again.send_again(topic, block_of(topic, 2, [b"c", b"d"]))
            assert (copy.api, copy.argument) == (Api.ACK, 4), "what is the same is acked as before"
            assert await values_of(broker) == [b"a", b"b", b"c", b"d"]
            await client.close()
            await again.close()

    run(work())
    assert len([line for line in caplog.messages if line.startswith("identity-conflict")]) == 1


def test_a_refusal_closes_the_stream_and_nothing_behind_it_is_acked() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [b"a"])
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"x"])) + write_frame(block_of(topic, 1, [b"y"])))
            assert code_of(await client.frame()) == "identity-conflict"
            assert (await client.send_again(topic, block_of(topic, 1, [b"z"]))).argument == 2
            assert await values_of(broker) == [b"a", b"z"]
            await client.close()

    run(work())


def test_a_block_whose_copy_can_not_be_read_any_more_is_taken_once_more() -> None:
    """Its object is gone: to call the block a copy would lose it, to refuse it would blame its producer."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [b"a"])
            processor_of(broker, topic).fence(ObjectExistsError("in a test"))
            while (await client.frame()).api != Api.REDIRECT:
                pass
            (key,) = [place.key for pointer in await pointers(broker, topic) for place in pointer.locations]
            await broker.services.store.delete(key)
            assert (await client.send_again(topic, block_of(topic, 0, [b"a"]))).argument == 1
            there = [pointer for pointer in await pointers(broker, topic) if pointer.kind == "data"]
            assert [(pointer.records, pointer.skip) for pointer in there] == [(1, ()), (1, ())]
            await client.close()

    run(work())


def test_an_owner_that_can_not_look_the_stored_block_up_asks_its_producer_to_wait() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            store.gate.set()
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [b"a"])
            processor_of(broker, topic).fence(ObjectExistsError("in a test"))
            while (await client.frame()).api != Api.REDIRECT:
                pass
            store.failing_ranges = 5
            assert (await client.send_again(topic, block_of(topic, 0, [b"a"]))).argument == 1
            assert (store.failing_ranges, broker.services.counters.duplicate_blocks) == (0, 1)
            await client.close()

    run(work())


async def answer_to_copy(client: BareClient, topic: Topic, first: int, values: Sequence[bytes] = (b"v",)) -> Api:
    """Send a block again, and return whether it is acked at once or its producer has to wait; then wait for the ack."""
    await client.open(topic, sequence=first)
    client.write(write_frame(block_of(topic, first, list(values))))
    answer = await client.frame()
    if answer.api == Api.THROTTLE:
        assert (await client.send_again(topic, block_of(topic, first, list(values)))).api == Api.ACK
    return Api(answer.api)


async def fenced(broker: Broker, client: BareClient, topic: Topic) -> None:
    """Let the owner lose its epoch, and with it what it knows of contents."""
    await client.open(topic)
    processor_of(broker, topic).fence(ObjectExistsError("in a test"))
    while (await client.frame()).api != Api.REDIRECT:
        pass


def test_the_headers_of_the_last_small_batches_are_kept_and_others_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_blocks, "RECENT_BLOCKS_MAX", 1)

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            for first in range(RECENT_BATCHES + 1):
                await client.open(topic, sequence=first)
                await sent(client, topic, first, [b"v"])
            assert await answer_to_copy(client, topic, 0) == Api.THROTTLE
            assert await answer_to_copy(client, topic, 1) == Api.ACK
            store = gated(broker)
            await client.open(topic, sequence=5)
            client.write(write_frame(block_of(topic, 5, [b"v"])))
            await until_sealed(processor_of(broker, topic))
            client.write(write_frame(block_of(topic, 6, [b"v"])) + write_frame(block_of(topic, 7, [b"v"])))
            store.gate.set()
            while (await client.frame()).argument < 8:
                pass
            assert await answer_to_copy(client, topic, 6) == Api.THROTTLE, "its batch has two blocks"
            await client.close()

    run(work())


def test_answers_are_kept_up_to_a_bound_and_for_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "ANSWERS_MAX", 1)

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            for first in range(3):
                await client.open(topic, sequence=first)
                await sent(client, topic, first, [b"v"])
            await fenced(broker, client, topic)
            asked = (0, 0, 1, 0, 2, 0)
            answers = [await answer_to_copy(client, topic, first) for first in asked]
            assert [answer == Api.ACK for answer in answers] == [False, True, False, True, False, False]
            await fenced(broker, client, topic)
            assert await answer_to_copy(client, topic, 0) == Api.THROTTLE
            await client.close()

    run(work())


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (QueueError("not now"), "compare-retry"),
        (TimeoutError(), "compare-retry"),
        (DeniedError("not you"), "compare-failed"),
    ],
)
def test_a_comparison_that_fails_is_named_and_its_producer_claims_again(
    error: Exception, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [b"v"])
            await fenced(broker, client, topic)
            await client.open(topic)
            queue = broker.services.queue
            seek_time, errors = queue.seek_time, [error]

            async def seek(partition: ReadPartition, time_ms: int) -> int:
                if errors:
                    raise errors.pop()
                return await seek_time(partition, time_ms)

            queue.seek_time = seek  # type: ignore[method-assign]  # one question fails
            assert await answer_to_copy(client, topic, 0) == Api.THROTTLE
            assert broker.services.counters.duplicate_blocks == 1
            await client.close()

    run(work())
    assert [line.partition(":")[0] for line in caplog.messages if line.startswith("compare-")] == [event]


def test_a_search_is_for_what_is_claimed_since_the_last_one_and_not_for_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A claim that fails each time would keep all others waiting."""
    searched: list[list[int]] = []

    def noted(*arguments: Any) -> Any:
        search = search_of(*arguments)
        find = search.find

        async def call(claims: Sequence[Claim], begin: int, end: int) -> Any:
            searched.append([first for _, first, _ in claims])
            if 0 in searched[-1]:
                raise DeniedError("not this one")
            return await find(claims, begin, end)

        search.find = call  # type: ignore[method-assign, assignment]
        return search

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            blocks = [block_of(topic, first, [b"v"]) for first in range(3)]
            await client.open(topic)
            for first in range(3):
                await sent(client, topic, first, [b"v"])
            await fenced(broker, client, topic)
            await client.open(topic)
            processor = processor_of(broker, topic)
            assert processor.own is not None
            monkeypatch.setattr(known_blocks, "search_of", noted)
            tasks = TaskOwner(lambda error: None, broker.services.events)
            known, headers = KnownBlocks(processor, tasks), [parse_header(each) for each in blocks]
            for header in headers[:2]:
                with pytest.raises(ThrottledError):
                    known.holds(processor.own.producer(PRODUCER), header)
                await until(lambda: not len(tasks))
            assert searched == [[0], [1]]
            known.remember(blocks[2][:BLOCK_HEADER_BYTES], None)
            await known.look_up(processor.own, [claim_of(header) for header in headers[1:]])
            assert searched == [[0], [1]]
            await tasks.stop()
            await client.close()

    run(work())


def test_search_of_an_earlier_epoch_does_not_count_in_the_next() -> None:
    """It may lack a late pointer: then the owner would refuse a block that the queue has."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            processor, queue = processor_of(broker, topic), broker.services.queue
            before, seek = processor.owned(), queue.seek_time

            searches = list[int]()

            async def counted(partition: ReadPartition, time_ms: int) -> int:
                searches.append(time_ms)
                return await seek(partition, time_ms)

            async def slow(partition: ReadPartition, time_ms: int) -> int:
                queue.seek_time = seek  # type: ignore[method-assign]
                await fenced(broker, client, topic)
                await client.open(topic)
                queue.seek_time = counted  # type: ignore[method-assign]
                return await seek(partition, time_ms)

            queue.seek_time = slow  # type: ignore[method-assign]
            claim = claim_of(parse_header(block_of(topic, 0, [b"v"])))
            await processor.known.look_up(before, [claim])
            assert processor.own is not before
            searches.clear()
            for _ in range(2):
                await processor.known.look_up(processor.owned(), [claim])
            assert len(searches) == 1, "the new owner searches once, and does not use the answer to the former one"
            await client.close()

    run(work())


def test_a_window_that_begins_too_late_in_one_answer_makes_no_conflict() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [b"a", b"b"])
            await fenced(broker, client, topic)
            await client.open(topic)  # it is the owner again
            queue, lies = broker.services.queue, [True]
            seek = queue.seek_time

            async def late(partition: ReadPartition, time_ms: int) -> int:
                return (await queue.span(partition)).end if lies and lies.pop() else await seek(partition, time_ms)

            queue.seek_time = late  # type: ignore[method-assign]
            assert (await client.send_again(topic, block_of(topic, 0, [b"a", b"b"]))).api == Api.ACK
            assert not lies
            await client.close()

    run(work())


def test_a_copy_is_found_whose_queue_time_another_clock_set() -> None:
    """It lies within the dedup window by the clock of its owner, which may be CLOCK_ERROR_MS apart from this one."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            for first in range(2):
                await client.open(topic, sequence=first)
                await sent(client, topic, first, [b"v"])
            (read,) = read_partitions(topic)
            log = broker.services.queue.log(read)  # type: ignore[attr-defined]  # the memory queue
            oldest_ms = broker.services.runtime.clock.wall_ms() - topic.settings.dedup_window_ms - CLOCK_ERROR_MS
            log.entries[:2] = [replace(entry, time_ms=oldest_ms + 5_000) for entry in log.entries[:2]]
            await fenced(broker, client, topic)
            assert (await client.send_again(topic, block_of(topic, 0, [b"v"]))).api == Api.ACK
            assert broker.services.counters.duplicate_blocks == 1
            await client.close()

    run(work())


def test_a_copy_is_found_whose_pointer_lies_behind_one_that_was_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another partition's pointer lies between: what was just published is behind what its owner has read."""
    monkeypatch.setattr(known_blocks, "RECENT_BLOCKS_MAX", 0)

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [b"v"])
            (read,) = read_partitions(topic)
            other = replace(control(topic, "opened", 1), write_partition=1)
            await broker.services.queue.publish(other)
            await sent(client, topic, 1, [b"w"])
            own = processor_of(broker, topic).owned()
            assert own.known_end() == (await broker.services.queue.span(read)).end > own.read_to
            assert await answer_to_copy(client, topic, 1, [b"w"]) == Api.THROTTLE
            assert broker.services.counters.conflicting_blocks == 0
            await client.close()

    run(work())


@pytest.mark.parametrize("late", [b"a", b"x"], ids=["copy", "other"])
def test_a_late_pointer_leaves_out_its_copies_alone(late: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """An earlier owner's pointer lands while its producer's block waits in the ring of the next one."""

    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            store.gate.set()
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [late])
            (read,) = read_partitions(topic)
            log = broker.services.queue.log(read)  # type: ignore[attr-defined]  # the memory queue
            entry = log.entries.pop()
            processor = processor_of(broker, topic)
            processor.fence(ObjectExistsError("in a test"))
            while (await client.frame()).api != Api.REDIRECT:
                pass
            store.gate.clear()
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            await until_sealed(processor)
            log.entries.append(replace(entry, offset=log.end))
            assert processor.own is not None
            processor.own.unread = True  # as after any publish next to which something landed
            store.failing_ranges = 2
            store.gate.set()
            assert (await client.frame()).argument == 1
            last = (await pointers(broker, topic))[-1]
            counters = broker.services.counters
            assert (store.failing_ranges, counters.conflicting_blocks) == (0, int(late != b"a"))
            assert (last.records, last.skip) == (1, () if late != b"a" else (0,))
            if late == b"a":
                assert await values_of(broker) == [b"a"]
            else:
                assert await values_of(broker, conflicts=1) == [b"x", b"a"]
            await client.close()

    run(work())
    events = [line for line in caplog.messages if line.startswith("consumer.identity-conflict")]
    assert len(events) == int(late != b"a")


def test_a_reader_compares_copies_that_their_pointers_do_not_name() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            store.gate.set()
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            await sent(client, topic, 0, [b"a", b"b"])
            (read,) = read_partitions(topic)
            log = broker.services.queue.log(read)  # type: ignore[attr-defined]  # the memory queue
            log.entries.append(replace(log.entries[-1], offset=log.end))  # it landed twice
            assert await values_of(broker, copies=2) == [b"a", b"b"]
            await client.close()

    run(work())


# ---- what a copy is ------------------------------------------------------------------------------


def sealed(values: Sequence[bytes], now_ms: int, times_ms: Sequence[int] = ()) -> bytes:
    builder = BlockBuilder()
    for number, value in enumerate(values):
        builder.append(value, timestamp_ms=times_ms[number] if times_ms else None)
    scope = scope_of(bytes(16), 0)
    return bytes(builder.seal(producer_id=PRODUCER, first_sequence=7, scope=scope, now_ms=now_ms, codec="zstd").data)


@pytest.mark.parametrize(
    ("values", "now_ms", "times_ms", "copy"),
    [
        ([b"a", b"b"], 1_000, (), True),
        ([b"a", b"b"], 2_000, (), True),  # the same records, sealed once more at another time
        ([b"a", b"c"], 1_000, (), False),
        ([b"a", b"c"], 2_000, (), False),
        ([b"b", b"a"], 1_000, (), False),
        ([b"a"], 1_000, (), False),
        ([b"a", b"b"], 1_000, (1_000, 1_001), False),
    ],
)
def test_a_copy_has_the_same_records_whenever_it_was_sealed(
    values: list[bytes], now_ms: int, times_ms: tuple[int, ...], copy: bool
) -> None:
    header = check_block(sealed([b"a", b"b"], 1_000))
    stored = StoredBlock(PRODUCER, 7, 9, header.checksum, header.base_ms)
    other = sealed(values, now_ms, times_ms)
    assert stored.is_copied_by(check_block(other)) is copy


def test_timestamps_that_records_have_of_their_own_are_content() -> None:
    header = check_block(sealed([b"a", b"b"], 5, (1_000, 1_001)))
    stored = StoredBlock(PRODUCER, 7, 9, header.checksum, header.base_ms)
    for times_ms, copy in (((1_000, 1_001), True), ((2_000, 2_001), False)):
        other = sealed([b"a", b"b"], 9, times_ms)
        assert stored.is_copied_by(check_block(other)) is copy


def test_other_sequences_are_no_copy() -> None:
    block = sealed([b"a"], 5)
    header = check_block(block)
    for producer, first, next_ in ((PRODUCER + 1, 7, 8), (PRODUCER, 6, 7), (PRODUCER, 7, 9)):
        assert not StoredBlock(producer, first, next_, header.checksum, header.base_ms).is_copied_by(header)
