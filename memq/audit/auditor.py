"""The audit's machine: takes pointers and checked batches in queue order, returns a verdict.

Pure. It acts as a reader that starts at the beginning and never stops. Records that this reader delivers are counted
once, those that it drops are copies, and each sequence that it misses must have an explanation. Memory: range sets for
each producer, and the first findings of each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from memq.audit.account import NOT_ASKED, Account, Balance, Evidence, Fate, HeldWord, RecentRanges, TailKnowledge
from memq.audit.checks.batch_check import NO_NUMBER, BatchCheck, BlockCheck, CheckedEntry
from memq.audit.finding import IN_OBJECT, IN_QUEUE, Finding, Kind
from memq.audit.held import HeldAnswer, Sought, Source, doubt_of
from memq.audit.minutes import Minutes, ReadBlock, active_ms
from memq.audit.pointer_facts import PointerFacts
from memq.audit.released import NOT_ASKED as UNITS_NOT_ASKED
from memq.audit.released import ReleaseAnswer, ReleasedBlocks, ReleaseFacts, ShardCounts, Shortfall
from memq.audit.verdict import BALANCES_MAX, THROUGH_STORE, Coverage, FindingCounts, PartitionCoverage, Verdict
from memq.errors import CorruptDataError, MemqError, TooLargeError
from memq.format.blocks.header import BlockHeader, StoredBlock
from memq.format.held_sequences import due_time_of, is_held
from memq.format.pointer import Pointer
from memq.format.ranges import RangeSet
from memq.limits import SEQUENCE_END
from memq.notification import Span
from memq.topic import CLOCK_ERROR_MS, Position, Topic

ACCOUNTS_MAX = 1 << 20  # (write partition, producer) pairs; each takes about 2 KiB
EPOCHS_MAX = 1 << 16
BLOCKS_MAX = 65_536  # about 15 MB; what lies further apart than that is judged by its sequences alone
OTHER_BYTES = "same sequences, other bytes"


class Contents:
    """The most recent blocks, by write partition, producer and first sequence."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int, int], StoredBlock] = {}
        self._forgotten = False

    def add(self, partition: int, header: BlockHeader) -> None:
        """Remember a block, unless one with its sequences is known."""
        key = (partition, header.producer_id, header.first_sequence)
        stored = StoredBlock(*key[1:], header.next_sequence, header.checksum, header.base_ms)
        if self._blocks.setdefault(key, stored) is stored and len(self._blocks) > BLOCKS_MAX:
            del self._blocks[next(iter(self._blocks))]
            self._forgotten = True

    def differs(self, partition: int, header: BlockHeader) -> bool:
        """Whether a block with known sequences differs from the known block."""
        known = self._blocks.get((partition, header.producer_id, header.first_sequence))
        return not self._forgotten if known is None else not known.is_copied_by(header)


@dataclass(slots=True)
class _WritePartition(PointerFacts):
    """The facts of a write partition, and its batches.

    `starts` has by epoch the batch from which on all must be here.
    """

    read_partition: int = 0
    batches: dict[int, RangeSet] = field(default_factory=dict)  # batch sequences by epoch
    starts: dict[int, int | None] = field(default_factory=dict)

    def add(self, epoch: int, number: int, time_ms: int) -> None:
        """Take a batch."""
        self.batches.setdefault(epoch, RangeSet()).add(number, number + 1)
        start = self.starts[epoch]
        if time_ms > self.copies_ms:
            self.starts[epoch] = number if start is None else min(start, number)


class Auditor:
    """Audits one topic. Call `open_partition` before the entries of a read partition; `verdict` ends it.

    `take_shards` gets the counts of held records, before the queue's ends are asked for. Without them the end
    of held records is unknown. Records that `sought` returns are unproven, until three steps are done: brokers are
    asked for them, `take_answer` gets the answers, and the read partitions of `sought_in` are opened again and read to
    their ends.
    `minutes`, if given, gets every block, for a verdict as a table.
    """

    def __init__(self, topic: Topic, *, through: str = THROUGH_STORE, minutes: Minutes | None = None) -> None:
        settings = topic.settings
        self._topic = topic
        self._late_ms = settings.late_ms
        self._window_ms = settings.reader_window_ms
        self._active_ms = active_ms(settings)
        self._minutes = minutes
        self._coverage = Coverage(through=through)
        self._reads: dict[int, PartitionCoverage] = {}
        self._unread: dict[int, None] = {}  # read partitions where something that may hold any sequence was not read
        self._writes: dict[int, _WritePartition] = {}
        self._contents = Contents()
        self._accounts: dict[tuple[int, int], Account] = {}
        self._found = FindingCounts()
        self._asked: dict[Source, RangeSet] = {}
        self._answer: HeldAnswer | None = None
        self._blocks: dict[int, ReleasedBlocks] = {}  # of held records, by write partition
        self._held: dict[int, int] = {}  # delivered held records, by write partition
        self._shards = UNITS_NOT_ASKED

    # ---- what is read ------------------------------------------------------------------------------

    def open_partition(self, partition: int, span: Span) -> None:
        """Begin the entries of a read partition, all of `span`.

        A second call continues up to a later end.
        """
        before = self._reads.get(partition, PartitionCoverage(partition, span.begin, span.end))
        self._reads[partition] = replace(before, end=span.end)

    def fail_partition(self, partition: int, error: MemqError) -> None:
        """Note that a read partition can't be read completely."""
        before = self._reads.get(partition, PartitionCoverage(partition, 0, 0))
        self._reads[partition] = replace(before, error=str(error))
        self._unread[partition] = None
        self._forget_totals(partition)
        self._found.add(1, Finding(kind=Kind.UNREAD, partition=partition, cause=str(error)))

    def take(self, partition: int, checked: CheckedEntry) -> None:
        """Add an entry that was read and checked."""
        offset, time_ms, pointer = checked.entry.offset, checked.entry.time_ms, checked.pointer
        for size in checked.object_bytes:
            self._count(objects=1, bytes=size)
        if checked.error is not None and checked.expired:
            self.fail_partition(partition, checked.error)
        elif checked.error is not None:
            self.take_unreadable(partition, offset, checked.error)
        elif pointer is not None and checked.check is not None:
            self.take_batch(partition, offset, time_ms, pointer, checked.check)
        elif pointer is not None:
            self.take_control(partition, offset, time_ms, pointer)

    def take_unreadable(self, partition: int, offset: int, error: MemqError) -> None:
        """Add an entry whose pointer is damaged or newer than this version."""
        self._count_pointer(partition)
        self._forget_totals(partition)
        kind = Kind.POINTER if isinstance(error, CorruptDataError) else Kind.UNREAD
        if kind is Kind.UNREAD:
            self._unread[partition] = None
        self._found.add(1, Finding(kind=kind, partition=partition, offset=offset, cause=str(error)))

    def take_control(self, partition: int, offset: int, time_ms: int, pointer: Pointer) -> None:
        """Add a pointer without a batch; `time_ms` is its queue time (Unix ms)."""
        write = self._meet(partition, offset, time_ms, pointer)
        write.released.compare(pointer, offset, time_ms, write.released.meet(pointer, whole=not write.expired), 0)
        for end in pointer.ended:
            self._account(pointer.partition, end.producer).close(end, time_ms)
            if self._minutes is not None:
                self._minutes.end((pointer.partition, end.producer), end.next_sequence, time_ms)

    def take_batch(self, partition: int, offset: int, time_ms: int, pointer: Pointer, check: BatchCheck) -> None:
        """Add a pointer and the checked content of its batch. Raises: TooLargeError over EPOCHS_MAX epochs."""
        write = self._meet(partition, offset, time_ms, pointer)
        write.add(pointer.epoch, pointer.batch_sequence, time_ms)
        if len(write.batches) > EPOCHS_MAX:
            raise TooLargeError(f"partition {pointer.partition} has over {EPOCHS_MAX} epochs")
        for fault in check.faults:
            wrong = Finding(kind=Kind.FAULT, partition=partition, offset=offset, object=check.key, cause=fault)
            self._found.add(1, wrong)
        if not check.complete and any(block.unread for block in check.blocks):
            self._unread[partition] = None
        skip, late, record_index = frozenset(pointer.skip), pointer.epoch < write.epoch, 0
        has_held = not check.complete or any(block.cause or is_held(block.first) for block in check.blocks)
        stated = write.released.meet(pointer, whole=not write.expired, has_held=has_held)
        found, held = 0, 0
        for block in check.blocks:
            position = Position(partition, offset, record_index)
            met = ReadBlock((pointer.partition, block.producer), block.first, block.next, time_ms, position, late)
            record_index += block.next - block.first
            records = block.next - block.first if is_held(block.first) else 0
            held += records
            if block.cause is not None:
                self._take_unsound(block, block.cause, met, check.key)
                found += records
            elif block.number in skip:
                self._drop(met)
            elif is_held(met.first):
                found += records if self._deliver_held(met, block, check.key, pointer.sealed_ms) else 0
            else:
                self._deliver(met, block, check.key)
        if any(block.cause is not None and not block.producer for block in check.blocks):
            stated = None  # they may be held records
        elif stated is not None:
            found += max(min(held - found, stated - found), 0)  # copies: a unit may have a record again
        surplus = write.released.compare(pointer, offset, time_ms, stated, found)
        if surplus:
            cause = f"{surplus} more held records than their shards have released"
            wrong = Finding(
                kind=Kind.UNRELEASED, partition=pointer.partition, offset=offset, object=check.key, cause=cause
            )
            self._found.add(surplus, wrong)

    # ---- what brokers hold -------------------------------------------------------------------------

    def sought(self, now_ms: int) -> list[Sought]:
        """Return the records that are lost unless a broker holds them."""
        found = (
            Sought(partition, producer, account.sought(self._evidence((partition, producer), account, now_ms)))
            for (partition, producer), account in sorted(self._accounts.items())
        )
        return [each for each in found if each.ranges]

    def sought_in(self, sought: Sequence[Sought]) -> list[int]:
        """Return the read partitions in which sought records may appear."""
        return sorted({self._writes[each.partition].read_partition for each in sought})

    def take_answer(self, sought: Sequence[Sought], answer: HeldAnswer) -> None:
        """Add the brokers' answers about the sought records; later entries of the queue follow."""
        self._asked = {(each.partition, each.producer): RangeSet(each.ranges) for each in sought}
        self._answer = answer

    def take_shards(self, answer: ReleaseAnswer) -> None:
        """Add what the shards of held records say; the ends of the queue were asked for after that."""
        self._shards = answer

    # ---- the verdict -------------------------------------------------------------------------------

    def verdict(self, now_ms: int) -> Verdict:
        """Return the verdict; producers seen shortly before `now_ms` (Unix ms) may still be sending."""
        balances, found = self.balances(now_ms), FindingCounts(self._found)
        by_partition = {partition: list(group) for partition, group in groupby(balances, lambda each: each.partition)}
        for partition in sorted({*self._writes, *(each.partition for each in self._shards.shards)}):
            for balance in by_partition.get(partition, ()):
                _add_missing_records(balance, found)
            self._add_missing_units(partition, found)
        for partition, write in sorted(self._writes.items()):
            if write.read_partition not in self._unread:  # else the hole may be what was not read
                _add_missing_batches(partition, write, found)
        return Verdict(
            topic=self._topic.name,
            topic_id=self._topic.id,
            findings=tuple(found),
            coverage=self._covered(balances),
            balances=tuple(sorted(balances, key=lambda balance: balance.clean)[:BALANCES_MAX]),
        )

    def balances(self, now_ms: int) -> list[Balance]:
        """Return the balances of all producers, by write partition and producer."""
        return [
            account.settle(partition, producer, self._evidence((partition, producer), account, now_ms))
            for (partition, producer), account in sorted(self._accounts.items())
        ]

    def _evidence(self, source: Source, account: Account, now_ms: int) -> Evidence:
        write = self._writes[source[0]]
        return Evidence(
            expired=write.expired,
            unread=write.read_partition in self._unread,
            active_since_ms=now_ms - self._active_ms,
            word=self._word(write, source, account, now_ms),
        )

    def _word(self, write: _WritePartition, source: Source, account: Account, now_ms: int) -> HeldWord:
        if self._answer is None:
            return NOT_ASKED
        asked = self._asked.get(source)
        if asked is None:
            return HeldWord()
        doubt = doubt_of(self._answer, write, self._topic, account.end_ms, now_ms)
        return HeldWord(asked, self._answer.held.get(source, RangeSet()), doubt)

    def _covered(self, balances: list[Balance]) -> Coverage:
        return replace(
            self._coverage,
            partitions=tuple(self._reads[partition] for partition in sorted(self._reads)),
            records=sum(balance.delivered for balance in balances) + sum(self._held.values()),
            held=sum(self._held.values()),
            waiting=self._shards.waiting,
            producers=len(balances),
            producers_proven=sum(balance.tail is TailKnowledge.PROVEN for balance in balances),
            producers_in_flight=sum(balance.tail is TailKnowledge.IN_FLIGHT for balance in balances),
            burned=sum(balance.burned for balance in balances),
            expired=sum(balance.expired for balance in balances),
            unread=sum(each.count for each in self._found if each.kind is Kind.UNREAD),
        )

    def shortfalls(self) -> list[tuple[int, Shortfall]]:
        """Return the held records that pointers should have shown, by write partition."""
        return [(partition, short) for partition, write in self._writes.items() for short in write.released.short]

    # ---- inside --------------------------------------------------------------------------------------

    def _meet(self, partition: int, offset: int, time_ms: int, pointer: Pointer) -> _WritePartition:
        self._count_pointer(partition)
        if pointer.topic_id != self._topic.id:
            cause = f"pointer belongs to topic id {pointer.topic_id}, not to {self._topic.id}"
            self._found.add(1, Finding(kind=Kind.FAULT, partition=partition, offset=offset, cause=cause))
        write = self._writes.get(pointer.partition)
        if write is None:
            write = self._writes[pointer.partition] = _WritePartition(read_partition=partition)
            write.begin(pointer, self._reads[partition].begin, time_ms, self._late_ms)
        # An epoch that begins after the copies has all of its batches here.
        write.starts.setdefault(pointer.epoch, 0 if time_ms > write.copies_ms else None)
        missing = write.meet(pointer, time_ms)
        if missing:
            cause = f"its totals count {missing} records that no pointer before it shows"
            wrong = Finding(kind=Kind.TOTALS, partition=pointer.partition, offset=offset, cause=cause)
            self._found.add(missing, wrong)
        return write

    def _forget_totals(self, partition: int) -> None:
        for write in self._writes.values():
            if write.read_partition == partition:
                write.forget_totals()

    def _account(self, partition: int, producer: int) -> Account:
        account = self._accounts.get((partition, producer))
        if account is None:
            if len(self._accounts) >= ACCOUNTS_MAX:
                raise TooLargeError(f"topic '{self._topic.name}' has over {ACCOUNTS_MAX} producers")
            recent = RecentRanges(self._window_ms)
            account = self._accounts[partition, producer] = Account(recent, self._writes[partition].copies_ms)
        return account

    def _take_unsound(self, block: BlockCheck, cause: MemqError, met: ReadBlock, key: str) -> None:
        damaged = isinstance(cause, CorruptDataError)
        self._found.add(1, _finding(Kind.CORRUPT if damaged else Kind.UNREAD, block, met, key, str(cause)))
        if is_held(met.first):
            if self._minutes is not None:
                self._minutes.held(met, "corrupt" if damaged else "unread", met.next - met.first)
        elif block.producer:
            self._account(*met.stream).miss(met.first, met.next, met.time_ms, damaged=damaged)
            if self._minutes is not None:
                self._minutes.miss(met)

    def _deliver(self, met: ReadBlock, block: BlockCheck, key: str) -> None:
        account, partition, header = self._account(*met.stream), met.stream[0], block.header
        delivered, doubled = account.delivered.total, account.doubled.total
        differs = False
        if header is not None:
            differs = account.delivered.covers(met.first, met.next) and self._contents.differs(partition, header)
            self._contents.add(partition, header)
        fate = account.deliver(met.first, met.next, met.time_ms, differs=differs)
        if fate is Fate.COPY:
            self._drop(met)
            return
        self._count(blocks=1)
        doubled = account.doubled.total - doubled
        if fate is Fate.DOUBLED:
            # A record that is delivered a third time was counted already; its block is named all the same.
            self._found.add(doubled, _finding(Kind.DOUBLED, block, met, key, OTHER_BYTES if differs else ""))
        if self._minutes is not None:
            self._minutes.deliver(met, new=account.delivered.total - delivered, doubled=doubled)

    def _deliver_held(self, met: ReadBlock, block: BlockCheck, key: str, sealed_ms: int) -> bool:
        """Take a block of held records; return whether readers deliver it."""
        partition, records = met.stream[0], met.next - met.first
        blocks = self._blocks.setdefault(partition, ReleasedBlocks(self._window_ms))
        fate, differs = blocks.meet(met.stream[1], met.first, met.time_ms), False
        if block.header is not None:
            differs = fate is not Fate.NEW and self._contents.differs(partition, block.header)
            self._contents.add(partition, block.header)
        if fate is Fate.COPY and not differs:
            self._drop(met)
            return False
        self._count(blocks=1)
        early_ms = due_time_of(met.first) - sealed_ms - CLOCK_ERROR_MS
        if sealed_ms and early_ms > 0:
            cause = f"in the log {early_ms + CLOCK_ERROR_MS} ms before it is due"
            self._found.add(records, _finding(Kind.EARLY, block, met, key, cause))
        if fate is not Fate.NEW:
            self._found.add(records, _finding(Kind.DOUBLED, block, met, key, OTHER_BYTES if differs else ""))
        else:
            self._held[partition] = self._held.get(partition, 0) + records
        if self._minutes is not None:
            self._minutes.held(met, "delivered" if fate is Fate.NEW else "doubled", records)
        return True

    def _add_missing_units(self, partition: int, found: FindingCounts) -> None:
        """Add the held records that a write partition lacks, by its pointers and by the counts of shards."""
        write, answer = self._writes.get(partition), self._shards
        if write is not None and write.read_partition in self._unread:
            return
        for short in write.released.short if write is not None else ():
            wrong = Finding(kind=Kind.LOST, partition=partition, offset=short.offset, cause=short.cause)
            found.add(short.records, wrong)
        if answer.error and write is not None and write.released.shards:
            cause = f"its shards did not say how many held records it has: {answer.error}"
            found.add(len(write.released.shards), Finding(kind=Kind.UNKNOWN, partition=partition, cause=cause))
        for each in answer.shards:
            if each.partition == partition and (write is not None or not self._unread):
                self._add_of_shard(each, write, found)

    def _add_of_shard(self, counts: ShardCounts, write: _WritePartition | None, found: FindingCounts) -> None:
        facts = write.released if write is not None else ReleaseFacts()
        whole = not write.expired if write is not None else all(not each.begin for each in self._reads.values())
        lost, pending = facts.absent(counts, whole=whole), facts.pending(counts)
        if lost:
            cause = f"unit {counts.done} of shard {counts.shard:016x} is done, and in no pointer"
            found.add(lost, Finding(kind=Kind.LOST, partition=counts.partition, cause=cause))
        if pending > 0:
            cause = f"units up to {counts.released} of shard {counts.shard:016x} are on their way"
            found.add(pending, Finding(kind=Kind.HELD, partition=counts.partition, cause=cause))

    def _drop(self, met: ReadBlock) -> None:
        """Count a block that readers pass over."""
        self._count(blocks=1, copies_dropped=met.next - met.first)
        if self._minutes is not None:
            if is_held(met.first):
                self._minutes.held(met, "copies", met.next - met.first)
            else:
                self._minutes.copy(met)

    def _count_pointer(self, partition: int) -> None:
        coverage = self._reads[partition]
        self._reads[partition] = replace(coverage, pointers=coverage.pointers + 1)

    def _count(self, **amounts: int) -> None:
        grown = {name: getattr(self._coverage, name) + amount for name, amount in amounts.items()}
        self._coverage = replace(self._coverage, **grown)


def _finding(kind: Kind, block: BlockCheck, met: ReadBlock, key: str, cause: str) -> Finding:
    return Finding(
        kind=kind,
        stage=IN_OBJECT if block.number != NO_NUMBER else IN_QUEUE,
        partition=met.stream[0],
        producer=block.producer,
        ranges=((block.first, block.next),) if block.producer else (),
        offset=met.position.pointer_offset,
        object=key,
        block=max(block.number, 0),
        cause=cause,
    )


def _add_missing_records(balance: Balance, found: FindingCounts) -> None:
    """Add the missing records of one producer.

    Findings of damaged, unread and doubled blocks exist already.
    """
    kinds = {Kind.LOST: balance.lost, Kind.HELD: balance.held, Kind.HOLE: balance.unproven}
    wrong = [(kind, piece) for kind, pieces in kinds.items() for piece in pieces]
    if balance.tail is not TailKnowledge.PROVEN:
        kind = Kind.IN_FLIGHT if balance.tail is TailKnowledge.IN_FLIGHT else Kind.UNKNOWN
        wrong.append((kind, (balance.next_sequence, SEQUENCE_END)))
    for kind, (first, next_) in wrong:
        finding = Finding(
            kind=kind,
            partition=balance.partition,
            producer=balance.producer,
            ranges=((first, next_),),
            cause=balance.doubt if kind is Kind.HOLE else "",
        )
        found.add(next_ - first if kind.unit == "record" else 1, finding)


def _add_missing_batches(partition: int, write: _WritePartition, found: FindingCounts) -> None:
    """Add the missing batches of one write partition.

    Batch sequences are dense within an epoch, from 0; retention may have removed the first ones.
    """
    for epoch, numbers in sorted(write.batches.items()):
        start = write.starts[epoch]
        for first, next_ in numbers.holes(numbers.next if start is None else start, numbers.next):
            cause = f"epoch {epoch} has no pointer of batch {first}" + (f" to {next_ - 1}" if next_ > first + 1 else "")
            found.add(next_ - first, Finding(kind=Kind.BATCH_HOLE, partition=partition, cause=cause))
