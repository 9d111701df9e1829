"""Files by hour have all their records, and of two manifests with one number one wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memq.errors import CorruptDataError, DeniedError, InvalidRequestError, InvalidSettingError, StoreError
from memq.runtime.clock import SystemClock
from memq.spark.pipelines.to_files import HOURS_MAX, HourFiles, WrittenFile
from memq.spark.pipelines.topic_files import (
    KEPT,
    File,
    FilesLocation,
    FilesManifest,
    decode_manifest,
    encode_manifest,
    first_of,
    key_of,
    latest,
    location_of_text,
    open_location,
    publish,
)
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Position
from tests.skipping_loop import run_skipping

SCHEMA = pyarrow.schema({"value": pyarrow.int64(), "timestamp": pyarrow.timestamp("us", "UTC")})
HOUR_MS = 3_600_000
FILE = File(key="data/x", date="2026-01-01", hour=3, records=5, bytes=9, least_ms=1, greatest_ms=2)
times = st.lists(st.integers(-(1 << 53) + 1, (1 << 53) - 1) | st.integers(0, 5 * HOUR_MS), max_size=30)


def batch_of(first: int, given_ms: list[int]) -> pyarrow.RecordBatch:
    stamps = pyarrow.array([each * 1_000 for each in given_ms], pyarrow.int64()).cast(SCHEMA.field(1).type)
    numbers = pyarrow.array(range(first, first + len(given_ms)), pyarrow.int64())
    return pyarrow.RecordBatch.from_arrays([numbers, stamps], schema=SCHEMA)


def written(batches: list[list[int]], file_bytes: int) -> list[WrittenFile]:
    files = HourFiles(SCHEMA, "00000-7", file_bytes=file_bytes)
    found: list[WrittenFile] = []
    count = 0
    for given_ms in batches:
        found += files.take(batch_of(count, given_ms))
        count += len(given_ms)
    return [*found, *files.end()]


@settings(max_examples=40)
@given(st.lists(times, max_size=3), st.sampled_from([1, 1 << 20]))
def test_every_record_is_in_one_file_of_its_hour(batches: list[list[int]], file_bytes: int) -> None:
    sent = [time for given_ms in batches for time in given_ms]
    found: dict[int, int] = {}
    for file, data in written(batches, file_bytes):
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
        stamps = [each // 1_000 for each in table.column("timestamp").cast(pyarrow.int64()).to_pylist()]
        assert (file.records, file.bytes) == (table.num_rows, data.size)
        assert (file.least_ms, file.greatest_ms) == (min(stamps), max(stamps))
        assert len({stamp // HOUR_MS for stamp in stamps}) == 1
        assert file.date == "no-date" or file.hour == stamps[0] // HOUR_MS % 24
        found.update(zip(table.column("value").to_pylist(), stamps, strict=True))
        assert file.key.startswith(f"data/{file.date}/{file.hour:02}/00000-7-")
    assert found == dict(enumerate(sent))


def test_open_hours_are_bounded_and_names_tell_the_content() -> None:
    hours = [number * HOUR_MS for number in range(2 * HOURS_MAX)]
    files = HourFiles(SCHEMA, "00000-7")
    ended = [each for hour in hours for each in files.take(batch_of(0, [hour]))]
    assert len(ended) == HOURS_MAX
    assert [file.key for file, _ in written([hours], 1)] == [file.key for file, _ in written([hours], 1)]


def test_manifests_continue_from_one_another() -> None:
    before = FilesManifest(number=4, topic="clicks", topic_id="ab" * 16)
    after = before.next({0: Position(0, 3)}, {0: Position(0, 17, 2)}, (FILE,))
    again = after.next({0: Position(0, 17, 2)}, {0: Position(0, 20)}, (FILE,))
    assert (again.number, again.records, len(again.files)) == (6, 10, 2)
    assert (again.started, again.covered) == ({"0": "0:3:0"}, {"0": "0:20:0"})
    assert again.positions == {0: Position(0, 20)}
    assert decode_manifest(encode_manifest(again), again.key) == again


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", encode_manifest(FilesManifest(number=3, topic="t", topic_id="x"))]
)
def test_data_that_is_no_manifest_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptDataError, match="manifest"):
        decode_manifest(data, "manifests/00000000000000000004.json")


def test_of_two_manifests_of_one_number_one_wins(tmp_path: Path) -> None:
    async def go() -> None:
        async with open_location(FilesLocation((tmp_path / "files").as_uri())) as store:
            manifest = await first_of(store, "clicks", "ab")
            one, other = manifest.next({}, {0: Position(0, 1)}, ()), manifest.next({}, {0: Position(0, 2)}, ())
            assert [await publish(store, each) for each in (one, other, one)] == [True, False, True]
            assert await latest(store) == one
            with pytest.raises(InvalidRequestError, match="holds topic 'clicks'"):
                await first_of(store, "clicks", "cd")
            for number in range(2, 2 * KEPT):
                one = one.next({}, {0: Position(0, number)}, ())
                assert await publish(store, one)
            assert await latest(store) == one
            assert len([entry async for entry in store.list("manifests/")]) == KEPT
            late = manifest.next({}, {0: Position(0, 3)}, ())
            assert not await publish(store, late), "number 1 is free again, and is not the highest"
            assert await latest(store) == one

    asyncio.run(go())


def test_a_listing_that_keeps_showing_a_deleted_manifest_is_an_error() -> None:
    """The pipeline listed and read without end."""

    class StaleListing(MemoryHandler):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
            yield ObjectEntry(key_of(7), 1, 1)

    async def work() -> None:
        with pytest.raises(StoreError, match=f"manifests that do not exist, the last one '{key_of(7)}'"):
            await latest(StaleListing(SystemClock()))

    run_skipping(work())


def test_a_location_that_can_not_be_is_named(tmp_path: Path) -> None:
    async def opened(text: str) -> None:
        async with open_location(location_of_text(text)):
            pass

    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DeniedError, match=r"no folder can be made at .*/file': "):
        asyncio.run(opened(str(tmp_path / "file")))
    with pytest.raises(InvalidSettingError, match="no files can be written to 'hdfs://host/files'"):
        location_of_text("hdfs://host/files")
