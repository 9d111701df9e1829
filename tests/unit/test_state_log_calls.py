"""The calls of a state log: bounds, time-outs, pauses, wrong answers, its end. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from memq.errors import (
    CorruptDataError,
    DeniedError,
    EpochFencedError,
    LogCutError,
    LogLostError,
    MovedError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    QueueError,
    ThrottledError,
    UnsupportedFormatError,
)
from memq.format.state_log.entry import (
    StateDecision,
    StateDecisions,
    StateEntry,
    decision_bytes,
    encode_state_entry,
)
from memq.notification import Entries, Entry
from tests.model.state_log import MACHINE
from tests.skipping_loop import now_s, skip
from tests.unit.state_log_rig import ANSWER_S, DRAIN_S, LOG, NAME, Rig, claim, on_rig, pauses


def test_callers_and_bytes_that_wait_have_bounds() -> None:
    async def work(rig: Rig) -> None:
        size = decision_bytes(MACHINE, claim(0, 1))
        log = await rig.opened(waiting_bytes_max=2 * size)
        rig.queue.hangs = {"publish"}
        first = [asyncio.create_task(log.propose(MACHINE, claim(0, each))) for each in range(2)]
        await skip(1)  # they are in an entry now
        third = asyncio.create_task(log.fresh())
        await skip(1)
        with pytest.raises(ThrottledError, match="3 callers wait with 0 bytes, 3 callers are allowed"):
            async with asyncio.timeout(1):
                await log.fresh()
        with pytest.raises(ThrottledError, match="3 callers are allowed"):
            await log.propose(MACHINE, claim(0, 9))
        with pytest.raises(NotFoundError, match="has no machine 'other'"):
            await log.propose("other", b"")
        rig.queue.hangs.clear()
        await asyncio.gather(*first, third)
        count = len(rig.contents())
        with pytest.raises(ThrottledError, match=f"0 callers wait with 0 bytes, {2 * size} bytes are allowed"):
            await log.propose(MACHINE, b"x" * (2 * size + 1))
        assert await log.propose(MACHINE, claim(1, 9)) is True
        assert len(rig.contents()) == count + 1, "what is refused is in no entry"

    on_rig(work)


def test_waiting_bytes_are_those_of_all_callers() -> None:
    async def work(rig: Rig) -> None:
        size = decision_bytes(MACHINE, claim(0, 1))
        log = await rig.opened(waiting_bytes_max=size + len(claim(0, 1)), callers_max=9)
        rig.queue.hangs = {"publish"}
        tasks = []
        for each in range(3):  # the first is in an entry, two wait
            tasks.append(asyncio.create_task(log.propose(MACHINE, claim(0, each))))
            await skip(0.1)
        with pytest.raises(ThrottledError, match="bytes are allowed"):
            await log.propose(MACHINE, claim(0, 9))
        rig.queue.hangs.clear()
        await asyncio.gather(*tasks)

    on_rig(work)


def test_a_caller_that_gives_up_leaves_the_others_their_outcomes() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        rig.queue.hangs = {"publish"}
        first, second = (asyncio.create_task(log.propose(MACHINE, claim(0, each))) for each in (1, 2))
        await skip(1)
        first.cancel()
        rig.queue.hangs.clear()
        assert await second is False, "the other decision counts all the same"

    on_rig(work)


# ---- steps ---------------------------------------------------------------------------------------


def test_a_publish_that_fails_is_followed_by_a_read_with_growing_pauses() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        rig.queue.calls.clear()
        rig.queue.errors = {"publish": [QueueError("away")], "span": [DeniedError("no right"), *[TimeoutError()] * 4]}
        assert await log.propose(MACHINE, claim(0, 1)) is True
        times = pauses(6)
        assert rig.queue.times("publish") == pytest.approx([10, 10 + times[-1]])
        assert rig.queue.times("span") == pytest.approx([10 + each for each in times])
        assert [text for _, text in rig.events][:2] == [f"{NAME}, try 1: away", f"{NAME}, try 2: no right"]
        rig.events.clear()
        rig.queue.errors = {"publish": [QueueError("away")]}
        assert await log.propose(MACHINE, claim(1, 2)) is True
        assert [text for _, text in rig.events] == [f"{NAME}, try 1: away"], "a success ends the growth"

    on_rig(work)


def test_a_publish_that_hangs_is_repeated_after_its_time() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        rig.queue.calls.clear()
        rig.queue.hangs = {"publish"}
        sent = asyncio.create_task(log.propose(MACHINE, claim(0, 1)))
        await skip(1)
        rig.queue.hangs.clear()
        assert await sent is True
        assert rig.queue.times("publish") == pytest.approx([10, 10 + ANSWER_S + 0.1])

    on_rig(work)


def test_an_owner_reads_to_the_end_that_a_publish_has_shown() -> None:
    """A replica that lags states an earlier end."""

    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await rig.put(1, 7, StateDecisions(()))  # void: of a number that is not the next
        rig.lost.clear()
        sent = asyncio.create_task(log.propose(MACHINE, claim(0, 1)))
        await asyncio.wait([sent])
        assert isinstance(sent.exception(), OutcomeUnknownError)
        assert [type(each) for each in rig.lost] == [LogLostError]

    on_rig(work)


def test_an_answer_does_not_wait_for_the_next_entry() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        rig.queue.delays_s = [1.0, 3.0]
        first = asyncio.create_task(log.propose(MACHINE, claim(0, 1)))
        await skip(0.5)
        second = asyncio.create_task(log.propose(MACHINE, claim(1, 2)))
        await skip(0.6)
        assert (first.done(), second.done()) == (True, False)
        assert await second is True
        assert now_s() == 14

    on_rig(work)


def test_an_answer_does_not_wait_for_the_rest_of_a_read_that_fails() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        rig.queue.lands = True
        rig.queue.span_ends = [9, 9, 9]  # the queue shows nothing at offset 2
        assert await log.propose(MACHINE, claim(0, 1)) is True
        assert now_s() == pytest.approx(10 + pauses(1)[0])

    on_rig(work)


def test_entries_of_a_former_owner_change_nothing() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened(5)
        for number in range(3):
            rig.queue.logs[LOG].epochs.clear()
            await rig.put(4, number, StateDecisions((StateDecision(MACHINE, claim(0, 9)),)))
        rig.queue.span_ends = [1]
        assert await log.propose(MACHINE, claim(0, 1)) is True
        assert (log.counted().offset, log.counted().machines) == (5, {MACHINE: b"[[[0, 1]], [1]]"})

    on_rig(work)


def test_a_higher_opened_ends_the_epoch_and_says_that_nothing_was_done() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened(1)
        await rig.opened(2)
        with pytest.raises(MovedError, match=f"{NAME} has another owner: the decision does not count"):
            await log.propose(MACHINE, claim(0, 1))
        await skip(1)
        assert [type(each) for each in rig.lost] == [EpochFencedError]
        assert rig.names() == ["state-log-retry", "state-log-ended"]
        assert rig.events[-1][1].startswith(f"{NAME}, epoch 1: epoch 1 of the state log is over")
        with pytest.raises(MovedError, match="epoch 1 has ended"):
            await log.fresh()
        await log.close()
        assert len(rig.lost) == 1

    on_rig(work)


def test_an_error_that_does_not_pass_ends_the_epoch() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        rig.queue.errors["publish"] = [UnsupportedFormatError("newer")]
        with pytest.raises(OutcomeUnknownError, match="the decision may count, or not"):
            await log.propose(MACHINE, claim(0, 1))
        await skip(1)
        assert [type(each) for each in rig.lost] == [UnsupportedFormatError]
        assert not log.is_owner

    on_rig(work)


@pytest.mark.parametrize("kind", ["cut", "other entry", "no entry"])
def test_an_owner_compares_its_last_entry_with_the_log_before_it_reads_on(kind: str) -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await log.propose(MACHINE, claim(0, 1))
        other = encode_state_entry(StateEntry(1, 0, StateDecisions(())))
        answers: dict[str, Callable[[Entries], Entries]] = {
            "cut": lambda found: Entries([Entry(1, 0, other)], found.next),
            "other entry": lambda found: Entries([Entry(2, 0, other)], found.next),
            "no entry": lambda found: Entries([], found.next),
        }
        rig.queue.errors["publish"] = [QueueError("away")]
        rig.queue.changes = [answers[kind]]
        sent = asyncio.create_task(log.propose(MACHINE, claim(1, 2)))
        await asyncio.wait([sent])
        if kind == "cut":
            assert isinstance(sent.exception(), OutcomeUnknownError)
            await skip(1)
            (error,) = rig.lost
            assert isinstance(error, LogCutError)
            assert str(error) == f"{NAME} has another entry than before at offset 1"
        else:
            assert sent.result() is True

    on_rig(work)


def test_a_task_that_fails_is_reported_once() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        rig.queue.errors["publish"] = [ZeroDivisionError("a fault")]
        with pytest.raises(OutcomeUnknownError):
            await log.propose(MACHINE, claim(0, 1))
        await skip(1)
        assert rig.names() == ["state-log-failed", "state-log-ended"]
        assert rig.events[0][1] == f"{NAME}: ZeroDivisionError('a fault')"
        assert [str(each) for each in rig.lost] == [f"{NAME} failed: ZeroDivisionError('a fault')"]

    on_rig(work)


def test_a_close_waits_for_outcomes_for_its_time() -> None:
    async def work(rig: Rig) -> None:
        await rig.log().close()
        log = await rig.opened()
        rig.queue.hangs = {"publish"}
        first = asyncio.create_task(log.propose(MACHINE, claim(0, 1)))
        await skip(0.1)
        second = asyncio.create_task(log.propose(MACHINE, claim(0, 2)))
        await skip(0.9)
        closing = asyncio.create_task(log.close())
        await skip(0.1)
        with pytest.raises(NotReadyError, match="is not open"):
            await log.fresh()
        await closing
        assert now_s() == 11 + DRAIN_S
        with pytest.raises(OutcomeUnknownError):
            await first
        with pytest.raises(MovedError):
            await second
        assert (rig.lost, rig.names(), log.is_owner, len(asyncio.all_tasks())) == ([], [], False, 1)

    on_rig(work)


def test_a_close_ends_with_the_last_outcome() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened(answer_s=1.0)
        rig.queue.hangs = {"publish"}
        first = asyncio.create_task(log.propose(MACHINE, claim(0, 1)))
        await skip(0.5)
        rig.queue.hangs.clear()
        await log.close()
        assert await first is True
        assert now_s() == pytest.approx(10 + 1.0 + 0.1)
        await log.close()

    on_rig(work)


def test_damage_that_stays_ends_the_epoch() -> None:
    async def work(rig: Rig) -> None:
        log = await rig.opened()
        await rig.put(1, 9, StateDecisions(()))
        rig.damage(1, b"damaged")
        with pytest.raises(OutcomeUnknownError):
            await log.propose(MACHINE, claim(0, 1))
        await skip(1)
        assert [type(each) for each in rig.lost] == [CorruptDataError]

    on_rig(work)
