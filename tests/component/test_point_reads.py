"""Reads by position: one record, and the number of records between two positions, from Python and the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

import memq
from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.errors import InvalidRequestError, NotFoundError, PositionExpiredError, PositionLostError
from memq.testing import Cluster
from memq.topic import Position, read_partitions
from tests.brokers import run, running_broker


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def sent(cluster: Cluster, batches: int = 3, records: int = 5) -> list[memq.Record]:
    """Send batches of records to the topic clicks; return them as a consumer gets them."""
    with memq.Producer(cluster.address) as producer:
        for batch in range(batches):
            for number in range(records):
                producer.send("clicks", f"{batch}.{number}", key=b"k", headers={"n": str(number)}, tag="web")
            producer.flush()
    with memq.Consumer(cluster.address, ["clicks"], end="end") as consumer:
        return [record for batch in consumer for record in batch]


def test_a_record_is_read_by_its_position(cluster: Cluster) -> None:
    records = sent(cluster)
    assert len(records) == 15
    for record in records:
        assert memq.read_record(cluster.address, "clicks", record.position) == record
    with memq.Producer(cluster.address) as producer:
        ack = producer.send("clicks", b"last").result(10)
    assert ack.position is not None
    assert memq.read_record(cluster.address, "clicks", ack.position).value == b"last"


def test_a_position_without_a_record_is_not_found(cluster: Cluster) -> None:
    last = sent(cluster)[-1].position
    for missing in (
        Position(0, last.pointer_offset, last.record_index + 1),  # after the last record of its batch
        Position(0, last.pointer_offset + 1),  # the end
        Position(0, last.pointer_offset + 99),
        Position(0, 0),  # the pointer `opened`
        Position(3, 0),
    ):
        with pytest.raises(NotFoundError):
            memq.read_record(cluster.address, "clicks", missing)
    with pytest.raises(NotFoundError, match="'views'"):
        memq.read_record(cluster.address, "views", last)
    with pytest.raises(TypeError, match="not str"):
        memq.read_record(cluster.address, "clicks", "0:1:0")  # type: ignore[arg-type]


def test_a_record_that_retention_took_or_that_a_cut_lost_is_no_other_record() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            async with AsyncProducer(broker.address) as producer:
                acks = [await (await producer.send("clicks", b"%d" % number)) for number in range(3)]
            first, *_, last = [ack.position for ack in acks if ack.position is not None]

            async def read(position: Position) -> memq.Record:
                return await asyncio.to_thread(memq.read_record, broker.address, "clicks", position)

            with pytest.raises(PositionLostError):
                await read(replace(last, mark=1))
            (partition,) = read_partitions((await admin.topic("clicks")).topic)
            await broker.services.queue.trim(partition, last.pointer_offset)
            with pytest.raises(PositionExpiredError):
                await read(first)
            with pytest.raises(PositionExpiredError):
                await admin.count("clicks", first, last)
            assert await asyncio.to_thread(main, ["get", "clicks", str(first), "-b", broker.address]) == 3
            assert (await read(last)).value == b"2"

    run(work())


def test_the_records_between_two_positions_are_counted(cluster: Cluster) -> None:
    records = sent(cluster)
    end = Position(0, records[-1].position.pointer_offset + 1)
    with memq.Admin(cluster.address) as admin:
        for low in range(len(records)):
            for high in range(low, len(records)):
                assert admin.count("clicks", records[low].position, records[high].position) == high - low
            assert admin.count("clicks", records[low].position, end) == len(records) - low
        assert admin.count("clicks", Position(0, 0), end) == len(records)
        with pytest.raises(InvalidRequestError, match="no record is from"):
            admin.count("clicks", records[1].position, records[0].position)
        with pytest.raises(InvalidRequestError, match="no record is from"):
            admin.count("clicks", Position(0, 0), Position(1, 0))
        with pytest.raises(InvalidRequestError, match="after its end"):
            admin.count("clicks", Position(0, 0), Position(0, 999))
        with pytest.raises(NotFoundError, match="no partition 4"):
            admin.count("clicks", Position(4, 0), Position(4, 1))
        with pytest.raises(TypeError, match="position"):
            admin.count("clicks", "0:1:0", end)  # type: ignore[arg-type]


def test_the_command_line_gets_and_counts_records(cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    records = sent(cluster)

    def shown(*arguments: str) -> tuple[int, bytes]:
        code = main([*arguments, "-b", cluster.address])
        return code, capsysbinary.readouterr().out

    at = str(records[7].position)
    assert shown("get", "clicks", at) == (0, b"1.2\n")
    assert shown("get", "clicks", at, "-f", r"%t %p %k %s %h %o|\n") == (
        0,
        b"clicks 0 k 1.2 n=2 %d|\n" % records[7].offset,
    )
    code, line = shown("get", "clicks", at, "--json")
    assert code == 0
    assert json.loads(line)["value"] == "1.2"
    assert json.loads(line)["position"] == at
    assert shown("get", "clicks", "0:99:0") == (3, b"")
    assert shown("get", "clicks", "seven") == (2, b"")
    assert shown("topic", "count", "clicks", at, str(records[9].position)) == (0, b"2\n")
    code, line = shown("topic", "count", "clicks", at, str(records[9].position), "--json")
    assert json.loads(line)["records"] == 2
    assert shown("topic", "count", "clicks", "x", at) == (2, b"")
