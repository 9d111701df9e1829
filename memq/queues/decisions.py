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
from memq.queues.runs.spilled import BringBlocksDecision, SavedRun, SpillBlocksDecision
from memq.state_log.machine_format import MachineFormat

QUEUES_MACHINE = "queues"  # its name in the log
STATE_NAME = "snapshot of queues"  # in errors
STATE_VERSION = 3  # 1: no dedupe keys. 1 and 2: `blocks` have a state for each item; no pop groups
RUNS_VERSION = 4  # of a state with runs: earlier releases refuse it
_TERMS = "queue"  # first word of the lanes of queue blocks
NUMBERS = 4  # of the words after it; the others have names
_KEY, _ORDERED, _DEDUPE = "key", "ordered", "dedupe"
DIGEST_BYTES = 16


class ItemState(IntEnum):
    """State of an item. DEAD: the item has used all its attempts; its payload is kept."""

    READY = 0
    LEASED = 1
    ACKED = 2
    EXPIRED = 3
    CANCELLED = 4
    DEAD = 5

    @property
    def is_over(self) -> bool:
        """Whether the item has ended, so that its payload is no longer needed."""
        return _OVER[self]


_OVER = tuple(each in (ItemState.ACKED, ItemState.EXPIRED, ItemState.CANCELLED) for each in ItemState)


class ItemOutcome(StrEnum):
    """The outcome of a request about an item.

    LEASE_LOST: the lease was over, and the item is ready or has another grant. LEASED: a worker has the item.
    UNKNOWN: no queue has the item, or its end was too long ago.
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
    """A dedupe key: a queue accepts one item with this key from `since_ms` until `until_ms` (Unix ms).

    `digest` is the digest of queue and key: 16 bytes in the state for each key.
    """

    digest: bytes
    since_ms: int
    until_ms: int


def dedupe_digest(queue: str, key: str) -> bytes:
    """Return the digest of a dedupe key of a queue."""
    return blake2b(f"{queue} {key}".encode(), digest_size=DIGEST_BYTES).digest()


class ItemTerms(NamedTuple):
    """The settings of all items of a block; times in ms.

    The lowest `priority` is first. `lease_ms` 0: at most once. `attempts_max` 0: no limit. `expires_ms` is a Unix time,
    0 for none. Keys take turns. `ordered`: one item of the `key` is leased at a time. A block with `dedupe` has one
    item.
    """

    priority: int
    lease_ms: int
    attempts_max: int
    expires_ms: int
    key: str = ""
    ordered: bool = False
    dedupe: Dedupe | None = None

    def lane(self) -> str:
        """Return the lane of blocks with these settings in the index of their object.

        Without keys, the lane is as in earlier releases, which refuse lanes with keys.
        """
        words = [_TERMS, *map(str, self[:NUMBERS])]
        if self.key:
            words.append(f"{_ORDERED if self.ordered else _KEY}={quote(self.key, safe='')}")
        if self.dedupe is not None:
            words.append(f"{_DEDUPE}={self.dedupe.digest.hex()}.{self.dedupe.since_ms}.{self.dedupe.until_ms}")
        return " ".join(words)


@lru_cache(maxsize=1_024)
def terms_of(lane: str) -> ItemTerms:
    """Return the settings that a lane encodes. Raises: CorruptDataError."""
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
    """Whether the blocks of a lane have queue items. Lanes of transactions have other names."""
    return lane.startswith(f"{_TERMS} ")


def queue_scope(queue: str) -> int:
    """Return the scope of the blocks of a queue. The check of a block refuses another scope."""
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
    """Items with the number of the grant that the request names; 0 for items that were never granted."""

    items: ItemRanges
    grant: int


def ranges_of(block: int, numbers: Iterable[int]) -> ItemRanges:
    """Return items of a block, in the order of their numbers."""
    return merged_ranges(block, ((number, number + 1) for number in numbers))


def merged_ranges(block: int, ranges: Iterable[Range]) -> ItemRanges:
    """Return ranges of items of a block, in the order of their numbers."""
    return ItemRanges(block, tuple(edge for each in merged(ranges) for edge in each))


class EnqueueDecision(msgspec.Struct, frozen=True, tag="enqueue"):
    """Add blocks of items, which are in object `key`.

    A block that exists gets this object in place of its own. The target of a lane is the queue, and the lane has the
    settings. Ends before `before_ms` may be forgotten, and so may dedupe keys whose windows ended before. A block whose
    dedupe key has another first item is not added.
    """

    key: str
    before_ms: int
    lanes: tuple[HeldLane, ...]


class GrantDecision(msgspec.Struct, frozen=True, tag="grant", omit_defaults=True):
    """Lease items to one worker. `number` grows with each grant, and is the fencing token (Q4).

    `request` is the identity of the worker's request, 0 for none.
    """

    number: int
    now_ms: int
    items: tuple[ItemRanges, ...]
    request: int = 0


class AckDecision(msgspec.Struct, frozen=True, tag="ack"):
    """End items that their worker has finished."""

    now_ms: int
    leases: tuple[LeasedItems, ...]


class NackKind(StrEnum):
    """The reason why a worker gives an item back.

    FAILED: the attempt counts. UNUSED: it does not count, as the worker did not begin. DEAD: no attempt may follow.
    """

    FAILED = "failed"
    UNUSED = "unused"
    DEAD = "dead"


class NackDecision(msgspec.Struct, frozen=True, tag="nack", omit_defaults=True):
    """Make items ready again at `due_ms`: their worker gives them back, with a note for the next worker."""

    due_ms: int
    note: bytes
    leases: tuple[LeasedItems, ...]
    kind: NackKind = NackKind.FAILED


class ExtendDecision(msgspec.Struct, frozen=True, tag="extend"):
    """Extend leases to at least `lease_ms` from now on. No lease gets shorter."""

    lease_ms: int
    leases: tuple[LeasedItems, ...]


class EndDecision(msgspec.Struct, frozen=True, tag="end"):
    """End items without a worker: they expire, or are `dead` after all their attempts."""

    now_ms: int
    dead: bool
    leases: tuple[LeasedItems, ...]


class CancelDecision(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel items that no worker has."""

    now_ms: int
    items: tuple[ItemRanges, ...]


class RedriveDecision(msgspec.Struct, frozen=True, tag="redrive"):
    """Make dead items ready again; their attempts begin again."""

    now_ms: int
    items: tuple[ItemRanges, ...]


class PurgeDecision(msgspec.Struct, frozen=True, tag="purge"):
    """End dead items."""

    now_ms: int
    items: tuple[ItemRanges, ...]


class EndPopDecision(msgspec.Struct, frozen=True, tag="pop-end"):
    """End items of pop groups without an ack, also dead ones: retention has deleted their records.

    With `removed`, the reason is that the pop group was removed, or its topic deleted.
    """

    now_ms: int
    removed: bool
    leases: tuple[LeasedItems, ...]


LeaseDecision = AckDecision | NackDecision | ExtendDecision | EndDecision | EndPopDecision
ItemDecision = CancelDecision | RedriveDecision | PurgeDecision
PopDecision = BeginPopDecision | ReadPopDecision | RemovePopDecision
RunsDecision = SpillBlocksDecision | BringBlocksDecision
QueueDecision = EnqueueDecision | GrantDecision | LeaseDecision | ItemDecision | PopDecision | RunsDecision


class GrantedItems(NamedTuple):
    """A range of granted items: the number of grants of each, and the note of the last nack."""

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
        """Number of granted items."""
        return sum(each.end - each.begin for each in self.items)


class OutcomeRun(NamedTuple):
    """A number of items with the same outcome, which follow each other in a request."""

    outcome: ItemOutcome
    items: int


Outcomes = tuple[OutcomeRun, ...]  # the answer to a decision about items


def outcomes_of(runs: Iterable[tuple[ItemOutcome, int]]) -> Outcomes:
    """Return the outcomes of items in their order; neighbours with the same outcome become one run."""
    found: list[OutcomeRun] = []
    for outcome, count in runs:
        if found and found[-1].outcome is outcome:
            found[-1] = OutcomeRun(outcome, found[-1].items + count)
        else:
            found.append(OutcomeRun(outcome, count))
    return tuple(found)


def with_outcomes(items: Iterable[ItemRanges], outcomes: Outcomes) -> Iterator[tuple[int, int, int, ItemOutcome]]:
    """Yield block, begin and end of each range of items with the same outcome, and this outcome."""
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
    """State of an item, number of its last grant, and number of its grants (`attempts`).

    The item is due at `due_ms` (Unix ms). `lease_ms` is the length of its present lease, `note` that of the last nack.
    """

    state: ItemState
    grant: int
    attempts: int
    due_ms: int
    lease_ms: int
    note: bytes = b""


class SavedItems(NamedTuple):
    """A number of items with the same status, which follow each other in a block of a snapshot."""

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
    """A block whose items have all ended: the time of the last end (Unix ms), and the ends.

    `runs` has state, last grant and number of items, for items in order.
    """

    ended_ms: int
    runs: tuple[tuple[int, int, int], ...]

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, ItemStatus]]:
        """Yield begin, end and status of ranges of items; their times and attempts are no longer known."""
        first = 0
        for state, grant, count in self.runs:
            last = first + count
            if max(begin, first) < min(end, last):
                yield max(begin, first), min(end, last), ItemStatus(ItemState(state), grant, 0, 0, 0)
            first = last


class FirstBlock(NamedTuple):
    """In the answer to an enqueue: the first block with the same dedupe key."""

    block: int


class SavedFirst(NamedTuple):
    """The first block with a dedupe key, in a snapshot."""

    digest: bytes
    block: int
    until_ms: int


class SavedGrant(NamedTuple):
    """A grant of a request, in a snapshot: the request's identity, and the blocks of its items."""

    request: int
    grant: int
    blocks: tuple[int, ...]


class SavedReturn(NamedTuple):
    """Items that a worker gave back under a grant, in a snapshot, and the outcome of its nack."""

    block: int
    grant: int
    begin: int
    end: int
    outcome: ItemOutcome


class SavedQueues(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a queue machine. `blocks` is empty from version 3 on, `ranged` before."""

    version: int
    last_grant: int
    arrivals: int
    blocks: list[FormerBlock]
    ended: list[tuple[int, EndedBlock]]
    totals: dict[str, int]
    firsts: list[SavedFirst] = []
    ranged: list[SavedBlock] = []
    pops: list[PopGroup] = []
    grants: list[SavedGrant] = []
    returns: list[SavedReturn] = []
    runs: list[SavedRun] = []


FORMAT: MachineFormat[QueueDecision, SavedQueues] = MachineFormat(
    QueueDecision, SavedQueues, RUNS_VERSION, decision="decision about queue items", snapshot=STATE_NAME
)
encode_decision = FORMAT.encode_decision
decode_decision = FORMAT.decode_decision
