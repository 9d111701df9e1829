"""Pieces of a writer's batch at the owner: refused ones, published ones, and errors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from memq.broker.api import staged_publisher as publisher
from memq.broker.api.staged_publisher import (
    INDEX_BYTES_MAX,
    _held,
    _Published,
    _until_s,
    check_pieces,
    publish_staged,
)
from memq.broker.partition.appender import Appender
from memq.broker.partition.ownership import NamedProducers, Ownership
from memq.broker.partition.staged_batch import StagedBatch
from memq.broker.partition.topic_processor import TopicProcessor
from memq.errors import (
    InvalidNameError,
    InvalidRequestError,
    MemqError,
    MovedError,
    StoreError,
    TooLargeError,
    TooOldError,
)
from memq.format.pointer import NamedProducer
from memq.limits import BATCH_ID_END, NAMED_PRODUCERS_MAX, STAGED_PIECES_MAX, TRAILER_BYTES
from memq.protocol.admin_messages import PublishStaged, WirePiece
from memq.topic import CLOCK_ERROR_MS, TopicSettings, writer_id
from tests.contract.manual_clock import ManualClock
from tests.partition_owners import turns

PREFIX = "c/staged/nightly/objects/"
PIECE = WirePiece(key=f"{PREFIX}o", object_bytes=1_000, index_offset=700, offset=100, length=500, raw_bytes=900)
ASK = PublishStaged(
    topic="clicks",
    topic_id="a" * 32,
    partition=0,
    writer="nightly",
    batch_id=7,
    store="main",
    manifest=5,
    pieces_total=4,
    first=1,
    pieces=[PIECE, PIECE],
    created_ms=1_000,
)


def asked(**changes: Any) -> PublishStaged:
    return msgspec.structs.replace(ASK, **changes)


def piece(**changes: Any) -> list[WirePiece]:
    return [msgspec.structs.replace(PIECE, **changes)]


class Owner:
    """A processor as staged pieces see it; `room` says how many batches its ring takes."""

    def __init__(self, room: int = 9) -> None:
        self.clock = ManualClock()
        settings = SimpleNamespace(cluster="c", staged_age_ms=10_000)
        runtime = SimpleNamespace(clock=self.clock)
        limits = SimpleNamespace(of_topic=lambda topic_id: ())
        self.services = SimpleNamespace(settings=settings, stores={"main": None}, runtime=runtime, limits=limits)
        self.topic = SimpleNamespace(name="t", id="00" * 16, settings=TopicSettings(), sealed_ms=0)
        self.name = "topic 'clicks' partition 0"
        self.own: Ownership | None = Ownership(0, 1, 0.0, 0, 30.0, 300_000)
        self.failure: MemqError | None = None
        self.draining = False
        self.changed, self.staging = asyncio.Event(), asyncio.Lock()
        self.room, self.added, self.pumped = room, list[Any](), 0
        self.ring: Any = self
        self.slots: list[Any] = []
        self.appender = Appender(cast(Any, self))

    def __iter__(self) -> Any:
        return iter(self.slots)

    def add_staged(self, batch: Any, now_s: float, now_ms: int) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.added.append(batch)
        return True

    def pump(self) -> None:
        self.pumped += 1


def seen(owner: Owner) -> TopicProcessor:
    return cast(TopicProcessor, owner)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"batch_id": 0, "manifest": 0, "first": 0}, None),
        ({"batch_id": BATCH_ID_END - 1, "manifest": (1 << 32) - 1}, None),
        ({"first": 2}, None),
        ({"pieces": [PIECE] * STAGED_PIECES_MAX, "pieces_total": STAGED_PIECES_MAX + 1}, None),
        ({"pieces": [PIECE], "pieces_total": BATCH_ID_END - 1}, None),
        ({"pieces": piece(object_bytes=700 + INDEX_BYTES_MAX)}, None),
        ({"pieces": piece(raw_bytes=(1 << 53) - (1 << 32) - 1)}, None),
        ({"pieces": piece(raw_bytes=(1 << 53) - (1 << 32))}, InvalidRequestError),
        ({"pieces": piece(raw_bytes=500 - (1 << 32))}, None),
        ({"pieces": piece(raw_bytes=499 - (1 << 32))}, InvalidRequestError),
        ({"writer": "a/b"}, InvalidRequestError),
        ({"store": "other"}, InvalidRequestError),
        ({"batch_id": -1}, InvalidRequestError),
        ({"batch_id": BATCH_ID_END}, InvalidRequestError),
        ({"manifest": -1}, InvalidRequestError),
        ({"manifest": 1 << 32}, InvalidRequestError),
        ({"pieces": []}, InvalidRequestError),
        ({"pieces": [PIECE] * (STAGED_PIECES_MAX + 1), "pieces_total": 99}, InvalidRequestError),
        ({"first": -1}, InvalidRequestError),
        ({"first": 3}, InvalidRequestError),
        ({"pieces": [PIECE], "pieces_total": BATCH_ID_END}, InvalidRequestError),
        ({"pieces": piece(length=0)}, InvalidRequestError),
        ({"pieces": piece(key="c/staged/other/objects/o")}, InvalidRequestError),
        ({"pieces": piece(object_bytes=701 + INDEX_BYTES_MAX)}, InvalidRequestError),
        ({"pieces": [PIECE, *piece(index_offset=1_000 - TRAILER_BYTES)]}, InvalidRequestError),
    ],
)
def test_pieces_are_within_their_bounds(changes: dict[str, Any], error: type[MemqError] | None) -> None:
    if error is None:
        check_pieces(seen(Owner()), asked(**changes))
    else:
        with pytest.raises(error):
            check_pieces(seen(Owner()), asked(**changes))


@pytest.mark.parametrize("writer", ["a/b", "_memq_transactions"])
def test_a_client_names_no_writer_of_memq_itself(writer: str) -> None:
    with pytest.raises(InvalidNameError):
        asyncio.run(
            publish_staged(seen(Owner()), asked(writer=writer, pieces=piece(key=f"c/staged/{writer}/objects/o")))
        )


LAST = NamedProducer(producer=writer_id("nightly"), epoch=0, last_sequence=2, batch_id="7", manifest=5, pieces=4)


@pytest.mark.parametrize(
    ("known", "changes", "held"),
    [
        (None, {}, 0),
        (None, {"remember": False}, 1),
        (LAST, {"remember": False}, 1),
        (LAST, {}, 2),
        (LAST, {"batch_id": 8}, 0),
        (LAST, {"batch_id": 6}, 4),
        (LAST, {"batch_id": 6, "created_ms": 50 + CLOCK_ERROR_MS}, 4),
        (LAST, {"batch_id": 6, "created_ms": 51 + CLOCK_ERROR_MS}, "was begun after its batch 7"),
        (LAST, {"manifest": 6}, "by another manifest"),
        (msgspec.structs.replace(LAST, last_sequence=4), {}, 4),
        (msgspec.structs.replace(LAST, last_sequence=4), {"manifest": 6}, 4),
        (msgspec.structs.replace(LAST, last_sequence=3), {"pieces_total": 9}, 3),
        (msgspec.structs.replace(LAST, last_sequence=4), {"pieces_total": 9}, 9),
    ],
)
def test_remembered_writer_shows_which_pieces_are_published(
    known: NamedProducer | None, changes: dict[str, Any], held: int | str
) -> None:
    own = Ownership(0, 1, 0.0, 0, 30.0, 300_000)
    if known is not None:
        own.learn([known], 50)
    if isinstance(held, int):
        assert _held(own, asked(**{"created_ms": 0, **changes})) == held
    else:
        with pytest.raises(InvalidRequestError, match=held):
            _held(own, asked(**{"created_ms": 0, **changes}))


def test_a_partition_remembers_so_many_writers_and_takes_pieces_of_others_that_need_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Ownership(0, 1, 0.0, 0, 30.0, 300_000)
    count = NAMED_PRODUCERS_MAX - 1
    monkeypatch.setattr(NamedProducers, "__len__", lambda named: count)
    assert _held(own, ASK) == 0
    count += 1
    with pytest.raises(TooLargeError):
        _held(own, ASK)
    assert _held(own, asked(remember=False)) == 1
    own.learn([LAST], 50)
    assert _held(own, ASK) == 2, "it is remembered already"


def test_a_piece_is_published_while_it_is_younger_than_half_the_age_of_the_sweep() -> None:
    owner = Owner()
    now_ms = owner.clock.wall_ms()
    for age_ms in (5_000, 4_000, 0):
        assert _until_s(seen(owner), PIECE, now_ms - age_ms) == owner.clock.monotonic() + (5_000 - age_ms) / 1000
    with pytest.raises(TooOldError, match="staged 5001 ms ago"):
        _until_s(seen(owner), PIECE, now_ms - 5_001)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([None, None], None),
        ([StoreError("first"), StoreError("second")], "first"),
        ([None, StoreError("second")], "second"),
        ([StoreError("first"), None], "first"),
    ],
)
def test_waiter_for_pieces_gets_the_first_error_after_all_are_settled(
    answers: list[MemqError | None], error: str | None
) -> None:
    async def work() -> None:
        published = _Published()
        await published.wait()
        published.waiting = len(answers)
        waits = asyncio.create_task(published.wait())
        for answer in answers:
            await turns(3)
            assert not waits.done()
            published.settle(answer)
        if error is None:
            await waits
        else:
            with pytest.raises(StoreError, match=error):
                await waits

    asyncio.run(work())


def test_a_batch_is_added_when_the_ring_has_room_and_never_to_another_epoch() -> None:
    async def work() -> None:
        owner, batch = Owner(room=0), cast(StagedBatch, object())
        assert owner.own is not None
        adds = asyncio.create_task(owner.appender.append_staged(owner.own, batch))
        owner.changed.set()
        await turns(3)
        assert not adds.done()
        owner.room = 1
        owner.changed.set()
        await adds
        assert (owner.added, owner.pumped) == ([batch], 1)
        for name, value in (("draining", True), ("failure", StoreError("gone")), ("own", None)):
            lost = Owner()
            own = lost.own
            assert own is not None
            setattr(lost, name, value)
            with pytest.raises(MovedError):
                await lost.appender.append_staged(own, batch)

    asyncio.run(work())


def test_pieces_wait_for_those_of_a_requester_that_is_gone() -> None:
    async def work() -> None:
        owner = Owner()
        owner.slots = [SimpleNamespace(staged=None), SimpleNamespace(staged=object())]
        idle = [asyncio.create_task(owner.appender.idle_of_staged()) for _ in range(2)]
        await turns(3)
        assert not any(task.done() for task in idle)
        owner.slots.pop()
        owner.changed.set()
        await asyncio.gather(*idle)
        owner.slots = [SimpleNamespace(staged=object())]
        owner.failure = StoreError("gone")
        with pytest.raises(StoreError):
            await owner.appender.idle_of_staged()

    asyncio.run(work())


def test_published_pieces_are_known_after_those_of_a_closed_requester_settle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the same pieces get a second pointer, and count twice in the totals."""

    async def work() -> None:
        owner, read = Owner(), list[int]()
        assert owner.own is not None

        async def found(processor: Any, ask: PublishStaged, held: int, settle: Any, unit: Any) -> list[Any]:
            read.append(held)
            return []

        monkeypatch.setattr(publisher, "read_pieces", found)
        owner.slots = [SimpleNamespace(staged=object())]
        publishes = asyncio.create_task(publish_staged(seen(owner), asked(first=0)))
        await turns(3)
        owner.own.learn([msgspec.structs.replace(LAST, last_sequence=2)], 51)
        owner.slots.pop()
        owner.changed.set()
        assert await publishes == 2
        assert read == []

    asyncio.run(work())


@pytest.mark.parametrize(
    ("known", "changes", "read_from", "answer"),
    [
        (2, {}, 2, 4),  # the first of two is there
        (1, {}, 1, 4),
        (3, {}, None, 3),
        (0, {}, None, "only 0 are published"),
        (0, {"remember": False}, 1, 3),
    ],
)
def test_the_pieces_that_are_missing_are_read_and_published(
    known: int, changes: dict[str, Any], read_from: int | None, answer: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        owner = Owner()
        assert owner.own is not None
        owner.own.learn([msgspec.structs.replace(LAST, last_sequence=known)], 50)
        read: list[int] = []

        async def found(processor: Any, ask: PublishStaged, held: int, settle: Any, unit: Any) -> list[Any]:
            read.append(held)
            return [settle] * (ask.first + len(ask.pieces) - held)

        async def land() -> None:
            while not owner.added:  # noqa: ASYNC110 - the ring has no event for this
                await asyncio.sleep(0)
            await turns()
            assert not publishes.done()
            assert owner.own is not None
            owner.own.learn([msgspec.structs.replace(LAST, last_sequence=4)], 51)
            for settle in owner.added:
                settle(None)

        monkeypatch.setattr(publisher, "read_pieces", found)
        publishes = asyncio.create_task(publish_staged(seen(owner), asked(**changes)))
        if read_from is not None:
            await land()
        if isinstance(answer, int):
            assert await publishes == answer
        else:
            with pytest.raises(InvalidRequestError, match=answer):
                await publishes
        assert read == ([] if read_from is None else [read_from])
        owner.own = None
        with pytest.raises(MovedError, match="is not open any more"):
            await publish_staged(seen(owner), ASK)

    asyncio.run(work())
