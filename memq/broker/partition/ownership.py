"""An owner's knowledge of its partition from the queue: epoch, proof, producers, totals. Pure.

The queue is the log of all committed batches. An owner publishes a control pointer, `opened`, and reads the tail up to
it. From then on the owner knows all entries of the queue, as long as it reads the entries between its own pointers.
The time of a proof is when its request was handed over, never when its answer was read. Otherwise an owner that was
paused in between would date its pointers too late. `next_instance` and `check_instance` decide which instance of a
named producer may write.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from memq.broker.partition.append import ProducerState
from memq.broker.partition.ring import BatchSlot
from memq.errors import LogCutError, NotReadyError, OutOfSequenceError, ProducerFencedError, TooLargeError
from memq.format.pointer import Adopted, NamedProducer, Pointer, ProducerRanges, named_since_ms, pointer_mark
from memq.format.totals import TotalsFold, adopted_of
from memq.limits import NAMED_PRODUCERS_MAX
from memq.topic import CLOCK_ERROR_MS, Totals

ADOPTED_MAX = 256  # entries for late pointers in one pointer; the last one stands for all that have no entry
RETRY_MS_MAX = 5_000
INSTANCES_PER_EPOCH = 1 << 10  # instances of one name in one epoch of the owner; for more it opens again
NUMBERED_EPOCHS = 1 << 21  # so that numbers of instances fit in 32 bits, with room for 2^31 after the last epoch


class Phase(Enum):
    """OPENING until the tail is read, OWNING, FENCED once a higher epoch was met."""

    OPENING = auto()
    OWNING = auto()
    FENCED = auto()


SUCCESSORS: dict[Phase, frozenset[Phase]] = {
    Phase.OPENING: frozenset({Phase.OWNING, Phase.FENCED}),
    Phase.OWNING: frozenset({Phase.FENCED}),
    Phase.FENCED: frozenset(),
}


class QueueTail:
    """The pointers of one write partition at an opening, added in order of offset.

    The tail gives the totals after these pointers, and the batches that no owner has counted. `last_ms` is the latest
    queue time of a pointer, and `last_at` the offset of the first pointer with that time. An opening must read all
    pointers from queue time `named_ms` on to know the named producers; 0: there are none.
    """

    def __init__(self) -> None:
        self.last_ms = 0
        self.last_at = -1
        self.named_ms = 0
        self._fold = TotalsFold()
        self._newest = (0, -1)  # epoch and number of the last owner's last batch
        self._uncounted: list[tuple[int, Adopted]] = []  # (records before it, batch), in no stated totals yet

    def add(self, offset: int, time_ms: int, pointer: Pointer) -> None:
        """Take the next pointer.

        The totals in a pointer count all batches below some offset (`memq.format.totals`, rule 1). So they include a
        batch if they exceed the records before it.
        """
        stated = pointer.totals.records
        self._uncounted = [(before, entry) for before, entry in self._uncounted if before >= stated]
        self._fold.reach(pointer.totals)
        before = self._fold.totals.records
        self._fold.add(pointer)
        if time_ms > self.last_ms:
            self.last_ms, self.last_at = time_ms, offset
        if pointer.epoch > self._newest[0]:
            self._newest = (pointer.epoch, -1)
        if pointer.epoch == self._newest[0]:
            self.named_ms = named_since_ms(pointer, time_ms)
        if pointer.kind == "data":
            self._uncounted.append((before, adopted_of(offset, pointer)))
            self._newest = max(self._newest, (pointer.epoch, pointer.batch_sequence))

    def uncounted(self) -> list[Adopted]:
        """Return the batches that no owner has counted so far, without the last owner's last batch."""
        late = [entry for _, entry in self._uncounted]
        last = next((entry for entry in late if (entry.epoch, entry.batch_sequence) == self._newest), None)
        return [entry for entry in late if entry is not last]

    def counted(self) -> Totals:
        """Return the totals after the tail, without the uncounted batches."""
        totals = self._fold.totals
        for entry in self.uncounted():
            totals = totals.plus(-entry.records, -entry.bytes)
        return totals


class NamedProducers:
    """The names of one write partition by producer id, remembered for longer than the dedup window.

    Theory. A named producer's sequences are dense from 0: the owner opens no stream beyond the sequences in the queue.
    So one number, the sequence after the last one, says which sequences are committed, as long as the name is
    remembered. Each pointer to the producer's batches has this number. The `opened` pointer has it for all names, and
    an owner publishes `opened` again at intervals. An opening reads from the last `opened` on, and then knows the same
    as the earlier owners. A writer that stages has two numbers: its last batch, and how many pieces of that batch are
    in the queue. `next_instance` allows at most NAMED_PRODUCERS_MAX names.
    """

    def __init__(self) -> None:
        self._known: dict[int, NamedProducer] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, producer_id: int) -> NamedProducer | None:
        """Return the state of a name, None if it is unknown."""
        return self._known.get(producer_id)

    def entries(self) -> tuple[NamedProducer, ...]:
        """Return the states of all names."""
        return tuple(self._known.values())

    def last_unit(self, shard: int) -> int:
        """Return the number of a shard's last unit that the queue holds; 0 for none (H4)."""
        known = self._known.get(shard)
        return known.last_sequence if known is not None else 0

    def learn(self, entry: NamedProducer, time_ms: int) -> None:
        """Take an entry of a pointer with queue time `time_ms`, in any order; older entries change nothing."""
        known = self._known.get(entry.producer, entry)
        seen_ms = max(entry.last_seen_ms or time_ms, known.last_seen_ms)
        if entry.batch_id:
            newest = max(known, entry, key=lambda each: (batch_of(each), each.last_sequence))
            self._known[entry.producer] = msgspec.structs.replace(newest, last_seen_ms=seen_ms)
            return
        self._known[entry.producer] = msgspec.structs.replace(
            entry,
            epoch=max(entry.epoch, known.epoch),
            last_sequence=max(entry.last_sequence, known.last_sequence),
            last_seen_ms=seen_ms,
            records=max((each.last_sequence, each.records) for each in (entry, known))[1],
        )

    def forget(self, before_ms: int, busy: Container[int] = ()) -> None:
        """Forget names silent since before `before_ms` (queue time), except the `busy` ones and shards (H4)."""
        for number, entry in list(self._known.items()):
            if entry.last_seen_ms < before_ms and number not in busy and not entry.is_shard:
                del self._known[number]


def batch_of(entry: NamedProducer) -> int:
    """Return the last batch of a writer that stages, -1 for other producers."""
    return int(entry.batch_id) if entry.batch_id.isdecimal() and entry.batch_id.isascii() else -1


@dataclass(slots=True)
class Ownership:
    """One epoch of one partition at one broker. Monotonic times in s, queue times in Unix ms.

    The owner knows all entries of the queue below offset `read_to`.
    """

    partition: int
    epoch: int
    opened_s: float
    opened_wall_ms: int
    stale_publish_s: float
    dedup_window_ms: int
    phase: Phase = Phase.OPENING
    read_to: int = 0
    proof_s: float = 0.0
    stated: bool = False  # `opened` has fixed the totals: later foreign pointers are adopted
    totals: Totals = field(default_factory=Totals)  # of all known batches except `adopted` and `landed`
    producers: dict[int, ProducerState] = field(default_factory=dict)
    adopted: list[Adopted] = field(default_factory=list)  # late pointers that the next own pointer lists and counts
    landed: dict[int, Pointer] = field(default_factory=dict)  # own pointers found by a read, by batch sequence
    last_mark: int = 0  # of the entry before `read_to`; 0: unknown
    highest_epoch: int = 0
    unclosed: dict[int, str] = field(default_factory=dict)  # lower epochs without `closed`, and their brokers
    unread: bool = False  # unknown entries may lie between the own pointers: read before the next publish
    log_was_cut: bool = False  # entries that this owner has read, or published, are not in the log
    named: NamedProducers = field(default_factory=NamedProducers)
    named_ms: int = 0  # queue time of the last own `opened`, which has the state of all names
    owned_s: float = math.inf  # when the opening ended; its `opened` had landed before
    handed_over_s: float = -math.inf  # when a batch's pointer was last handed to the queue, with any outcome
    handed_over: int = -1  # the batch sequence of that pointer
    published_s: float = -math.inf  # when the last pointer that is known to be in the queue was handed over
    _own: dict[int, int] = field(default_factory=dict)  # marks of own pointers at or after `read_to`, by offset
    _published: int = -1  # highest own batch sequence that is counted
    tail: QueueTail = field(default_factory=QueueTail)  # while opening: what earlier owners counted

    def become(self, phase: Phase) -> None:
        """Change to a phase that the table allows."""
        assert phase in SUCCESSORS[self.phase], f"{self.phase.name} to {phase.name}"
        self.phase = phase

    # ---- proof and queue time --------------------------------------------------------------

    def prove(self, handed_over_s: float) -> None:
        """Note a proof: a request handed over at `handed_over_s` showed no higher epoch."""
        self.proof_s = max(self.proof_s, handed_over_s)

    def needs_proof(self, now_s: float) -> bool:
        """Whether the last proof is older than a third of S: read before publishing."""
        return now_s - self.proof_s > self.stale_publish_s / 3

    def queue_time_ms(self) -> int:
        """Return the time of the last proof: the opening's wall clock plus the monotonic time since (Unix ms)."""
        return self.opened_wall_ms + int((self.proof_s - self.opened_s) * 1000)

    # ---- what the queue shows ----------------------------------------------------------------

    def producer(self, producer_id: int) -> ProducerState:
        """Return the known sequences of a producer; a new one starts empty."""
        found = self.producers.get(producer_id)
        if found is None:
            found = self.producers[producer_id] = ProducerState(producer_id)
        return found

    def meet(self, offset: int, time_ms: int, pointer: Pointer) -> None:
        """Take one entry of the queue, in order of offset; entries below `read_to` are ignored.

        Raises: LogCutError if the entry is at the offset of an own pointer, and is another one.
        """
        if offset < self.read_to:
            return
        mark = pointer_mark(pointer)
        if self._own.get(offset, mark) != mark:
            raise changed_entry(offset)
        self.read_to, self.last_mark = offset + 1, mark
        if self._own.pop(offset, None) is not None or pointer.partition != self.partition:
            return
        if pointer.epoch > self.epoch and self.phase is not Phase.FENCED:
            self.become(Phase.FENCED)
        if pointer.kind == "closed":
            self.unclosed.pop(pointer.epoch, None)
        elif pointer.epoch < self.epoch and pointer.broker:
            self.unclosed.setdefault(pointer.epoch, pointer.broker)
        if pointer.kind == "data":
            self.join(pointer.producers, time_ms)
        self.learn(pointer.named, time_ms)
        if not self.stated:
            self.tail.add(offset, time_ms, pointer)
        elif pointer.kind == "data":
            self._count_met(offset, pointer)
        self.highest_epoch = max(self.highest_epoch, pointer.epoch)

    def restart(self, offset: int) -> None:
        """Read the tail again, from `offset` on; forget the entries that were read."""
        self.read_to, self.last_mark = offset, 0
        self.producers.clear()
        self.unclosed.clear()
        self.named = NamedProducers()
        self.tail = QueueTail()

    def join(self, producers: Iterable[ProducerRanges], time_ms: int) -> None:
        """Note sequences that the queue holds since `time_ms`."""
        for entry in producers:
            producer = self.producer(entry.producer)
            producer.seen_ms = max(producer.seen_ms, time_ms)
            for first, next_ in entry.ranges:
                producer.queued.add(first, next_)
                producer.next = max(producer.next, next_)

    def learn(self, named: Iterable[NamedProducer], time_ms: int) -> None:
        """Note the named producers of a pointer with queue time `time_ms`."""
        for entry in named:
            self.named.learn(entry, time_ms)
            if entry.batch_id or entry.is_shard:
                continue  # the blocks of a writer that stages, or of a shard, have other producer ids
            producer = self.producer(entry.producer)
            producer.seen_ms = max(producer.seen_ms, time_ms)
            producer.epoch = max(producer.epoch, entry.epoch)
            producer.queued.add(0, entry.last_sequence)
            producer.next = max(producer.next, entry.last_sequence)

    def _count_met(self, offset: int, pointer: Pointer) -> None:
        """Note a pointer between the own ones: an own try that landed late, or a late one of another owner."""
        own = pointer.epoch == self.epoch and pointer.batch_sequence > self._published
        if own and pointer.batch_sequence not in self.landed:
            self.landed[pointer.batch_sequence] = pointer  # `take_landed` counts it
        else:
            self._adopt(adopted_of(offset, pointer))

    def _adopt(self, late: Adopted) -> None:
        """Note a late pointer that the next own pointer counts.

        The next pointer must count all of them: with a part of them its totals would be too low, and nothing near it
        in a quiet partition would show that (`memq.format.totals`, rule 3).
        """
        if len(self.adopted) < ADOPTED_MAX:
            self.adopted.append(late)
        else:
            last = self.adopted[-1]
            records, stored = last.records + late.records, last.bytes + late.bytes
            self.adopted[-1] = msgspec.structs.replace(last, records=records, bytes=stored)

    def state(self) -> None:
        """Fix the totals of the `opened` pointer, which include late pointers of earlier owners."""
        self.stated = True
        self.totals = self.tail.counted()
        for late in self.tail.uncounted():
            self._adopt(late)
        self.tail = QueueTail()

    def named_since_ms(self) -> int:
        """Return the queue time from which on an opening must read to know all names; 0 without names."""
        return self.named_ms if len(self.named) else 0

    def must_republish_opened(self) -> bool:
        """Whether `opened` must be published again, so that an opening reads at most W for the names."""
        return len(self.named) > 0 and self.queue_time_ms() - self.named_ms > self.dedup_window_ms // 2

    # ---- what is published -------------------------------------------------------------------

    def next_adopted(self) -> tuple[Adopted, ...]:
        """Return the late pointers that the next pointer counts, in at most ADOPTED_MAX entries."""
        return tuple(self.adopted)

    def totals_with(self, adopted: Iterable[Adopted]) -> Totals:
        """Return the totals before a pointer that counts `adopted`."""
        totals = self.totals
        for entry in adopted:
            totals = totals.plus(entry.records, entry.bytes)
        return totals

    def published(self, offset: int, pointer: Pointer, time_ms: int) -> None:
        """Count an own pointer that is in the queue at `offset`."""
        if self.follows(offset):
            self.read_to, self.last_mark = offset + 1, pointer_mark(pointer)
        elif offset >= self.read_to:
            self._own[offset] = pointer_mark(pointer)
            self.unread = True
        self._count_own(pointer)
        self.join(pointer.producers, time_ms)
        self.learn(pointer.named, time_ms)
        if pointer.kind == "opened":
            self.named_ms = time_ms

    def take_landed(self, batch_sequence: int) -> None:
        """Count an earlier try of an own pointer, which a read has found in the queue."""
        self._count_own(self.landed.pop(batch_sequence))

    def known_end(self) -> int:
        """Return the offset after all read entries and all own pointers: the end is not before it."""
        return max([self.read_to, *(offset + 1 for offset in self._own)])

    def _count_own(self, pointer: Pointer) -> None:
        """Add a pointer and its adopted ones to the totals; the totals in an earlier try may be too small."""
        listed = set(pointer.adopted)  # without an entry that grew after an earlier try: the next pointer counts it
        totals = self.totals_with(entry for entry in self.adopted if entry in listed)
        self.adopted = [entry for entry in self.adopted if entry not in listed]
        self.totals = totals.plus(pointer.records, pointer.stored_bytes)
        if pointer.kind == "data":
            self._published = max(self._published, pointer.batch_sequence)

    def follows(self, offset: int) -> bool:
        """Whether no entry can be between the known end and a pointer published at `offset`."""
        return offset == self.read_to

    def is_alone(self, now_s: float) -> bool:
        """Whether pointers of earlier owners can no longer land in the queue."""
        return now_s > self.owned_s + self.stale_publish_s + CLOCK_ERROR_MS / 1000

    def forget(self, now_ms: int, busy: Container[int] = (), retention_ms: int = 0) -> None:
        """Drop producers silent for the dedup window without stream or block in the ring (`busy`).

        The ring may hold blocks of a producer for longer than the window before the queue shows any of them. A named
        producer is dropped after `retention_ms` of silence; 0: never.
        """
        horizon = now_ms - self.dedup_window_ms
        if retention_ms:
            writing = [number for number, producer in self.producers.items() if producer.streams or number in busy]
            self.named.forget(now_ms - retention_ms, writing)
        for producer_id in [
            number
            for number, producer in self.producers.items()
            if producer.seen_ms < horizon
            and not (producer.streams or number in busy or self.named.get(number) is not None)
        ]:
            del self.producers[producer_id]


def known_ms(own: Ownership, slots: Iterable[BatchSlot]) -> int:
    """Return the queue time before which the dedup window has all copies of the blocks in `slots`.

    Without slots, the result is the time of the last proof. A copy of a block may land as soon as the block is taken.
    A ring may hold the block for longer than the dedup window.
    """
    known_s = min([own.proof_s, *(slot.opened_s for slot in slots)])
    return own.opened_wall_ms + int((known_s - own.opened_s) * 1000)


def changed_entry(offset: int) -> LogCutError:
    """Return the error for an offset at which the log had another pointer before."""
    return LogCutError(f"the queue shows another pointer at offset {offset} than before: its log was cut, or replaced")


def next_instance(own: Ownership, producer: ProducerState, epoch: int, now_s: float, *, by_age: bool) -> int:
    """Return the epoch of an instance that begins: the requested epoch, or the next one for 0.

    The next one is above all numbers of earlier epochs of the owner. A log that was cut may have lost the pointers that
    state an older instance. The owner then has a new epoch, so no two instances have one number.
    `now_s` is monotonic. An older instance may have blocks at an earlier owner. Where the queue refuses by age
    (`by_age`), a pointer to them may land for S after this owner's opening, so the producer's next sequence is unknown.
    Raises: ProducerFencedError for an older instance; NotReadyError during that time; TooLargeError when the partition
    has too many names.
    """
    if own.named.get(producer.id) is None:
        if len(own.named) >= NAMED_PRODUCERS_MAX:
            raise TooLargeError(
                f"partition {own.partition} remembers {len(own.named)} named producers, more are not allowed",
                hint="a name is forgotten when it was silent for the retention of the topic; use fewer names",
            )
    elif by_age:
        left_s = own.owned_s + own.stale_publish_s + CLOCK_ERROR_MS / 1000 - now_s
        if left_s > 0:
            raise NotReadyError(
                f"pointers of an earlier owner of partition {own.partition} may arrive for {left_s:.0f} s",
                retry_after_ms=min(RETRY_MS_MAX, int(left_s * 1000) + 1),
            )
    begun = epoch or max(producer.epoch, min(own.epoch, NUMBERED_EPOCHS) * INSTANCES_PER_EPOCH) + 1
    check_instance(producer, begun)
    return begun


def uses_up_numbers(own: Ownership, producer: ProducerState) -> bool:
    """Whether the next instance would have a number of the owner's next epoch.

    After a cut of the log another instance may get it: the next epoch counts from there.
    """
    return own.epoch < NUMBERED_EPOCHS and producer.epoch == (own.epoch + 1) * INSTANCES_PER_EPOCH


def check_instance(producer: ProducerState, epoch: int, sequence: int = 0) -> None:
    """Refuse an instance that a newer one has followed, or a first sequence that leaves a gap.

    Raises: ProducerFencedError, OutOfSequenceError.
    """
    if epoch < producer.epoch:
        raise ProducerFencedError(
            f"instance {epoch} of named producer {producer.id:016x} was followed by instance {producer.epoch}"
        )
    if sequence > producer.next:
        raise OutOfSequenceError(
            f"named producer {producer.id:016x} is at sequence {producer.next}, a stream from {sequence} leaves a gap"
        )
