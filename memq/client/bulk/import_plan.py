"""The plan of a copy of a foreign log: block boundaries and range, safe against a kill. Pure.

A copied record has its source's offset as its sequence, under a producer id that only the pair of source partition and
target topic has. So it is the same record whoever copies it, and when. memq drops what comes twice by whole
blocks, so a copy that goes on where another one was killed has to cut as that one did: what was on its way then may
still arrive. Three things make the cut:

1. It begins where a block ended: behind the greatest sequence that the target's queue shows, or the plan's start.
2. It follows from the records alone: a block ends where the next one does not follow on, or does not fit.
3. It ends at the plan's end, not at the end that the source has by chance. So that is stored before the first record is
   sent, and a copy that finds a plan fulfills it before it makes the next one.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from memq.client.producer.fields import RecordColumns, RecordFields
from memq.format.blocks.builder import BlockBuilder

# The rule by which blocks are cut: whoever changes a number here gives the rule another name.
RULE = "memq-import1"
BLOCK_BYTES_MAX = 256 << 10
BLOCK_RECORDS_MAX = 10_000
_PLAN = re.compile(rf"{RULE} (\d{{1,19}})\Z")


def producer_of(cluster: str, topic_id: str, partition: int, target_id: str) -> int:
    """Return the producer id of all copies of one source partition into one topic."""
    named = f"{RULE}\n{cluster}\n{topic_id}\n{partition}\n{target_id}".encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "big") >> 1 or 1


def encode_plan(end: int) -> str:
    """Return the metadata stored with the position: the offset at which the copy ends."""
    return f"{RULE} {end}"


def decode_plan(metadata: str) -> int | None:
    """Return the end of a plan; None for what is none."""
    found = _PLAN.match(metadata)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Cut:
    """Records of one block, in columns: sequences from `first` on."""

    first: int
    columns: BlockBuilder

    @property
    def next(self) -> int:
        """The sequence behind the last record."""
        return self.first + self.columns.count


class Cutter:
    """Cuts the records of one partition, in order, into blocks; the same for single and many."""

    def __init__(self) -> None:
        self._first = 0
        self._columns = BlockBuilder()
        self._bytes = 0

    def add(self, offset: int, fields: RecordFields, size: int) -> Cut | None:
        """Take a record of `size` bytes; return the block that ended before it.

        Raises: as `BlockBuilder.append`.
        """
        count, done = self._columns.count, None
        if count and (
            offset != self._first + count or self._bytes + size > BLOCK_BYTES_MAX or count == BLOCK_RECORDS_MAX
        ):
            count, done = 0, self.end()
        if not count:
            self._first = offset
        self._columns.append(*fields)
        self._bytes += size
        return done

    def extend(self, offset: int, many: RecordColumns, start: int, end: int, ends: Sequence[int]) -> int:
        """Take records of `many` from number `start` up to `end` as long as they fit.

        Return the number of the next.
        They follow on what came before, and the first one has this offset. `ends` are the bytes of all records up to
        each, with it. Where nothing fits, end the block. Raises: as `BlockBuilder.append_many`.
        """
        count, before = self._columns.count, ends[start - 1] if start else 0
        fits = bisect_right(ends, before + BLOCK_BYTES_MAX - self._bytes, start, end)
        next_ = min(fits, start + BLOCK_RECORDS_MAX - count)
        if not count:
            self._first, next_ = offset, max(next_, start + 1)
        assert offset == self._first + count, f"{offset} does not follow on {self._first} + {count}"
        if next_ > start:
            self._columns.append_many(*many.part(start, next_))
            self._bytes += ends[next_ - 1] - before
        return next_

    def end(self) -> Cut | None:
        """Return what is left as a block; None when nothing is."""
        if not self._columns.count:
            return None
        done, self._columns, self._bytes = Cut(self._first, self._columns), BlockBuilder(), 0
        return done
