"""Snapshots of a queue machine in slices: the owner of a state log does other work between them.

A snapshot has the state of one moment. So a block that a decision changes before its slice is encoded first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from memq.queues.block import QueueBlock
from memq.queues.decisions import EndedBlock, EnqueueDecision, LeaseDecision, PopDecision, QueueDecision, SavedFirst
from memq.queues.pop.groups import PopGroup, ReadPopDecision

SLICE_BLOCKS = 500  # of a snapshot, encoded at once: about 3 ms
SLICE_RANGES = 4_096  # the same for ranges of items
_encode = msgspec.msgpack.Encoder().encode


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


def _encoded(block: QueueBlock) -> msgspec.Raw:
    return msgspec.Raw(_encode(block.saved()))


def _blocks_of(decision: QueueDecision) -> Iterable[int]:
    """Return the blocks that a decision names, which are all that it may change."""
    if isinstance(decision, EnqueueDecision | ReadPopDecision):
        return (block.id.producer for lane in decision.lanes for block in lane.blocks)
    if isinstance(decision, PopDecision):
        return ()
    if isinstance(decision, LeaseDecision):
        return (each.items.block for each in decision.leases)
    return (each.block for each in decision.items)
