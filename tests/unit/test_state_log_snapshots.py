"""The snapshots of a state log: when they are due, their keys, failures, trims. On virtual time."""

from __future__ import annotations

import pytest

from memq.errors import (
    StoreError,
)
from memq.format.key import parse_state_key
from tests.model.state_log import MACHINE
from tests.skipping_loop import skip
from tests.unit.state_log_rig import ANSWER_S, KEY_S, LOG, NAME, SNAPSHOT_S, Rig, claim, on_rig


def test_a_snapshot_is_taken_when_the_first_decision_is_old_enough() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await skip(SNAPSHOT_S + 1)
        assert [at_s for _, at_s in rig.store.puts] == [10 + SNAPSHOT_S], "`opened` is an entry, too"
        await log.fresh()  # changes nothing
        await skip(200)
        rig.store.puts.clear()
        await log.propose(MACHINE, claim(0, 1))
        await skip(30)
        await log.propose(MACHINE, claim(0, 2))
        await skip(29.5)
        await log.propose(MACHINE, claim(0, 5))
        await skip(0.4)
        assert rig.store.puts == []
        await skip(0.2)
        ((key, at_s),) = rig.store.puts
        assert at_s == 271 + SNAPSHOT_S
        place = parse_state_key(key)
        assert place is not None
        assert (place.epoch, place.offset) == (1, 6)
        (snapshot,) = rig.snapshots()
        assert (snapshot.offset, snapshot.epoch, snapshot.number) == (6, 1, 5)
        assert rig.queue.logs[LOG].begin == 6
        await skip(500)
        assert len(rig.store.puts) == 1
        await log.propose(MACHINE, claim(0, 3))
        await skip(SNAPSHOT_S + 1)
        assert (len(rig.store.puts), list(rig.store.objects)) == (2, [rig.store.puts[-1][0]])

    on_rig(work)


def test_an_opener_takes_a_snapshot_of_what_none_covers() -> None:
    async def work(rig: Rig) -> None:
        first = await rig.opened(1)
        await first.propose(MACHINE, claim(0, 1))
        await first.close()
        await rig.opened(2)
        await skip(SNAPSHOT_S - 1)
        assert rig.store.puts == []
        await skip(2)
        assert len(rig.store.puts) == 1

    on_rig(work)


def test_a_snapshot_that_is_not_stored_is_tried_again_under_its_key_while_it_may_be_named() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await log.propose(MACHINE, claim(0, 1))
        rig.store.errors["put"] = [StoreError("away")] * 11
        await skip(SNAPSHOT_S + 300)
        first_s = 10 + SNAPSHOT_S
        tries = [at_s for _, at_s in rig.store.puts]
        expected = [first_s]
        for count in range(1, 13):
            expected.append(expected[-1] + min(30.0, 0.5 * 2**count))
        assert tries == pytest.approx(expected[: len(tries)])
        assert len(tries) == 13
        keys = [key for key, _ in rig.store.puts]
        assert len(set(keys[:9])) == len(set(keys[9:])) == 1
        assert keys[0] != keys[-1], "it is too old from 170 s on, and the next entry moves the offset"
        assert rig.names() == ["state-snapshot-retry"] * 12
        assert rig.events[0][1] == f"{NAME}, try 1: away"
        assert rig.events[11][1].startswith(f"{NAME}, try 12: ")
        assert len(rig.snapshots()) == 1
        rig.events.clear()
        rig.store.errors["put"] = [StoreError("away")]
        await log.propose(MACHINE, claim(1, 2))
        await skip(SNAPSHOT_S + 10)
        assert [text for _, text in rig.events] == [f"{NAME}, try 1: away"], "a success ends the growth"

    on_rig(work)


def test_a_put_that_takes_longer_than_its_key_may_be_named_ends() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await log.propose(MACHINE, claim(0, 1))
        rig.store.delay_s = 10 * KEY_S
        await skip(SNAPSHOT_S + KEY_S - 1)
        assert rig.names() == []
        rig.store.delay_s = 0.0
        await skip(2)
        assert rig.names() == ["state-snapshot-retry"]
        await skip(2)
        assert len(rig.store.puts) == 2
        assert len({key for key, _ in rig.store.puts}) == 2, "the sweep may take the first one"
        assert len(rig.snapshots()) == 1

    on_rig(work)


@pytest.mark.parametrize("kind", ["trim", "delete", "hang"])
def test_a_trim_that_fails_is_reported_and_the_next_snapshot_trims_more(kind: str) -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await log.propose(MACHINE, claim(0, 1))
        await skip(SNAPSHOT_S + 1)
        begin = rig.queue.logs[LOG].begin
        if kind == "hang":
            rig.queue.hangs = {"trim"}
        else:
            (rig.queue.errors if kind == "trim" else rig.store.errors)[kind] = [StoreError("away")]
        await log.propose(MACHINE, claim(1, 2))
        await skip(SNAPSHOT_S + ANSWER_S + 1)
        rig.queue.hangs.clear()
        assert rig.names() == ["state-trim-failed"]
        assert rig.events[0][1].startswith(f"{NAME} below ")
        assert (rig.queue.logs[LOG].begin > begin) is (kind == "delete")
        assert len(rig.store.objects) == 2
        await log.propose(MACHINE, claim(2, 3))
        await skip(SNAPSHOT_S + 1)
        assert rig.queue.logs[LOG].begin == rig.snapshots()[-1].offset
        assert await log.fresh() == 1

    on_rig(work)
