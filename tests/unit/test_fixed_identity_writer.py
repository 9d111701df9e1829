"""The writer of blocks with given sequences, on a scripted broker: its blocks in flight, and its end."""

from __future__ import annotations

import asyncio

import pytest

from memq.client.bulk.block_cutter import Cut, Cutter
from memq.client.bulk.direct_writer import BLOCKS_IN_FLIGHT_MAX, FixedIdentityWriter
from memq.client.producer.fields import RecordFields
from memq.errors import DeniedError, IdentityConflictError, MemqError
from memq.format.blocks.header import check_block
from memq.protocol.frames import Api, Frame
from tests.stepped_time import stepped_runtime
from tests.unit.toy_broker import Script, ToyBroker, ToyConnection, address_of, run, turns, until

PRODUCER = 7


def block(number: int) -> Cut:
    """Return a block of one record, which has the block's number as its sequence."""
    cutter = Cutter("clicks", 0)
    cutter.add(number, RecordFields(b"%d" % number, None, None, None, None), 2)
    cut = cutter.end()
    assert cut is not None
    return cut


def writer_of(broker: ToyBroker) -> FixedIdentityWriter:
    return FixedIdentityWriter([address_of(broker)], stepped_runtime(), PRODUCER)


def test_a_block_waits_while_so_many_are_in_flight() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        writer = writer_of(broker)
        for number in range(BLOCKS_IN_FLIGHT_MAX):
            await writer.put(block(number))
        waiting = asyncio.create_task(writer.put(block(BLOCKS_IN_FLIGHT_MAX)))
        await broker.until(lambda: len(broker.blocks) == BLOCKS_IN_FLIGHT_MAX)
        await turns()
        assert (waiting.done(), writer.acked) == (False, 0)
        broker.acking = True
        (connection,) = [each for each in broker.connections if each.streams]
        connection.ack(next(iter(connection.streams)))
        await waiting
        await writer.drain()
        assert writer.acked == BLOCKS_IN_FLIGHT_MAX + 1
        await writer.close()
        assert broker.values() == [b"%d" % number for number in range(BLOCKS_IN_FLIGHT_MAX + 1)]

    run(test)


def refusing(error: MemqError, sequence: int = 0) -> Script:
    """Return the script of a broker that refuses the block that begins at this sequence."""

    def script(connection: ToyConnection, frame: Frame) -> bool:
        refused = frame.api == Api.WRITE and check_block(frame.body).first_sequence == sequence
        if refused:
            connection.nack(frame, error)
        return refused

    return script


def test_only_blocks_refused_for_other_records_are_given_back() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = refusing(IdentityConflictError("other records"))
        writer = writer_of(broker)
        for number in range(2):
            await writer.put(block(number))
        assert [(cut.first, cut.next) for cut in await writer.take_refused()] == [(0, 1)]
        assert broker.values() == [b"1"]
        broker.script = refusing(DeniedError("no right to write"), sequence=2)
        await writer.put(block(2))
        with pytest.raises(DeniedError, match="no right to write"):
            await writer.take_refused()
        await writer.close()

    run(test)


def test_no_block_is_sent_after_one_that_was_refused() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = refusing(DeniedError("no right to write"))
        writer = writer_of(broker)
        await writer.put(block(0))
        with pytest.raises(DeniedError, match="no right to write"):
            await writer.drain()
        broker.script = lambda connection, frame: False
        with pytest.raises(DeniedError, match="no right to write"):
            await writer.put(block(1))
        await writer.close()
        assert (broker.values(), writer.acked) == ([], 0)

    run(test)


def test_a_writer_that_is_abandoned_leaves_no_connection_and_waits_for_no_ack() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        writer = writer_of(broker)
        await writer.put(block(0))
        await broker.until(lambda: bool(broker.blocks))
        await writer.abandon()
        await until(lambda: not broker.connections)
        await writer.abandon()

    run(test)
