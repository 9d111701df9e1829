"""The decisions about items of queues, their answers, and the saved state of a queue machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError
from memq.format.held_object import HeldBlock, HeldLane
from memq.queues.pop.groups import BeginPopDecision, PopGroup, ReadPopDecision, RemovePopDecision
from memq.queues.range_map import Range, merged
from memq.state_log.machine_format import MachineFormat

QUEUES_MACHINE = "queues"  # its name in the log
STATE_NAME = "snapshot of queues"  # in errors
STATE_VERSION = 3  # 1: no dedupe keys. 1 and 2: `blocks` have a state for each item; no pop groups
_TERMS = "queue"  # first word of the lanes of queue blocks
NUMBERS = 4  # of the words after it; the others have names
_KEY, _ORDERED, _DEDUPE = "key", "ordered", "dedupe"
DIGEST_BYTES = 16


class ItemState(IntEnum):
    """State of an item. DEAD: it has had all its attempts; its payload is kept."""

    READY = 0
    LEASED = 1
    ACKED = 2
    EXPIRED = 3
    CANCELLED = 4
    DEAD = 5

    @property
    def is_over(self) -> bool:
        """Whether the payload is needed no more."""
        return _OVER[self]


_OVER = tuple(each in (ItemState.ACKED, ItemState.EXPIRED, ItemState.CANCELLED) for each in ItemState)


class ItemOutcome(StrEnum):
    """The outcome of a request about an item.

    LEASE_LOST: the lease was over, and another grant or the queue has the item now. LEASED: a worker has it.
    UNKNOWN: no queue has it, or its end was long ago.
    """

    ACKED = "acked"
    ALREADY_ACKED = "already-acked"
    RETURNED = "returned"
    EXTENDED = "extended"
    LEASE_LOST = "lease-lost"
    LEASED = "leased"
    EXPIRED = "expired"
    DEAD = "dead"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


class Dedupe(NamedTuple):
    """A dedupe key: a queue takes one item under it from `since_ms` until `until_ms` (Unix ms).

    `digest` is of queue and key, so that the state has 16 bytes of each.
    """

    digest: bytes
    since_ms: int
    until_ms: int


def dedupe_digest(queue: str, key: str) -> bytes:
    """Return the digest of a dedupe key of a queue."""
    return blake2b(f"{queue} {key}".encode(), digest_size=DIGEST_BYTES).digest()


class ItemTerms(NamedTuple):
    """The terms that all items of a block have; times in ms.

    The lowest `priority` is first. `lease_ms` 0: at most once. `attempts_max` 0: no limit. `expires_ms` is a Unix time,
    0 for none. Items with a `key` take turns with those of other keys. `ordered`: one item of the key is leased at a
    time. A block with `dedupe` has one item.
    """

    priority: int
    lease_ms: int
    attempts_max: int
    expires_ms: int
    key: str = ""
    ordered: bool = False
    dedupe: Dedupe | None = None

    def lane(self) -> str:
        """Return the lane of such blocks in the index of their object.

        Without keys it is the lane of earlier releases, which refuse other ones.
        """
        words = [_TERMS, *map(str, self[:NUMBERS])]
        if self.key:
            words.append(f"{_ORDERED if self.ordered else _KEY}={quote(self.key, safe='')}")
        if self.dedupe is not None:
            words.append(f"{_DEDUPE}={self.dedupe.digest.hex()}.{self.dedupe.since_ms}.{self.dedupe.until_ms}")
        return " ".join(words)


@lru_cache(maxsize=1_024)
def terms_of(lane: str) -> ItemTerms:
    """Return the terms in a lane. Raises: CorruptDataError."""
    word, *words = lane.split(" ")
    numbers, more = words[:NUMBERS], dict(each.partition("=")[::2] for each in words[NUMBERS:])
    try:
        if word != _TERMS or len(numbers) != NUMBERS or not all(map(str.isdecimal, numbers)):
            raise ValueError(word)
        dedupe = _dedupe_of(more.pop(_DEDUPE)) if _DEDUPE in more else None
        ordered = _ORDERED in more
        key = unquote(more.pop(_ORDERED if ordered else _KEY, ""), errors="strict")
        priority, lease_ms, attempts_max, expires_ms = map(int, numbers)
    except ValueError as error:
        raise CorruptDataError(f"lane {lane[:60]!a} has no terms of queue items") from error
    if more or (ordered and not key):
        raise CorruptDataError(f"lane {lane[:60]!a} has no terms of queue items")
    return ItemTerms(priority, lease_ms, attempts_max, expires_ms, key, ordered, dedupe)


def _dedupe_of(word: str) -> Dedupe:
    digest, since_ms, until_ms = word.split(".")
    found = Dedupe(bytes.fromhex(digest), int(since_ms), int(until_ms))
    if len(found.digest) != DIGEST_BYTES:
        raise ValueError(word)
    return found


def is_queue_lane(lane: str) -> bool:
    """Whether the blocks of a lane have queue items: the lanes of transactions have other names."""
    return lane.startswith(f"{_TERMS} ")


def queue_scope(queue: str) -> int:
    """Return the scope of the blocks of a queue: a block of another one is refused."""
    scope: int = crc32c(queue.encode())
    return scope


class ItemRanges(msgspec.Struct, frozen=True, array_like=True):
    """Items of a block: begin and end (exclusive) of each range of their numbers, in order."""

    block: int
    ranges: tuple[int, ...]

    def __iter__(self) -> Iterator[int]:
        for begin, end in self.pairs():
            yield from range(begin, end)

    def pairs(self) -> Iterable[Range]:
        """Return begin and end of each range."""
        if len(self.ranges) == 2:
            return (self.ranges,)
        return zip(self.ranges[::2], self.ranges[1::2], strict=False)

    def __len__(self) -> int:
        return sum(self.ranges[1::2]) - sum(self.ranges[::2])


class LeasedItems(msgspec.Struct, frozen=True, array_like=True):
    """Items with the number of the grant that the request names; 0: they were never granted."""

    items: ItemRanges
    grant: int


def ranges_of(block: int, numbers: Iterable[int]) -> ItemRanges:
    """Return items of a block, in the order of their numbers."""
    return merged_ranges(block, ((number, number + 1) for number in numbers))


def merged_ranges(block: int, ranges: Iterable[Range]) -> ItemRanges:
    """Return ranges of items of a block, in the order of their numbers."""
    return ItemRanges(block, tuple(edge for each in merged(ranges) for edge in each))


class EnqueueDecision(msgspec.Struct, frozen=True, tag="enqueue"):
    """Blocks of items that lie in object `key`. A block that exists gets this object in place of its own.

    The target of a lane is the queue, and the lane has the terms. Ends before `before_ms` may be forgotten, and dedupe
    keys whose windows ended before it. Blocks of another first item under their dedupe key are not taken.
    """

    key: str
    before_ms: int
    lanes: tuple[HeldLane, ...]


class GrantDecision(msgspec.Struct, frozen=True, tag="grant"):
    """A lease on items for one worker. Its number is above all before it, and is the fencing token (Q3)."""

    number: int
    now_ms: int
    items: tuple[ItemRanges, ...]


class AckDecision(msgspec.Struct, frozen=True, tag="ack"):
    """Items that their worker has done."""

    now_ms: int
    leases: tuple[LeasedItems, ...]


class NackKind(StrEnum):
    """The reason why a worker gives an item back.

    FAILED: this was an attempt. UNUSED: it was none, because the worker did not begin. DEAD: no attempt may follow.
    """

    FAILED = "failed"
    UNUSED = "unused"
    DEAD = "dead"


class NackDecision(msgspec.Struct, frozen=True, tag="nack", omit_defaults=True):
    """Items that their worker gives back until `due_ms`, with a note for the next one."""

    due_ms: int
    note: bytes
    leases: tuple[LeasedItems, ...]
    kind: NackKind = NackKind.FAILED


class ExtendDecision(msgspec.Struct, frozen=True, tag="extend"):
    """Leases that last at least `lease_ms` from now on: none gets shorter."""

    lease_ms: int
    leases: tuple[LeasedItems, ...]


class EndDecision(msgspec.Struct, frozen=True, tag="end"):
    """Items without a worker that end: they expire, or have had all their attempts."""

    now_ms: int
    dead: bool
    leases: tuple[LeasedItems, ...]


class CancelDecision(msgspec.Struct, frozen=True, tag="cancel"):
    """Items that no worker has, and that nobody wants any more."""

    now_ms: int
    items: tuple[ItemRanges, ...]


class RedriveDecision(msgspec.Struct, frozen=True, tag="redrive"):
    """Dead items that are to be ready again; their attempts begin again."""

    now_ms: int
    items: tuple[ItemRanges, ...]


class PurgeDecision(msgspec.Struct, frozen=True, tag="purge"):
    """Dead items that nobody wants any more."""

    now_ms: int
    items: tuple[ItemRanges, ...]


class EndPopDecision(msgspec.Struct, frozen=True, tag="pop-end"):
    """Items of pop groups that end without an ack, dead ones too: retention took their records.

    With `removed` their pop group was removed, or its topic deleted.
    """

    now_ms: int
    removed: bool
    leases: tuple[LeasedItems, ...]


LeaseDecision = AckDecision | NackDecision | ExtendDecision | EndDecision | EndPopDecision
ItemDecision = CancelDecision | RedriveDecision | PurgeDecision
PopDecision = BeginPopDecision | ReadPopDecision | RemovePopDecision
QueueDecision = EnqueueDecision | GrantDecision | LeaseDecision | ItemDecision | PopDecision


class GrantedItems(NamedTuple):
    """Items in a row in the answer to a grant: grants that each has had, and the note of the last nack."""

    begin: int
    end: int
    attempt: int
    note: bytes


class GrantedBlock(NamedTuple):
    """The granted items of one block, and where its bytes are."""

    topic: str
    block: HeldBlock
    key: str
    lease_ms: int
    items: tuple[GrantedItems, ...]

    @property
    def granted(self) -> int:
        """How many items are granted."""
        return sum(each.end - each.begin for each in self.items)


class OutcomeRun(NamedTuple):
    """Items in a row with the same outcome."""

    outcome: ItemOutcome
    items: int


Outcomes = tuple[OutcomeRun, ...]  # the answer to a decision about items


def outcomes_of(runs: Iterable[tuple[ItemOutcome, int]]) -> Outcomes:
    """Return outcomes of items in their order; neighbours with the same one become one run."""
    found: list[OutcomeRun] = []
    for outcome, count in runs:
        if found and found[-1].outcome is outcome:
            found[-1] = OutcomeRun(outcome, found[-1].items + count)
        else:
            found.append(OutcomeRun(outcome, count))
    return tuple(found)


def with_outcomes(items: Iterable[ItemRanges], outcomes: Outcomes) -> Iterator[tuple[int, int, int, ItemOutcome]]:
    """Yield block, begin and end of items in a row with the same outcome, and this outcome."""
    runs, outcome, left = iter(outcomes), ItemOutcome.UNKNOWN, 0
    for each in items:
        for begin, end in each.pairs():
            while begin < end:
                if not left:
                    outcome, left = next(runs)
                stop = min(end, begin + left)
                yield each.block, begin, stop, outcome
                left -= stop - begin
                begin = stop


class ItemStatus(NamedTuple):
    """State of an item, number of its last grant, and grants that it has had.

    It is due at `due_ms` (Unix ms). `lease_ms` is how long its present lease lasts. `note` is that of the last nack.
    """

    state: ItemState
    grant: int
    attempts: int
    due_ms: int
    lease_ms: int
    note: bytes = b""


class SavedItems(NamedTuple):
    """Items in a row with the same status, in a snapshot."""

    items: int
    status: ItemStatus


class SavedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block in a snapshot, with all its items in order.

    `items` is empty if no item was ever granted, and none has ended.
    """

    arrival: int
    lane: HeldLane  # with this block alone
    key: str
    items: tuple[SavedItems, ...] = ()


class FormerBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block in a snapshot of versions 1 and 2, with values for each item.

    `states`, `grants` and `attempts` are empty if no item was ever granted.
    """

    arrival: int
    lane: HeldLane  # with this block alone
    key: str
    states: bytes = b""
    grants: tuple[int, ...] = ()
    attempts: tuple[int, ...] = ()
    due_ms: dict[int, int] = {}
    lease_ms: dict[int, int] = {}
    notes: dict[int, bytes] = {}


class EndedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block whose items are all over: when the last one ended, and their ends.

    `runs` has state and last grant of items in order, and how many have the same.
    """

    ended_ms: int
    runs: tuple[tuple[int, int, int], ...]

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, ItemStatus]]:
        """Yield begin, end and status of its items in a row; their times and attempts are not known any more."""
        first = 0
        for state, grant, count in self.runs:
            last = first + count
            if max(begin, first) < min(end, last):
                yield max(begin, first), min(end, last), ItemStatus(ItemState(state), grant, 0, 0, 0)
            first = last


class FirstBlock(NamedTuple):
    """In the answer to an enqueue: the block that came first under the same dedupe key."""

    block: int


class SavedFirst(NamedTuple):
    """The first block under a dedupe key, in a snapshot."""

    digest: bytes
    block: int
    until_ms: int


class SavedQueues(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a queue machine. `blocks` is empty from version 3 on, and `ranged` before it."""

    version: int
    last_grant: int
    arrivals: int
    blocks: list[FormerBlock]
    ended: list[tuple[int, EndedBlock]]
    totals: dict[str, int]
    firsts: list[SavedFirst] = []
    ranged: list[SavedBlock] = []
    pops: list[PopGroup] = []


FORMAT: MachineFormat[QueueDecision, SavedQueues] = MachineFormat(
    QueueDecision, SavedQueues, STATE_VERSION, decision="decision about queue items", snapshot=STATE_NAME
)
encode_decision = FORMAT.encode_decision
decode_decision = FORMAT.decode_decision
