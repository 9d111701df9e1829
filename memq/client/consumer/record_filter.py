"""The records that a consumer wants, by tag and by headers. Pure.

Tags have bits in pointers, indexes and headers of blocks (`tag_bit`). Two tags may share a bit: bits only decide what
need not be read, tags and headers of each record decide what is delivered.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from memq.client.consumer.batch import Slice
from memq.client.consumer.fetch.cursor_outcomes import Counts, LeftOut, ReadyRange
from memq.client.consumer.predicate import Condition
from memq.errors import CorruptDataError, InvalidFilterError, InvalidSettingError, UnsupportedFormatError
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.envelope import FORGOTTEN
from memq.format.blocks.header import HEADERS, TAG, BlockHeader, tag_bit
from memq.format.ranges import Range
from memq.limits import NAME_BYTES_MAX

TAGS_MAX = 256
OnForgotten = Literal["deliver", "skip"]


class RecordFilter:
    """Wants the records with one of `tags` for which the condition `where` is true.

    `tags` are a text as `A || B`, or a sequence of tags; None: any record, with or without a tag. None for `where`: any
    headers. Without `forgotten`, records whose subject was forgotten are not wanted.
    Raises: InvalidFilterError, TypeError.
    """

    def __init__(
        self, tags: str | Sequence[str] | None = None, where: str | None = None, *, forgotten: bool = True
    ) -> None:
        self._forgotten = forgotten
        self._tags = frozenset(_tags_of(tags)) if tags is not None else frozenset()
        self._condition = Condition(where) if where is not None else None
        self._bare = self._condition is None or self._condition.holds(())
        self.tag_bits = 0  # those of the tags; 0 when each tag is wanted
        for tag in self._tags:
            self.tag_bits |= tag_bit(tag)

    def excludes(self, tag_bits: int) -> bool:
        """Whether no record of a batch or block with these tag bits can be wanted."""
        return bool(self.tag_bits) and not tag_bits & self.tag_bits

    def excludes_block(self, header: BlockHeader) -> bool:
        """Whether no record of a block can be wanted."""
        return self.excludes(header.tag_bits) or not (self._bare or header.flags & HEADERS)

    def mask(self, reader: BlockReader) -> bytes | None:
        """Return 1 for each wanted record of a block and 0 for the others; None if all are wanted.

        Raises: CorruptDataError, UnsupportedFormatError.
        """
        flags = reader.header.flags
        found: bytes | None = None
        if self._tags:
            found = bytes(map(self._tags.__contains__, reader.tags())) if flags & TAG else bytes(reader.count)
        if self._condition is not None and (flags & HEADERS or not self._bare):
            holds = bytes(map(self._condition.holds, reader.headers()))
            found = holds if found is None else bytes(map(operator.and_, found, holds))
        if not self._forgotten and flags & HEADERS and FORGOTTEN in reader.layout().names:
            holds = bytes(all(name != FORGOTTEN for name, _ in headers) for headers in reader.headers())
            found = holds if found is None else bytes(map(operator.and_, found, holds))
        return None if found is None or 0 not in found else found


def wanted_part(
    delivery: ReadyRange, wanted: RecordFilter, counts: Counts, left_out: list[LeftOut]
) -> ReadyRange | None:
    """Return a delivery with its wanted records; None if none is wanted and nothing else is in it.

    Blocks without a wanted record are added to `left_out`. A block that can't be unpacked stays, also one of a newer
    memq: its reader reports it. An error here would lose the block, because the cursor has passed it.
    """
    writer = delivery.pointer.partition if delivery.pointer is not None else 0
    slices: list[Slice] = []
    for part in delivery.slices:
        header = part.piece.header
        assert header is not None, "what is given out is sound"
        try:
            mask = wanted.mask(BlockReader(part.piece.data, header))
        except (CorruptDataError, UnsupportedFormatError):
            mask = None
        found = part._replace(mask=mask)
        unwanted = part.records - found.records
        counts.records -= unwanted
        counts.filtered_records += unwanted
        if found.records:
            slices.append(found)
        else:
            first = header.first_sequence
            left_out.append(LeftOut(writer, header.producer_id, first + part.low, first + part.high, header.base_ms))
    if not slices and not delivery.damaged and delivery.failure is None:
        return None
    return replace(delivery, slices=tuple(slices))


def runs_of(mask: bytes, low: int, high: int) -> Iterator[tuple[int, Range]]:
    """Yield the runs of equal values of a mask between two indexes: 1 or 0, and its first index and end."""
    at = low
    for value, run in groupby(mask[low:high]):
        end = at + sum(1 for _ in run)
        yield value, (at, end)
        at = end


def filter_of(
    tags: str | Sequence[str] | None, where: str | None, on_forgotten: OnForgotten = "deliver"
) -> RecordFilter | None:
    """Return the filter of these options; None when all want every record, as tags `*` do.

    Raises: as `RecordFilter`.
    """
    wanted = None if isinstance(tags, str) and tags.strip() == "*" else tags
    if on_forgotten not in ("deliver", "skip"):
        raise InvalidSettingError(f"on_forgotten = {on_forgotten!r} is not 'deliver' or 'skip'")
    if wanted is None and where is None and on_forgotten == "deliver":
        return None
    return RecordFilter(wanted, where, forgotten=on_forgotten == "deliver")


def _tags_of(tags: str | Sequence[str]) -> list[str]:
    found = _parsed(tags) if isinstance(tags, str) else _listed(tags)
    if not found:
        raise InvalidFilterError(
            "tags is empty: no record would be delivered", hint="leave tags out to get all records"
        )
    if "" in found:
        raise InvalidFilterError("tags has an empty tag, which no record has")
    if len(found) > TAGS_MAX:
        raise InvalidFilterError(f"tags has {len(found)} tags, {TAGS_MAX} are allowed")
    for tag in found:
        try:
            size = len(tag.encode())
        except UnicodeEncodeError as error:
            raise InvalidFilterError(f"tags has {tag[:60]!a}, which is not valid Unicode") from error
        if size > NAME_BYTES_MAX:
            raise InvalidFilterError(f"tags has a tag over {NAME_BYTES_MAX} bytes")
    return found


def _listed(tags: Sequence[str]) -> list[str]:
    given: object = tags
    if not isinstance(given, list | tuple | set | frozenset) or not all(isinstance(tag, str) for tag in given):
        raise TypeError(f"tags must be a text as 'A || B' or a list of texts, not {str(given)[:60]}")
    return list(given)


def _parsed(text: str) -> list[str]:
    found, at = [], 0
    for part in text.split("||"):
        tag = part.strip()
        if not tag or "|" in tag:
            what, place = ("has a single '|'", at + part.index("|")) if tag else ("lacks a tag", at)
            raise InvalidFilterError(
                f"tags {what} at character {place + 1}: {text[:200]}", hint="write tags='A', 'A || B', or '*' for all"
            )
        if tag == "*":
            raise InvalidFilterError(f"tags has '*' with other tags, at character {at + 1}: {text[:200]}")
        found.append(tag)
        at += len(part) + 2
    return found
