"""A Spark task whose store misses objects: retries, then a failure or a named damage."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow
import pytest
from awscrt.checksums import crc32c
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.errors import CorruptDataError, InvalidSettingError, NotFoundError
from memq.format.batch import BlockPiece, is_whole
from memq.format.blocks.header import Buffer
from memq.limits import BLOCK_HEADER_BYTES
from memq.runtime.logs import EventLog
from memq.spark.options import MISSING_S, read_options
from memq.spark.read.arrow_rows import RowMaker
from memq.spark.read.planner import BatchPart, TaskSettings
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.task import _Ahead, _Fetched, _rows_of, settings_of
from memq.spark.stores import StoreUrls
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from tests.skipping_loop import LoopClock, run_skipping
from tests.unit.fetched_batch import BODY, POINTER, Shelf, stored_object


class HidingShelf(Shelf):
    """A store that answers "not found" for its object until `hidden_s`."""

    def __init__(self, hidden_s: float) -> None:
        super().__init__(stored_object())
        self.hidden_s = hidden_s

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        if LoopClock().monotonic() < self.hidden_s:
            raise NotFoundError(f"no object '{key}'")
        return await super().get_range(key, offset, length)


async def no_broker(store: str, key: str, offset: int, length: int) -> Buffer:
    raise AssertionError("no broker is asked")


def task_settings(policy: str = "fail", **options: str) -> TaskSettings:
    given = read_options({"topics": "clicks", "brokers": "a:1", "onDamaged": policy, **options}, "batch")
    return settings_of(given, StoreUrls({}), ReadFilter())


def fetched(hidden_s: float, settings: TaskSettings, *, by_index: bool = False) -> tuple[_Fetched, float]:
    """Return what a task fetches of a batch whose object is hidden for so long, and the virtual time it took."""

    async def main() -> tuple[_Fetched, float]:
        confirmed = ConfirmedReads(EventLog(LoopClock()), missing_s=settings.missing_s)
        shelf = HidingShelf(hidden_s)
        ahead = _Ahead(
            BatchFetcher("direct", no_broker, lambda store: shelf, confirmed),
            [BatchPart(0, 7, POINTER, by_index=by_index)],
            settings,
        )
        found = await ahead.next()
        assert found is not None
        await ahead.close()
        return found, LoopClock().monotonic()

    return run_skipping(main())


def bytes_of(pieces: Sequence[BlockPiece]) -> bytes:
    return b"".join(bytes(piece.data) for piece in pieces)


@pytest.mark.parametrize("by_index", [False, True])
def test_an_object_that_is_hidden_for_five_seconds_is_read(by_index: bool, caplog: pytest.LogCaptureFixture) -> None:
    found, seconds = fetched(5.0, task_settings(), by_index=by_index)
    assert is_whole(found.pieces)
    assert bytes_of(found.pieces) == BODY
    assert 5.0 <= seconds < 10.0
    assert "object-missing: no object 'k'; asking again for 30 s" in caplog.text.replace(POINTER.locations[0].key, "k")


def rows_of(found: _Fetched, settings: TaskSettings, *columns: str) -> list[pyarrow.RecordBatch]:
    kinds = {"value": BinaryType(), "damage": StringType()}
    maker = RowMaker(StructType([StructField(name, kinds[name]) for name in columns]), range(0))
    return list(_rows_of(found, settings, maker, None))


@pytest.mark.parametrize("by_index", [False, True])
def test_an_object_that_stays_away_fails_the_task_after_the_time_of_a_consumer(by_index: bool) -> None:
    settings = task_settings()
    found, seconds = fetched(1_000.0, settings, by_index=by_index)
    assert seconds == pytest.approx(MISSING_S) == pytest.approx(30)
    with pytest.raises(CorruptDataError, match="its object is missing"):
        rows_of(found, settings, "value")


def test_with_skip_the_loss_is_named_in_the_column_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    settings = task_settings("skip", missingSeconds="2")
    found, seconds = fetched(1_000.0, settings)
    assert seconds == pytest.approx(2)
    (row,) = rows_of(found, settings, "value", "damage")
    assert "its object is missing" in row.column("damage")[0].as_py()
    caplog.clear()
    assert rows_of(found, settings, "value") == []
    assert "spark.damage-skipped: topic 'clicks' at 0:7:0" in caplog.text
    assert "its object is missing" in caplog.text


def test_a_block_that_its_producer_made_unreadable_is_skipped_whatever_the_option(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each try would meet it again: a stream stopped for ever."""
    settings = task_settings("fail")
    found, _ = fetched(0.0, settings)
    first, *others = found.pieces
    broken = bytearray(first.data)
    broken[BLOCK_HEADER_BYTES + 2] ^= 0x40  # the length of a value
    broken[4:8] = crc32c(bytes(broken[8:])).to_bytes(4, "little")
    poisoned = found._replace(pieces=[first._replace(data=memoryview(bytes(broken))), *others])
    rows = sum(each.num_rows for each in rows_of(poisoned, settings, "value"))
    assert rows == sum(piece.records for piece in others)
    assert "spark.damage-skipped: topic 'clicks' at 0:7:0" in caplog.text
    broken[-1] ^= 1  # damage behind the producer stops the task
    damaged = found._replace(pieces=[first._replace(data=memoryview(bytes(broken))), *others])
    with pytest.raises(CorruptDataError, match="block 0 of object"):
        rows_of(damaged, settings, "value")


def test_the_time_is_an_option_with_bounds() -> None:
    assert fetched(5.0, task_settings(missingSeconds="0"))[1] == pytest.approx(0.2)
    for wrong in ("-1", "1.5", "soon"):
        with pytest.raises(InvalidSettingError, match="missingSeconds"):
            task_settings(missingSeconds=wrong)
