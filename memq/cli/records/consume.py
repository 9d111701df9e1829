"""`memq consume`: prints records as they come."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import click

from memq.cli.log_lines import talk_of_waits
from memq.cli.options import json_option, section_values, setting_options, settings_of
from memq.cli.output import count_text, talk
from memq.cli.records.consume_start import look_up
from memq.cli.records.record_printer import Printer, record_printer
from memq.cli.records.start_position import LastRecords, Start, parse_start
from memq.client.consumer.consumer import Consumer
from memq.client.consumer.settings import OnDamaged, OnExpired, Point
from memq.runtime.clock import SystemClock
from memq.settings import ClientSettings, Value
from memq.topic import Position


@dataclass(frozen=True, slots=True)
class ConsumeRequest:
    """Request to read: the topic, its range, and the treatment of damage and gaps."""

    topic: str
    group: str | None
    partition: int | None
    start: Start
    until_end: bool
    on_damaged: OnDamaged
    on_expired: OnExpired
    s3: Mapping[str, object]  # how to open the store


@dataclass(slots=True)
class PrintedCount:
    """Counts of printed and skipped records."""

    records: int = 0
    damaged: int = 0


@click.command()
@click.argument("topic")
@setting_options("brokers", "prefetch_bytes_max")
@click.option("-G", "--group", metavar="GROUP", help="Share the topic with the group's members, and commit.")
@click.option("-p", "--partition", type=click.IntRange(min=0), metavar="N", help="Only this partition.")
@click.option(
    "-o",
    "--offset",
    default="beginning",
    metavar="START",
    help="beginning, end, stored, -N (the last N), @TIME (RFC 3339, epoch ms, -1h) or a position as 0:17:3.",
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
@json_option
def consume(
    topic: str,
    group: str | None,
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
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Print the values of TOPIC, one per line; with -f or --json also other fields of each record.

    With -G it starts at the group's committed position; -o counts only where the group has none. It commits each batch
    that was printed whole: if -c ends inside a batch, the next run prints that batch from its start. Without an end
    (-e, -c) it waits for more records; Ctrl-C prints a summary.
    """
    found = settings_of(config, profile, **flags)
    settings, s3 = found.client(), section_values(found, "s3")
    start = parse_start(offset, SystemClock().wall_ms())
    if isinstance(start, Position) and group is None:
        partition = start.read_partition
    _check_together(group, partition, start, form, as_json=as_json)
    printer = record_printer(form, separator=key_separator, delimiter=delimiter, null=null, as_json=as_json)
    tally = PrintedCount()
    talk_of_waits()
    try:
        request = ConsumeRequest(topic, group, partition, start, until_end, on_damaged, on_expired, s3)
        _print_all(settings, request, count, printer, tally)
    except KeyboardInterrupt:
        talk(f"interrupted: {count_text(tally.records, 'record')} printed")
        raise
    if tally.damaged:
        talk(f"{count_text(tally.damaged, 'damaged block')} skipped")


def _check_together(group: str | None, partition: int | None, start: Start, form: str | None, *, as_json: bool) -> None:
    """Refuse options that exclude each other. Raises: click.UsageError."""
    if start == "stored" and group is None:
        raise click.UsageError("-o stored needs a group, -G")
    if isinstance(start, LastRecords) and group is not None:
        raise click.UsageError("-o -N and -G exclude each other; memq group reset moves a group")
    if partition is not None and group is not None:
        raise click.UsageError("-p and -G exclude each other: the group gives out the partitions")
    if as_json and form is not None:
        raise click.UsageError("--json and -f exclude each other")


def _print_all(
    settings: ClientSettings, request: ConsumeRequest, count: int | None, printer: Printer, tally: PrintedCount
) -> None:
    """Print up to the end, or `count` records.

    A batch is done, and committed, when the next one is asked for.
    """
    with _open_consumer(settings, request) as consumer:
        for batch in consumer:
            if request.partition is not None and batch.partition != request.partition:
                continue
            content, printed = printer(batch, None if count is None else count - tally.records)
            tally.records += printed
            tally.damaged += len(batch.damaged)
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
            if count is not None and tally.records >= count:
                if request.group is not None and printed == len(batch):
                    consumer.commit(batch)
                return


def _open_consumer(settings: ClientSettings, request: ConsumeRequest) -> Consumer:
    start: Point
    end: Point | None = "end" if request.until_end else None
    if isinstance(request.start, LastRecords) or request.partition is not None:
        start, ends = look_up(settings.brokers, request.topic, request.start, request.partition)
        end = ends if request.until_end else None
    else:
        start = "beginning" if request.start == "stored" else request.start
    return Consumer(
        settings.brokers,
        [request.topic],
        group=request.group,
        start=start,
        end=end,
        prefetch_bytes_max=settings.prefetch_bytes_max,
        on_damaged=request.on_damaged,
        on_expired=request.on_expired,
        s3=request.s3,
    )
