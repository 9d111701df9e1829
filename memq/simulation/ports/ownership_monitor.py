"""The rules of docs/ownership.md, checked at every call of an owner to the queue or the coordinator.

The model in `tests/model` shows that these rules keep the promises; this monitor shows that the product keeps the
rules. Its input are the calls of the ports: claims, reads and publishes. For each it knows when the owner handed it
over, when it took effect, and when the owner read its answer. Each finding begins with the number of the broken rule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from memq.format.pointer import Pointer
from memq.format.ranges import RangeSet
from memq.notification import Entry, Publication
from memq.topic import ReadPartition

ROUNDING_S = 0.002  # queue times are whole milliseconds
AHEAD_S_MAX = 10.0
REQUESTS_MAX = 64  # remembered request times of one owner
TASKS_MAX = 16_384  # remembered tasks: thousands may read while an opening is paused

_T = TypeVar("_T")
Task = tuple[int, int]  # process, number of the task there
MonitoredPartition = tuple[ReadPartition, int]  # read partition, write partition
Key = tuple[int, MonitoredPartition, int]  # process, partition, epoch


@dataclass(frozen=True, slots=True)
class Landed:
    """One entry of the queue: its owner's epoch, and when it landed (true time)."""

    write_partition: int
    epoch: int
    kind: str
    time_ms: int
    landed_s: float


@dataclass(slots=True)
class MonitoredLog:
    """The true content of one read partition; an entry's index is its offset."""

    entries: list[Landed] = field(default_factory=list)
    highest: dict[int, int] = field(default_factory=dict)  # epoch of each write partition
    begin: int = 0
    stale_s: float = 0.0
    window_s: float = 0.0  # 0: the tail is not checked
    cut_s: float = -1.0  # when it was last cut: publishes that were sent before went to a lost leader
    dropped: bool = False  # with its topic: a late `create` may bring an empty one back, to which no rule applies

    def end_at(self, moment_s: float) -> int:
        """Return the end of the log at a moment."""
        return bisect_right(self.entries, moment_s, key=lambda entry: entry.landed_s)

    def tail_begin(self, since_ms: float) -> int:
        """Return the first remaining offset with a queue time of at least `since_ms`."""
        young = (n for n in range(self.begin, len(self.entries)) if self.entries[n].time_ms >= since_ms)
        return next(young, len(self.entries))


@dataclass(slots=True)
class Reading:
    """One read on its way: task, offset and time; `end` is the log's end at the moment of the read."""

    task: Task
    partition: ReadPartition
    offset: int
    handed_over_s: float
    end: int = 0


@dataclass(slots=True)
class Known:
    """Offsets that answers have shown, the moments of the requests, and reads up to the end."""

    shown: RangeSet = field(default_factory=RangeSet)
    requests: deque[float] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    ended_s: float = -1.0  # hand-over of the last read that reached the end,
    end_seen_s: float = -1.0  # and the time when its answer was read
    met: dict[int, int] = field(default_factory=dict)  # the highest epoch read, by write partition

    def join(self, other: Known) -> None:
        """Add the knowledge of `other`."""
        for first, next_ in other.shown:
            self.shown.add(first, next_)
        self.requests.extend(other.requests)
        self.ended_s, self.end_seen_s = max(self.ended_s, other.ended_s), max(self.end_seen_s, other.end_seen_s)
        for partition, epoch in other.met.items():
            self.met[partition] = max(self.met.get(partition, 0), epoch)


@dataclass(slots=True)
class MonitoredOwner:
    """One epoch of one write partition at one process."""

    known: Known
    opened_s: float = -1.0  # hand-over of its `opened`
    opened_at: int = -1
    answered_s: float | None = None
    clock_ms: float = 0.0  # by how much its queue times are ahead of true time
    in_flight: bool = False
    failed_s: float = -1.0  # when it learned that its last publish failed
    last_s: float = -1.0  # hand-over of its last batch
    batches: int = 0
    closed: bool = False
    cut: tuple[float, int] | None = None  # when its log was cut, and the end that it knew before
    over: bool = False  # it has learned that its log was cut


@dataclass(slots=True)
class Publish:
    """One publish on its way."""

    owner: MonitoredOwner
    name: str
    partition: ReadPartition
    pointer: Pointer
    handed_over_s: float
    read_to: int


class OwnershipMonitor:
    """All partitions of one run. `fail` gets each finding; the queue refuses low epochs, or old entries.

    `key_valid_s` is the time after the put of an object within which its batch may be published.
    """

    def __init__(self, fail: Callable[[str], None], refuse: Literal["epoch", "age"]) -> None:
        self.key_valid_s = float("inf")
        self._fail = fail
        self._refuse = refuse
        self._logs: dict[ReadPartition, MonitoredLog] = {}
        self._claims: dict[tuple[str, int], int] = {}  # the highest claimed epoch
        self._claimed: dict[tuple[str, int, int], int] = {}  # the process that claimed an epoch
        self._owners: dict[Key, MonitoredOwner] = {}
        self._readers: dict[tuple[Task, ReadPartition], Known] = {}  # a task's reads before its first publish
        self._owner_of: dict[tuple[Task, ReadPartition], MonitoredOwner] = {}  # the owner of a task's last publish
        self._stored_s: dict[str, float] = {}
        self._over: dict[tuple[str, int, int], None] = {}  # the epochs whose owners learned that their logs were cut

    def log(self, partition: ReadPartition) -> MonitoredLog:
        """Return the log of a read partition."""
        return self._logs.setdefault(partition, MonitoredLog())

    # ---- the coordinator -------------------------------------------------------------------------

    def claiming(self, task: Task) -> None:
        """A task claims an epoch: its earlier reads do not count for this epoch."""
        for key in [key for key in self._readers if key[0] == task]:
            del self._readers[key]
        for key in [key for key in self._owner_of if key[0] == task]:
            del self._owner_of[key]

    def claimed(self, topic_id: str, write_partition: int, epoch: int, process: int) -> None:
        """The coordinator gave an epoch to a process."""
        if epoch <= self._claims.get((topic_id, write_partition), 0):
            self._fail(f"rule 1: epoch {epoch} of partition {write_partition} is given a second time")
        self._claims[topic_id, write_partition] = epoch
        self._claimed[topic_id, write_partition, epoch] = process

    # ---- reads -----------------------------------------------------------------------------------

    def works_for(self, task: Task, partition: ReadPartition, write_partition: int, epoch: int) -> None:
        """A task reads and publishes for an epoch of its process."""
        owner = self._owners.get((task[0], (partition, write_partition), epoch))
        if owner is not None and (task, partition) not in self._owner_of:
            _keep(self._owner_of, (task, partition), owner)

    def asked(self, task: Task, partition: ReadPartition, now_s: float) -> None:
        """A task hands over a request to the queue; reads of entries count here, too."""
        known = self._readers.pop((task, partition), None) or Known()
        _keep(self._readers, (task, partition), known)
        known.requests.append(now_s)
        owner = self._owner_of.get((task, partition))
        if owner is not None:
            owner.known.requests.append(now_s)

    def reads(self, task: Task, partition: ReadPartition, offset: int, now_s: float) -> Reading:
        """A task hands over a read."""
        self.asked(task, partition, now_s)
        return Reading(task, partition, offset, now_s)

    def happens(self, reading: Reading) -> None:
        """A read happens at the queue."""
        reading.end = len(self.log(reading.partition).entries)

    def shows(self, reading: Reading, entries: Sequence[Entry], now_s: float) -> None:
        """The task reads the answer to its read."""
        key = (reading.task, reading.partition)
        owner = self._owner_of.get(key)
        next_ = entries[-1].offset + 1 if entries else reading.offset
        for each in (self._readers.get(key), None if owner is None else owner.known):
            if each is None:
                continue
            each.shown.add(reading.offset, next_)
            for entry in self.log(reading.partition).entries[reading.offset : next_]:
                each.met[entry.write_partition] = max(each.met.get(entry.write_partition, 0), entry.epoch)
            if next_ >= reading.end:
                each.ended_s, each.end_seen_s = max(each.ended_s, reading.handed_over_s), now_s

    def compares(self, task: Task, partition: ReadPartition, now_s: float) -> None:
        """The task reads the last entry that it knows again: the second half of a read up to the end."""
        owner = self._owner_of.get((task, partition))
        for known in (self._readers.get((task, partition)), None if owner is None else owner.known):
            if known is not None:
                known.end_seen_s = now_s

    def forwards(self, task: Task, partition: ReadPartition, write_partition: int, epoch: int, now_s: float) -> None:
        """A task reads to forward blocks of a lost epoch: no publish of this epoch may still land."""
        owner = self._owners.get((task[0], (partition, write_partition), epoch))
        if owner is None or owner.last_s < 0 or self._refuse != "age":
            return
        since_s = now_s - owner.last_s
        if since_s < self.log(partition).stale_s - ROUNDING_S:
            self._fail(f"rule 5: blocks of epoch {epoch} are forwarded {since_s:.3f} s after its last publish")

    # ---- publishes -------------------------------------------------------------------------------

    def publishes(self, process: int, task: Task, publication: Publication, pointer: Pointer, now_s: float) -> Publish:
        """A task hands over a pointer."""
        partition = publication.partition
        key = (process, (partition, publication.write_partition), publication.epoch)
        owner = self._owners.get(key)
        name = f"epoch {publication.epoch} of {partition.topic}/{publication.write_partition}: '{pointer.kind}'"
        opening = owner is None
        if owner is None:
            owner = self._owners[key] = MonitoredOwner(Known())
        owner.known.join(self._readers.pop((task, partition), Known()))
        _keep(self._owner_of, (task, partition), owner)
        log = self.log(partition)
        if opening:
            self._check_opening(process, publication, pointer, name)
            owner.opened_s, owner.clock_ms = now_s, publication.time_ms - now_s * 1000
        else:
            self._check_publish(log, owner, publication, pointer, name, now_s)
        if pointer.kind == "data":
            owner.last_s = now_s
            owner.batches += 1
            self._check_key(pointer, name, now_s)
        owner.closed = owner.closed or pointer.kind == "closed"
        owner.in_flight = True
        owner.known.requests.append(now_s)
        ranges = list(owner.known.shown)
        return Publish(owner, name, partition, pointer, now_s, ranges[-1][1] if ranges else 0)

    def _check_opening(self, process: int, publication: Publication, pointer: Pointer, name: str) -> None:
        claim = self._claimed.pop(
            (publication.partition.topic_id, publication.write_partition, publication.epoch), None
        )
        if pointer.kind != "opened":
            self._fail(f"rule 1: {name} is published before 'opened'")
        elif claim != process:
            self._fail(f"rule 1: {name} by a process that has not claimed it, or opened it before")

    def _check_publish(
        self,
        log: MonitoredLog,
        owner: MonitoredOwner,
        publication: Publication,
        pointer: Pointer,
        name: str,
        now_s: float,
    ) -> None:
        if owner.answered_s is None or owner.answered_s - owner.opened_s > log.stale_s + ROUNDING_S:
            self._fail(f"rule 1: {name} is published, but its opening was not answered within {log.stale_s:g} s")
        if owner.in_flight:
            self._fail(f"rule 4: {name} is published while another is in flight")
        if owner.failed_s >= 0 and owner.known.ended_s < owner.failed_s:
            self._fail(f"rule 4: {name} is published after an error, without reading to the end")
        met = owner.known.met.get(publication.write_partition, 0)
        if met > publication.epoch:
            self._fail(f"rule 5: {name} is published after epoch {met} was read")
        if owner.over:
            self._fail(f"rule 12: {name} is published after a cut of the log that its owner has seen")
        if owner.closed and pointer.kind != "closed":
            self._fail(f"rule 5: {name} is published after 'closed'")
        if owner.opened_at >= 0:
            self._check_tail(log, owner, name)
            self._check_proof(log, owner, publication.time_ms, name, now_s)

    def _check_tail(self, log: MonitoredLog, owner: MonitoredOwner, name: str) -> None:
        """Check at the first publish after an opening that the tail of W was read up to `opened`."""
        since_ms = log.entries[owner.opened_at].time_ms - log.window_s * 1000
        first = log.tail_begin(since_ms) if log.window_s and not owner.batches else owner.opened_at
        if first < owner.opened_at and not owner.known.shown.covers(first, owner.opened_at):
            self._fail(f"rule 1: {name} is published, and {first} to {owner.opened_at} of the tail was not read")

    def _check_proof(self, log: MonitoredLog, owner: MonitoredOwner, time_ms: int, name: str, now_s: float) -> None:
        """Check that a queue time is the hand-over of a request, and that all entries until then were read."""
        proof_s = (time_ms - owner.clock_ms) / 1000
        if not any(abs(moment_s - proof_s) <= ROUNDING_S for moment_s in owner.known.requests):
            self._fail(f"rule 3: {name} is dated {now_s - proof_s:.3f} s ago, when no request was handed over")
        end, first = log.end_at(proof_s - ROUNDING_S), max(owner.opened_at + 1, log.begin)
        if first < end and not owner.known.shown.covers(first, end):
            self._fail(f"rule 3: {name} is dated {now_s - proof_s:.3f} s ago: not all was read that lay there then")
        age_s = now_s - proof_s
        if abs(proof_s - owner.known.ended_s) <= ROUNDING_S:
            age_s = min(age_s, now_s - owner.known.end_seen_s)  # the answer to a read may be late
        if age_s > log.stale_s / 3 + ROUNDING_S:
            self._fail(f"rule 3: {name} is dated {now_s - proof_s:.3f} s ago, and nothing was read since")

    def stored(self, key: str, now_s: float) -> None:
        """An object was stored."""
        self._stored_s.setdefault(key, now_s)

    def _check_key(self, pointer: Pointer, name: str, now_s: float) -> None:
        key = pointer.locations[0].key
        stored_s = self._stored_s.get(key, now_s)
        if "/staged/" not in key and now_s - stored_s > self.key_valid_s + ROUNDING_S:
            self._fail(f"rule 10: {name} is published {now_s - stored_s:.1f} s after its object was stored")

    def lands(self, publish: Publish, publication: Publication, offset: int, wall_ms: float, now_s: float) -> None:
        """A pointer lands in the queue, whose clock shows `wall_ms`."""
        log = self.log(publication.partition)
        if log.dropped:
            return
        highest = log.highest.get(publication.write_partition, 0)
        log.highest[publication.write_partition] = max(highest, publication.epoch)
        if self._refuse == "epoch" and publication.epoch < highest:
            self._fail(f"rule 4: the queue took {publish.name} after epoch {highest}")
        age_s = (wall_ms - publication.time_ms) / 1000
        if self._refuse == "age" and not -AHEAD_S_MAX - ROUNDING_S <= age_s <= log.stale_s + ROUNDING_S:
            self._fail(f"rule 4: the queue took {publish.name}, {age_s:.3f} s old")
        assert offset == len(log.entries), f"offset {offset} follows on {len(log.entries)}"
        log.entries.append(
            Landed(publication.write_partition, publication.epoch, publish.pointer.kind, publication.time_ms, now_s)
        )
        if publish.pointer.kind == "opened" and publish.owner.opened_at < 0:
            publish.owner.opened_at = offset

    def answers(self, publish: Publish, offset: int, now_s: float) -> None:
        """A publish is answered with its offset."""
        owner = publish.owner
        owner.in_flight = False
        if owner.cut is not None and publish.handed_over_s > owner.cut[0] and offset < owner.cut[1]:
            owner.over = True
            pointer = publish.pointer
            self._over[pointer.topic_id, pointer.partition, pointer.epoch] = None
        owner.known.shown.add(offset, offset + 1)
        if owner.answered_s is None:
            owner.answered_s = now_s

    def fails(self, publish: Publish, now_s: float) -> None:
        """A publish ended without an offset: refused, lost, or given up."""
        publish.owner.in_flight = False
        publish.owner.failed_s = now_s

    def drops(self, partition: ReadPartition) -> None:
        """A log is deleted with its topic."""
        self.log(partition).dropped = True

    def cuts(self, partition: ReadPartition, end: int, now_s: float) -> None:
        """A log loses all entries from offset `end` on."""
        log = self.log(partition)
        del log.entries[end:]
        log.cut_s = now_s
        for (_, (read_partition, _), _), owner in self._owners.items():
            if read_partition != partition:
                continue
            owner.opened_at = min(owner.opened_at, end - 1)  # the tail before it is the one that is left
            known = max((next_ for _, next_ in owner.known.shown), default=0)
            if known > end:
                owner.cut = (now_s, known if owner.cut is None else max(known, owner.cut[1]))

    def acks(self, topic_id: str, write_partition: int, epoch: int) -> None:
        """An owner acks blocks whose pointers are in the queue."""
        if (topic_id, write_partition, epoch) in self._over:
            self._fail(
                f"rule 12: epoch {epoch} of partition {write_partition} acks after a cut that its owner has seen"
            )

    def trims(self, partition: ReadPartition, before: int) -> None:
        """Entries below `before` are removed."""
        log = self.log(partition)
        log.begin = max(log.begin, before)


def _keep(kept: dict[tuple[Task, ReadPartition], _T], key: tuple[Task, ReadPartition], value: _T) -> None:
    """Keep a value of a task, and forget the oldest one above TASKS_MAX."""
    kept[key] = value
    if len(kept) > TASKS_MAX:
        del kept[next(iter(kept))]
