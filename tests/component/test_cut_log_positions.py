"""A start that is a `Position` with a mark, after its log was cut and grew again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from memq.broker.broker import Broker
from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import TopicPartition
from memq.errors import InvalidRequestError, PositionExpiredError, PositionLostError
from memq.topic import Position, read_partitions
from tests.brokers import run
from tests.component.test_cut_log import CUT, LEFT, READ, WAIT_S, filled, log_of, next_owner, reader, send, take


async def positions_of(broker: Broker) -> list[Position]:
    """Read all records, and return the position before each batch and that after the last one."""
    found: list[Position] = []
    async with reader(broker, None) as consumer:
        for _ in range(READ):
            batch = await consumer.poll(WAIT_S)
            assert batch is not None
            found.append(batch.first)
        return [*found, consumer.position()[TopicPartition("clicks", 0)]]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_start_at_a_position_that_the_log_lost_is_refused(as_text: bool) -> None:
    async def work() -> None:
        async with filled() as (broker, topic):
            positions = await positions_of(broker)
            if as_text:
                positions = [Position.parse(position.marked_text) for position in positions]
            del log_of(broker, topic).entries[-CUT:]
            await send(broker, 100, READ)
            async with reader(broker, None, start=positions[-1]) as consumer:
                with pytest.raises(PositionLostError, match=f"before position {positions[-1]}"):
                    await consumer.poll(WAIT_S)
                await consumer.seek("clicks", 0, positions[LEFT])  # what was before it is left
                assert await take(consumer, READ) == [*range(100, 100 + READ)]
                await consumer.seek("clicks", 0, positions[-2])
                with pytest.raises(PositionLostError):
                    await consumer.poll(WAIT_S)

    run(work())


def test_a_trace_of_a_position_that_the_log_lost_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It showed another record, or none, as for a position without a mark."""

    async def work() -> None:
        async with filled() as (broker, topic):
            positions = await positions_of(broker)
            texts = [position.marked_text for position in positions]

            async def traced(text: str) -> tuple[int, str]:
                code = await asyncio.to_thread(main, ["trace", "clicks", text, "-b", broker.address])
                out, err = capsys.readouterr()
                return code, out or err

            code, out = await traced(texts[-2])
            assert code == 0
            assert f"position: {positions[-2]}" in out
            del log_of(broker, topic).entries[-CUT:]
            code, out = await traced("0:999:0:00000001")
            assert code == 1
            assert "was cut before position 0:999:0: it ends at" in out
            await send(broker, 100, READ)
            code, out = await traced(texts[-2])
            assert code == 1
            assert f"was cut before position {positions[-2]}" in out
            code, out = await traced(texts[LEFT])
            assert code == 0
            assert f"position: {positions[LEFT]}" in out, "what was before it is left"
            assert "was cut" not in (await traced(str(positions[-2])))[1], "a position without a mark is not compared"

    run(work())


def test_a_group_is_not_set_to_a_position_that_the_log_lost() -> None:
    async def work() -> None:
        async with filled() as (broker, topic), AsyncAdmin(broker.address) as admin:
            last = (await positions_of(broker))[-1]
            del log_of(broker, topic).entries[-CUT:]
            await send(broker, 100, READ)
            with pytest.raises(PositionLostError):
                await admin.reset_group("g", "clicks", to=last, new_ok=True)

    run(work())


def test_a_group_that_was_reset_is_refused_after_a_cut_before_its_position() -> None:
    async def work() -> None:
        async with filled() as (broker, topic), AsyncAdmin(broker.address) as admin:
            (reset,) = await admin.reset_group("g", "clicks", to="end", new_ok=True)
            assert (await admin.group("g")).partitions[0].position == reset.after
            del log_of(broker, topic).entries[-CUT:]
            await send(broker, 100, READ)
            async with reader(broker, "g") as consumer:
                with pytest.raises(PositionLostError):
                    await consumer.poll(WAIT_S)

    run(work())


def test_a_group_of_a_lost_log_is_notified_of_new_records_that_retention_took() -> None:
    """Retention took the pointer whose mark would differ, and fewer records were before it than before the cut."""

    async def work() -> None:
        async with filled() as (broker, topic):
            async with reader(broker, "g") as consumer:
                assert await take(consumer, READ) == [*range(READ)]
                await consumer.commit()
            del log_of(broker, topic).entries[1:]
            await broker.close()
            async with next_owner(broker) as another:
                for number in range(100, 100 + READ):
                    await send(another, number, 1)  # a record and the end of its producer
                first = log_of(another, topic).end - 3
                await another.services.queue.trim(read_partitions(topic)[0], first)
                async with reader(another, "g") as consumer:
                    with pytest.raises(PositionExpiredError, match=f"0:8:0 of topic 'clicks' is before 0:{first}:0"):
                        await consumer.poll(WAIT_S)
                    await consumer.seek("clicks", 0, "beginning")
                    assert await take(consumer, 1) == [105]

    run(work())


def test_a_position_in_a_whole_log_is_a_start_with_and_without_its_mark() -> None:
    async def work() -> None:
        async with filled() as (broker, _):
            positions = await positions_of(broker)
            for position in (positions[2], Position.parse(str(positions[2]))):
                async with reader(broker, None, start=position) as consumer:
                    assert await take(consumer, READ - 2) == [*range(2, READ)]

    run(work())


def test_a_position_after_the_last_record_of_its_batch_is_refused() -> None:
    """A reader began at the next batch, as if the wanted record had been there and was passed over."""

    async def work() -> None:
        async with filled() as (broker, _), AsyncAdmin(broker.address) as admin:
            first = (await positions_of(broker))[0]
            after = replace(first, record_index=2, mark=0)
            text = f"position {after} of topic 'clicks' is after its batch: {replace(first, mark=0)} has 1 records"
            async with reader(broker, None, start=after) as consumer:
                with pytest.raises(InvalidRequestError, match=text):
                    await consumer.poll(WAIT_S)
                await consumer.seek("clicks", 0, replace(after, record_index=1))
                assert await take(consumer, READ - 1) == [*range(1, READ)], "the end of a batch is a place"
                await consumer.seek("clicks", 0, after)
                with pytest.raises(InvalidRequestError, match=text):
                    await consumer.poll(WAIT_S)
            with pytest.raises(InvalidRequestError, match=text):
                await admin.reset_group("g", "clicks", to=after, new_ok=True)

    run(work())


def test_a_group_whose_end_is_after_the_last_record_of_a_batch_reads_on_there() -> None:
    async def work() -> None:
        async with filled() as (broker, _):
            first = (await positions_of(broker))[0]
            async with reader(broker, "g", start="beginning", end=replace(first, record_index=9)) as consumer:
                assert [record.value async for batch in consumer for record in batch] == [b"0000"]
            async with reader(broker, "g", end="end") as consumer:
                assert await take(consumer, READ - 1) == [*range(1, READ)]

    run(work())


def test_a_mark_is_no_part_of_the_place_and_of_its_text() -> None:
    plain, marked = Position(0, 17, 3), Position(0, 17, 3, 0x1A2B3C)
    assert (plain, hash(plain), str(plain)) == (marked, hash(marked), str(marked))
    assert marked < Position(0, 17, 4)
    assert (plain.marked_text, marked.marked_text) == ("0:17:3", "0:17:3:001a2b3c")
    assert Position.parse(marked.marked_text).mark == marked.mark
    assert Position.parse(str(marked)).mark == 0


@pytest.mark.parametrize("text", ["0:17:3:", "0:17:3:1a2b", "0:17:3:1A2B3C4D", "0:17:3:1a2b3c4d:0", "0:17", "0:17:3\n"])
def test_text_that_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="bad position"):
        Position.parse(text)
