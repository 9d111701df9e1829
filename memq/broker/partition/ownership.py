"""An owner's knowledge of its partition from the queue: epoch, proof, producers, totals. Pure.

From it follows which instance of a named producer may write (`next_instance`, `check_instance`).

The queue is the log of what was committed. An owner opens with a control pointer, reads the tail up to
it, and from then on knows everything that lies in the queue as long as it keeps reading what comes
between its own pointers. The moment of a proof is when its request was handed over, never when its
answer was read: an owner that was paused in between would date its pointers too young.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from memq.broker.partition.append import ProducerState
from memq.errors import NotReadyError, OutOfSequenceError, ProducerFencedError, TooLargeError
from memq.format.pointer import Adopted, NamedProducer, Pointer, ProducerRanges, named_since_ms
from memq.format.totals import TotalsFold, adopted_of
from memq.limits import NAMED_PRODUCERS_MAX
from memq.topic import CLOCK_ERROR_MS, Totals

ADOPTED_MAX = 64  # late pointers that one pointer can count; more wait for the next one
RETRY_MS_MAX = 5_000


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

    It knows the totals behind them, and the batches that no owner has counted.

    `last_ms` is the latest queue time of them, `last_at` the offset of the first one that has it.
    `named_ms` is from when on they must be read for what they say of named producers, 0: they say nothing.
    """

    def __init__(self) -> None:
        self.last_ms = 0
        self.last_at = -1
        self.named_ms = 0
        self._fold = TotalsFold()
        self._newest = (0, -1)  # epoch and number of the last owner's last batch
        self._uncounted: list[tuple[int, Adopted]] = []  # with the records before each, in no stated totals so far

    def add(self, offset: int, time_ms: int, pointer: Pointer) -> None:
        """Take the next pointer.

        Totals that are stated count all that lies below some offset (`memq.format.totals`, 1), so a batch is counted
        when they are more than what lies before it.
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
        """Return the batches that came late to all owners so far; the last owner's last batch is none of them."""
        late = [entry for _, entry in self._uncounted]
        last = next((entry for entry in late if (entry.epoch, entry.batch_sequence) == self._newest), None)
        return [entry for entry in late if entry is not last]

    def counted(self) -> Totals:
        """Return the totals behind the tail without the uncounted ones."""
        totals = self._fold.totals
        for entry in self.uncounted():
            totals = totals.plus(-entry.records, -entry.bytes)
        return totals


class NamedProducers:
    """The names of one write partition by producer id, remembered for longer than the dedup window.

    Theory. A named producer's sequences are dense from 0: its owner opens no stream for it beyond what the queue holds.
    So one number, the sequence after its last, says which of them are committed, for as long as the name is remembered.
    Each pointer of its batches says that number again, and the `opened` of an epoch, which is published again now and
    then, says it of all names: an opening reads from the last of these on, and knows what its predecessors knew. Of a
    writer that stages, it is two numbers: its last batch, and how many pieces of that are there.
    There are no more than NAMED_PRODUCERS_MAX: `next_instance` sees to that.
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

    def learn(self, entry: NamedProducer, time_ms: int) -> None:
        """Take the statement of a pointer of queue time `time_ms`, in any order: older ones change nothing."""
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
        )

    def forget(self, before_ms: int, busy: Container[int] = ()) -> None:
        """Forget names silent since before `before_ms` (queue time), except the `busy` ones."""
        for number, entry in list(self._known.items()):
            if entry.last_seen_ms < before_ms and number not in busy:
                del self._known[number]


def batch_of(entry: NamedProducer) -> int:
    """Return the last batch of a writer that stages, -1 for other producers."""
    return int(entry.batch_id) if entry.batch_id.isdecimal() and entry.batch_id.isascii() else -1


@dataclass(slots=True)
class Ownership:
    """One epoch of one partition at one broker. Monotonic times in s, queue times in Unix ms.

    `read_to` is the queue offset below which everything is known.
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
    stated: bool = False  # the opening's totals are stated: what is met from here on is adopted
    totals: Totals = field(default_factory=Totals)  # all that is known in the queue but `adopted` and `landed`
    producers: dict[int, ProducerState] = field(default_factory=dict)
    adopted: list[Adopted] = field(default_factory=list)  # late pointers that the next own ones list and count
    landed: dict[int, Pointer] = field(default_factory=dict)  # own batches met by reading, by batch sequence
    highest_epoch: int = 0
    unread: bool = False  # something may lie between the own pointers: read before the next publish
    named: NamedProducers = field(default_factory=NamedProducers)
    named_ms: int = 0  # queue time of the last own `opened`, which says what is remembered of all names
    owned_s: float = math.inf  # when the opening was over: before, its `opened` had landed
    handed_over_s: float = -math.inf  # when a batch's pointer was last handed to the queue, whatever came of it
    handed_over: int = -1  # the batch sequence of that pointer
    published_s: float = -math.inf  # when the last pointer that is known to be in the queue was handed over
    _own: dict[int, None] = field(default_factory=dict)  # offsets of own pointers at or behind `read_to`
    _published: int = -1  # highest own batch sequence that is counted
    tail: QueueTail = field(default_factory=QueueTail)  # while opening: what earlier owners counted

    def become(self, phase: Phase) -> None:
        """Change phase; only what the table allows."""
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
        """The moment of the last proof as wall clock, carried on from the opening by the monotonic clock."""
        return self.opened_wall_ms + int((self.proof_s - self.opened_s) * 1000)

    # ---- what the queue shows ----------------------------------------------------------------

    def producer(self, producer_id: int) -> ProducerState:
        """Return the known sequences of a producer; a new one starts empty."""
        found = self.producers.get(producer_id)
        if found is None:
            found = self.producers[producer_id] = ProducerState(producer_id)
        return found

    def meet(self, offset: int, time_ms: int, pointer: Pointer) -> None:
        """Take one entry of the queue, in order of offset; entries below `read_to` were taken before."""
        if offset < self.read_to:
            return
        self.read_to = offset + 1
        if self._own.pop(offset, self) is None or pointer.partition != self.partition:
            return
        if pointer.epoch > self.epoch and self.phase is not Phase.FENCED:
            self.become(Phase.FENCED)
        if pointer.kind == "data":
            self.join(pointer.producers, time_ms)
        self.learn(pointer.named, time_ms)
        if not self.stated:
            self.tail.add(offset, time_ms, pointer)
        elif pointer.kind == "data":
            self._count_met(offset, pointer)
        self.highest_epoch = max(self.highest_epoch, pointer.epoch)

    def restart(self, offset: int) -> None:
        """Begin to read the tail at `offset`; nothing is known yet."""
        self.read_to = offset
        self.producers.clear()
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
        """Note what a pointer of queue time `time_ms` says of named producers."""
        for entry in named:
            self.named.learn(entry, time_ms)
            if entry.batch_id:
                continue  # a writer that stages: its blocks have producer ids of their own
            producer = self.producer(entry.producer)
            producer.seen_ms = max(producer.seen_ms, time_ms)
            producer.epoch = max(producer.epoch, entry.epoch)
            producer.queued.add(0, entry.last_sequence)
            producer.next = max(producer.next, entry.last_sequence)

    def _count_met(self, offset: int, pointer: Pointer) -> None:
        """Count a pointer that came between the own ones: an own try that landed late, or a late owner's."""
        own = pointer.epoch == self.epoch and pointer.batch_sequence > self._published
        if own and pointer.batch_sequence not in self.landed:
            self.landed[pointer.batch_sequence] = pointer  # counted when it is taken as the publication of its batch
        else:
            self.adopted.append(adopted_of(offset, pointer))

    def state(self) -> None:
        """Fix the totals of the `opened` pointer, which include late pointers of earlier owners."""
        self.stated = True
        self.totals = self.tail.counted()
        self.adopted = self.tail.uncounted()
        self.tail = QueueTail()

    def named_since_ms(self) -> int:
        """Return from when on an opening must read for all names, as pointers say it; 0 when there are none."""
        return self.named_ms if len(self.named) else 0

    def must_restate(self) -> bool:
        """Whether `opened` must be published again, so that an opening reads at most W for the names."""
        return len(self.named) > 0 and self.queue_time_ms() - self.named_ms > self.dedup_window_ms // 2

    # ---- what is published -------------------------------------------------------------------

    def next_adopted(self) -> tuple[Adopted, ...]:
        """Return the late pointers that the next pointer counts."""
        return tuple(self.adopted[:ADOPTED_MAX])

    def totals_with(self, adopted: Iterable[Adopted]) -> Totals:
        """Return the totals before a pointer that counts `adopted`."""
        totals = self.totals
        for entry in adopted:
            totals = totals.plus(entry.records, entry.bytes)
        return totals

    def published(self, offset: int, pointer: Pointer, time_ms: int) -> None:
        """Count an own pointer that is in the queue at `offset`."""
        if self.follows(offset):
            self.read_to = offset + 1
        elif offset >= self.read_to:
            self._own[offset] = None
            self.unread = True
        self._count_own(pointer)
        self.join(pointer.producers, time_ms)
        self.learn(pointer.named, time_ms)
        if pointer.kind == "opened":
            self.named_ms = time_ms

    def take_landed(self, batch_sequence: int) -> None:
        """Count an earlier try of an own pointer, met by reading: what it says is what the queue holds."""
        self._count_own(self.landed.pop(batch_sequence))

    def known_end(self) -> int:
        """Return the offset behind all that was read, and all own pointers: no end lies before it."""
        return max([self.read_to, *(offset + 1 for offset in self._own)])

    def _count_own(self, pointer: Pointer) -> None:
        """Add what the pointer holds and lists: an earlier try may state less than what was counted since."""
        listed = {entry.offset for entry in pointer.adopted}
        totals = self.totals_with(entry for entry in self.adopted if entry.offset in listed)
        self.adopted = [entry for entry in self.adopted if entry.offset not in listed]
        self.totals = totals.plus(pointer.records, pointer.stored_bytes)
        if pointer.kind == "data":
            self._published = max(self._published, pointer.batch_sequence)

    def follows(self, offset: int) -> bool:
        """Whether no entry can be between the known end and a pointer published at `offset`."""
        return offset == self.read_to

    def is_alone(self, now_s: float) -> bool:
        """Whether no pointer of an earlier owner can land any more, whose blocks were sent again to this one."""
        return now_s > self.owned_s + self.stale_publish_s + CLOCK_ERROR_MS / 1000

    def forget(self, now_ms: int, busy: Container[int] = (), retention_ms: int = 0) -> None:
        """Drop producers silent for the dedup window without stream or block in the ring (`busy`).

        A ring may hold blocks for longer than the window, of a producer that the queue has never seen. A named one
        goes after the topic's retention, 0: never.
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


def next_instance(own: Ownership, producer: ProducerState, epoch: int, now_s: float, *, by_age: bool) -> int:
    """Return the epoch of an instance that begins: the one it asks for, for 0 the next.

    `now_s` is monotonic.
    An older instance may have blocks at an earlier owner. Where the queue refuses by age (`by_age`), their pointer may
    land for S after this owner's `opened`; before that, nobody can say where the name is.
    Raises: ProducerFencedError for an older instance; NotReadyError until then; TooLargeError for a name too many.
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
    begun = epoch or producer.epoch + 1
    check_instance(producer, begun)
    return begun


def check_instance(producer: ProducerState, epoch: int, sequence: int = 0) -> None:
    """Refuse an instance that a newer one has followed, or one that leaves sequences out.

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
