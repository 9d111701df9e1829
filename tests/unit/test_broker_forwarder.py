"""A forwarder alone, on virtual time: its requests, its retries, and when it releases a block."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.ingest.slabs import Slab
from memq.broker.spool import forwarding
from memq.broker.spool.forwarding import BACKOFF_S_MAX, DELETED_S, READ_TIMEOUT_S, UNREAD_S_MAX
from memq.broker.spool.segments import Ticket
from memq.broker.spool.unpublished_blocks import UnpublishedBlock, UnpublishedBlocks
from memq.errors import (
    CorruptDataError,
    IdentityConflictError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    QueueError,
    TimedOutError,
    UnreachableError,
)
from memq.format.blocks.header import parse_header
from memq.format.ranges import RangeSet
from memq.limits import FORWARD_S_MAX, KIB
from memq.notification import Entries
from memq.protocol.frames import Api, decode_forward
from memq.topic import CLOCK_ERROR_MS, ReadPartition
from tests.brokers import events_of, log_lines
from tests.skipping_loop import run_skipping, skip
from tests.unit.forwarder_bench import Bench
from tests.unit.sealed_batches import TOPIC, block, flipped

NAME = "topic 'clicks' partition 0"


def test_blocks_go_to_the_new_owner_once_no_publish_of_the_lost_epoch_can_land() -> None:
    async def work() -> None:
        await skip(1.0)
        bench = Bench(settled_s=7.0)
        ticket = Ticket(lambda: None)
        bench.held.tickets.append(ticket)
        await bench.start()
        assert (bench.forwarder.works, len(bench.forwarder)) == (1, 3)
        assert len(bench.forwarder.describe()) == 3
        await skip(5.99)
        assert bench.located_s == []
        await bench.forwarder.drain()
        assert [data for _, _, data in bench.owner.asked] == bench.blocks
        assert bench.located_s == bench.owner.connects_s == pytest.approx([7.0])
        assert bench.owner.closed == 1
        assert (len(bench.released), len(bench.forwarder), bench.forwarder.works) == (3, 0, 0)
        assert (bench.counters.forwarded_blocks, bench.counters.forward_retries) == (3, 0)
        assert bench.forwarder.changed.is_set()
        assert ticket.released

    run_skipping(work())


def test_blocks_that_the_queue_holds_are_not_forwarded() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.queue.create([bench.read], 30_000)
        await bench.land(*bench.blocks[:2])
        await bench.done()
        assert [data for _, _, data in bench.owner.asked] == bench.blocks[2:]
        assert bench.counters.forwarded_blocks == 1

    run_skipping(work())


def test_an_empty_read_before_the_end_shows_no_block_to_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for the end of the log, and blocks that the queue held were brought to the new owner."""

    async def work() -> None:
        bench = Bench()
        await bench.queue.create([bench.read], 30_000)
        await bench.land(*bench.blocks[:2])
        read, short = bench.queue.read, [True, True]

        async def cut(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            return Entries((), offset) if short and short.pop() else await read(partition, offset, bytes_max)

        monkeypatch.setattr(bench.queue, "read", cut)
        await bench.done()
        assert [data for _, _, data in bench.owner.asked] == bench.blocks[2:]
        assert (short, bench.counters.forward_retries) == ([], 2)

    run_skipping(work())


def test_a_block_is_absent_since_the_last_read_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another owner may publish while the read runs, and the answer may not show it."""

    async def work() -> None:
        bench = Bench(count=1)
        await bench.queue.create([bench.read], 30_000)
        read = bench.queue.read
        begun_s: list[float] = []

        async def slow(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            begun_s.append(asyncio.get_running_loop().time())
            await skip(2.0)
            return await read(partition, offset, bytes_max)

        asked: list[int] = []

        async def take(number: int, data: bytes) -> None:
            (frame,) = [each for each in bench.owner.frames if each.api == Api.FORWARD and each.argument == number]
            asked.append(decode_forward(frame.body)[0].absent_ms)
            await bench.land(data)

        monkeypatch.setattr(bench.queue, "read", slow)
        bench.owner.take = take
        await bench.done()
        last_s = max(each for each in begun_s if each < bench.owner.connects_s[0])
        assert asked == [pytest.approx(1_000 * (last_s - bench.owner.connects_s[0]), abs=20)]

    run_skipping(work())


def test_each_failure_doubles_the_pause_until_some_block_was_taken() -> None:
    async def work() -> None:
        bench = Bench()
        bench.locate_errors = [NotReadyError("not yet"), *[UnreachableError("nobody")] * 6]
        await bench.done()
        pauses_s = [0.1, 0.2, 0.4, 0.8, 1.6, BACKOFF_S_MAX, BACKOFF_S_MAX]
        assert bench.located_s == pytest.approx([sum(pauses_s[:number]) for number in range(8)])
        assert bench.counters.forward_retries == 7

        again = Bench()
        taken = 0

        async def one_at_a_time(number: int, data: bytes) -> None:
            nonlocal taken
            taken += 1
            if taken % 3 == 1:
                await again.land(data)
            else:
                raise NotReadyError("later")

        again.owner.take = one_at_a_time
        await again.done()
        pauses = [later - first for first, later in zip(again.located_s, again.located_s[1:], strict=False)]
        assert all(each == pytest.approx(0.11, abs=0.02) for each in pauses), "each time one was taken"
        assert again.owner.closed == len(again.owner.connects_s), "each connection ends with its try"

    run_skipping(work())


def test_an_answer_is_no_proof(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench = Bench(count=2)
        answered = 0

        async def pretend(number: int, data: bytes) -> None:
            nonlocal answered
            answered += 1
            if answered > 2:
                await bench.land(data)

        bench.owner.take = pretend
        with caplog.at_level("INFO", "memq"):
            await bench.done()
        assert len(bench.owner.asked) == 4
        assert bench.counters.forwarded_blocks == 2
        assert bench.counters.forward_retries == 1

    run_skipping(work())
    (line,) = [line for line in caplog.messages if line.startswith("forward-retry")]
    assert f"host-2:77 took 2 blocks of {NAME} that the queue does not show" in line
    assert line.startswith(f"forward-retry: {NAME}, 2 blocks, try 1:")


def test_a_block_that_is_refused_keeps_no_other_waiting() -> None:
    async def work() -> None:
        bench = Bench(count=3)
        left = 2

        async def refuse_one(number: int, data: bytes) -> None:
            nonlocal left
            if data == bench.blocks[0] and left:
                left -= 1
                raise IdentityConflictError("others are there")
            await bench.land(data)

        bench.owner.take = refuse_one
        await bench.start()
        await skip(0.09)
        assert len(bench.forwarder) == 1
        await bench.forwarder.drain()
        assert [data for _, _, data in bench.owner.asked] == [*bench.blocks, *bench.blocks[:1] * 2]
        assert bench.counters.forwarded_blocks == 3

    run_skipping(work())


def test_the_first_refusal_is_named_and_one_of_a_block_that_landed_all_the_same_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        for together in (forwarding.IN_FLIGHT_BLOCKS_MAX, 1):
            monkeypatch.setattr(forwarding, "IN_FLIGHT_BLOCKS_MAX", together)
            bench = Bench(count=4)
            refused: list[bytes] = []

            async def refuse(number: int, data: bytes, bench: Bench = bench, refused: list[bytes] = refused) -> None:
                at = bench.blocks.index(data)
                if at < 2 and data not in refused:
                    refused.append(data)
                    raise IdentityConflictError(f"others are at {at}")
                await bench.land(data)

            bench.owner.take = refuse
            with caplog.at_level("INFO", "memq"):
                await bench.done()
            assert (bench.counters.forward_retries, len(bench.located_s), len(bench.owner.asked)) == (1, 2, 6)
        landed = Bench(count=1)

        async def land(number: int, data: bytes) -> None:
            await landed.land(data)
            raise IdentityConflictError("it is there already")

        landed.owner.take = land
        await landed.done()
        assert (landed.counters.forward_retries, landed.counters.forwarded_blocks) == (0, 1)

    run_skipping(work())
    retries = [line for line in caplog.messages if line.startswith("forward-retry")]
    assert ["others are at 0" in line for line in retries] == [True, False]
    assert "others are at 1" in retries[1], "each group has its own"


def test_a_copy_is_found_that_the_lost_epoch_knew_as_long_as_the_dedup_window_and_two_clocks_may_say() -> None:
    async def work() -> None:
        bench = Bench(count=1)
        await bench.queue.create([bench.read], 30_000)
        await bench.land(bench.blocks[0])
        await skip((TOPIC.settings.dedup_window_ms + CLOCK_ERROR_MS) / 1000 - 1.0)
        held = UnpublishedBlocks(TOPIC, 0, 1, 0.0, bench.released.append)
        known = RangeSet()
        known.add(0, 1)
        held.add(next(iter(bench.held.blocks)), known)
        bench.held = held
        await bench.done()
        assert bench.owner.asked == []

    run_skipping(work())


def test_a_copy_is_found_in_a_log_that_was_cut_below_what_the_lost_epoch_had_read() -> None:
    async def work() -> None:
        bench = Bench(count=1)
        await bench.queue.create([bench.read], 30_000)
        await bench.land(bench.blocks[0])
        held = UnpublishedBlocks(TOPIC, 0, 5, 0.0, bench.released.append)
        held.add(next(iter(bench.held.blocks)))
        bench.held = held
        await bench.done()
        assert bench.owner.asked == []

    run_skipping(work())


def test_a_copy_is_found_however_long_its_block_is_held() -> None:
    async def work() -> None:
        bench = Bench(count=1)
        await bench.queue.create([bench.read], 30_000)
        await bench.land(bench.blocks[0])
        clock = bench.services.runtime.clock
        lost = SimpleNamespace(
            read_to=1,
            handed_over_s=clock.monotonic(),
            stale_publish_s=(2 * TOPIC.settings.dedup_window_ms) / 1000,
            epoch=4,
            log_was_cut=False,
            last_mark=0,
            opened_wall_ms=clock.wall_ms(),
            opened_s=0.0,
            proof_s=0.0,
        )
        bench.held = UnpublishedBlocks.of_epoch(TOPIC, 0, cast(Any, lost), [], bench.released.append)
        known = RangeSet()
        known.add(0, 1)
        block_ = UnpublishedBlock(parse_header(bench.blocks[0]), Slab(len(bench.blocks[0])), 0, len(bench.blocks[0]))
        block_.slab.view[:] = bench.blocks[0]
        bench.held.add(block_, known)
        await bench.done()
        assert bench.owner.asked == [], "the next owner would publish it, and readers have forgotten the first one"

    run_skipping(work())


@pytest.mark.parametrize("kept", [False, True])
def test_blocks_that_no_owner_takes_for_long_are_given_up_by_name(kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench = Bench(count=2)
        ticket = Ticket(lambda: None)
        if kept:
            bench.held.tickets.append(ticket)
        taken = 0

        async def take_one(number: int, data: bytes) -> None:
            nonlocal taken
            if asyncio.get_running_loop().time() < 300.0 or taken:
                raise MovedError("elsewhere")
            taken += 1
            await bench.land(data)

        bench.owner.take = take_one
        with pytest.raises(TimedOutError, match=f"no owner of {NAME} took 1 blocks for {FORWARD_S_MAX:g} s"):
            await bench.done()
        ended_s = asyncio.get_running_loop().time()
        assert 0 < ended_s - 300.0 - FORWARD_S_MAX < 3 * BACKOFF_S_MAX, "counted from the last one that was taken"
        assert (bench.counters.given_up_blocks, bench.counters.spool_kept_blocks) == (1, int(kept))
        assert (len(bench.released), ticket.released) == (2, False)
        held = [(*source, next_ - first) for source, (first, next_) in bench.forwarder.held_records(TOPIC.id)]
        assert held == [(0, 5, 1)] * kept, "what the next start brings is held"
        assert list(bench.forwarder.held_records("f" * 32)) == []
        await bench.forwarder.drain()  # it is said once

    run_skipping(work())
    (line,) = [line for line in caplog.messages if line.startswith("given-up")]
    assert ("they stay in the spool" in line) == kept
    assert "producer 0000000000000005 sequences 1 to 1" in line or "sequences 0 to 0" in line


def test_only_a_topic_that_is_proven_to_be_deleted_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench = Bench()
        ticket = Ticket(lambda: None)
        bench.held.tickets.append(ticket)
        answers: list[bool | MemqError] = [False, True, False, True, UnreachableError("away"), True, True]
        asked_s: list[float] = []

        async def deleted(topic_id: str) -> bool:
            assert topic_id == TOPIC.id
            asked_s.append(asyncio.get_running_loop().time())
            answer = answers.pop(0)
            if isinstance(answer, MemqError):
                raise answer
            return answer

        bench.coordinator.deleted = deleted  # type: ignore[method-assign]
        bench.locate_errors = [NotReadyError("not yet"), *[NotFoundError("no such topic")] * 4]
        await bench.done()
        assert answers == []
        assert [asked_s[at + 1] - asked_s[at] for at in (1, 3, 5)] == pytest.approx([DELETED_S] * 3)
        assert len(bench.located_s) == 5
        assert (len(bench.released), ticket.released, bench.owner.asked) == (3, True, [])

    run_skipping(work())
    assert events_of(caplog) == ["forward-gone"]


def test_a_coordinator_that_hangs_proves_nothing() -> None:
    async def work() -> None:
        bench = Bench()

        async def hang(topic_id: str) -> bool:
            return bool(await asyncio.get_running_loop().create_future())

        bench.coordinator.deleted = hang  # type: ignore[method-assign]
        assert not await bench.forwarder.deleted(TOPIC.id)
        assert asyncio.get_running_loop().time() == READ_TIMEOUT_S

    run_skipping(work())


def test_some_blocks_are_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        many = Bench(count=70)
        await many.done()
        assert many.owner.most == forwarding.IN_FLIGHT_BLOCKS_MAX
        assert [data for _, _, data in many.owner.asked] == many.blocks
        assert len({when for when, _, _ in many.owner.asked}) == 3
        size = len(many.blocks[0])
        for room, groups in ((3 * size, 2), (3 * size - 1, 3), (1, 6)):
            monkeypatch.setattr(forwarding, "IN_FLIGHT_BYTES_MAX", room)
            bench = Bench(count=6)
            await bench.done()
            assert len({when for when, _, _ in bench.owner.asked}) == groups
            assert bench.counters.forwarded_blocks == 6

    run_skipping(work())


def test_others_under_the_same_identity_are_a_conflict_and_the_block_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        bench, ticket = Bench(count=2), Ticket(lambda: None)
        bench.held.tickets.append(ticket)
        await bench.queue.create([bench.read], 30_000)
        await bench.land(block(0, [b"another"], 5))
        with pytest.raises(IdentityConflictError):
            await bench.done()
        assert not ticket.released, "the spool keeps what was given up, although the other block was taken"
        assert [data for _, _, data in bench.owner.asked] == bench.blocks[1:]
        assert (bench.counters.conflicting_blocks, bench.counters.given_up_blocks) == (1, 1)
        assert bench.counters.forwarded_blocks == 1
        assert len(bench.released) == 2

    run_skipping(work())
    assert events_of(caplog) == ["identity-conflict", "given-up"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_block_is_held_while_what_has_its_sequences_can_not_be_read(lost: bool) -> None:
    """The next owner published it a second time. If the object was lost, the block must go to it in the end."""

    async def work() -> None:
        bench = Bench(count=2)
        await bench.queue.create([bench.read], 30_000)
        await bench.land(bench.blocks[0])
        objects = dict(bench.store.objects)
        bench.store.objects.clear()
        await bench.start()
        await skip(UNREAD_S_MAX - 10)
        assert (len(bench.forwarder), len(bench.released)) == (1, 1)
        bench.store.objects.update({} if lost else objects)
        await bench.forwarder.drain()
        asked = [data for _, _, data in bench.owner.asked]  # a block that is absent does not wait
        assert asked == bench.blocks[1:] + bench.blocks[: int(lost)]
        assert (len(bench.released), bench.counters.given_up_blocks) == (2, 0)

    run_skipping(work())


@pytest.mark.parametrize("damaged", [False, True])
def test_only_a_block_that_is_damaged_here_is_given_up(damaged: bool) -> None:
    async def work() -> None:
        bench = Bench(count=1)
        data = bench.blocks[0]
        if damaged:
            next(iter(bench.held.blocks)).slab.view[10:] = flipped(data, len(data) - 1)
        refused = 0

        async def refuse(number: int, data: bytes) -> None:
            nonlocal refused
            refused += 1
            if refused == 1 or damaged:
                raise CorruptDataError("its checksum fails")
            await bench.land(data)

        bench.owner.take = refuse
        if damaged:
            with pytest.raises(CorruptDataError):
                await bench.done()
        else:
            await bench.done()
        assert refused == (1 if damaged else 2), "damage on the way is another matter"
        assert bench.counters.given_up_blocks == int(damaged)

    run_skipping(work())


def test_an_error_that_nobody_foresaw_is_named_and_lets_go_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench = Bench()
        bench.locate_errors = [cast(MemqError, ValueError("a mistake")), cast(MemqError, TimeoutError())]
        await bench.done()
        assert bench.counters.forwarded_blocks == 3

    run_skipping(work())
    assert log_lines(caplog) == [f"forward-failed: {NAME}: ValueError('a mistake')"]


def test_stopped_forwarder_releases_all_blocks_and_takes_none() -> None:
    async def work() -> None:
        bench = Bench(settled_s=100.0)
        await bench.start()
        await skip(1.0)
        await bench.forwarder.stop()
        assert (len(bench.released), bench.forwarder.works) == (3, 0)
        late = UnpublishedBlocks(TOPIC, 0, 0, 0.0, bench.released.append)
        bench.held = late
        bench.hold(block(9, [b"v" * KIB]))
        bench.forwarder.take(late)
        assert (len(bench.released), len(late), bench.forwarder.works) == (4, 0, 0)

    run_skipping(work())


def test_a_copy_that_retention_removes_before_an_owner_answers_is_not_published_again() -> None:
    async def work() -> None:
        bench = Bench(1)
        bench.locate_errors = [UnreachableError("nobody")] * 100
        await bench.start()
        await skip(0.01)
        await bench.land(*bench.blocks)
        await skip(2 * BACKOFF_S_MAX)
        await bench.queue.trim(bench.read, 1)
        bench.locate_errors.clear()
        await bench.forwarder.drain()
        assert (bench.owner.asked, len(bench.released)) == ([], 1)

    run_skipping(work())


def test_a_queue_that_hangs_is_asked_again() -> None:
    async def work() -> None:
        bench = Bench()
        read, reads = bench.queue.read, 0

        async def slow(*arguments: Any) -> Any:
            nonlocal reads
            reads += 1
            if reads == 1:
                await asyncio.get_running_loop().create_future()
            if reads == 2:
                raise QueueError("not now")
            return await read(*arguments)

        bench.queue.read = slow  # type: ignore[method-assign, assignment]
        await bench.done()
        assert bench.located_s == pytest.approx([READ_TIMEOUT_S + 0.3])

    run_skipping(work())
