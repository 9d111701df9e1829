"""The state log on asyncio, over sound queues and stores: batches, fencing, snapshots, refusals, cut logs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from awscrt.checksums import crc32c

from memq.errors import (
    CorruptDataError,
    EpochFencedError,
    LogCutError,
    LogLostError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    QueueError,
    ThrottledError,
    TooLargeError,
    UnsupportedFormatError,
)
from memq.format.state_log.entry import (
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    decode_state_entry,
    encode_state_entry,
)
from memq.limits import POINTER_BYTES_MAX
from memq.notification import Entry, NotificationQueue, Publication
from memq.notification.memory import MemoryQueue
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.state_log.state_log import StateLog, StateLogSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition
from tests.model.state_log import MACHINE, machines

LOG = ReadPartition("_memq_state", "ab" * 16, 0)
SETTINGS = StateLogSettings("memq", "b1", answer_s=20.0, drain_s=0.1)
HANG_S = 60


class HangingQueue(MemoryQueue):
    """Answers no publish while `hangs` is set; the entry lands if `lands` is set."""

    hangs = lands = False

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        offset = await super().publish(publication) if self.lands or not self.hangs else -1
        if self.hangs:
            await asyncio.get_running_loop().create_future()  # for ever
        return offset


class Rig:
    """State logs over one queue and one store."""

    def __init__(self, queue: NotificationQueue) -> None:
        self.queue = queue
        self.store = MemoryHandler(SystemClock())
        self.lost: list[MemqError] = []
        self.ended = asyncio.Event()

    def log(self, **settings: float) -> StateLog:
        """Return a log that is not open."""
        chosen = replace(SETTINGS, **settings)  # type: ignore[arg-type]  # numbers only
        runtime, events = Runtime(), EventLog(SystemClock())
        return StateLog(self.queue, self.store, runtime, events, LOG, chosen, machines, self.end)

    async def opened(self, epoch: int, **settings: float) -> StateLog:
        """Return an open log."""
        log = self.log(**settings)
        await log.open(epoch)
        return log

    def end(self, error: MemqError) -> None:
        """Note the end of an epoch."""
        self.lost.append(error)
        self.ended.set()

    async def contents(self) -> list[object]:
        """Return the contents of all entries."""
        found = await self.queue.read(LOG, 0, 1 << 30)
        return [decode_state_entry(entry.body).content for entry in found]

    async def put(self, entry: StateEntry) -> None:
        """Publish an entry."""
        await self.queue.publish(Publication(LOG, 0, entry.epoch, Runtime().clock.wall_ms(), encode_state_entry(entry)))


def on_rig(work: Callable[[Rig], Awaitable[None]], queue: NotificationQueue | None = None) -> None:
    """Run a test."""

    async def run() -> None:
        made = queue or HangingQueue(SystemClock())
        await made.create([LOG], 30_000)
        try:
            async with asyncio.timeout(HANG_S):
                await work(Rig(made))
        finally:
            await made.close()

    asyncio.run(run())


def claim(slot: int, request: int) -> bytes:
    return bytes((slot, request))


async def until(log: StateLog, done: Callable[[], bool]) -> None:
    """Wait until something is done; each turn is an entry of the log."""
    while not done():
        await log.fresh()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_an_owner_answers_and_the_next_one_has_the_state(kind: str, tmp_path: Path) -> None:
    async def work(rig: Rig) -> None:
        first = await rig.opened(1)
        assert await asyncio.gather(*(first.propose(MACHINE, claim(0, request)) for request in (1, 2))) == [True, False]
        second = await rig.opened(2)
        assert await second.fresh() == 2
        assert second.machine(MACHINE).snapshot() == b"[[[0, 1]], [1, 2]]"
        assert await second.propose(MACHINE, claim(1, 3)) is True
        with pytest.raises(MovedError):
            await first.propose(MACHINE, claim(2, 4))
        with pytest.raises(MovedError):
            await first.fresh()
        assert [type(error) for error in rig.lost] == [EpochFencedError]
        assert not first.is_owner
        assert second.is_owner
        assert second.counted().machines == {MACHINE: b"[[[0, 1], [1, 3]], [1, 2, 3]]"}
        await first.close()
        await second.close()

    on_rig(work, SqliteQueue(tmp_path / "queue.sqlite", SystemClock()) if kind == "sqlite" else None)


def test_proposals_that_wait_share_an_entry() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened(1)
        await asyncio.gather(*(log.propose(MACHINE, claim(request, request)) for request in range(50)), log.fresh())
        assert len(await rig.contents()) <= 3
        await log.close()

    on_rig(work)


def test_an_opening_with_a_lower_epoch_learns_the_highest() -> None:
    async def work(rig: Rig) -> None:
        owner = await rig.opened(7)
        other = rig.log()
        with pytest.raises(EpochFencedError):
            await other.open(3)
        assert other.highest_epoch == 7
        await owner.close()

    on_rig(work)
    on_rig(work, MemoryQueue(SystemClock(), refuse="age"))


def test_a_log_refuses_proposals_before_its_opening_and_after_its_end() -> None:
    async def work(rig: Rig) -> None:
        log = rig.log(waiting_bytes_max=100)
        with pytest.raises(NotReadyError):
            await log.propose(MACHINE, b"")
        await log.close()
        log = await rig.opened(1, waiting_bytes_max=100)
        with pytest.raises(NotFoundError, match="no machine"):
            await log.propose("other", b"")
        with pytest.raises(ThrottledError):
            await log.propose(MACHINE, b"x" * 101)
        few = await rig.opened(2, callers_max=0)
        with pytest.raises(ThrottledError):
            await few.fresh()
        await few.close()
        large = await rig.opened(3)
        with pytest.raises(TooLargeError):
            await large.propose(MACHINE, b"x" * POINTER_BYTES_MAX)
        await log.close()
        await large.close()
        with pytest.raises(NotReadyError):
            await log.fresh()

    on_rig(work)


@pytest.mark.parametrize("content", [b"\x09", "machine"])
def test_an_unknown_entry_forbids_the_opening(content: object) -> None:
    async def work(rig: Rig) -> None:
        await rig.put(StateEntry(1, 0, OpenedState(1, "b")))
        if content == "machine":
            await rig.put(StateEntry(1, 0, StateDecisions((StateDecision("newer", b""),))))
        else:
            body = bytearray(encode_state_entry(StateEntry(1, 0, StateDecisions(()))))
            body[9] = 9
            body[4:8] = crc32c(bytes(body[8:])).to_bytes(4, "little")
            await rig.queue.publish(Publication(LOG, 0, 1, Runtime().clock.wall_ms(), bytes(body)))
        with pytest.raises(UnsupportedFormatError):
            await rig.log().open(2)

    on_rig(work)


def test_a_closed_log_does_not_know_what_was_on_its_way() -> None:
    async def work(rig: Rig) -> None:
        queue = rig.queue
        assert isinstance(queue, HangingQueue), queue
        log = await rig.opened(1)
        queue.hangs = queue.lands = True
        sent = asyncio.create_task(log.propose(MACHINE, claim(0, 1)))
        await queue.wait({LOG: 1}, HANG_S)
        waits = asyncio.create_task(log.propose(MACHINE, claim(0, 2)))
        await asyncio.sleep(0)
        await log.close()
        with pytest.raises(OutcomeUnknownError):
            await sent
        with pytest.raises(MovedError):
            await waits
        assert rig.lost == []

    on_rig(work)


def test_a_timeout_is_followed_by_the_same_bytes() -> None:
    async def work(rig: Rig) -> None:
        queue = rig.queue
        assert isinstance(queue, HangingQueue), queue
        log = await rig.opened(1, answer_s=0.05)
        queue.hangs = True
        sent = asyncio.create_task(log.propose(MACHINE, claim(0, 1)))
        await asyncio.wait([sent], timeout=0.2)
        assert not sent.done()
        queue.hangs = False
        assert await sent is True
        assert len(await rig.contents()) == 2
        await log.close()

    on_rig(work)


# ---- snapshots -------------------------------------------------------------------------------


def test_a_snapshot_trims_the_log_and_replaces_the_one_before() -> None:
    async def work(rig: Rig) -> None:
        queue = rig.queue
        assert isinstance(queue, HangingQueue), queue
        log = await rig.opened(1, snapshot_s=0.0)
        await log.propose(MACHINE, claim(0, 1))
        await until(log, lambda: queue.logs[LOG].begin > 0)
        (first,) = rig.store.objects
        await log.propose(MACHINE, claim(1, 2))
        await until(log, lambda: len(rig.store.objects) == 1 and first not in rig.store.objects)
        await log.close()
        later = await rig.opened(2)
        assert later.counted().machines == {MACHINE: b"[[[0, 1], [1, 2]], [1, 2]]"}
        assert await later.propose(MACHINE, claim(0, 3)) is False
        await later.close()

    on_rig(work)


def test_a_log_without_its_snapshot_is_lost() -> None:
    async def work(rig: Rig) -> None:
        queue = rig.queue
        assert isinstance(queue, HangingQueue), queue
        log = await rig.opened(1, snapshot_s=0.0)
        await log.propose(MACHINE, claim(0, 1))
        await until(log, lambda: queue.logs[LOG].begin > 0)
        await log.close()
        (key,) = rig.store.objects
        sound = rig.store.objects.pop(key)
        with pytest.raises(LogLostError, match="does not exist"):
            await rig.log().open(2)
        rig.store.objects[key] = sound[:-1] + b"x"
        with pytest.raises(LogLostError, match="checksum"):
            await rig.log().open(3)
        rig.store.objects[key] = sound
        await (await rig.opened(4)).close()

    on_rig(work)


def test_a_snapshot_that_was_stored_with_other_bytes_is_not_named() -> None:
    class Changing(MemoryHandler):
        reads = 0

        async def get(self, key: str, *, checked: bool = True) -> bytes:
            """Return other bytes than those that were put."""
            self.reads += 1
            return (await super().get(key))[:-1] + b"\0"

    async def work(rig: Rig) -> None:
        rig.store = store = Changing(SystemClock())
        log = await rig.opened(1, snapshot_s=0.0)
        await log.propose(MACHINE, claim(0, 1))
        await until(log, lambda: store.reads >= 3)
        assert not any(isinstance(content, StateSnapshot) for content in await rig.contents())
        await log.close()

    on_rig(work)


# ---- logs that are damaged or cut ------------------------------------------------------------


def damage(rig: Rig, at: int, body: bytes) -> None:
    """Change the entry at an offset."""
    assert isinstance(rig.queue, MemoryQueue), rig.queue
    entries = rig.queue.logs[LOG].entries
    entries[at] = Entry(entries[at].offset, entries[at].time_ms, body)


def test_a_damaged_entry_loses_the_state_unless_a_snapshot_covers_it() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened(1)
        await log.propose(MACHINE, claim(0, 1))
        await log.propose(MACHINE, claim(0, 2))
        await log.close()
        damage(rig, 1, b"")
        with pytest.raises(LogLostError, match="begins at 2"):
            await rig.log().open(2)

    on_rig(work)


def test_an_owner_that_reads_a_damaged_entry_ends() -> None:
    async def work(rig: Rig) -> None:
        queue = rig.queue
        assert isinstance(queue, HangingQueue), queue
        log = await rig.opened(1)
        queue.logs[LOG].entries.append(Entry(1, 0, b"damaged"))
        with pytest.raises(OutcomeUnknownError):
            await log.propose(MACHINE, claim(0, 1))
        assert [type(error) for error in rig.lost] == [CorruptDataError]
        await log.close()

    on_rig(work)


@pytest.mark.parametrize("grown", [False, True])
def test_an_owner_ends_when_its_log_was_cut(*, grown: bool) -> None:
    async def work(rig: Rig) -> None:
        queue = rig.queue
        assert isinstance(queue, HangingQueue), queue
        log = await rig.opened(1)
        await log.propose(MACHINE, claim(0, 1))
        await log.propose(MACHINE, claim(0, 2))
        del queue.logs[LOG].entries[1:]
        if grown:
            for number in range(3):
                await rig.put(StateEntry(1, number, StateDecisions(())))
        with pytest.raises(OutcomeUnknownError):
            await log.propose(MACHINE, claim(0, 3))
        assert [type(error) for error in rig.lost] == [LogCutError]
        await log.close()

    on_rig(work)


def test_an_opening_without_an_answer_fails_and_the_next_one_works() -> None:
    async def work(rig: Rig) -> None:
        queue = rig.queue
        assert isinstance(queue, HangingQueue), queue
        queue.hangs = queue.lands = True
        log = rig.log(answer_s=0.05)
        with pytest.raises(MemqError, match="no answer in"):
            await log.open(1)
        queue.hangs = False
        again = await rig.opened(2)
        assert [type(content) for content in await rig.contents()] == [OpenedState, OpenedState]
        await again.close()

    on_rig(work)


def test_a_task_that_fails_ends_the_epoch() -> None:
    class Broken(HangingQueue):
        broken = False

        async def publish(self, publication: Publication) -> int:
            if self.broken:
                raise ZeroDivisionError
            return await super().publish(publication)

    async def work(rig: Rig) -> None:
        assert isinstance(rig.queue, Broken), rig.queue
        log = await rig.opened(1)
        rig.queue.broken = True
        with pytest.raises(OutcomeUnknownError):
            await log.propose(MACHINE, claim(0, 1))
        assert [type(error) for error in rig.lost] == [NotReadyError]
        await log.close()

    on_rig(work, Broken(SystemClock()))


def test_a_queue_that_fails_is_asked_again() -> None:
    class Failing(HangingQueue):
        failures = 0

        async def publish(self, publication: Publication) -> int:
            if self.failures:
                self.failures -= 1
                raise QueueError("away")
            return await super().publish(publication)

    async def work(rig: Rig) -> None:
        assert isinstance(rig.queue, Failing), rig.queue
        log = await rig.opened(1)
        rig.queue.failures = 3
        assert await log.propose(MACHINE, claim(0, 1)) is True
        assert log.proved_s > 0
        await log.close()

    on_rig(work, Failing(SystemClock()))
