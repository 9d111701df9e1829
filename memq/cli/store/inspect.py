"""`memq inspect`: shows the content of an object or segment, without a broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

import click

from memq.audit.checks.object_check import readable_blocks
from memq.cli.options import json_option, settings_of, settings_options
from memq.cli.output import count_text, print_json, print_message, print_pairs, print_table, size_text, time_text
from memq.cli.records.record_text import encode_record
from memq.cli.store.object_files import ObjectTarget, find_objects
from memq.errors import CorruptDataError, MemqError, NotFoundError
from memq.format.blocks.columns import BlockReader, open_block
from memq.format.blocks.header import CODECS, ENVELOPE
from memq.format.key import kind_without_batches
from memq.format.object import BatchEntry, BlockEntry, ObjectIndex, open_object
from memq.format.ranges import RangeSet
from memq.format.spool import MAGIC, SpoolEntry, decode_segment
from memq.topic import INTERNAL_PREFIX

_CODEC_NAMES = {**{number: name for name, number in CODECS.items()}, ENVELOPE: "encrypted"}


@click.command()
@click.argument("target", metavar="URI|FILE|FOLDER")
@click.option("--records", is_flag=True, help="Print the records as JSON lines, the input of produce --input json.")
@settings_options
@json_option
def inspect(target: str, records: bool, as_json: bool, config: str | None, profile: str | None) -> None:
    """Show an object's batches, blocks, producers, times and checksums.

    Of a folder, also a data folder, it shows the objects that are below it; not the lists of a sweep, nor manifests,
    which have no batches. A URI is file:///PATH or
    s3://BUCKET/KEY?endpoint=URL, with the section [s3] of the settings. A segment of a broker's spool is shown, too.
    """
    found = find_objects(target, settings_of(config, profile).parts().section("s3"))
    if found.is_folder:
        _inspect_folder(found, records=records, as_json=as_json)
        return
    (one,) = found.objects
    data = one.read()
    if records:
        _print_records(data)
        return
    if is_segment(data):
        print_segment(one.name, data, as_json=as_json)
        return
    try:
        index = open_object(data)
    except CorruptDataError as error:
        kind = kind_without_batches(one.name)
        hint = f"it is no object of memq, or its end is damaged; 'memq verify {one.name}' finds its sound blocks"
        if kind:
            hint = f"by its name it is a {kind}, which has no batches; 'memq verify {one.name}' checks it"
        raise CorruptDataError(f"{one.name}: {error}", hint=hint) from error
    if as_json:
        print_json({"object": one.name, "bytes": len(data), **_index_json(index)})
        return
    meta = index.meta
    print_pairs(
        (
            ("object", one.name),
            ("size", f"{size_text(len(data))} ({len(data):,} bytes)"),
            ("written", f"{time_text(meta.created_ms)} by broker {meta.broker} of cluster {meta.cluster}"),
            ("holds", _contents(index)),
        )
    )
    for number, batch in enumerate(index.batches):
        click.echo()
        _print_batch(data, index, number, batch)


def _inspect_folder(folder: ObjectTarget, *, records: bool, as_json: bool) -> None:
    """Show each object in a line, complete as JSON, or with its records.

    Objects that can't be read are reported on stderr, as is the number of files that have no batches, and of records
    of memq's own topics: these would be sent to the user's topic by produce --input json.
    """
    damaged = internal = 0
    objects = [one for one in folder.objects if not kind_without_batches(one.name)]
    if len(objects) < len(folder.objects):
        others = count_text(len(folder.objects) - len(objects), "file")
        print_message(
            f"{others} without batches (lists of a sweep, manifests) not shown; memq verify checks such files"
        )
    elif not objects:
        raise NotFoundError(f"no file is below '{folder.name}'", hint="name an object, or a folder with some")
    for one in objects:
        try:
            data = one.read()
            if records:
                internal += _print_records(data, own=False)
                continue
            if is_segment(data):
                print_segment(one.name, data, as_json=as_json)
                continue
            index = open_object(data)
        except MemqError as error:
            damaged += 1
            print_message(f"{one.name}: {error}")
            continue
        if as_json:
            print_json({"object": one.name, "bytes": len(data), **_index_json(index)})
        else:
            written = time_text(index.meta.created_ms)
            click.echo(f"{one.name}: {size_text(len(data))}, {_contents(index)}, written {written}")
    if internal:
        text = f"{count_text(internal, 'record')} of memq's own topics not shown; name their object to see them"
        print_message(text)
    if damaged:
        raise CorruptDataError(f"{count_text(damaged, 'object')} below '{folder.name}' can't be read")


def _contents(index: ObjectIndex) -> str:
    batches, blocks = count_text(len(index.batches), "batch"), count_text(len(index.blocks), "block")
    return f"{batches}, {blocks}, {count_text(_records_of(index), 'record')}"


def _records_of(index: ObjectIndex) -> int:
    return sum(batch.records for batch in index.batches)


def _print_batch(data: memoryview, index: ObjectIndex, number: int, batch: BatchEntry) -> None:
    topic = index.meta.topics[batch.topic]
    click.echo(
        f"batch {number}: topic {topic.name} (id {topic.id}) partition {batch.partition} epoch {batch.epoch} "
        f"sequence {batch.batch_sequence}, appended {time_text(batch.appended_ms)}"
    )
    heads = ("offset", "bytes", "records", "producer", "first", "codec", "checksum", "least time", "greatest time")
    print_table(heads, [_block_row(data, entry) for entry in index.blocks_of(batch)])


def _block_row(data: memoryview, entry: BlockEntry) -> tuple[object, ...]:
    return (
        *(entry.offset, entry.length, entry.count, f"{entry.producer_id:016x}", entry.first_sequence),
        *(_codec_of(data, entry), f"{entry.checksum:08x}", time_text(entry.least_ms), time_text(entry.greatest_ms)),
    )


def _codec_of(data: memoryview, entry: BlockEntry) -> str:
    """Return the name of the block's codec, byte 9 of its header; the index does not repeat it."""
    return _CODEC_NAMES.get(data[entry.offset + 9], "?") if entry.offset + 9 < len(data) else "?"


def _index_json(index: ObjectIndex) -> dict[str, object]:
    meta = index.meta
    return {
        "cluster": meta.cluster,
        "broker": meta.broker,
        "created_ms": meta.created_ms,
        "records": _records_of(index),
        "batches": [
            {
                "topic": meta.topics[batch.topic].name,
                "topic_id": meta.topics[batch.topic].id,
                **{name: value for name, value in batch._asdict().items() if name not in ("topic", "first_block")},
                "blocks": [_block_json(entry) for entry in index.blocks_of(batch)],
            }
            for batch in index.batches
        ],
    }


def _block_json(entry: BlockEntry) -> dict[str, object]:
    hexed = {"producer_id": f"{entry.producer_id:016x}", "checksum": f"{entry.checksum:08x}"}
    return {**entry._asdict(), **hexed, "tag_bits": f"{entry.tag_bits:016x}"}


def _print_records(data: memoryview, *, own: bool = True) -> int:
    """Print readable blocks; an unreadable one is reported on stderr, and makes the command fail.

    Unless `own` is given, records of memq's own topics are left out. Returns how many these are.
    """
    damaged = left_out = 0
    internal = RangeSet() if own else _internal_ranges(data)
    for at, found in segment_blocks(data) if is_segment(data) else readable_blocks(data):
        try:
            if isinstance(found, MemqError):
                raise found
            if internal.covers(at, at + 1):
                left_out += found.count
                continue
            _print_block(found)
        except MemqError as error:
            damaged += 1
            print_message(f"at {at}: {error}")
    if damaged:
        raise CorruptDataError(f"{count_text(damaged, 'byte range')} can't be read")
    return left_out


def _internal_ranges(data: memoryview) -> RangeSet:
    """Return the bytes of batches of memq's own topics; none without a readable index."""
    found = RangeSet()
    with suppress(MemqError):
        index = open_object(data)
        for batch in index.batches:
            if index.meta.topics[batch.topic].name.startswith(INTERNAL_PREFIX):
                found.add(batch.offset, batch.offset + batch.length)
    return found


def _print_block(reader: BlockReader) -> None:
    header = reader.header
    for number, (value, key, headers, timestamp_ms, tag) in enumerate(reader.records()):
        identity: dict[str, object] = {
            "producer_id": f"{header.producer_id:016x}",
            "sequence": header.first_sequence + number,
        }
        click.echo(encode_record(identity, value, key, headers, timestamp_ms, tag))


def is_segment(data: memoryview) -> bool:
    """Whether these are the bytes of a segment, possibly a damaged one."""
    return data[: len(MAGIC)] == MAGIC


def print_segment(name: str, data: memoryview, *, as_json: bool) -> None:
    """Print the content of a segment.

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
    """Yield offset and reader of each block, or its error, in the order of the segment."""
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
