"""Prefetch of a Spark task: how much, up to its end, and an early end."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.format.batch import BlockPiece
from memq.format.pointer import Pointer
from memq.limits import KIB
from memq.spark.source import MemqSource
from tests.unit.spark_rows import batches_of, schema_of
from tests.unit.stored_topic import StoredTopic, block


def test_a_task_holds_as_many_bytes_ahead_as_it_may_and_one_batch_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = StoredTopic(tmp_path)
    for number in range(12):
        topic.write(block([bytes([number]) * (10 * KIB)], first=number))
    held, most = list[int](), list[int]()
    fetch = BatchFetcher.fetch

    async def counted(self: BatchFetcher, pointer: Pointer) -> Sequence[BlockPiece]:
        held.append(pointer.locations[0].length)
        most.append(sum(held))
        pieces = await fetch(self, pointer)
        await asyncio.sleep(0)
        held.pop()
        return pieces

    monkeypatch.setattr(BatchFetcher, "fetch", counted)
    for prefetch, fits in (("64KiB", 6), ("100KiB", 9), ("128MiB", 12)):
        most.clear()
        (batches,) = batches_of({**topic.options, "columns": "value", "prefetchBytes": prefetch})
        assert len(batches) == 12
        assert max(most) // (10 * KIB) == fits, prefetch


def test_a_task_fetches_as_much_ahead_at_its_end_as_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = StoredTopic(tmp_path)
    for number in range(12):
        topic.write(block([bytes([number]) * (10 * KIB)], first=number))
    ahead = list[int]()
    fetch = BatchFetcher.fetch
    read = 0

    async def counted(self: BatchFetcher, pointer: Pointer) -> Sequence[BlockPiece]:
        ahead.append(len(ahead) + 1 - read)
        return await fetch(self, pointer)

    monkeypatch.setattr(BatchFetcher, "fetch", counted)
    options = {**topic.options, "columns": "value", "prefetchBytes": "64KiB"}
    reader = MemqSource(options).reader(schema_of(options))
    (split,) = reader.partitions()
    for _ in reader.read(split):
        read += 1
    assert (read, ahead) == (12, [1, 2, 3, 4, 5, 6, *[7] * 6]), "the seventh begins when the first was handed out"


def test_a_read_that_ends_early_gives_up_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a query with LIMIT."""
    topic = StoredTopic(tmp_path)
    for number in range(2):
        topic.write(block([b"%d" % number], first=number))
    fetch = BatchFetcher.fetch
    begun, given_up = list[Pointer](), list[Pointer]()

    async def hanging(self: BatchFetcher, pointer: Pointer) -> Sequence[BlockPiece]:
        begun.append(pointer)
        try:
            if len(begun) > 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.append(pointer)
            raise
        return await fetch(self, pointer)

    monkeypatch.setattr(BatchFetcher, "fetch", hanging)
    options = {**topic.options, "columns": "value"}
    reader = MemqSource(options).reader(schema_of(options))
    (split,) = reader.partitions()
    batches = reader.read(split)
    assert isinstance(batches, Generator)
    assert next(batches).column(0).to_pylist() == [b"0"]
    batches.close()
    assert given_up == begun[1:]
    assert len(given_up) == 1
