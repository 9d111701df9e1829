"""The records of an open transaction, cut into blocks, which a producer's core holds (`core.py`)."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memq.client.bulk.staged_object import StagedBlocks
from memq.client.producer.delayed import NoteHeld
from memq.client.producer.fields import HeadersLike, RecordFields, check_size, encrypted_fields, with_subject
from memq.client.producer.open_block import Route
from memq.client.producer.settings import ProducerSettings
from memq.errors import InvalidRequestError, TooLargeError
from memq.format.blocks.builder import BlockBuilder, SealedBlock
from memq.format.held_sequences import held_minute, transactional_sequence
from memq.format.report import HeldStage
from memq.groups import OUTSIDE_GENERATION
from memq.limits import (
    HOLD_BYTES_MAX,
    KIB,
    POINTER_RANGES_MAX,
    PRODUCER_ID_END,
    SLOTS,
    TRANSACTION_STAGED_BYTES_MAX,
    TRANSACTION_TARGET_BYTES_MAX,
)
from memq.protocol.transaction_messages import WireTransactionBlock
from memq.runtime.runtime import Runtime
from memq.topic import Committed, ReadPartition, Topic

if TYPE_CHECKING:
    from memq.client.consumer.group.session import Committer

BLOCK_BYTES = 256 * KIB  # raw size at which a block is sealed
REQUEST_BYTES_MAX = 600 * KIB  # of the blocks in one request, which has them as text
IS_BEING_COMMITTED, HAS_UNKNOWN_END = "is being committed", "has an unknown end"  # how a transaction has ended
IS_COMMITTED, WAS_ROLLED_BACK = "is committed", "was rolled back"
IS_LEFT = "is undecided: its producer group is asked"
# How the audit gets the end of a transaction; an unknown one may be followed by another.
_STAGES: dict[str, HeldStage] = {
    HAS_UNKNOWN_END: "unsure",
    IS_LEFT: "unsure",
    WAS_ROLLED_BACK: "rolled-back",
    IS_COMMITTED: "committed",
}


@dataclass(slots=True)
class _Target:
    """The records of a transaction for one partition: the open block, and what was sealed."""

    topic: str
    topic_id: str
    partition: int
    scope: int
    slots: tuple[int, int]
    producer_id: int
    next: int
    builder: BlockBuilder = field(default_factory=BlockBuilder)
    slots_hold: bool = True
    blocks: int = 0
    bytes: int = 0
    sealed: list[SealedBlock] = field(default_factory=list)  # all of them: the part may become a staged one
    staged: bool = False
    staged_next: int = 0  # the sequence after the last record of the staged part that is held


class OpenTransaction:
    """The records of one transaction that are not held yet. Any thread may add some."""

    def __init__(
        self, settings: ProducerSettings, runtime: Runtime, number: int, note: bytes, *, visible: bool
    ) -> None:
        self.number = number
        self.note = note
        self.visible = visible  # wait for that after the commit
        self.began_ms = runtime.clock.wall_ms()
        self.prepared = False
        self.blocks = 0
        self.committer: Committer | None = None  # of the consumer whose positions move
        self.member = "", OUTSIDE_GENERATION
        self.before: dict[ReadPartition, Committed] = {}
        self.after: dict[ReadPartition, Committed] = {}
        self.commit_sent = False  # and may have moved the positions
        self.note_held: NoteHeld = lambda *noted: None  # reports its records to the audit
        self._ended = ""
        self._noted: HeldStage | None = None  # the end that was reported
        self._settings = settings
        self._runtime = runtime
        self._lock = threading.Lock()
        self._targets: dict[tuple[str, int], _Target] = {}
        self._topics: dict[str, Topic] = {}
        self._first = transactional_sequence(runtime.clock.wall_ms())
        self._chosen: dict[str, int] = {}  # by topic: the partition of its records without a key
        self._sealed: list[WireTransactionBlock] = []
        self._sealed_bytes = 0
        self._complete = False
        self.needs_store = False  # since a part became a staged one

    @property
    def empty(self) -> bool:
        """Whether it has no record."""
        return not self._targets

    @property
    def commits_for_ever(self) -> bool:
        """Whether its commit was sent, and is not refused any more: it is never rolled back here."""
        return self.prepared and self.commit_sent

    def complete(self) -> None:
        """Take no more records."""
        with self._lock:
            self._complete = True

    @property
    def ended(self) -> str:
        """How it has ended; "" if it has not."""
        return self._ended

    @ended.setter
    def ended(self, how: str) -> None:
        self._ended = how
        if how in (IS_COMMITTED, WAS_ROLLED_BACK):
            for target in self._targets.values():
                target.sealed.clear()
        self._note_end(_STAGES.get(how))

    def _note_end(self, stage: HeldStage | None) -> None:
        """Report how its records have ended, unless that is known already."""
        not_asked_for = self._ended == HAS_UNKNOWN_END and not self.commit_sent
        if stage is None or stage == self._noted or not_asked_for:
            return
        self._noted = stage
        with self._lock:
            for target in self._targets.values():
                records = target.next - self._first + target.builder.count
                topic = self._topics[target.topic_id]
                self.note_held(topic, target.partition, stage, held_minute(self._first), records)

    def named_headers(self, headers: HeadersLike | None, subject: str | None) -> HeadersLike | None:
        """Return the headers of a record, with its subject. Raises: as `with_subject`."""
        return headers if subject is None else with_subject(headers, subject, self._settings.encryption)

    def add(self, route: Route, fields: RecordFields, partition: int | None) -> bool:
        """Add a record; return whether so much waits that it should be held now.

        Raises: TooLargeError, NotFoundError; InvalidRequestError after the end.
        """
        fields = encrypted_fields(fields, self._settings.encryption, route.topic)
        check_size(fields.size, route.topic)
        with self._lock:
            self.check_open()
            if self._complete:
                raise InvalidRequestError("the transaction is prepared", hint="send all records before prepare()")
            target = self._target(route, fields, partition)
            if target.builder.count and target.builder.raw_bytes + fields.size > BLOCK_BYTES:
                self._seal(target)
            target.builder.append(*fields)
            target.slots_hold &= partition is None
            if target.builder.raw_bytes >= BLOCK_BYTES:
                self._seal(target)
            return self._sealed_bytes >= REQUEST_BYTES_MAX or self.needs_store

    def staged_parts(self) -> list[StagedBlocks]:
        """Return the parts that are too large to be held as blocks, and have sealed blocks that are not held."""
        with self._lock:
            return [
                StagedBlocks(self._topics[target.topic_id], target.partition, target.sealed.copy())
                for target in self._targets.values()
                if target.staged and target.staged_next != target.next
            ]

    def note_staged(self, parts: Iterable[StagedBlocks]) -> None:
        """Note that these parts are held."""
        with self._lock:
            for part in parts:
                self._targets[part.topic.id, part.partition].staged_next = part.blocks[-1].header.next_sequence

    def take(self, *, everything: bool) -> list[WireTransactionBlock]:
        """Return the blocks that wait; with `everything`, also the open ones. Raises: TooLargeError."""
        with self._lock:
            for target in self._targets.values() if everything else ():
                if target.builder.count:
                    self._seal(target)
            found, self._sealed, self._sealed_bytes = self._sealed, [], 0
            return found

    def close(self) -> bool:
        """Take no more records; return False if some wait, which must be held first."""
        with self._lock:
            if self._sealed or any(target.builder.count for target in self._targets.values()):
                return False
            self.ended = IS_BEING_COMMITTED
            return True

    def reopen(self) -> None:
        """Undo `close`: the transaction is to be rolled back, and was not ended."""
        if self._ended == IS_BEING_COMMITTED:
            self._ended = ""

    def check_open(self) -> None:
        """Raise InvalidRequestError after the end."""
        if self.ended:
            raise InvalidRequestError(f"the transaction {self.ended}", hint="begin another one: producer.transaction()")

    def _target(self, route: Route, fields: RecordFields, partition: int | None) -> _Target:
        topic = route.topic
        if partition is not None:
            index = route.map.index_of(partition)
        elif fields.key is not None:
            index = route.map.index_of_key(fields.key)
        else:
            drawn = self._runtime.random.randrange(len(route.buffers))
            index = self._chosen.setdefault(topic.id, drawn) % len(route.buffers)
        buffer = route.buffers[index]
        place = topic.id, buffer.partition
        found = self._targets.get(place)
        if found is None:
            producer_id = self._runtime.random.randrange(1, PRODUCER_ID_END)
            found = _Target(
                topic.name, topic.id, buffer.partition, buffer.scope, buffer.slots, producer_id, self._first
            )
            self._targets[place], self._topics[topic.id] = found, topic
        found.slots_hold &= found.slots == buffer.slots
        return found

    def _seal(self, target: _Target) -> None:
        builder, count = target.builder, target.builder.count
        sealed = builder.seal(
            producer_id=target.producer_id,
            first_sequence=target.next,
            scope=target.scope,
            now_ms=self._runtime.clock.wall_ms(),
            codec=self._settings.codec,
            slot_range=target.slots if target.slots_hold else (0, SLOTS - 1),
        )
        if self._settings.encryption is not None:
            sealed = self._settings.encryption.seal_block(sealed, target.topic_id, target.partition)
        data = bytes(sealed.data)
        target.builder, target.slots_hold = BlockBuilder(), True
        target.next += count
        target.blocks, target.bytes = target.blocks + 1, target.bytes + len(data)
        target.sealed.append(SealedBlock(sealed.header, data, len(data)))
        place = f"topic '{target.topic}' partition {target.partition}"
        if len(data) > HOLD_BYTES_MAX:
            raise TooLargeError(f"a record of {len(data)} bytes in a transaction, {HOLD_BYTES_MAX} are allowed")
        if target.bytes > TRANSACTION_STAGED_BYTES_MAX:  # T5: one batch
            raise TooLargeError(
                f"a transaction has {target.bytes} bytes in {place}, {TRANSACTION_STAGED_BYTES_MAX} are allowed",
                hint="send fewer records in each transaction, or spread them over more partitions",
            )
        if target.staged:
            return
        if target.bytes > TRANSACTION_TARGET_BYTES_MAX or target.blocks > POINTER_RANGES_MAX:
            self._stage(target)
            return
        self.blocks += 1
        self._sealed.append(
            WireTransactionBlock(topic=target.topic, topic_id=target.topic_id, partition=target.partition, block=data)
        )
        self._sealed_bytes += len(data)

    def _stage(self, target: _Target) -> None:
        """Let the part of a target become a staged one, which replaces its held blocks."""
        place = target.topic_id, target.partition
        waiting = [each for each in self._sealed if (each.topic_id, each.partition) != place]
        self._sealed_bytes -= sum(len(each.block) for each in self._sealed) - sum(len(each.block) for each in waiting)
        self._sealed = waiting
        self.blocks -= target.blocks - 1  # the last block is not counted yet, and the part counts as one
        self.blocks += 1
        target.staged = self.needs_store = True
