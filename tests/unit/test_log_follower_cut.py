"""The live audit's reads of a log that was cut and grows again: it reads the new pointers."""

from __future__ import annotations

import pytest

from memq.audit.live.log_follower import LogFollower
from memq.audit.live.partition import PartitionAudit
from memq.audit.live.storage.state import decode_state, encode_state
from memq.audit.minutes import MINUTE_MS, QUEUE
from memq.errors import NotFoundError
from memq.format.blocks.header import Buffer
from memq.format.pointer import Location, encode_pointer
from memq.notification.memory import MemoryQueue
from memq.runtime.logs import EventLog
from memq.topic import Totals
from tests.contract.loopback_queue import LoopbackQueue
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, publication
from tests.skipping_loop import run_skipping, skip
from tests.unit.audited import TOPIC, data_pointer

LOG = TOPIC.read_partition_of(0)
BATCH = 10  # records of one pointer
READ, LEFT = 4, 2  # pointers that were read, and those of them that the log keeps


class CutLog:
    """One log in memory, the audit of its partition, and what follows it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.queue = MemoryQueue(self.clock, refuse="age")
        self.lent = LoopbackQueue(self.queue, self.clock)
        self.audit = PartitionAudit(TOPIC, 0)
        self.restart()

    def restart(self) -> None:
        """Continue with the stored state, as another auditor does."""
        books = decode_state(type(self.audit.state), encode_state(self.audit.state))
        self.audit = PartitionAudit(TOPIC, 0, books)
        self.follower = LogFollower(self.lent, self._read, EventLog(self.clock), self.clock)

    async def _read(self, store: str, key: str, offset: int, length: int) -> Buffer:
        raise NotFoundError(f"object '{key}' does not exist")

    async def publish(self, count: int, *, producer: int = 1, epoch: int = 1, first: int = 0) -> None:
        """Publish batches of a producer, each a minute after the one before."""
        before = len(self.queue.logs[LOG].entries)
        for number in range(first, first + count):
            self.clock.advance(MINUTE_MS)
            place = Location(store="main", key=f"{epoch}-{number}", offset=0, length=100)
            pointer = data_pointer(
                [(producer, BATCH * number, BATCH * (number + 1))],
                epoch=epoch,
                batch_sequence=number,
                locations=(place,),
                totals=Totals(BATCH * (before + number - first), 100 * (before + number - first)),
            )
            await self.queue.publish(publication(self.clock, encode_pointer(pointer), partition=LOG))

    async def follow(self, *, judged: bool = False) -> None:
        """Do some rounds, so that a log that was set apart is read again."""
        for _ in range(3):
            await self.follower.follow({LOG: [self.audit]}, [LOG], judged=[LOG] if judged else [])
            if not self.follower.lacks(LOG):
                self.audit.settle(self.clock.wall_ms())
            await skip(1)

    def delivered(self, producer: int) -> int:
        stream = self.audit.state.streams.get(producer)
        return 0 if stream is None else stream.account.delivered.total

    def unknown_minutes(self) -> int:
        return sum(row.side(QUEUE)["silent"] > 0 for row in self.audit.take_rows().values())


async def begun() -> CutLog:
    """Return a log that was read to its end, and was cut then."""
    world = CutLog()
    await world.lent.create([LOG], STALE_MS)
    await world.publish(READ)
    await world.follow()
    assert (world.delivered(1), world.unknown_minutes()) == (READ * BATCH, 0)
    del world.queue.logs[LOG].entries[LEFT:]
    return world


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("count", [READ - LEFT + 1, 7])
def test_a_log_that_was_cut_and_has_grown_is_read_from_the_cut(
    count: int, restart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        world = await begun()
        await world.publish(count, producer=2, epoch=2)
        if restart:
            world.restart()
        await world.follow()
        assert world.delivered(2) == count * BATCH, "no new record is passed over"
        assert world.unknown_minutes() >= READ - LEFT
        assert sum(getattr(each, "event", "") == "audit.log-cut" for each in caplog.records) == 1
        assert not world.follower.lacks(LOG)
        await world.publish(1, producer=2, epoch=2, first=count)
        await world.follow()
        assert world.delivered(2) == (count + 1) * BATCH
        assert world.audit.take_findings() == []
        await world.follower.close()

    run_skipping(work())


def test_while_a_log_ends_before_what_was_read_nothing_of_it_is_judged() -> None:
    async def work() -> None:
        world = await begun()
        await world.follow()
        assert world.follower.lacks(LOG)
        await world.publish(READ - LEFT, producer=2, epoch=2)
        await world.follow()
        assert (world.delivered(2), world.follower.lacks(LOG)) == ((READ - LEFT) * BATCH, False)
        await world.follower.close()

    run_skipping(work())


def test_a_log_with_the_same_end_is_compared_before_missing_records_are_judged() -> None:
    async def work() -> None:
        world = await begun()
        await world.publish(READ - LEFT, producer=2, epoch=2)
        await world.follow()
        assert world.delivered(2) == 0, "nothing shows it yet"
        await world.follow(judged=True)
        assert world.delivered(2) == (READ - LEFT) * BATCH
        await world.follower.close()

    run_skipping(work())


def test_a_log_that_lost_all_that_was_read_is_read_from_its_beginning() -> None:
    async def work() -> None:
        world = await begun()
        world.queue.logs[LOG].entries.clear()
        await world.publish(READ + 1, producer=2, epoch=2)
        await world.follow()
        assert world.delivered(2) == (READ + 1) * BATCH
        await world.follower.close()

    run_skipping(work())
