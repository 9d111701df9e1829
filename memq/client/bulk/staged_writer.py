"""Writes through the store: tasks stage records as objects, and a driver commits a whole batch, once.

Staged records are not readable before their commit, because no pointer names them. The sweep deletes objects that are
never committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from awscrt.checksums import crc32c
from msgspec import UNSET

from memq.client.arguments import check_connect_timeout, runtime_of
from memq.client.broker_router import BrokerRouter
from memq.client.bulk.atomic_commit import commit_atomically
from memq.client.bulk.staged_object import StagedObjectBuilder
from memq.client.lifecycle import AsyncClosing
from memq.client.link_pool import CONNECT_TIMEOUT_MS, LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.client.observers.audit_recorder import StagedRecorder
from memq.client.observers.reporter import STEP_S_MAX, JobReporter
from memq.client.owner_requests import OwnerRequests
from memq.client.producer.fields import BytesLike, HeadersLike, check_fields, check_many
from memq.errors import (
    CorruptDataError,
    IdentityConflictError,
    InvalidRequestError,
    NotFoundError,
    ObjectExistsError,
    ProtocolError,
    TimedOutError,
    TooOldError,
)
from memq.format.key import manifest_key, manifest_prefix, staged_object_key
from memq.format.staged_manifest import (
    Manifest,
    StagedObject,
    StagedPartition,
    StagedPiece,
    encode_manifest,
    manifest_under,
    same_rows,
)
from memq.limits import BATCH_ID_END, KIB, MIB, PRODUCER_ID_END, STAGED_PIECES_MAX
from memq.protocol.admin_messages import PublishStaged, WirePiece
from memq.protocol.messages import StoreMetadata
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import read_sealed
from memq.topic import Topic, check_name

ANSWER_S = 60.0
PARTITIONS_AT_ONCE_MAX = 16


class StagedWriter:
    """The writer of one task: takes records, returns staged objects.

    No reader sees the records before `StagedCommits.commit`.

    Args:
        cluster, topics, store: name of the cluster and topics as `StagedCommits` returns them, and its open store.
            More topics may be added to `topics` later.
        writer: name of the writer.
        block_bytes: maximum bytes of values, keys and headers in a block; a block has at most 10,000 records.
        object_bytes: approximate size of an object.
    """

    def __init__(
        self,
        cluster: str,
        topics: Mapping[str, Topic],
        store: StorageHandler,
        writer: str,
        *,
        codec: str = "zstd",
        block_bytes: int = 512 * KIB,
        object_bytes: int = 64 * MIB,
        runtime: Runtime | None = None,
    ) -> None:
        self._cluster = check_name(cluster, "cluster")
        self._topics = topics
        self._store = store
        self._writer = check_name(writer, "writer")
        self._codec = codec
        self._block_bytes = block_bytes
        self._object_bytes = object_bytes
        self._runtime = runtime_of(runtime)
        self._staged: list[StagedObject] = []
        self._open = self._builder()

    async def add(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
        partition: int | None = None,
    ) -> None:
        """Stage a record; arguments as those of `memq.Producer.send`.

        Raises: TypeError; TooLargeError, InvalidRequestError, NotFoundError. StoreError, DeniedError: the record is in,
        do not add it again; the next call, or `finish`, puts the object.
        """
        fields = check_fields(value, key, headers, timestamp_ms, tag)
        self._open.add(topic, fields, partition, self._runtime.clock.wall_ms())
        if self._open.bytes >= self._object_bytes:
            await self._put()

    async def add_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> None:
        """Stage many records with one fast call; arguments as those of `memq.Producer.send_many`.

        Raises: as `add`.
        """
        if values:
            many = check_many(values, keys, timestamps_ms, tag)
            self._open.add_many(topic, many, self._runtime.clock.wall_ms())
        if self._open.bytes >= self._object_bytes:
            await self._put()

    async def finish(self) -> list[StagedObject]:
        """Store the remaining records and return all objects, in the order of their records."""
        if not self._open.empty:
            await self._put()
        return self._staged

    async def _put(self) -> None:
        now_ms, draw = self._runtime.clock.wall_ms(), self._runtime.random
        key = staged_object_key(self._cluster, self._writer, draw.getrandbits(64), now_ms)
        buffers, checksum, staged = self._open.build(self._cluster, self._writer, key, now_ms)
        await self._store.put(key, buffers, checksum)
        self._staged.append(staged)
        self._open = self._builder()

    def _builder(self) -> StagedObjectBuilder:
        producer_id = self._runtime.random.randrange(1, PRODUCER_ID_END)
        return StagedObjectBuilder(self._topics, producer_id, block_bytes=self._block_bytes, codec=self._codec)


class StagedCommits(AsyncClosing):
    """The driver: asks for the cluster's data, and commits the batches of one writer.

    With `audit` it reports to the audit as a writer of Spark, if the cluster asks for reports.
    """

    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        writer: str,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        runtime: Runtime | None = None,
        audit: bool = False,
    ) -> None:
        self._runtime = runtime_of(runtime)
        self._writer = check_name(writer, "writer")
        self._events = EventLog(self._runtime.clock)
        self._pool = LinkPool(self._runtime, bootstrap_addresses(brokers), owner="staged writer")
        self._metadata = ClusterMetadata(self._runtime, self._pool)
        self._owners = OwnerRequests(self._runtime, self._pool, self._metadata, ANSWER_S)
        self._router = BrokerRouter(self._pool)
        self._connect_timeout_s = check_connect_timeout(connect_timeout_ms) / 1000
        self._reporter: JobReporter | None = None
        if audit:
            self._reporter = JobReporter("spark-writer", writer, self._runtime, self._pool)

    async def close(self) -> None:
        """Send the last report to the audit, and disconnect."""
        if self._reporter is not None:
            await self._reporter.close(STEP_S_MAX)
        await self._metadata.close()
        await self._pool.close()

    async def connect(self) -> None:
        """Ask for the cluster's name and stores. Raises: UnreachableError."""
        await self._pool.reach(self._connect_timeout_s)
        await self._metadata.all_topics()

    async def topics(self, names: Sequence[str]) -> dict[str, Topic]:
        """Return the topics of these names; create missing ones if the cluster allows that.

        Raises: NotFoundError, UnreachableError.
        """
        await self._pool.reach(self._connect_timeout_s)
        return {name: (await self._metadata.topic(name, create=True)).topic for name in names}

    @property
    def cluster(self) -> str:
        """The cluster's name, after `connect` or `topics`."""
        return self._metadata.cluster

    @property
    def store(self) -> StoreMetadata:
        """The store for staged objects, after `connect` or `topics`: the cluster's first one."""
        return self._metadata.stores[0]

    async def commit(
        self,
        batch_id: int,
        objects: Sequence[StagedObject],
        store: StorageHandler,
        *,
        remember: bool = True,
        source: str = "",
        atomic: bool = False,
        timeout_s: float = 600.0,
    ) -> Manifest:
        """Make a batch of staged objects visible, completely and once, however often it is committed.

        The first commit of a batch decides its content; a later one completes that content. If the later one has
        objects with other records, a job (without `source`) then gets an InvalidRequestError. A stream logs it, because
        its micro-batch may be computed again with another result.
        If the sweep has deleted the manifest of the first commit, nothing can compare them: a job is refused, and for a
        stream the batch counts as committed.
        Batch ids of a writer grow; an id at or below the last one counts as committed. Without `remember`
        no partition stores the writer's name, and a commit can be repeated within the dedup window only. `source`
        names the stream of the batch; a batch of another stream is refused. Returns the committed batch.
        `atomic`: all partitions become visible by one transaction. The first commit decides about that, too.
        Raises: TimedOutError: commit it again; InvalidRequestError, NotFoundError, TooOldError, CorruptDataError.
        """
        if not 0 <= batch_id < BATCH_ID_END:
            raise InvalidRequestError(f"batch id {batch_id} is outside 0 to {BATCH_ID_END - 1}")
        if atomic and not remember:
            raise InvalidRequestError("an atomic commit needs a writer with a name", hint="let partitions remember it")
        manifest, checksum = await self.decide(batch_id, objects, store, source, atomic=atomic)
        turn, parts = asyncio.Semaphore(PARTITIONS_AT_ONCE_MAX), manifest.by_partition().items()
        try:
            async with asyncio.timeout(timeout_s):
                if manifest.is_atomic:
                    await self._publish_atomically(turn, manifest, checksum, timeout_s)
                    parts = {}.items()
                elif remember and not source:  # a refusal by one partition must come before another one publishes
                    async with asyncio.TaskGroup() as group:
                        for staged, pieces in parts:
                            group.create_task(self._check(turn, manifest, checksum, staged, pieces))
                async with asyncio.TaskGroup() as group:
                    for staged, pieces in parts:
                        group.create_task(self._publish(turn, manifest, checksum, staged, pieces, remember=remember))
        except TimeoutError as error:
            raise TimedOutError(
                f"batch {batch_id} of writer '{self._writer}' is not published after {timeout_s:g} s",
                hint="commit it again: published parts are not published twice",
            ) from error
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._check_rows(manifest, objects)
        return manifest

    def _check_rows(self, manifest: Manifest, objects: Sequence[StagedObject]) -> None:
        if not objects or same_rows(manifest.objects, objects):
            return
        records, given = (
            sum(piece.records for each in found for piece in each.pieces) for found in (manifest.objects, objects)
        )
        text = (
            f"batch {manifest.batch_id} of writer '{self._writer}' was committed before with other rows: it has the"
            f" {records} records of then, and none of the {given} of now"
        )
        if not manifest.source:
            raise InvalidRequestError(text, hint="give other rows a batch id of their own")
        self._events.warning("staged.other-rows", text)

    async def finish_last(self, store: StorageHandler) -> Manifest | None:
        """Complete the writer's last batch, whose driver may have died after publishing a part.

        Returns that batch; None if no batch exists, if its staged objects were deleted, or if it was refused because an
        earlier attempt is there.
        Raises: TimedOutError: try again; otherwise as `commit`.
        """
        prefix = manifest_prefix(self.cluster, self._writer)
        keys = [entry.key async for entry in store.list(prefix)]
        if not keys:
            return None
        try:
            last, _ = await read_sealed(store, max(keys), manifest_under)
            return await self.commit(last.batch_id, last.objects, store, source=last.source)
        except (IdentityConflictError, NotFoundError, TooOldError):
            return None

    async def is_decided(self, batch_id: int, store: StorageHandler) -> bool:
        """Whether a commit has decided the content of a batch, as long as its manifest exists."""
        key = manifest_key(self.cluster, self._writer, batch_id)
        return key in [entry.key async for entry in store.list(manifest_prefix(self.cluster, self._writer))]

    async def decide(
        self,
        batch_id: int,
        objects: Sequence[StagedObject],
        store: StorageHandler,
        source: str = "",
        *,
        atomic: bool = False,
    ) -> tuple[Manifest, int]:
        """Store the manifest, or read an existing one; return it with its checksum.

        Raises: InvalidRequestError when that one is of another stream; CorruptDataError when it is damaged.
        """
        key = manifest_key(self.cluster, self._writer, batch_id)
        manifest = Manifest(
            cluster=self.cluster,
            writer=self._writer,
            batch_id=batch_id,
            store=self.store.name,
            created_ms=self._runtime.clock.wall_ms(),
            objects=tuple(objects),
            source=source,
            atomic=True if atomic else UNSET,
        )
        body = encode_manifest(manifest)
        try:
            await store.put(key, [body], crc32c(body))
        except ObjectExistsError:
            manifest, body = await read_sealed(store, key, manifest_under)
            if manifest.source != source:
                raise InvalidRequestError(
                    f"batch {batch_id} of writer '{self._writer}' is of stream '{manifest.source}', not of '{source}'",
                    hint="give each stream a writer name of its own, and a new one with each new checkpoint",
                ) from None
        return manifest, crc32c(body)

    async def _publish_atomically(
        self, turn: asyncio.Semaphore, manifest: Manifest, checksum: int, timeout_s: float
    ) -> None:
        """Publish the parts that partitions do not have yet, by one transaction."""
        if not (missing := await self._missing(turn, manifest, checksum)):
            return
        recorders = {
            (topic, topic_id, partition): self._recorder_of(
                await self._topic(topic, topic_id), manifest, partition, missing[topic, topic_id, partition]
            )
            for topic, topic_id, partition in missing
        }
        for recorder in recorders.values():
            recorder.send(self._runtime.clock.wall_ms())
        await commit_atomically(self._runtime, self._router, manifest, missing, timeout_s)
        if left := await self._missing(turn, manifest, checksum):
            places = ", ".join(f"'{topic}' partition {partition}" for topic, _, partition in list(left)[:3])
            raise CorruptDataError(
                f"batch {manifest.batch_id} of writer '{manifest.writer}' is committed, and {len(left)} partitions"
                f" could not publish their part: {places}",
                hint="the event held-block-lost of their brokers says why",
            )
        for staged, recorder in recorders.items():
            recorder.ack(len(missing[staged]), self._runtime.clock.wall_ms())

    async def _missing(
        self, turn: asyncio.Semaphore, manifest: Manifest, checksum: int
    ) -> dict[StagedPartition, list[tuple[StagedObject, StagedPiece]]]:
        """Return the parts that are not published whole. Raises: the refusal of a partition."""
        parts = manifest.by_partition()
        async with asyncio.TaskGroup() as group:
            asked = {
                staged: group.create_task(self._check(turn, manifest, checksum, staged, pieces))
                for staged, pieces in parts.items()
            }
        return {staged: parts[staged] for staged, task in asked.items() if task.result() < len(parts[staged])}

    async def _publish(
        self,
        turn: asyncio.Semaphore,
        manifest: Manifest,
        checksum: int,
        staged: StagedPartition,
        pieces: Sequence[tuple[StagedObject, StagedPiece]],
        *,
        remember: bool,
    ) -> None:
        """Have the owner of one partition publish its pieces."""
        name, topic_id, partition = staged
        async with turn:
            topic = await self._topic(name, topic_id)
            recorder, done = self._recorder_of(topic, manifest, partition, pieces), 0
            recorder.send(self._runtime.clock.wall_ms())
            while done < len(pieces):
                ask = _ask(manifest, checksum, staged, pieces, done)
                ask.remember = remember
                asked, done = done + len(ask.pieces), (await self._owners.ask(topic, partition, ask)).published
                if done < asked:
                    raise ProtocolError(
                        f"the owner of partition {partition} of topic '{name}' answers that {done} pieces of batch"
                        f" {manifest.batch_id} are published, and it was asked for {asked}",
                        hint="commit it again: published parts are not published twice",
                    )
                recorder.ack(done, self._runtime.clock.wall_ms())

    async def _check(
        self,
        turn: asyncio.Semaphore,
        manifest: Manifest,
        checksum: int,
        staged: StagedPartition,
        pieces: Sequence[tuple[StagedObject, StagedPiece]],
    ) -> int:
        """Ask the owner of one partition how many pieces it has published. Raises: its refusal of the batch."""
        name, topic_id, partition = staged
        async with turn:
            ask = _ask(manifest, checksum, staged, pieces[:1], 0)
            ask.pieces_total, ask.only_check = len(pieces), True
            return (await self._owners.ask(await self._topic(name, topic_id), partition, ask)).published

    async def _topic(self, name: str, topic_id: str) -> Topic:
        """Return the topic for which records were staged. Raises: NotFoundError if it is gone."""
        topic = (await self._metadata.topic(name)).topic
        if topic.id != topic_id:
            raise NotFoundError(f"topic '{name}' with id {topic_id[:8]} was deleted while records were staged for it")
        return topic

    def _recorder_of(
        self, topic: Topic, manifest: Manifest, partition: int, pieces: Sequence[tuple[StagedObject, StagedPiece]]
    ) -> StagedRecorder:
        """Return the recorder of the pieces of one partition.

        A batch as old as the dedup window is not reported: retention may have removed it from the queue, and the audit
        would call its acked records lost.
        """
        part, age_ms = None, self._runtime.clock.wall_ms() - manifest.created_ms
        if self._reporter is not None and age_ms < topic.settings.dedup_window_ms:
            part = self._reporter.part(topic, partition)
        return StagedRecorder(part, pieces)


def _ask(
    manifest: Manifest,
    checksum: int,
    staged: StagedPartition,
    pieces: Sequence[tuple[StagedObject, StagedPiece]],
    done: int,
) -> PublishStaged:
    """Return the request to publish the pieces of one partition from number `done` on."""
    name, topic_id, partition = staged
    return PublishStaged(
        topic=name,
        topic_id=topic_id,
        partition=partition,
        writer=manifest.writer,
        batch_id=manifest.batch_id,
        store=manifest.store,
        manifest=checksum,
        pieces_total=len(pieces),
        first=done,
        any_manifest=bool(manifest.source),
        created_ms=manifest.created_ms,
        pieces=[wire_piece(*piece) for piece in pieces[done : done + STAGED_PIECES_MAX]],
    )


def wire_piece(staged: StagedObject, piece: StagedPiece) -> WirePiece:
    """Return the piece as the owner of its partition is asked for it."""
    return WirePiece(
        key=staged.key,
        object_bytes=staged.bytes,
        index_offset=staged.index_offset,
        offset=piece.offset,
        length=piece.length,
        raw_bytes=piece.raw_bytes,
    )
