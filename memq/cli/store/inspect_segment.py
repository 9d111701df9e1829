"""`memq inspect` of a spool segment: the blocks that a broker acked with 1, as they lie on its disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click

from memq.cli.output import count_text, print_json, print_pairs, print_table, size_text, time_text
from memq.errors import CorruptDataError, MemqError
from memq.format.blocks.columns import BlockReader, open_block
from memq.format.spool import MAGIC, SpoolEntry, decode_segment


def is_segment(data: memoryview) -> bool:
    """Whether these are the bytes of a segment, whatever else is wrong with them."""
    return data[: len(MAGIC)] == MAGIC


def print_segment(name: str, data: memoryview, *, as_json: bool) -> None:
    """Print what a segment holds.

    Raises: CorruptDataError, UnsupportedFormatError when its head can't be read.
    """
    content = decode_segment(bytes(data))
    if as_json:
        blocks, damages = [_entry_json(entry) for entry in content.entries], [asdict(part) for part in content.damages]
        rest = {"damages": damages, "torn_bytes": content.torn_bytes}
        print_json({"segment": name, "bytes": len(data), "blocks": blocks, **rest})
        return
    records = sum(entry.header.count for entry in content.entries)
    print_pairs(
        (
            ("segment", name),
            ("size", f"{size_text(len(data))} ({len(data):,} bytes)"),
            ("holds", f"{count_text(len(content.entries), 'block')}, {count_text(records, 'record')}"),
            ("torn", f"{content.torn_bytes:,} bytes at its end, which were being written: never acked"),
            *(("damaged", f"bytes {part.start} to {part.end}: {part.cause}") for part in content.damages),
        )
    )
    click.echo()
    heads = ("offset", "bytes", "records", "producer", "first", "topic id", "partition", "queue offset", "taken")
    print_table(heads, [_entry_row(entry) for entry in content.entries])


def segment_blocks(data: memoryview) -> Iterator[tuple[int, BlockReader | MemqError]]:
    """Yield place and reader of each block, or its error, in the order of the segment."""
    content = decode_segment(bytes(data))
    found: dict[int, BlockReader | MemqError] = {}
    for damage in content.damages:
        found[damage.start] = CorruptDataError(damage.cause)
    for entry in content.entries:
        try:
            found[entry.start] = open_block(data[entry.start : entry.end])
        except MemqError as error:
            found[entry.start] = error
    yield from sorted(found.items())


def _entry_row(entry: SpoolEntry) -> tuple[object, ...]:
    header = entry.header
    return (
        *(entry.start, entry.end - entry.start, header.count, f"{header.producer_id:016x}", header.first_sequence),
        *(entry.topic_id, entry.partition, entry.queue_offset, time_text(entry.appended_ms)),
    )


def _entry_json(entry: SpoolEntry) -> dict[str, object]:
    header = entry.header
    return {
        "offset": entry.start,
        "length": entry.end - entry.start,
        "topic_id": entry.topic_id,
        "partition": entry.partition,
        "queue_offset": entry.queue_offset,
        "appended_ms": entry.appended_ms,
        "producer_id": f"{header.producer_id:016x}",
        "first_sequence": header.first_sequence,
        "count": header.count,
    }
