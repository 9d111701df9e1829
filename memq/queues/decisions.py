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
from memq.queues.pop import BeginPopDecision, PopGroup, ReadPopDecision, RemovePopDecision
from memq.state_log.machine_format import MachineFormat

QUEUES_MACHINE = "queues"  # its name in the log
STATE_VERSION = 3  # 1: a state without dedupe keys; 2: one without pop groups
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
        for begin, end in zip(self.ranges[::2], self.ranges[1::2], strict=False):
            yield from range(begin, end)

    def __len__(self) -> int:
        return sum(self.ranges[1::2]) - sum(self.ranges[::2])


class LeasedItems(msgspec.Struct, frozen=True, array_like=True):
    """Items with the number of the grant that the request names; 0: they were never granted."""

    items: ItemRanges
    grant: int


def ranges_of(block: int, numbers: Iterable[int]) -> ItemRanges:
    """Return items of a block, in the order of their numbers."""
    found: list[int] = []
    for number in sorted(numbers):
        if found and found[-1] == number:
            found[-1] += 1
        else:
            found += [number, number + 1]
    return ItemRanges(block, tuple(found))


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


class GrantedItem(NamedTuple):
    """An item in the answer to a grant: number, grants that it has had, and the note of the last nack."""

    number: int
    attempt: int
    note: bytes


class GrantedBlock(NamedTuple):
    """The granted items of one block, and where its bytes are."""

    topic: str
    block: HeldBlock
    key: str
    lease_ms: int
    items: tuple[GrantedItem, ...]


class SavedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block in a snapshot. `states`, `grants` and `attempts` are empty if no item was ever granted."""

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

    def end_of(self, number: int) -> tuple[ItemState, int] | None:
        """Return state and last grant of an item, None if the block did not have it."""
        for state, grant, count in self.runs if number >= 0 else ():
            if number < count:
                return ItemState(state), grant
            number -= count
        return None


class FirstBlock(NamedTuple):
    """In the answer to an enqueue: the block that came first under the same dedupe key."""

    block: int


class SavedFirst(NamedTuple):
    """The first block under a dedupe key, in a snapshot."""

    digest: bytes
    block: int
    until_ms: int


class SavedQueues(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a queue machine."""

    version: int
    last_grant: int
    arrivals: int
    blocks: list[SavedBlock]
    ended: list[tuple[int, EndedBlock]]
    totals: dict[str, int]
    firsts: list[SavedFirst] = []
    pops: list[PopGroup] = []


FORMAT: MachineFormat[QueueDecision, SavedQueues] = MachineFormat(
    QueueDecision, SavedQueues, STATE_VERSION, decision="decision about queue items", snapshot="snapshot of queues"
)
encode_decision = FORMAT.encode_decision
decode_decision = FORMAT.decode_decision
