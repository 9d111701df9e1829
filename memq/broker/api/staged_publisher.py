"""Publishes pieces of a writer's batch for one partition, each once, in any order of requests.

Theory. The first commit of a batch puts its manifest, which never changes. So the number of a piece in the manifest
identifies the piece. The pointer of piece 3 has the writer's progress, 4. A writer that repeats its request, after
hours, a crash or a change of owner, gets the progress, and continues from there. Within the dedup window, a piece whose
pointer lands late is known by its blocks, like any other batch. A writer commits its batches one after another, with
growing ids, so every batch below the last one is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from memq.broker.partition.ownership import Ownership, batch_of
from memq.broker.partition.staged_batch import StagedBatch, check_bounds, staged_batch, staged_index
from memq.broker.partition.topic_processor import TopicProcessor
from memq.errors import IdentityConflictError, InvalidRequestError, MemqError, MovedError, TooLargeError, TooOldError
from memq.format.key import staged_prefix
from memq.format.object import ObjectIndex
from memq.format.pointer import NamedProducer
from memq.limits import BATCH_ID_END, NAMED_PRODUCERS_MAX, STAGED_PIECES_MAX
from memq.protocol.admin_messages import PublishStaged, WirePiece
from memq.storage_handlers import ObjectReader
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.topic import CLOCK_ERROR_MS, check_name, writer_id

READS_AT_ONCE_MAX = 8
INDEX_BYTES_MAX = 16 << 20


class _Published:
    """Waits until all batches that were added are settled; the first error counts."""

    def __init__(self) -> None:
        self.waiting = 0  # number of added batches
        self._settled = 0
        self._error: MemqError | None = None
        self._changed = asyncio.Event()

    def settle(self, error: MemqError | None) -> None:
        """Note that a batch is in the queue, or the error with which it was given up."""
        self._settled += 1
        self._error = self._error or error
        self._changed.set()

    async def wait(self) -> None:
        """Return when all batches are in the queue. Raises: the first error of a batch that is not."""
        while self._settled < self.waiting:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error


async def publish_staged(processor: TopicProcessor, ask: PublishStaged) -> int:
    """Publish the requested pieces that are not published yet; return how many the queue then holds.

    Raises: InvalidRequestError for impossible pieces; as `publish_pieces`.
    """
    check_name(ask.writer, "writer")
    check_pieces(processor, ask)
    return await publish_pieces(processor, ask)


async def publish_pieces(processor: TopicProcessor, ask: PublishStaged, unit: NamedProducer | None = None) -> int:
    """Do the same for checked pieces.

    `unit`: they are of a unit that a state log names, so that the sweep keeps their objects. The pointer of the last
    piece has its number (H4).
    Raises: InvalidRequestError, TooLargeError. TooOldError for a manifest whose objects the sweep may delete, or whose
    batch may have been published and forgotten. CorruptDataError when an object does not match the manifest;
    NotFoundError when it was deleted.
    MovedError, RetryableError: the writer repeats the request.
    """
    async with processor.staging:
        await processor.appender.idle_of_staged()
        own = processor.own
        if own is None:
            raise MovedError(f"{processor.name} is not open any more")
        if unit is None:
            _check_remembered(processor, own, ask)
        elif own.named.last_unit(unit.producer) >= unit.last_sequence:  # another request was faster
            return ask.pieces_total
        held = _held(own, ask, names_max=NAMED_PRODUCERS_MAX if unit is None else BATCH_ID_END)
        if ask.only_check:
            return held
        if held >= ask.first + len(ask.pieces):
            return held
        if held < ask.first:
            raise InvalidRequestError(
                f"pieces from {ask.first} on, but only {held} are published", hint="continue after these"
            )
        published = _Published()
        for batch in await read_pieces(processor, ask, held, published.settle, unit):
            await processor.appender.append_staged(own, batch)
            published.waiting += 1
        await published.wait()
        return _held(own, ask) if ask.remember else ask.first + len(ask.pieces)


def check_pieces(processor: TopicProcessor, ask: PublishStaged) -> None:
    """Refuse impossible pieces. Raises: InvalidRequestError."""
    prefix = f"{staged_prefix(processor.services.settings.cluster)}{ask.writer}/objects/"
    if ask.store not in processor.services.stores:
        raise InvalidRequestError(f"store {ask.store[:60]!a} is not one of this cluster")
    if not (
        0 <= ask.batch_id < BATCH_ID_END and 0 <= ask.manifest < 1 << 32 and 0 < len(ask.pieces) <= STAGED_PIECES_MAX
    ):
        raise InvalidRequestError(
            f"batch {ask.batch_id} with {len(ask.pieces)} pieces, 1 to {STAGED_PIECES_MAX} are allowed"
        )
    if not 0 <= ask.first <= ask.first + len(ask.pieces) <= ask.pieces_total < BATCH_ID_END:
        raise InvalidRequestError(f"pieces {ask.first}+{len(ask.pieces)} of {ask.pieces_total}")
    for piece in ask.pieces:
        check_bounds(piece)
        if not piece.key.startswith(prefix) or piece.object_bytes - piece.index_offset > INDEX_BYTES_MAX:
            raise InvalidRequestError(f"object {piece.key[:120]!a} was not staged by writer '{ask.writer}'")


def _check_remembered(processor: TopicProcessor, own: Ownership, ask: PublishStaged) -> None:
    """Refuse a batch of an unknown writer whose manifest is about as old as records of the topic may be.

    An owner forgets a writer after a silence of that length. An earlier attempt may have published the batch, at the
    time of its manifest or later; two clocks may differ. Raises: TooOldError.
    """
    kept_ms = processor.topic.settings.kept_ms_max
    if not (kept_ms and ask.remember) or own.named.get(writer_id(ask.writer)) is not None:
        return
    age_ms = processor.services.runtime.clock.wall_ms() - ask.created_ms
    if age_ms > kept_ms - 2 * CLOCK_ERROR_MS:
        raise TooOldError(
            f"batch {ask.batch_id} of writer '{ask.writer}' was first committed {age_ms} ms ago; since then topic"
            f" '{processor.topic.name}', which keeps records for {kept_ms} ms, may have published and forgotten it",
            hint="read whether the topic had the batch; if it did not, stage its rows again under a new batch id",
        )


def _held(own: Ownership, ask: PublishStaged, names_max: int = NAMED_PRODUCERS_MAX) -> int:
    """Return how many pieces of the batch the queue holds.

    A batch before the writer's last one is complete.
    """
    known = own.named.get(writer_id(ask.writer))
    if not ask.remember:
        return ask.first
    if known is None:
        if len(own.named) >= names_max:
            raise TooLargeError(
                f"partition {own.partition} remembers {len(own.named)} names, more are not allowed",
                hint="a name is forgotten when it was silent for the retention of the topic; use fewer names",
            )
        return 0
    last = batch_of(known)
    if ask.batch_id > last:
        return 0
    if ask.batch_id < last:
        if ask.created_ms > known.last_seen_ms + CLOCK_ERROR_MS:
            raise InvalidRequestError(
                f"batch {ask.batch_id} of writer '{ask.writer}' was begun after its batch {last} was there",
                hint="batch ids of a writer grow: give a stream with a new checkpoint a new writer name",
            )
        return ask.pieces_total
    if known.last_sequence >= known.pieces:
        if known.manifest != ask.manifest and not ask.any_manifest:
            raise IdentityConflictError(
                f"batch {last} of writer '{ask.writer}' was committed before, by a manifest that is gone:"
                " its rows and those of now can't be compared",
                hint="give other rows a batch id of their own; for the same rows there is nothing to do",
            )
        return ask.pieces_total
    if known.manifest != ask.manifest:
        raise InvalidRequestError(
            f"batch {last} of writer '{ask.writer}' is published in part, by another manifest",
            hint="the store has lost or replaced the manifest of the batch: restore it, or use another writer name",
        )
    return known.last_sequence


def _until_s(processor: TopicProcessor, piece: WirePiece, created_ms: int) -> float:
    """Return until when (monotonic s) a pointer to a piece may be handed over: half the age of the sweep.

    The sweep deletes no object below the whole age. Raises: TooOldError when the time is over.
    """
    clock = processor.services.runtime.clock
    age_ms = clock.wall_ms() - created_ms
    left_ms = processor.services.settings.staged_age_ms // 2 - age_ms
    if left_ms < 0:
        raise TooOldError(
            f"object '{piece.key}' was staged {age_ms} ms ago",
            hint="staged_age_ms of the brokers is twice what a commit may take",
        )
    return clock.monotonic() + left_ms / 1000


async def check_stored(processor: TopicProcessor, ask: PublishStaged, unit: NamedProducer) -> None:
    """Check that the indexes of all pieces of a part can be read. Raises: as `publish_pieces`."""
    await read_pieces(processor, ask, ask.first, lambda error: None, unit)


async def read_pieces(
    processor: TopicProcessor,
    ask: PublishStaged,
    held: int,
    settle: Callable[[MemqError | None], None],
    unit: NamedProducer | None,
) -> list[StagedBatch]:
    """Read the indexes of the pieces from number `held` on; return their batches."""
    turn = asyncio.Semaphore(READS_AT_ONCE_MAX)
    store = processor.services.stores[ask.store]
    target = (processor.services.settings.cluster, processor.topic.id, processor.partition)

    async def read(number: int, piece: WirePiece) -> StagedBatch:
        async with turn:
            index = await ConfirmedReads().read([Way(f"object '{piece.key}'", partial(_index_of, store, piece))])
        writer = NamedProducer(
            producer=writer_id(ask.writer),
            epoch=0,
            last_sequence=number + 1,
            batch_id=str(ask.batch_id),
            manifest=ask.manifest,
            pieces=ask.pieces_total,
        )
        writers: tuple[NamedProducer, ...] = (writer,) if ask.remember else ()
        if unit is None:
            until_s = _until_s(processor, piece, index.meta.created_ms)
        else:
            writers += (unit,) if number + 1 == ask.pieces_total else ()
            now_ms = processor.services.runtime.clock.wall_ms()
            until_s = _until_s(processor, piece, now_ms)
        return staged_batch(index, piece, ask.store, target, writers, settle, until_s)

    pieces = list(enumerate(ask.pieces, ask.first))[held - ask.first :]
    return list(await asyncio.gather(*(read(number, piece) for number, piece in pieces)))


async def _index_of(store: ObjectReader, piece: WirePiece) -> ObjectIndex:
    tail = await store.get_range(piece.key, piece.index_offset, piece.object_bytes - piece.index_offset)
    return staged_index(tail, piece)
