"""The parts of transactions in staged objects: checked at their hold, published by their units.

Theory. A part names the manifest of an atomic batch, and the state log names the manifest from the hold until the unit
is done (H5). So the sweep keeps the objects meanwhile, whatever their age is. A part is held only while they are young:
then no pass of the sweep has them on its list (ADR 6).

The target publishes the pieces of the manifest, as those of any staged batch, and the pointer of the last one has the
number of the unit. A writer of batches is remembered with the number of its last piece. So a batch that another
transaction has committed before is not published again. The part of a producer's transaction has one piece.
"""

from __future__ import annotations

from contextlib import suppress

from awscrt.checksums import crc32c

from memq.broker.api.staged_publisher import check_pieces, check_stored, publish_pieces
from memq.broker.holds.taking import (
    IncomingUnit,
    is_there,
    owned,
    pass_over,
    until_ready,
)
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.services import Services
from memq.errors import (
    CorruptDataError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    NotReadyError,
    ObjectExistsError,
    StoreError,
    TooOldError,
    TopicSealedError,
    UnsupportedFormatError,
)
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.key import decided_key, manifest_key
from memq.format.pointer import NamedProducer
from memq.format.staged_manifest import MARK, Manifest, manifest_under
from memq.limits import STAGED_PIECES_MAX
from memq.protocol.admin_messages import PublishStaged, WirePiece
from memq.storage_handlers.confirmed_reads import ConfirmedReads, check_missing, read_sealed


class StagedParts:
    """Checks the parts of one batch when they are held."""

    def __init__(self, key: str, manifest: Manifest, manifest_bytes: int) -> None:
        self.key = key
        self._bytes = manifest_bytes
        self._manifest = manifest
        self._pieces = manifest.by_partition()

    @classmethod
    async def read(cls, services: Services, writer: str, batch_id: int) -> StagedParts:
        """Read the manifest of a batch.

        Raises: NotFoundError, CorruptDataError; InvalidRequestError for a batch without a transaction; TooOldError.
        """
        key = manifest_key(services.settings.cluster, writer, batch_id)
        manifest, body = await read_sealed(services.store, key, manifest_under)
        if not manifest.is_atomic:
            raise InvalidRequestError(f"batch {batch_id} of writer '{writer}' is not one of a transaction")
        made = cls(key, manifest, len(body))
        made.check_age(services)
        return made

    def check_age(self, services: Services) -> None:
        """Refuse objects that the sweep may have on its list. Raises: TooOldError."""
        now_ms = services.runtime.clock.wall_ms()
        created = (each.created_ms for each in self._manifest.objects)
        times = (each if isinstance(each, int) else 0 for each in created)  # 0: of an earlier writer
        age_ms = now_ms - min(times, default=self._manifest.created_ms)
        if age_ms > services.settings.staged_age_ms // 2:
            raise TooOldError(
                f"batch {self._manifest.batch_id} of writer '{self._manifest.writer}' was staged {age_ms} ms ago",
                hint="staged_age_ms of the brokers is twice what a commit may take",
            )

    def lane(self, target: Target, lane: str, hold: HoldId, records: int) -> HeldLane:
        """Return the hold of a part. Raises: InvalidRequestError if the manifest does not have it."""
        pieces = self._pieces.get((target.topic, target.topic_id, target.partition), [])
        found = sum(piece.records for _, piece in pieces)
        if not pieces or found != records or not (self._manifest.is_remembered or len(pieces) == 1):
            place = f"topic '{target.topic}' partition {target.partition}"
            text = f"manifest '{self.key}' has {len(pieces)} pieces with {found} records"
            raise InvalidRequestError(f"{text} for {place}, and the request says {records}")
        return HeldLane(target, lane, (HeldBlock(hold, hold.first + records, 0, 0, self._bytes),))


async def mark_committed(services: Services, manifest: str) -> None:
    """Put the mark that the transaction of a manifest is committed: a restore then takes its pieces (S9).

    Raises: StoreError: try again.
    """
    try:
        await services.store.put(decided_key(manifest), [MARK], crc32c(MARK))
    except ObjectExistsError:
        return


async def take_staged_unit(processor: TopicProcessor, unit: IncomingUnit) -> None:
    """Return when the queue holds all pieces of a staged part, once. Raises: as `take_unit`."""
    await until_ready(processor)
    if await is_there(processor, unit):
        return
    if processor.topic.sealed_ms:
        raise NotReadyError(f"{processor.name} is sealed: its staged parts wait until it is unsealed")
    services, (part,) = processor.services, unit.blocks
    try:
        await _publish(processor, unit, part.key)
    except TopicSealedError as error:
        raise NotReadyError(str(error)) from error
    except UnsupportedFormatError:
        raise  # a broker of a later release reads it
    except (CorruptDataError, InvalidRequestError) as error:  # no later try changes it
        await _check_lost(processor, part.key, error)
        services.counters.lost_held_blocks += 1
        text = f"{processor.name}, unit {unit.number}: the part in '{part.key}' is lost: {error}"
        services.events.error("held-block-lost", text)
    if not await is_there(processor, unit):  # its pieces were published before, or are lost
        await pass_over(processor, unit)


async def _publish(processor: TopicProcessor, unit: IncomingUnit, key: str) -> None:
    """Publish the pieces of a part that are not published yet: all or, if one is lost, none.

    Raises: as `publish_pieces`.
    """
    topic, named = (
        processor.topic,
        NamedProducer(producer=unit.shard, epoch=0, last_sequence=unit.number, records=unit.records),
    )
    reads = ConfirmedReads.patient(processor.services.events)
    manifest, body = await read_sealed(processor.services.store, key, manifest_under, reads)
    pieces = manifest.by_partition().get((topic.name, topic.id, processor.partition), [])

    def ask_from(first: int) -> PublishStaged:
        return PublishStaged(
            topic=topic.name,
            topic_id=topic.id,
            partition=processor.partition,
            writer=manifest.writer,
            batch_id=manifest.batch_id,
            store=manifest.store,
            manifest=crc32c(body),
            pieces_total=len(pieces),
            first=first,
            any_manifest=bool(manifest.source),
            created_ms=manifest.created_ms,
            remember=manifest.is_remembered,
            pieces=[
                WirePiece(
                    key=staged.key,
                    object_bytes=staged.bytes,
                    index_offset=staged.index_offset,
                    offset=piece.offset,
                    length=piece.length,
                    raw_bytes=piece.raw_bytes,
                )
                for staged, piece in pieces[first : first + STAGED_PIECES_MAX]
            ],
        )

    if len(pieces) > STAGED_PIECES_MAX:  # the first ones would be published before the others are read
        ask = ask_from(0)
        ask.only_check = True
        there = await publish_pieces(processor, ask, named)
        for first in range(there, len(pieces), STAGED_PIECES_MAX):
            await check_stored(processor, ask_from(first), named)
    done = 0
    while done < len(pieces):
        ask = ask_from(done)
        check_pieces(processor, ask)
        done = max(done + len(ask.pieces), await publish_pieces(processor, ask, named))


async def _check_lost(processor: TopicProcessor, key: str, error: MemqError) -> None:
    """Return if a part is lost for ever.

    Raises: StoreError if the store lists all of its objects; as `owned`.
    """
    owned(processor)
    if not isinstance(error, NotFoundError):
        return
    store, keys = processor.services.store, [key]
    with suppress(NotFoundError):
        manifest, _ = await read_sealed(store, key, manifest_under)
        keys = [each.key for each in manifest.objects]
    for each in keys:
        with suppress(StoreError):
            await check_missing(processor.services.store, each)
            return
    raise StoreError(f"an object of '{key}' was not found, and the store lists all of them") from error
