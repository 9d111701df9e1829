"""`memq consume`: prints records as they come.

Another consumer finds the last N records and the bounds of one partition; it reads pointers, never an object.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import click

from memq.cli.options import (
    LastRecords,
    RecordOffset,
    Start,
    encryption_of_settings,
    json_option,
    parse_start,
    raw_option,
    s3_values,
    setting_options,
    settings_of,
)
from memq.cli.output import count_text, print_message, write_records
from memq.cli.records.record_text import encode_record, parse_delimiter, parse_format
from memq.client.admin import Admin
from memq.client.consumer.batch import Batch, Record, TopicPartition
from memq.client.consumer.consumer import Consumer
from memq.client.consumer.settings import OnDamaged, OnExpired, Point
from memq.errors import InvalidSettingError, NotFoundError
from memq.runtime.clock import SystemClock
from memq.settings import ClientSettings, Value
from memq.topic import Position

Positions = Mapping[tuple[str, int], Position]
# (batch, number of its records to print, None for all) -> (bytes to write, number of records in them)
Printer = Callable[[Batch, int | None], tuple[bytes, int]]


@dataclass(frozen=True, slots=True)
class ConsumeRequest:
    """Request to read: the topics, their range, and the treatment of damage and gaps."""

    topics: tuple[str, ...]
    group: str | None
    broadcast: str | None
    partition: int | None
    start: Start
    until_end: bool
    on_damaged: OnDamaged
    on_expired: OnExpired
    tags: str | None
    where: str | None
    s3: Mapping[str, object]  # how to open the store

    @property
    def commits(self) -> bool:
        """Whether positions are stored."""
        return self.group is not None or self.broadcast is not None


@dataclass(slots=True)
class PrintedCount:
    """Counts of printed, skipped and unwanted records."""

    records: int = 0
    damaged: int = 0
    filtered: int = 0


@click.command()
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@setting_options("brokers", "prefetch_bytes_max", "encryption", "subjects", "plain_blocks")
@click.option("-G", "--group", metavar="GROUP", help="Share the topic with the group's members, and commit.")
@click.option("--broadcast", metavar="NAME", help="Read all partitions, and commit under this name of your own.")
@click.option("-p", "--partition", type=click.IntRange(min=0), metavar="N", help="Only this partition.")
@click.option(
    "-o",
    "--offset",
    default="beginning",
    metavar="START",
    help="beginning, end, stored, -N (the last N), an offset as %o prints it, @TIME (RFC 3339, epoch ms, -1h) or a "
    "position as 0:17:3.",
)
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="COUNT", help="Stop after COUNT records.")
@click.option("-e", "--exit", "until_end", is_flag=True, help="Stop at the end that the topic has at the start.")
@click.option("-f", "--format", "form", metavar="FORMAT", help=r"Format of a record, such as '%t %p %o %k %s %h %T\n'.")
@click.option("-K", "--key-separator", metavar="SEP", help="Print the key and SEP before each value.")
@click.option("-D", "--delimiter", default=r"\n", metavar="DELIM", help=r"End of each record (default \n).")
@click.option("-Z", "--null", is_flag=True, help="Print null as NULL.")
@click.option(
    "--on-damaged",
    type=click.Choice(["fail", "skip", "dead-letter"]),
    default="fail",
    help="Treatment of a damaged block: dead-letter sends it to TOPIC.dlq.",
)
@click.option(
    "--on-expired",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    help="Treatment of a position that retention removed: skip continues at the first record left.",
)
@click.option("--tags", metavar="TAGS", help="Only records with one of these tags: 'A || B'.")
@click.option(
    "--where", metavar="CONDITION", help="Only records with such headers: \"amount > 100 AND region = 'EU'\"."
)
@raw_option
@json_option
def consume(
    topics: tuple[str, ...],
    group: str | None,
    broadcast: str | None,
    partition: int | None,
    offset: str,
    count: int | None,
    until_end: bool,
    form: str | None,
    key_separator: str | None,
    delimiter: str,
    null: bool,
    on_damaged: OnDamaged,
    on_expired: OnExpired,
    tags: str | None,
    where: str | None,
    raw: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Print the values of the topics, one per line; with -f or --json also other fields of each record.

    A TOPIC with * or ? is a pattern: it means the topics of that name that exist at the start.

    With -G it starts at the group's committed position; -o counts only where the group has none. It commits each batch
    that was printed whole: if -c ends inside a batch, the next run prints that batch from its start. Without an end
    (-e, -c) it waits for more records, until the topic is sealed; Ctrl-C prints a summary. With --tags or --where, -o
    -N counts all records, -c only the printed ones.
    """
    if sys.__stdout__ is None:  # its replacement takes everything, and a group would commit it
        raise click.ClickException("stdout is closed, so no record can be printed: send it to a file or a pipe")
    found = settings_of(config, profile, **flags)
    settings, s3 = found.client(), s3_values(found)
    start = parse_start(offset, SystemClock().wall_ms())
    stored = group if broadcast is None else broadcast
    if isinstance(start, Position) and stored is None:
        partition = start.read_partition
    if group is not None and broadcast is not None:
        raise click.UsageError("-G and --broadcast exclude each other")
    _check_together(stored, partition, start, form, as_json=as_json)
    names = topics_named(settings.brokers, topics)
    if isinstance(start, Position) and len(names) > 1:
        raise click.UsageError(f"-o {offset} is a position of one topic, and there are {len(names)}")
    printer = record_printer(form, separator=key_separator, delimiter=delimiter, null=null, as_json=as_json)
    counts = PrintedCount()
    try:
        position = (names, group, broadcast, partition, start, until_end)
        request = ConsumeRequest(*position, on_damaged, on_expired, tags, where, s3)
        _print_all(settings, request, count, printer, counts, raw=raw)
    except KeyboardInterrupt:
        print_message(f"interrupted: {count_text(counts.records, 'record')} printed")
        raise
    if counts.damaged:
        print_message(f"{count_text(counts.damaged, 'damaged block')} skipped")
    if counts.filtered and not counts.records:  # a mistyped tag or header would look like an empty topic
        print_message(f"memq: {count_text(counts.filtered, 'record')} read, none matches the filter")


def topics_named(brokers: str, given: Sequence[str]) -> tuple[str, ...]:
    """Return the topics of names and patterns, each once. Raises: NotFoundError if one matches nothing."""
    patterns = [each for each in given if set(each) & set("*?")]
    if not patterns:
        return tuple(dict.fromkeys(given))
    with Admin(brokers) as admin:
        names = [topic.name for topic in admin.topics()]
    found: dict[str, None] = {}
    for each in given:
        matching = fnmatch.filter(names, each) if each in patterns else [each]
        if not matching:
            raise NotFoundError(f"no topic matches '{each}'", hint="memq topic list shows the topics")
        found |= dict.fromkeys(matching)
    return tuple(found)


def _check_together(group: str | None, partition: int | None, start: Start, form: str | None, *, as_json: bool) -> None:
    """Refuse options that exclude each other. Raises: click.UsageError."""
    if start == "stored" and group is None:
        raise click.UsageError("-o stored needs a group, -G")
    if isinstance(start, RecordOffset) and group is not None:
        raise click.UsageError("-o OFFSET and -G exclude each other; memq group reset moves a group")
    if isinstance(start, LastRecords) and group is not None:
        raise click.UsageError("-o -N and -G exclude each other; memq group reset moves a group")
    if partition is not None and group is not None:
        raise click.UsageError("-p and -G exclude each other: the group gives out the partitions")
    if as_json and form is not None:
        raise click.UsageError("--json and -f exclude each other")


def _print_all(
    settings: ClientSettings,
    request: ConsumeRequest,
    count: int | None,
    printer: Printer,
    counts: PrintedCount,
    *,
    raw: bool,
) -> None:
    """Print up to the end, or `count` records.

    The request for the next batch commits the last one.
    """
    with _open_consumer(settings, request) as consumer:
        for batch in consumer:
            if request.partition is not None and batch.partition != request.partition:
                continue
            content, printed = printer(batch, None if count is None else count - counts.records)
            counts.records += printed
            counts.damaged += len(batch.damaged)
            write_records(content, raw=raw)
            if count is not None and counts.records >= count:
                if request.commits and printed == len(batch):
                    consumer.commit(batch)
                return
        counts.filtered = consumer.stats().counts.filtered_records


def _open_consumer(settings: ClientSettings, request: ConsumeRequest) -> Consumer:
    start: Point
    end: Point | None = "end" if request.until_end else None
    if isinstance(request.start, LastRecords | RecordOffset) or request.partition is not None:
        start, ends = resolve_range(settings.brokers, request.topics, request.start, request.partition)
        end = ends if request.until_end else None
    else:
        start = "beginning" if request.start == "stored" else request.start
    return Consumer(
        settings.brokers,
        list(request.topics),
        group=request.group,
        broadcast=request.broadcast,
        start=start,
        end=end,
        prefetch_bytes_max=settings.prefetch_bytes_max,
        on_damaged=request.on_damaged,
        on_expired=request.on_expired,
        tags=request.tags,
        where=request.where,
        s3=request.s3,
        encryption=encryption_of_settings(settings),
    )


def resolve_range(
    brokers: str, topics: Sequence[str], start: Start, partition: int | None
) -> tuple[Positions, Positions]:
    """Return the start and the present end of every partition.

    With `partition` all others start at their end.

    Raises: NotFoundError for a partition that does not exist; as the consumer.
    """
    with Consumer(brokers, list(topics), start="end", end="end") as consumer:
        consumer.poll()  # returns at once: every partition is at its end
        ends = {(each.topic, each.partition): at for each, at in consumer.position().items()}
        for topic in topics:
            count = sum(name == topic for name, _ in ends)
            if partition is not None and (topic, partition) not in ends:
                raise NotFoundError(f"topic '{topic}' has no partition {partition}", hint=f"it has {count}, from 0 on")
        wanted = [each for each in sorted(ends) if partition in (None, each[1])]
        if isinstance(start, RecordOffset) and len(wanted) > 1:
            raise InvalidSettingError(
                f"offset {start.offset} is of one partition, and {len(wanted)} are read",
                hint="name one topic, and its partition with -p, as %p prints it",
            )
        starts = {each: _start_of(consumer, TopicPartition(*each), start, ends[each]) for each in wanted}
        return {**ends, **starts}, ends


def _start_of(consumer: Consumer, source: TopicPartition, start: Start, end: Position) -> Position:
    if isinstance(start, LastRecords):
        consumer.seek(source.topic, source.partition, "beginning")
        ends = consumer.position()[source].pointer_offset, end.pointer_offset
        offset, before = last_offset(*ends, start.records, partial(_lag_at, consumer, source))
        return Position(source.partition, offset, before)
    if isinstance(start, RecordOffset):
        start = Position.at_offset(source.partition, start.offset)
    consumer.seek(source.topic, source.partition, start)
    return consumer.position()[source]


def _lag_at(consumer: Consumer, source: TopicPartition, offset: int) -> int:
    consumer.seek(source.topic, source.partition, Position(source.partition, offset))
    return consumer.lag()[source].records


def last_offset(begin: int, end: int, records: int, lag_at: Callable[[int], int]) -> tuple[int, int]:
    """Return the greatest offset with at least `records` records from it on, and the number above that.

    `lag_at(offset)` counts the records from `offset` on; it never grows with the offset, and is 0 at `end`. If the
    partition has fewer than `records`, the result is its start: (`begin`, 0).
    """
    low, high = begin, end
    if records == 0:
        return end, 0
    at_low = lag_at(low)
    if at_low <= records:
        return begin, 0
    while high - low > 1:
        middle = (low + high) // 2
        lag = lag_at(middle)
        if lag >= records:
            low, at_low = middle, lag
        else:
            high = middle
    return low, at_low - records


def record_printer(
    form: str | None, *, separator: str | None = None, delimiter: str = r"\n", null: bool = False, as_json: bool = False
) -> Printer:
    """Return a function that converts a batch to bytes.

    `form` is a format, as in `parse_format`. Without it, a record is its value and `delimiter`. With `separator`, the
    key and the separator come before the value. Null is printed as NULL if `null`, else as nothing.
    Raises: InvalidRequestError for a bad format or delimiter.
    """
    shown_null = b"NULL" if null else b""
    if as_json:
        return _each(_json_line)
    if form is not None:
        return _each(parse_format(form, shown_null))
    end = parse_delimiter(delimiter)
    if separator is None:
        return _values(end, shown_null)
    between = parse_delimiter(separator)
    return _each(
        lambda record, topic, partition: b"".join(
            (
                shown_null if record.key is None else record.key,
                between,
                shown_null if record.value is None else record.value,
                end,
            )
        )
    )


def line_of_record(form: str | None, *, as_json: bool) -> Callable[[Record, str], bytes]:
    """Return a function that converts a record to bytes: JSON, a format, or its value and a line end.

    Raises: InvalidRequestError for a bad format.
    """
    if as_json:
        return lambda record, topic: _json_line(record, topic, record.partition)
    show = parse_format(r"%s\n" if form is None else form, b"")
    return lambda record, topic: show(record, topic, record.partition)


def _each(show: Callable[[Record, str, int], bytes]) -> Printer:
    def print_batch(batch: Batch, count: int | None) -> tuple[bytes, int]:
        parts = [show(record, batch.topic, batch.partition) for record in islice(batch, count)]
        return b"".join(parts), len(parts)

    return print_batch


def _values(end: bytes, null: bytes) -> Printer:
    def print_batch(batch: Batch, count: int | None) -> tuple[bytes, int]:
        values: Sequence[bytes | None] = batch.values()[:count]
        shown = [null if value is None else value for value in values] if None in values else values
        return (end.join(shown) + end if shown else b""), len(shown)  # type: ignore[arg-type]  # no None is left

    return print_batch


def _json_line(record: Record, topic: str, partition: int) -> bytes:
    identity = {"topic": topic, "partition": partition, "offset": record.offset, "position": str(record.position)}
    line = encode_record(identity, record.value, record.key, record.headers, record.timestamp_ms, record.tag)
    return line.encode() + b"\n"
