"""Pop groups: the records of a plain topic as items that are leased one by one (rule Q1). Pure.

A pop group is a queue with the name `topic@group`. Its blocks are those of the topic, which the owner of its shard
reads from the log as a consumer does. Each read is one decision: it moves the position of the group, and adds the
blocks before the new position. The decision counts only if the group is at its first position. So each block is added
once, also by two owners at the same time.

A block names no object. It has its *place*: the pointer that named it when it was read. Compaction may move the batch;
the pointer then names another object. Retention does not wait for items: it deletes pointers, and then the items end.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Protocol

import msgspec

from memq.errors import CorruptDataError
from memq.format.held_object import HeldLane, Target
from memq.limits import PRODUCER_ID_END
from memq.topic import ReadPartition, check_group, check_resource_name

SEPARATOR = "@"  # of topic and group; no name has it
_PLACE = ":"  # first character of a place; no key of an object has it


def pop_queue(topic: str, group: str) -> str:
    """Return the name of the queue of a pop group."""
    return f"{topic}{SEPARATOR}{group}"


def is_pop_queue(queue: str) -> bool:
    """Whether a queue is a pop group."""
    return SEPARATOR in queue


def topic_of(queue: str) -> str:
    """Return the topic of a pop group."""
    return queue.partition(SEPARATOR)[0]


def check_queue(queue: str) -> str:
    """Return the name of a queue or of a pop group. Raises: InvalidNameError, TypeError."""
    parts = str(queue).split(SEPARATOR, 1)
    if len(parts) == 1:
        return check_resource_name(queue, "queue")
    check_resource_name(parts[0])
    check_group(parts[1])
    return queue


class PopPlace(NamedTuple):
    """The pointer of a batch: offset in a read partition, mark, and the life of the group that read it."""

    life: int
    partition: int
    offset: int
    mark: int

    def __str__(self) -> str:
        return _PLACE + _PLACE.join(map(str, self))

    def read_partition(self, target: Target) -> ReadPartition:
        """Return the read partition of a block with this target."""
        return ReadPartition(topic_of(target.topic), target.topic_id, self.partition)


def is_place(key: str) -> bool:
    """Whether the key of a block is a place."""
    return key.startswith(_PLACE)


def place_of(key: str) -> PopPlace:
    """Return the place that the key of a block encodes. Raises: CorruptDataError."""
    try:
        return PopPlace(*map(int, key[1:].split(_PLACE)))
    except (TypeError, ValueError) as error:
        raise CorruptDataError(f"'{key[:60]}' is no place in a topic") from error


def block_id(life: int, target: Target, producer: int, first: int, next_: int, salt: int = 0) -> int:
    """Return the id of a block of a topic in the state of a pop group. A copy of a block has the same id.

    `salt` is the checksum of a block that has the sequences of another block, but other content; else 0.
    """
    name = f"{life} {target.topic_id} {target.partition} {producer} {first} {next_} {salt}"
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (PRODUCER_ID_END - 1) + 1


class PopPosition(msgspec.Struct, frozen=True, array_like=True):
    """The next record of a pop group in a read partition, and the mark of the pointer before it.

    `records` has the number of records before the position for each write partition, as far as it is known.
    """

    partition: int
    offset: int
    index: int = 0
    mark: int = 0
    records: tuple[tuple[int, int], ...] = ()

    def is_at(self, other: PopPosition) -> bool:
        """Whether both name the same record."""
        return (self.partition, self.offset, self.index) == (other.partition, other.offset, other.index)


class PopGroup(msgspec.Struct, frozen=True, array_like=True):
    """A pop group. `life` changes when the group is removed and begun again, or its topic created again."""

    queue: str
    topic_id: str
    life: int
    lease_ms: int
    attempts_max: int
    positions: tuple[PopPosition, ...] = ()

    def position(self, partition: int) -> PopPosition | None:
        """Return the position in a read partition; None for a partition that was added later."""
        return next((each for each in self.positions if each.partition == partition), None)


class BeginPopDecision(msgspec.Struct, frozen=True, tag="pop-begin"):
    """Begin a pop group, or change the settings of records that it reads from now on.

    A known group uses the positions of read partitions that it does not have yet. Its topic id changes only if it is
    `replaced`. A new group gets `life`, a random number: so nobody can guess the ids of its blocks. 0: the next number.
    """

    queue: str
    topic_id: str
    lease_ms: int
    attempts_max: int
    positions: tuple[PopPosition, ...]
    replaced: str = ""
    life: int = 0


class ReadPopDecision(msgspec.Struct, frozen=True, tag="pop-read", omit_defaults=True):
    """Move a pop group from one position to another, and add the blocks between them.

    `place` is that of the batch. Ends before `before_ms` may be forgotten. Retention deleted `lost` records before the
    blocks.
    """

    queue: str
    life: int
    before_ms: int
    begin: PopPosition
    end: PopPosition
    place: str = ""
    lanes: tuple[HeldLane, ...] = ()
    lost: int = 0


class RemovePopDecision(msgspec.Struct, frozen=True, tag="pop-remove"):
    """Remove a pop group; later decisions end its items. A `life` of 0 means any."""

    queue: str
    life: int = 0


class StreamBlock(Protocol):
    """The part of a block of items that this module uses."""

    @property
    def is_stream(self) -> bool:
        """Whether it belongs to a topic."""
        ...

    @property
    def topic(self) -> str:
        """Its queue."""
        ...

    @property
    def number(self) -> int:
        """Its id."""
        ...


class PopGroups:
    """The pop groups of a shard, and which blocks of items they have."""

    def __init__(self) -> None:
        self.groups: dict[str, PopGroup] = {}
        self.blocks: dict[str, dict[int, None]] = {}  # by queue, the oldest first; also of groups that were removed

    def begin(self, decision: BeginPopDecision, number: int) -> bool:
        """Begin or change a group; return whether it then has the topic id of the decision.

        `number` is the life of a new group if the decision has none.
        """
        known = self.groups.get(decision.queue)
        if known is None or (decision.replaced and known.topic_id == decision.replaced):
            terms = decision.life or number, decision.lease_ms, decision.attempts_max
            self.groups[decision.queue] = PopGroup(decision.queue, decision.topic_id, *terms, decision.positions)
            return True
        if known.topic_id != decision.topic_id:
            return False
        met = {each.partition for each in known.positions}
        added = tuple(each for each in decision.positions if each.partition not in met)
        self.groups[decision.queue] = msgspec.structs.replace(
            known,
            lease_ms=decision.lease_ms,
            attempts_max=decision.attempts_max,
            positions=known.positions + added,
        )
        return True

    def move(self, decision: ReadPopDecision) -> bool:
        """Move a group if it is at the first position of the decision; return whether it was moved."""
        known = self.groups.get(decision.queue)
        if known is None or known.life != decision.life:
            return False
        at = known.position(decision.begin.partition)
        if at is None or not at.is_at(decision.begin) or decision.end.partition != at.partition:
            return False
        positions = tuple(decision.end if each is at else each for each in known.positions)
        self.groups[decision.queue] = msgspec.structs.replace(known, positions=positions)
        return True

    def remove(self, decision: RemovePopDecision) -> bool:
        """Remove a group; return whether it existed."""
        known = self.groups.get(decision.queue)
        if known is None or decision.life not in (0, known.life):
            return False
        del self.groups[decision.queue]
        return True

    def note(self, block: StreamBlock) -> None:
        """Note a block that is new in the state."""
        if block.is_stream:
            self.blocks.setdefault(block.topic, {})[block.number] = None

    def drop(self, block: StreamBlock) -> None:
        """Forget a block that has ended."""
        if block.is_stream:
            known = self.blocks[block.topic]
            del known[block.number]
            if not known:
                del self.blocks[block.topic]

    def restore(self, groups: list[PopGroup]) -> None:
        """Set the groups to those of a snapshot. `note` adds the blocks."""
        self.groups = {each.queue: each for each in groups}
