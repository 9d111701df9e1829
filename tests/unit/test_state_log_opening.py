"""The opening of a state log: its calls, damage, wrong answers, newer owners. On virtual time."""

from __future__ import annotations

import asyncio

import pytest

from memq.errors import (
    DeniedError,
    EpochFencedError,
    LogLostError,
    MemqError,
    NotFoundError,
    NotReadyError,
    QueueError,
    StoreError,
    TimedOutError,
    UnsupportedFormatError,
)
from memq.format.state_log.entry import (
    OpenedState,
)
from memq.notification import Entries, Entry
from memq.notification.memory import MemoryQueue
from memq.state_log.log_reading import read_state_log
from memq.state_log.state_log import SCANS_MAX
from tests.model.state_log import MACHINE
from tests.skipping_loop import LongestWait, now_s, skip
from tests.unit.state_log_rig import ANSWER_S, LOG, NAME, Rig, claim, on_rig, pauses


def test_an_opening_names_its_broker_with_64_random_bits() -> None:
    async def work(rig: Rig) -> None:
        log = rig.log()
        assert (log.is_owner, log.proved_s) == (False, float("-inf"))
        for call in (log.counted, lambda: log.machine(MACHINE)):
            with pytest.raises(NotReadyError, match=f"{NAME} is not open"):
                call()
        await log.open(7)
        (opened,) = rig.contents()
        assert opened == OpenedState(LongestWait(1).getrandbits(64), "b1")
        assert log.is_owner
        assert (await log.fresh(), log.highest_epoch, log.proved_s) == (7, 7, 10)

    on_rig(work)


def test_an_opening_without_an_answer_ends_in_time() -> None:
    async def work(rig: Rig) -> None:
        rig.queue.hangs = {"publish"}
        with pytest.raises(TimedOutError, match="no answer in 5 s to 'opened' of epoch 1"):
            await rig.log().open(1)
        assert now_s() == 10 + ANSWER_S
        assert rig.queue.times("span") == []

    on_rig(work)


@pytest.mark.parametrize("error", [QueueError("away"), DeniedError("no right"), NotFoundError("starting")])
def test_an_opening_fails_with_its_publish_and_reads_nothing(error: MemqError) -> None:
    async def work(rig: Rig) -> None:
        rig.queue.errors["publish"] = [error]
        with pytest.raises(type(error)):
            await rig.log().open(1)
        assert rig.queue.times("span") == []

    on_rig(work)


def test_a_fenced_opening_learns_the_highest_epoch_if_the_log_can_be_read() -> None:
    async def work(rig: Rig) -> None:
        await rig.opened(9)
        log = rig.log()
        with pytest.raises(EpochFencedError):
            await log.open(3)
        assert log.highest_epoch == 9
        log = rig.log()
        rig.queue.changes = [lambda found: (_ for _ in ()).throw(UnsupportedFormatError("newer"))]
        with pytest.raises(EpochFencedError):
            await log.open(3)
        assert log.highest_epoch == 0

    on_rig(work)


def test_reads_of_an_opening_are_repeated_with_growing_pauses() -> None:
    async def work(rig: Rig) -> None:
        rig.queue.errors["span"] = [QueueError("away"), NotFoundError("starting"), *[DeniedError("no right")] * 6]
        log = await rig.opened()
        assert rig.queue.times("span") == pytest.approx([10, *(10 + each for each in pauses(8))])
        assert rig.events[0] == ("state-log-retry", f"{NAME}, try 1: away")
        assert rig.events[-1][1].startswith(f"{NAME}, try 8: ")
        assert log.is_owner

    on_rig(work)


def test_a_read_of_an_opening_that_hangs_is_repeated_and_continues_where_it_was() -> None:
    async def work(rig: Rig) -> None:
        first = await rig.opened()
        for request in range(3):
            await first.propose(MACHINE, claim(0, request))
        await first.close()
        rig.queue.calls.clear()

        def cut(found: Entries) -> Entries:
            rig.queue.hangs = {"read"}
            asyncio.get_running_loop().call_later(ANSWER_S + 0.01, rig.queue.hangs.clear)
            return Entries(list(found)[:2], found[0].offset + 2)

        rig.queue.changes = [cut]
        begin_s = now_s()
        second = await rig.opened(2)
        assert now_s() == pytest.approx(begin_s + ANSWER_S + 0.1)
        assert len(rig.queue.times("span")) == 1
        assert second.counted().machines == {MACHINE: b"[[[0, 0]], [0, 1, 2]]"}

    on_rig(work)


def test_an_opening_reads_to_its_own_entry_when_the_queue_states_an_earlier_end() -> None:
    async def work(rig: Rig) -> None:
        first = await rig.opened()
        await first.propose(MACHINE, claim(0, 1))
        await first.close()
        rig.queue.span_ends = [1]
        rig.queue.changes = [lambda found: Entries(list(found)[:2], 2)]
        second = await rig.opened(2)
        assert second.counted().offset == 3

    on_rig(work)


def test_an_opening_whose_log_ends_in_a_hole_knows_no_state() -> None:
    async def work(rig: Rig) -> None:
        await rig.put(1, 0, OpenedState(1, "b"))
        rig.queue.span_ends = [9] * SCANS_MAX
        rig.queue.changes = [lambda found: found, *[lambda found: Entries([], 9)] * 2] * SCANS_MAX
        with pytest.raises(LogLostError, match=f"{NAME}: the state log begins at 9, and its state is known below 0"):
            await rig.log().open(2)
        opened = [each for each in rig.contents() if each.owner == "b1"]
        assert (len(opened), len(set(opened))) == (SCANS_MAX, 1), "copies, each behind the last read"

    on_rig(work)


def test_an_opening_whose_log_is_trimmed_by_a_newer_owner_starts_over() -> None:
    async def work(rig: Rig) -> None:
        await rig.put(1, 0, OpenedState(1, "b"))
        await rig.put(5, 0, OpenedState(1, "c"))
        await MemoryQueue.trim(rig.queue, LOG, 1)
        rig.queue.logs[LOG].epochs.clear()
        with pytest.raises(EpochFencedError, match=f"{NAME} has epoch 5, above 2"):
            await rig.log().open(2)

    on_rig(work)


def test_a_store_that_fails_is_asked_again_by_the_opening() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened(snapshot_s=1.0)
        await log.propose(MACHINE, claim(0, 1))
        await skip(5)
        await log.close()
        assert rig.snapshots()
        rig.store.errors["get"] = [StoreError("away")] * 40 + [DeniedError("no right")] * 40
        second = await rig.opened(2)
        assert second.counted().machines == {MACHINE: b"[[[0, 1]], [1]]"}
        retries = [text for event, text in rig.events if event == "state-log-retry"]
        assert len(retries) > 1
        assert all(f"{NAME}, try 1: " in each for each in retries), "the pause is short: reads of the store pause, too"
        assert rig.store.errors["get"] == []

    on_rig(work)


def test_damage_that_one_read_shows_is_read_again() -> None:
    async def work(rig: Rig) -> None:
        first = await rig.opened()
        await first.propose(MACHINE, claim(0, 1))
        await first.close()

        def damaged(found: Entries) -> Entries:
            return Entries([found[0], Entry(1, found[1].time_ms, b"x"), *found[2:]], found.next)

        def otherwise(found: Entries) -> Entries:
            return Entries([Entry(0, found[0].time_ms, b"y"), *found[1:]], found.next)

        rig.queue.changes = [damaged, otherwise]
        second = await rig.opened(2)
        assert rig.names() == ["state-log-retry"] * 2
        assert second.counted().machines == {MACHINE: b"[[[0, 1]], [1]]"}
        await second.close()
        rig.damage(1)
        with pytest.raises(LogLostError):
            await rig.log().open(3)
        assert "state-entry-damaged" in rig.names()
        assert any(text.startswith(f"{NAME} offset 1: ") for _, text in rig.events)

    on_rig(work)


def test_a_reader_of_a_log_learns_its_machines_and_that_it_ends_in_a_hole() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await log.propose(MACHINE, claim(0, 1))
        reading = await read_state_log(rig.queue, LOG)
        assert (reading.machines, reading.scan.begin, reading.scan.end) == ({MACHINE}, 0, 2)
        rig.queue.span_ends = [9]
        rig.queue.changes = [lambda found: found, *[lambda found: Entries([], 9)] * 2]
        reading = await read_state_log(rig.queue, LOG)
        assert (reading.scan.begin, reading.scan.end) == (9, 9)

    on_rig(work)
