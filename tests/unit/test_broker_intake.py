"""Received bytes under a small memory budget: held bytes stay unchanged, reading stops and continues."""

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.broker.ingest.connection import Outbox
from memq.broker.ingest.intake import MOVED_BYTES_MAX, Intake
from memq.broker.ingest.partial_frames import Region
from memq.broker.ingest.slabs import READ_BYTES_MIN, TRIM_SHARE, Slab, SlabPool
from memq.broker.partition.append import ProducerState
from memq.broker.partition.ring import RingStream
from memq.errors import MemqError, ThrottledError
from memq.limits import (
    KIB,
    MIB,
)
from memq.protocol.frames import PREFIX, AckLevel, Api
from tests.contract.manual_clock import ManualClock
from tests.unit.peers import HoldingPartition, House, Peer, Wire

SLAB = 64 * KIB
BUDGET = 2 * MIB
PIECES = (1, 15, 16, 17, 90, 1_000, 20_000, 300_000)
SIZES = [(1, 80), (1, 900, 5_000), (40_000, 70_000), (5, 60_000, 300_000, 700_000), (900_000,)]


def run(work: Callable[[], None]) -> None:
    """Run a test in an event loop, which the connections ask for."""

    async def inside() -> None:
        work()

    asyncio.run(inside())


def fill(peer: Peer, dice: random.Random, sizes: tuple[int, ...]) -> None:
    for _ in range(dice.randrange(1, 12)):
        if not peer.sends_blocks or dice.random() < 0.15:
            peer.add_request(dice.choice((0, 3, 700, 9_000, 200_000)))
        else:
            peer.add_block(dice.choice(sizes))


def drive(house: House, peers: list[Peer], dice: random.Random, hold: float) -> None:
    """Let everyone send until all is sent; memory comes back at random, and always when nobody can continue."""
    while not all(peer.done for peer in peers):
        moved = False
        for peer in dice.sample(peers, len(peers)):
            moved |= peer.step(dice.choice(PIECES))
            house.check()
            waits = peer.connection in house.intake.waiting or peer.connection in house.intake.partial.growing
            assert peer.sends_blocks or peer.dead or peer.reads() or waits
        if dice.random() < 0.02:
            dice.choice(peers).die()
            moved = True
        if len(house.partition.ring) and (not moved or dice.random() > hold):
            for _ in range(dice.randrange(1, len(house.partition.ring) + 1)):
                house.release_some(dice)
            moved = True
        house.wake()
        assert moved or any(peer.may_go_on() for peer in peers), "all memory is back, yet nobody reads"


def finish(house: House, peers: list[Peer], dice: random.Random) -> None:
    """Compare every byte with what was sent; then all memory must be back."""
    while len(house.partition.ring):
        house.release_some(dice)
    house.wake()
    alive = [peer for peer in peers if not peer.dead]
    assert not house.intake.starved
    assert not house.intake.waiting
    assert not house.intake.partial.growing
    assert all(peer.reads() for peer in alive)
    for peer in peers:
        blocks, bodies = house.received_of(peer), house.requests.bodies.get(peer.connection, [])
        assert blocks == peer.blocks[: len(blocks)]
        assert bodies == peer.bodies[: len(bodies)]
        assert peer.dead or (len(blocks), len(bodies)) == (len(peer.blocks), len(peer.bodies))
    for peer in alive:
        peer.die()
    assert house.pool.leased_bytes == house.intake.slab.size
    assert house.intake.slab.references == 1
    assert house.intake.partial.own_bytes == 0
    assert not house.intake.readers


@given(seed=st.integers(0, 1 << 32), sizes=st.sampled_from(SIZES))
def test_whatever_the_interleaving_every_byte_stays_and_everyone_ends(seed: int, sizes: tuple[int, ...]) -> None:
    def work() -> None:
        dice = random.Random(seed)
        house = House(BUDGET, SLAB)
        peers = [Peer(number, house, sends_blocks=dice.random() > 0.2) for number in range(dice.randrange(1, 12))]
        for peer in peers:
            fill(peer, dice, sizes)
        drive(house, peers, dice, hold=dice.choice((0.0, 0.5, 0.95, 1.0)))
        finish(house, peers, dice)

    run(work)


def starve(house: House, size: int = 5_000) -> Peer:
    """Let one producer use up the budget; return it, with more to send."""
    greedy = Peer(0, house)
    while not house.intake.starved:
        greedy.add_block(size)
        while greedy.step(1 << 20):
            pass
    return greedy


def test_a_starved_broker_reads_no_blocks_but_requests() -> None:
    def work() -> None:
        house = House(BUDGET, SLAB)
        greedy = starve(house)
        assert not greedy.reads()
        consumer, producer = Peer(1, house, sends_blocks=False), Peer(2, house)
        assert not producer.reads(), "a stream was opened, and its connection reads on"
        for _ in range(3 * BUDGET // 50_000):
            consumer.add_request(50_000)
            while consumer.step(7_000):
                assert house.intake.starved
        assert house.requests.bodies[consumer.connection] == consumer.bodies
        finish(house, [greedy, consumer, producer], random.Random(0))

    run(work)


def test_a_frame_that_waits_for_a_region_gets_it_before_anything_new_begins() -> None:
    def work() -> None:
        dice = random.Random(0)
        house = House(BUDGET, SLAB)
        large, small = Peer(1, house), Peer(2, house)
        greedy = starve(house)
        while house.intake.starved:
            house.release_some(dice)
            house.wake()
        large.add_block(BUDGET // 2)
        small.add_block(100)
        while large.reads():  # its memory grows with what has come
            assert large.step(20_000), "there is no room for so large a frame"
        assert list(house.intake.waiting) == [large.connection]
        assert not greedy.reads()
        while not large.reads():
            assert not small.reads(), "others begin while a frame that has begun waits"
            house.release_some(dice)
            house.wake()
        drive(house, [greedy, large, small], random.Random(1), hold=0.5)
        finish(house, [greedy, large, small], dice)

    run(work)


def test_a_frame_that_no_memory_can_hold_is_refused_and_no_client_waits_for_it() -> None:
    """A changed bit in a length stopped the broker: its frame waited for more than the whole budget."""

    def work() -> None:
        house = House(BUDGET, SLAB)
        greedy, wrong, other = starve(house), Peer(1, house), Peer(2, house)
        while house.intake.starved:
            house.release_some(random.Random(0))
            house.wake()
        wrong.data += PREFIX.pack(BUDGET + 1, Api.METADATA, 0, 0, 9) + bytes(50)
        with pytest.raises(AssertionError, match=f"a frame of {BUDGET + 17} bytes is larger than the memory"):
            wrong.step(1_000)
        wrong.die()
        other.add_block(100)
        drive(house, [greedy, other], random.Random(1), hold=0.5)
        finish(house, [greedy, other], random.Random(2))

    run(work)


def test_connection_that_closes_while_it_waits_leaves_its_turn_to_the_next() -> None:
    def work() -> None:
        house = House(BUDGET, SLAB)
        first, second = Peer(1, house), Peer(2, house)
        for peer in (first, second):
            peer.add_block(BUDGET // 2)
            peer.step(200)
        third = Peer(3, house)
        third.add_block(BUDGET // 2)
        third.step(200)
        assert list(house.intake.partial.growing) == [second.connection, third.connection]
        first.die()
        house.wake()
        assert second.reads()
        second.die()
        house.wake()
        drive(house, [third], random.Random(0), hold=1.0)
        finish(house, [first, second, third], random.Random(0))

    run(work)


class Waiting:
    """A connection whose frame gets a region when the test says so."""

    reads_on = False
    half_since_s: float | None = None
    host = ""

    def __init__(self) -> None:
        self.fits = False
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def take_region(self) -> bool:
        self.calls.append("take_region")
        return self.fits

    def refuse(self, error: MemqError) -> None:
        self.calls.append(error.code)


def test_a_frame_behind_one_that_is_given_up_gets_its_region_at_once() -> None:
    intake = Intake(SlabPool(BUDGET, SLAB))
    starving: list[bool] = []
    intake.starving = lambda: starving.append(intake.starved)
    first, second, third = (Waiting() for _ in range(3))
    for reader in (first, second, third):
        intake.readers[reader] = None
    intake.wait(first)
    intake.wait(second)
    assert starving == [True], "memory becomes short once"
    second.fits = True
    intake.feed()
    assert "take_region" not in second.calls, "it is not its turn"
    intake.forget(third)
    assert "take_region" not in second.calls
    intake.forget(first)
    assert (list(intake.readers), list(intake.waiting)) == ([second], [])
    assert second.calls[-2:] == ["take_region", "resume"]
    assert not intake.starved


def test_cached_slabs_are_reclaimed_before_reading_stops() -> None:
    pool = SlabPool(BUDGET, SLAB)
    cached = [slab for slab in (pool.lease(SLAB) for _ in range(BUDGET // SLAB)) if slab is not None]
    wanted: list[int] = []

    def reclaim(count: int) -> None:
        wanted.append(count)
        pool.release(cached.pop())

    pool.reclaim = reclaim
    assert pool.lease(SLAB) is not None
    assert wanted == [SLAB]
    assert pool.refusals == 0


def test_a_refused_lease_is_reported_once_when_memory_comes_back() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    report: list[int] = []
    pool.freed = lambda: report.append(pool.leased_bytes)
    slabs = [pool.lease(SLAB) for _ in range(4)]
    assert pool.lease(1) is None
    for slab in slabs:
        assert slab is not None
        pool.release(slab)
    assert report == [3 * SLAB]


def test_a_slab_that_is_released_too_often_is_an_assertion() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    slab = pool.lease(SLAB)
    assert slab is not None
    pool.release(slab)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(slab)


@pytest.mark.parametrize("populates", [True, False])
def test_a_slab_is_zeroed_memory_of_its_size_on_any_system(populates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not populates:
        monkeypatch.delattr(mmap, "MAP_POPULATE", raising=False)
    slab = Slab(3 * mmap.PAGESIZE)
    assert bytes(slab.view) == bytes(3 * mmap.PAGESIZE)
    assert (slab.size, slab.references) == (3 * mmap.PAGESIZE, 0)


def test_spare_and_leased_slabs_together_stay_within_the_budget() -> None:
    pool = SlabPool(8 * SLAB, SLAB)
    slabs = [pool.lease(SLAB) for _ in range(8)]
    for slab in slabs[1:]:
        assert slab is not None
        pool.release(slab)
    assert pool.held_bytes == 8 * SLAB
    large = pool.lease(5 * SLAB)
    assert large is not None
    assert pool.held_bytes <= 8 * SLAB
    assert pool.lease(3 * SLAB) is None
    for _ in range(4):  # a part of what was not wanted at a time
        pool.trim(0)
    assert pool.held_bytes == 6 * SLAB


def test_an_intake_needs_a_slab_at_least() -> None:
    with pytest.raises(AssertionError, match="budget below one slab"):
        Intake(SlabPool(SLAB - 1, SLAB))


def test_the_beginning_of_a_small_frame_moves_to_where_the_next_read_goes() -> None:
    pool = SlabPool(BUDGET, SLAB)
    intake = Intake(pool)
    old, reader = intake.slab, cast(Any, Wire())
    intake.buffer(None)[:5] = b"begin"
    intake.cursor = 5
    small = intake.reserve(reader, old, 0, 5, 100)
    assert small is not None
    assert intake.follow(reader, small) is small, "nothing came behind it: it reads on in place"
    large = intake.reserve(reader, old, intake.cursor, intake.cursor, MOVED_BYTES_MAX + 1)
    assert large is not None
    references = old.references
    moved = intake.follow(reader, small)
    assert (moved.slab, moved.filled - moved.start, moved.end - moved.start) == (old, 5, 100)
    assert bytes(old.view[moved.start : moved.filled]) == b"begin"
    assert (moved.end, old.references) == (intake.cursor, references)
    assert len(intake.buffer(moved)) == SLAB - moved.filled
    intake.cursor += 1
    assert intake.follow(reader, large) is large, "moving it costs more than the read that it saves"
    intake.cursor = SLAB - 100
    assert intake.follow(reader, moved) is moved, "there is no room"


# ---- slabs: the bound, what stays, and what goes back ----------------------------------------------


def leased(pool: SlabPool, size: int = SLAB) -> Slab:
    slab = pool.lease(size)
    assert slab is not None
    return slab


def test_the_pool_gives_its_whole_budget_and_leaves_what_it_is_asked_to_leave() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    assert leased(pool, 1).size == SLAB
    assert leased(pool, SLAB + 1).size == SLAB + 1
    assert pool.lease(SLAB, leave_bytes=SLAB) is None
    assert pool.lease(SLAB, leave_bytes=SLAB - 1) is not None
    assert pool.leased_bytes == 3 * SLAB + 1
    assert pool.refusals == 1


def test_the_pool_asks_for_what_is_missing_and_refuses_what_does_not_come() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    wanted: list[int] = []
    pool.reclaim = wanted.append
    leased(pool, 3 * SLAB)
    assert pool.lease(2 * SLAB + 5) is None
    assert (wanted, pool.refusals) == ([SLAB + 5], 1)
    assert leased(pool, SLAB).size == SLAB


def test_a_lease_that_is_not_refused_leads_to_no_wake_up() -> None:
    pool = SlabPool(4 * SLAB, SLAB)
    woken: list[int] = []
    pool.freed = lambda: woken.append(1)
    pool.release(leased(pool))
    assert not woken


def test_a_slab_with_more_references_stays_leased_and_one_of_another_size_is_not_kept() -> None:
    pool = SlabPool(8 * SLAB, SLAB)
    slab, large = leased(pool), leased(pool, 2 * SLAB)
    slab.references += 1
    pool.release(slab)
    assert pool.leased_bytes == 3 * SLAB
    pool.release(slab)
    pool.release(large)
    assert (pool.leased_bytes, pool.held_bytes) == (0, SLAB)
    assert leased(pool) is slab, "memory that is there already is used again"


def test_spare_slabs_that_were_wanted_since_the_last_trim_stay() -> None:
    pool = SlabPool(64 * SLAB, SLAB)
    slabs = [leased(pool) for _ in range(20)]
    for slab in slabs:
        pool.release(slab)
    pool.trim(0)  # all were wanted a moment ago
    assert pool.held_bytes == 20 * SLAB
    wanted = [leased(pool) for _ in range(5)]
    for slab in wanted:
        pool.release(slab)
    pool.trim(15 * SLAB)
    assert pool.held_bytes == 20 * SLAB, "15 were not wanted, and so many are kept"
    pool.trim(12 * SLAB)
    assert pool.held_bytes == (20 - 8 // TRIM_SHARE - 1) * SLAB


# ---- a client that does not read, and a connection that ends ---------------------------------------


def connected_peer() -> tuple[House, Peer]:
    """A client that has said HELLO and has a stream for blocks."""
    house = House(BUDGET, SLAB)
    peer = Peer(0, house)
    assert peer.step(len(peer.data))
    return house, peer


def test_a_broker_reads_nothing_from_a_client_that_does_not_read_its_answers() -> None:
    def work() -> None:
        _, peer = connected_peer()
        peer.connection.pause_writing()
        assert (peer.reads(), peer.connection.outbox.congested) == (False, True)
        peer.connection.resume_writing()
        assert (peer.reads(), peer.connection.outbox.congested) == (True, False)

    run(work)


def test_a_client_is_read_again_when_it_reads_and_memory_is_there() -> None:
    def work() -> None:
        _, peer = connected_peer()
        peer.connection.pause()
        peer.connection.pause_writing()
        peer.connection.resume_writing()
        assert not peer.reads(), "memory is short"
        peer.connection.resume()
        assert peer.reads()
        peer.connection.pause_writing()
        peer.connection.pause()
        peer.connection.resume()
        assert not peer.reads(), "its answers wait"
        peer.connection.resume_writing()
        assert peer.reads()

    run(work)


def test_a_connection_that_closes_is_not_read_again() -> None:
    """The transport of an event loop refuses it, as the one here does."""

    def work() -> None:
        _, peer = connected_peer()
        peer.connection.pause()
        peer.connection.pause_writing()
        peer.connection.close()
        peer.connection.resume_writing()
        peer.connection.resume()
        assert not peer.reads()

    run(work)


def test_a_connection_is_refused_once_and_its_streams_end_with_it() -> None:
    def work() -> None:
        house, peer = connected_peer()
        stream = peer.connection.streams[1]
        peer.connection.refuse(ThrottledError("too much"))
        written = bytes(peer.wire.written)
        peer.connection.refuse(ThrottledError("too much"))
        assert bytes(peer.wire.written) == written
        assert peer.connection.closed
        assert house.services.counters.rejected_connections == 1
        peer.die()
        assert (stream.open, peer.connection.streams) == (False, {})

    run(work)


def test_an_ack_or_a_throttle_for_a_stream_that_is_gone_is_not_sent() -> None:
    def work() -> None:
        _, peer = connected_peer()
        connection, first = peer.connection, peer.connection.streams[1]
        second = RingStream(1, connection, HoldingPartition().appender, ProducerState(1), AckLevel.ALL, 0)
        connection.bind(second)
        peer.wire.written.clear()
        connection.send_ack(first, AckLevel.ALL, 5, 1)
        connection.send_throttle(first, 0, ThrottledError("full"))
        assert (bytes(peer.wire.written), first.open) == (b"", True)
        connection.send_throttle(second, 0, ThrottledError("full"))
        written = bytes(peer.wire.written)
        assert (written[4], second.open) == (Api.THROTTLE, False)
        connection.send_throttle(second, 0, ThrottledError("full"))
        assert bytes(peer.wire.written) == written, "it is closed already"
        connection.send_ack(second, AckLevel.ALL, 5, 1)
        assert len(peer.wire.written) > len(written), "what it sent before is acked all the same"

    run(work)


class Socket(Wire):
    """A transport whose socket holds `unsent` bytes."""

    unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent


def test_a_client_is_late_when_it_read_nothing_for_the_whole_time() -> None:
    async def work() -> None:
        clock, wire = ManualClock(), Socket()
        outbox = Outbox(clock)
        assert outbox.unsent_bytes == 0
        outbox.write(b"lost: there is no connection yet")
        outbox.transport = cast(asyncio.Transport, wire)
        wire.unsent = 900
        clock.advance(60_000)
        assert not outbox.is_stuck(clock.monotonic(), 5_000), "the socket takes all"
        outbox.stop()
        clock.advance(5_000)
        assert not outbox.is_stuck(clock.monotonic(), 5_000)
        clock.advance(1)
        assert outbox.is_stuck(clock.monotonic(), 5_000)
        outbox.note_progress(clock.monotonic())
        assert outbox.is_stuck(clock.monotonic(), 5_000), "nothing was read"
        wire.unsent = 899
        outbox.note_progress(clock.monotonic())
        assert not outbox.is_stuck(clock.monotonic(), 5_000)
        clock.advance(5_001)
        outbox.note_progress(clock.monotonic())
        assert outbox.is_stuck(clock.monotonic(), 5_000), "it read one byte, and then no more"
        waiting = asyncio.create_task(outbox.writable())
        await asyncio.sleep(0)
        assert not waiting.done()
        outbox.release_waiters()
        await waiting
        assert not outbox.is_stuck(clock.monotonic(), 5_000)
        outbox.write(b"x")
        wire.close()
        outbox.write(b"y")
        assert bytes(wire.written) == b"x"

    asyncio.run(work())


def test_an_eighth_of_the_memory_is_left_for_frames_that_have_begun_and_two_slabs_at_least() -> None:
    for slabs, left in ((40, 5), (8, 2)):
        pool = SlabPool(slabs * SLAB, SLAB)
        intake = Intake(pool)
        while not intake.starved:
            intake.cursor = SLAB
            leased(pool)
            intake.after_read(cast(Any, SimpleNamespace(reads_on=True)))
        free = (pool.budget_bytes - pool.leased_bytes) // SLAB
        assert free in (left, left - 1), "the lease of the test itself comes before the intake's"


def test_only_the_region_at_the_cursor_of_the_current_slab_may_grow_beyond_its_end() -> None:
    pool = SlabPool(BUDGET, SLAB)
    intake, reader = Intake(pool), cast(Any, Wire())
    first = intake.reserve(reader, intake.slab, 0, 0, 100)
    assert first is not None
    assert intake.at_cursor(first)
    second = intake.reserve(reader, intake.slab, 100, 100, 50)
    assert second is not None
    assert (intake.at_cursor(first), intake.at_cursor(second)) == (False, True)
    assert len(intake.buffer(first)) == 100
    other = Region(leased(pool), 0, 0, intake.cursor, intake.cursor)
    assert not intake.at_cursor(other), "another slab, with as many bytes"
    assert len(intake.buffer(other)) == intake.cursor


def test_a_slab_is_read_into_while_it_has_room_for_one_read() -> None:
    pool = SlabPool(BUDGET, SLAB)
    intake = Intake(pool)
    slab, reader = intake.slab, cast(Any, SimpleNamespace(reads_on=True))
    intake.cursor = SLAB - READ_BYTES_MIN
    intake.after_read(reader)
    assert intake.slab is slab
    intake.cursor += 1
    intake.after_read(reader)
    assert intake.slab is not slab
