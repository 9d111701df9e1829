"""Snapshots of a queue machine in slices: the owner of a state log does other work between them.

So does the opener of a log, while it reads one. A snapshot has the state of one moment. So a block that a decision
changes before its slice is encoded first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from memq.queues.block import QueueBlock
from memq.queues.decisions import (
    RUNS_VERSION,
    STATE_NAME,
    EndedBlock,
    EnqueueDecision,
    FormerBlock,
    LeaseDecision,
    PopDecision,
    QueueDecision,
    RunsDecision,
    SavedBlock,
    SavedFirst,
    SavedGrant,
    SavedReturn,
)
from memq.queues.pop.groups import PopGroup, ReadPopDecision
from memq.queues.runs.spilled import SavedRun
from memq.state_log.machine_format import MachineFormat

SLICE_BLOCKS = 500  # of a snapshot, encoded or read at once: about 3 ms and 10 ms
SLICE_RANGES = 4_096  # the same for ranges of items
Item = TypeVar("Item")
_Ended = tuple[int, EndedBlock]
_encode = msgspec.msgpack.Encoder().encode
_BLOCKS: msgspec.msgpack.Decoder[SavedBlock] = msgspec.msgpack.Decoder(SavedBlock)
_FORMER: msgspec.msgpack.Decoder[FormerBlock] = msgspec.msgpack.Decoder(FormerBlock)
_ENDS: msgspec.msgpack.Decoder[_Ended] = msgspec.msgpack.Decoder(_Ended)
_FIRSTS: msgspec.msgpack.Decoder[SavedFirst] = msgspec.msgpack.Decoder(SavedFirst)


class EncodedQueues(msgspec.Struct, omit_defaults=True):
    """`SavedQueues` with encoded values in its lists.

    `blocks` is always empty: brokers of earlier releases need it to read the version, which they refuse.
    """

    version: int
    last_grant: int
    arrivals: int
    blocks: list[msgspec.Raw]
    ended: list[msgspec.Raw]
    totals: dict[str, int]
    firsts: list[msgspec.Raw] = []
    ranged: list[msgspec.Raw] = []
    pops: list[PopGroup] = []
    grants: list[SavedGrant] = []
    returns: list[SavedReturn] = []
    runs: list[SavedRun] = []


_FORMAT: MachineFormat[QueueDecision, EncodedQueues] = MachineFormat(
    QueueDecision, EncodedQueues, RUNS_VERSION, decision="decision about queue items", snapshot=STATE_NAME
)
decode_state = _FORMAT.decode_state


class QueueSnapshot:
    """A snapshot that is being encoded. Call `before_decision` for each decision until `pieces` ends."""

    def __init__(
        self,
        saved: EncodedQueues,
        blocks: Mapping[int, QueueBlock],
        ended: Sequence[tuple[int, EndedBlock]],
        firsts: Sequence[SavedFirst],
    ) -> None:
        self._saved = saved
        self._left = dict(blocks)
        self._early: dict[int, msgspec.Raw] = {}
        self._ended = ended
        self._firsts = firsts

    def before_decision(self, decision: QueueDecision) -> None:
        """Encode the blocks that a decision may change."""
        for id_ in _blocks_of(decision):
            block = self._left.get(id_)
            if block is not None and id_ not in self._early:
                self._early[id_] = _encoded(block)

    def pieces(self) -> Iterator[bytes]:
        """Yield an empty piece after each slice, and the whole state at the end."""
        blocks = ranges = 0
        for id_ in list(self._left):
            block = self._left.pop(id_)
            early = self._early.pop(id_, None)
            self._saved.ranged.append(early if early is not None else _encoded(block))
            blocks, ranges = blocks + 1, ranges + block.range_count
            if blocks >= SLICE_BLOCKS or ranges >= SLICE_RANGES:
                blocks = ranges = 0
                yield b""
        for found, values in ((self._saved.ended, self._ended), (self._saved.firsts, self._firsts)):
            for number, value in enumerate(values, 1):
                found.append(msgspec.Raw(_encode(value)))
                if number % SLICE_BLOCKS == 0:
                    yield b""
        yield _encode(self._saved)


def blocks_in(saved: EncodedQueues) -> Iterator[QueueBlock | None]:
    """Yield the blocks of a snapshot, and None between its slices. Raises: CorruptDataError."""
    yield from _in_slices(map(QueueBlock.of_former, _FORMAT.decode_items(_FORMER, saved.blocks)), _ranges_of)
    yield from _in_slices(map(QueueBlock.restored, _FORMAT.decode_items(_BLOCKS, saved.ranged)), _ranges_of)


def ended_in(saved: EncodedQueues) -> Iterator[_Ended | None]:
    """Yield the ended blocks of a snapshot, and None between its slices. Raises: CorruptDataError."""
    return _in_slices(_FORMAT.decode_items(_ENDS, saved.ended))


def firsts_in(saved: EncodedQueues) -> list[SavedFirst]:
    """Return the dedupe keys of a snapshot. Raises: CorruptDataError."""
    return list(_FORMAT.decode_items(_FIRSTS, saved.firsts))


def _in_slices(items: Iterable[Item], ranges_of: Callable[[Item], int] = lambda item: 0) -> Iterator[Item | None]:
    blocks = ranges = 0
    for item in items:
        yield item
        blocks, ranges = blocks + 1, ranges + ranges_of(item)
        if blocks >= SLICE_BLOCKS or ranges >= SLICE_RANGES:
            blocks = ranges = 0
            yield None


def _ranges_of(block: QueueBlock) -> int:
    return block.range_count


def _encoded(block: QueueBlock) -> msgspec.Raw:
    return msgspec.Raw(_encode(block.saved()))


def _blocks_of(decision: QueueDecision) -> Iterable[int]:
    """Return the blocks that a decision names, which are all that it may change."""
    if isinstance(decision, EnqueueDecision | ReadPopDecision):
        return (block.id.producer for lane in decision.lanes for block in lane.blocks)
    if isinstance(decision, PopDecision | RunsDecision):
        return ()  # those of runs are replaced, not changed
    if isinstance(decision, LeaseDecision):
        return (each.items.block for each in decision.leases)
    return (each.block for each in decision.items)
