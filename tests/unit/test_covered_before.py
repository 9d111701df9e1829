"""The batches that a position covers that no reader has reached, for example after a reset of its group (G5)."""

from __future__ import annotations

import pytest

from memq.client.consumer import offset_resolver
from memq.client.consumer.offset_resolver import COVERED_OFFSETS, TAIL_OFFSETS, OffsetResolver
from memq.topic import Covered, Position
from tests.unit.queue_model import PARTITION, Log
from tests.unit.test_offset_resolver import SETTINGS, LogReader, ask
from tests.unit.test_position_search import at, batch, found

WINDOW_MS = SETTINGS.reader_window_ms


class Written(Log):
    """A log of batches with a second between them."""

    now_ms = 10_000_000

    def write(self, epoch: int, *numbers: int, writer: int = 0, kind: str = "data", step_ms: int = 1_000) -> None:
        for number in numbers:
            self.now_ms += step_ms
            self.add(batch(epoch, number, writer=writer, kind=kind), time_ms=self.now_ms)


def covered(log: Log, offset: int, *writers: int) -> Covered:
    resolver = OffsetResolver(LogReader(log))
    return ask(resolver.covered_before(PARTITION, offset, SETTINGS, writers or (0,)))


def test_batches_of_a_long_epoch_and_all_lower_ones_are_covered() -> None:
    log = Written()
    log.write(2, 0, 1)
    log.write(3, 0, 1, 2)
    log.write(3, 3, 4, step_ms=WINDOW_MS)
    assert covered(log, 7) == ((0, 3, (3, 5)),)
    assert covered(log, 6) == ((0, 3, (3, 4)),), "epoch 3 began more than a window ago"
    assert covered(log, 5) == ((0, 0, (2, 2, 3, 3)),), "late batches of epoch 2 may come"
    assert covered(log, 2) == ((0, 0, (2, 2)),)
    assert covered(log, 0) == ()
    restored = (batch(2, 0), batch(2, 1), *(batch(3, number) for number in range(5)))
    assert found(at(covered(log, 6)), *restored).position == Position(0, 0), "all were sealed at one time"
    later = [batch(3, number, sealed_ms=4 * WINDOW_MS) for number in range(5)]
    assert found(at(covered(log, 6)), batch(2, 0), batch(2, 1), *later).position == Position(0, 6)


def test_few_entries_are_read_of_a_long_log() -> None:
    log = Written()
    log.write(3, *range(100), step_ms=WINDOW_MS // 10)
    reads: list[int] = []

    class Counting(LogReader):
        async def read(self, partition: object, offset: int, bytes_max: int) -> object:  # type: ignore[override]
            reads.append(offset)
            return await super().read(PARTITION, offset, bytes_max)

    resolver = OffsetResolver(Counting(log))  # type: ignore[arg-type]
    assert ask(resolver.covered_before(PARTITION, 100, SETTINGS, (0,))) == ((0, 3, (3, 100)),)
    assert len(reads) <= 2 * TAIL_OFFSETS + 2


@pytest.mark.parametrize("away", [COVERED_OFFSETS - 2, COVERED_OFFSETS + TAIL_OFFSETS])
def test_the_last_batch_of_a_quiet_writer_is_searched_for(away: int) -> None:
    log = Written()
    log.write(5, 8, writer=7)
    log.write(3, *range(away))
    quiet = ((7, 5, (5, 9)),) if away < COVERED_OFFSETS else ()
    assert covered(log, away + 1, 0, 7) == ((0, 3, (3, away)), *quiet)
    assert covered(log, 1, 0, 7) == ((7, 0, (5, 9)),)


def test_an_epoch_without_a_batch_covers_no_lower_ones() -> None:
    log = Written()
    log.write(2, 0)
    log.write(3, 0, kind="opened")
    log.write(3, 1, kind="ended", step_ms=2 * WINDOW_MS)
    assert covered(log, 3) == ((0, 2, (2, 1, 3, 0)),)


def test_a_queue_that_shows_less_for_a_moment_covers_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_resolver, "COVERED_OFFSETS", 4)
    log = Written()
    log.write(3, *range(6), step_ms=WINDOW_MS)
    assert covered(log, 99) == ((0, 3, (3, 6)),), "no more than the log has"
