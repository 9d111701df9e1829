"""`memq produce`: sends the lines of stdin or files, one record per line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click

from memq.cli.options import delay_of, encryption_of_settings, json_option, setting_options, settings_of
from memq.cli.output import ProgressBar, count_text, print_json, print_message, size_text
from memq.cli.records.record_text import decode_record, parse_delimiter
from memq.client.admin import Admin
from memq.client.producer.delivery import Ack
from memq.client.producer.producer import Producer
from memq.errors import InvalidRequestError, MemqError, NotFoundError, TooLargeError
from memq.limits import BLOCK_RAW_BYTES_MAX
from memq.protocol.frames import AckLevel
from memq.runtime.clock import SystemClock
from memq.settings import Value
from memq.topic import check_resource_name

CHUNK_BYTES = 1 << 20
# Time for which Ctrl-C waits for acks of blocks that are on their way.
INTERRUPTED_FLUSH_S = 0.3


@click.command()
@click.argument("topic")
@click.argument("files", metavar="[FILE]...", nargs=-1)
@setting_options(
    "brokers",
    "acks",
    "codec",
    "linger_ms",
    "delivery_timeout_ms",
    "pending_bytes_max",
    "metadata_timeout_ms",
    "encryption",
    "subjects",
)
@click.option("-p", "--partition", type=click.IntRange(min=0), metavar="N", help="Send to this partition.")
@click.option("-k", "--key", metavar="KEY", help="Key of every record.")
@click.option(
    "-H", "--header", "header", multiple=True, metavar="NAME=VALUE", help="A header of every record; repeatable."
)
@click.option("--tag", metavar="TAG", help="Tag of every record.")
@click.option("--deliver-after", metavar="DELAY", help="Readers get each record this long after it is sent, as 5m.")
@click.option("--deliver-at", metavar="TIME", help="Readers get the records at this time, as YYYY-MM-DDTHH:MM:SSZ.")
@click.option("--subject", metavar="SUBJECT", help="Encrypt each record with the key of this subject, too.")
@click.option("-K", "--key-separator", metavar="SEP", help="Separator of key and value in a line.")
@click.option("-D", "--delimiter", default=r"\n", metavar="DELIM", help=r"End of each record (default \n).")
@click.option("-Z", "--null", is_flag=True, help="Send empty values and keys as null.")
@click.option(
    "--input", "form", type=click.Choice(["lines", "json"]), default="lines", help="json: what consume --json prints."
)
@json_option
def produce(
    topic: str,
    files: tuple[str, ...],
    partition: int | None,
    key: str | None,
    header: tuple[str, ...],
    tag: str | None,
    deliver_after: str | None,
    deliver_at: str | None,
    subject: str | None,
    key_separator: str | None,
    delimiter: str,
    null: bool,
    form: str,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Send records to TOPIC, one per line of the files or of stdin (also as -).

    Ends when every record has its ack; with --json it then prints a summary. Ctrl-C prints the number of acked records.
    """
    check_resource_name(topic)  # checked first: without input, no record would reveal a wrong name
    settings = settings_of(config, profile, **flags).client()
    separator = parse_delimiter(key_separator) if key_separator is not None else None
    given = (_encode(key) or None) if null else _encode(key)
    clock = SystemClock()
    delay = delay_of(deliver_at, deliver_after, clock.wall_ms())
    keys = encryption_of_settings(settings)
    arguments = delay if subject is None else {**delay, "subject": subject}
    shape = Shape(topic, partition, given, parse_headers(header), tag, separator, null, arguments)
    started = clock.monotonic()
    counts = SentCount()
    with ExitStack() as stack:
        chunks = _chunks(files, stack)
        producer = stack.enter_context(
            Producer(
                settings.brokers,
                acks=settings.acks,
                codec=settings.codec,
                linger_ms=settings.linger_ms,
                pending_bytes_max=settings.pending_bytes_max,
                delivery_timeout_ms=settings.delivery_timeout_ms,
                metadata_timeout_ms=settings.metadata_timeout_ms,
                on_ack=counts.note,
                encryption=keys,
            )
        )
        send = json_sender(producer, shape, counts) if form == "json" else line_sender(producer, shape, counts)
        name_new_topic = _new_topic_notice(settings.brokers, topic)
        _send_all(producer, split_records(chunks, parse_delimiter(delimiter)), send, name_new_topic, counts)
    if counts.error:
        print_message(f"failed: {_done(counts)}")
        raise counts.error
    _summarize(counts, clock.monotonic() - started, as_json=as_json, acks=settings.acks, delayed=bool(delay))


def _send_all(
    producer: Producer,
    records: Iterable[list[bytes]],
    send: Callable[[list[bytes]], None],
    name_new_topic: Callable[[], None],
    counts: SentCount,
) -> None:
    """Send records until the end or the first error, and wait for their acks."""
    try:
        for some in records:
            send(some)
            name_new_topic()
            if counts.error:
                break
        producer.flush()
        name_new_topic()
    except KeyboardInterrupt:
        _give_up(producer, counts)
        raise
    except MemqError as error:  # one record is wrong: those before it are sent
        with suppress(MemqError):
            producer.flush()
        if counts.acked:
            done = f"{count_text(counts.acked, 'record')} before it acked: the whole input would send them again"
            error.hint = f"{error.hint}; {done}" if error.hint else done
        raise


def _new_topic_notice(brokers: str, topic: str) -> Callable[[], None]:
    """Return a function that names the topic once if a record has created it: its name may be a mistake."""
    with Admin(brokers) as admin:
        notices = [] if _exists(admin, topic) else [f"memq: topic {topic} did not exist: a record has created it"]

    def notice() -> None:
        if notices:
            with Admin(brokers) as admin:
                if _exists(admin, topic):  # it does not for a principal that may write only
                    print_message(notices.pop())

    return notice


def _exists(admin: Admin, topic: str) -> bool:
    with suppress(NotFoundError):
        admin.topic(topic)
        return True
    return False


def _encode(text: str | None) -> bytes | None:
    """Return a command line argument's bytes as they were given, UTF-8 or not."""
    return None if text is None else text.encode(errors="surrogateescape")


def parse_headers(texts: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    """Return the pairs of `-H NAME=VALUE`. Raises: click.BadParameter."""
    pairs = []
    for text in texts:
        name, found, value = text.partition("=")
        if not found or not name:
            raise click.BadParameter(f"'{text}' is not NAME=VALUE", param_hint="-H")
        pairs.append((name, value.encode(errors="surrogateescape")))
    return tuple(pairs)


def _chunks(files: tuple[str, ...], stack: ExitStack) -> Iterator[bytes]:
    """Open every input before the first record is sent, and return their bytes as they come."""
    streams: list[BinaryIO] = []
    total = 0
    for file in files or ("-",):
        if file == "-":
            streams.append(sys.stdin.buffer)
        else:
            total += Path(file).stat().st_size
            streams.append(stack.enter_context(Path(file).open("rb")))  # noqa: SIM115  # the stack closes it
    if streams == [sys.stdin.buffer] and sys.stdin.isatty():
        print_message("memq: reading lines from the terminal; Ctrl-D ends the input")
    progress = stack.enter_context(ProgressBar("produce", total))
    return _read(streams, progress)


def _read(streams: list[BinaryIO], progress: ProgressBar) -> Iterator[bytes]:
    for stream in streams:
        read = getattr(stream, "read1", stream.read)  # available bytes, without a wait for a full chunk
        while chunk := read(CHUNK_BYTES):
            yield chunk
            progress.move(len(chunk))


def _give_up(producer: Producer, counts: SentCount) -> None:
    """Print the result at once; unacked records have an unknown outcome."""
    with suppress(MemqError):
        producer.flush(timeout=INTERRUPTED_FLUSH_S)
    print_message(f"interrupted: {_done(counts)}")


def _done(counts: SentCount) -> str:
    return f"{count_text(counts.records, 'record')} sent, {counts.acked:,} of them acked"


def _summarize(counts: SentCount, seconds: float, *, as_json: bool, acks: str, delayed: bool) -> None:
    rate = counts.records / max(seconds, 1e-9)
    if as_json:
        print_json(
            {
                "records": counts.records,
                "bytes": counts.bytes,
                "acks": acks,
                "acked": counts.acked,
                "seconds": round(seconds, 3),
                "records_per_second": round(rate),
            }
        )
        return
    acked = "not acked, as asked" if acks == "0" else f"{counts.acked:,} acked (acks={acks})"
    if delayed:  # their acks say that the cluster holds them, whatever `acks` is
        acked = f"{counts.acked:,} held until they are due"
    print_message(f"{count_text(counts.records, 'record')}, {size_text(counts.bytes)}: {acked}, {rate:,.0f} records/s")


@dataclass(frozen=True, slots=True)
class Shape:
    """How a line of input becomes a record."""

    topic: str
    partition: int | None
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    tag: str | None
    separator: bytes | None
    null_when_empty: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further ones of `Producer.send`


@dataclass(slots=True)
class SentCount:
    """Counts of sent records and their outcomes; acks arrive on the I/O thread."""

    records: int = 0
    bytes: int = 0
    acked: int = 0
    error: MemqError | None = None

    def note(self, outcome: Ack | MemqError) -> None:
        """Count an ack, or keep the first error. Without acks there is nothing to count."""
        if isinstance(outcome, MemqError):
            self.error = self.error or outcome
        elif outcome.level is not AckLevel.NONE:
            self.acked += outcome.records


def line_sender(producer: Producer, shape: Shape, counts: SentCount) -> Callable[[list[bytes]], None]:
    """Return a function that sends a list of lines: by columns if records have only value and key."""

    def send(records: list[bytes]) -> None:
        keys, values = _columns(records, shape)
        if shape.partition is None and not shape.headers and not shape.arguments:
            try:
                producer.send_many(shape.topic, values, keys=keys, tag=shape.tag)
            except TooLargeError:
                pass  # none was sent: one by one, the first that is too large is named, and those before it are sent
            else:
                counts.records += len(records)
                counts.bytes += sum(map(len, records))
                return
        for record, value, key in zip(records, values, keys or [None] * len(values), strict=True):
            try:
                producer.send(
                    shape.topic,
                    value,
                    key=key,
                    headers=shape.headers,
                    tag=shape.tag,
                    partition=shape.partition,
                    **shape.arguments,
                )
            except TooLargeError as error:
                text = f"record {counts.records + 1} of the input: {error}"
                raise TooLargeError(text, hint=error.hint) from error
            counts.records += 1
            counts.bytes += len(record)

    return send


def _columns(records: list[bytes], shape: Shape) -> tuple[list[bytes | None] | None, list[bytes | None]]:
    keys: list[bytes | None] | None = None
    if shape.separator is not None:
        keys, records = split_keys(records, shape.separator)
    values: list[bytes | None] = list(records)
    if shape.null_when_empty:
        values = [value or None for value in values]
        keys = [key or None for key in keys] if keys is not None else None
    if shape.key is not None:
        keys = [shape.key if key is None else key for key in keys or [None] * len(values)]
    return keys, values


def json_sender(producer: Producer, shape: Shape, counts: SentCount) -> Callable[[list[bytes]], None]:
    """Return a function that sends lines of JSON; a bad line raises InvalidRequestError with its number."""

    def send(lines: list[bytes]) -> None:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = decode_record(line)
                producer.send(
                    shape.topic,
                    record.value,
                    key=shape.key if record.key is None else record.key,
                    headers=record.headers + shape.headers,
                    timestamp_ms=record.timestamp_ms,
                    tag=shape.tag if record.tag is None else record.tag,
                    partition=shape.partition,
                    **shape.arguments,
                )
            except NotFoundError:  # of the topic or the partition
                raise
            except InvalidRequestError as error:
                number = counts.records + 1
                raise type(error)(f"record {number} of the input: {error}", hint=error.hint) from error
            counts.records += 1
            counts.bytes += len(record.value or b"")

    return send


def split_records(chunks: Iterable[bytes], delimiter: bytes) -> Iterator[list[bytes]]:
    """Yield the records that each chunk completes; the last one needs no delimiter after it.

    A record without its delimiter may be as large as the largest block. Raises: TooLargeError.
    """
    carry = bytearray()
    done = 0
    for chunk in chunks:
        # Only the new bytes, and the start of a delimiter before them, are searched: a record that comes
        # in many chunks must not be searched again with each.
        if chunk.find(delimiter) < 0 and (bytes(carry[-len(delimiter) :]) + chunk).find(delimiter) < 0:
            carry += chunk
            _check_bound(len(carry), done)
            continue
        *records, rest = (bytes(carry) + chunk).split(delimiter)
        carry = bytearray(rest)
        done += len(records)
        _check_bound(len(carry), done)
        yield records
    if carry:
        yield [bytes(carry)]


def _check_bound(waiting: int, done: int) -> None:
    if waiting > BLOCK_RAW_BYTES_MAX:
        raise TooLargeError(
            f"record {done + 1} has more than {BLOCK_RAW_BYTES_MAX} bytes without a delimiter",
            hint="give its delimiter with -D",
        )


def split_keys(records: list[bytes], separator: bytes) -> tuple[list[bytes | None], list[bytes]]:
    """Return keys and values: the text before the first separator is the key.

    A record without the separator has no key.
    """
    keys: list[bytes | None] = []
    values: list[bytes] = []
    for record in records:
        key, found, value = record.partition(separator)
        keys.append(key if found else None)
        values.append(value if found else record)
    return keys, values
