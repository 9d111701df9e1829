"""The report: one JSON record of `_memq_audit` with a client's work, as ranges of sequences.

Theory. An auditor that counts lost records must also know which reports are missing. So a client numbers its reports
in each partition of `_memq_audit` without holes. Each report states up to when it is complete, and when the next one
comes at the latest. The work of a client is known from its first report up to `until_ms` of the last one before a hole.
After a hole, its work is unknown until a report has `last`, or the numbers continue. The reports of all clients about
one write partition are in one partition of `_memq_audit`, its *home*: reading the home is enough to judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from memq.errors import CorruptDataError, InvalidNameError, UnsupportedFormatError
from memq.format.blocks.header import scope_of
from memq.format.blocks.latency import Bucket, Latency
from memq.format.pointer import Hex, Number, Text, Time, TopicId
from memq.format.ranges import Range
from memq.limits import KIB, SEQUENCE_END
from memq.topic import check_resource_name

AUDIT_TOPIC = "_memq_audit"
REPORT_VERSION = 1
REPORT_BYTES_MAX = 64 * KIB
CAUSE_CHARS_MAX = 500
MINUTE_MS = 60_000
_HEX_MAX = (1 << 64) - 1
_HEX_OF_DAMAGE = ("producer", "first", "next")

# A Spark stream has two kinds: its driver (`spark-reader`) reports positions, each task (`spark-task`) its fetches.
Kind = Literal["producer", "consumer", "spark-reader", "spark-task", "spark-writer"]
# Producers: `sent` to a socket, `acked` at `level`, `gave-up`, whether sent or not. Readers: `fetched` and given to the
# user, `dropped` as a copy, `passed`: left out by a filter, `processed`: the group's commit succeeded.
Stage = Literal["sent", "acked", "gave-up", "fetched", "dropped", "passed", "processed"]
# Of delayed records: `held`, `cancelled`. Of transactions: `committed`, `rolled-back`. `unsure`: none of them is known.
# Those of readers are as in `Stage`.
ReadStage = Literal["fetched", "dropped", "passed", "processed"]
HeldStage = Literal[
    "held", "cancelled", "committed", "rolled-back", "unsure", "fetched", "dropped", "passed", "processed"
]
BeginReason = Literal["stored", "start", "seek"]
PositionText = Annotated[str, Meta(pattern=r"^([0-9]{1,16}:[0-9]{1,16}:[0-9]{1,16})?$", max_length=50)]
KnownPositionText = Annotated[str, Meta(pattern=r"^[0-9]{1,16}:[0-9]{1,16}:[0-9]{1,16}$", max_length=50)]
Stretch = tuple[KnownPositionText, KnownPositionText]
_HexRange = tuple[Hex, Hex]


class ReportedDamage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A block that a reader could not read: object, number in it, pointer offset, and cause.

    `records` is the number of records that the reader lost. `block` is also 0 for a whole batch. `producer` and its
    sequences `first` up to, not with, `next` are known only when the header is sound and the payload is damaged.
    """

    object: Text
    block: Number
    offset: Number
    records: Number
    cause: Text
    producer: int = 0
    first: int = 0
    next: int = 0


def damage_of(key: str, block: int, offset: int, records: int, cause: Exception | None) -> ReportedDamage:
    """Return the damage of a block of an object whose producer is not known; the cause's text is cut."""
    text = str(cause)[:CAUSE_CHARS_MAX]
    return ReportedDamage(object=key, block=block, offset=offset, records=records, cause=text)


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A reader began at a position: its group's, its configured start, or the target of a seek.

    The audit needs it to distinguish records that are processed again after a rewind from doubled ones.
    """

    at: PositionText
    reason: BeginReason


class ReportSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's progress: sequences of one producer with the least timestamp in one minute.

    `minute` is in Unix minutes of event time, as the block headers have it. `ranges` are half-open, ascend and do not
    touch. `level` is the ack level that the producer requested, 0 for readers. `latency` is as in
    `format/blocks/latency.py`.
    """

    stage: Stage
    producer: int
    minute: int
    ranges: tuple[Range, ...]
    level: int = 0
    latency: Latency = ()


class HeldSpan(msgspec.Struct, frozen=True, kw_only=True):
    """How many delayed records, or records of transactions, of one minute came to a stage.

    `minute` is the Unix minute in which a record is due, or in which its transaction began.
    """

    stage: HeldStage
    minute: Time
    records: Number


class ReportPart(msgspec.Struct, frozen=True, kw_only=True):
    """A report's content for one write partition; several in order if a reader began again.

    `begins` happened before all processed and committed records of the part.
    `committed` is the position of the group's last successful commit; "" when no commit succeeded since the last
    report. `read` is the stretch that a Spark task has read to its end, from a position up to, not with, another. With
    this part, all that the task fetched there is reported. `held` counts delayed records and those of transactions;
    `spans` have none of them.
    """

    topic: str
    topic_id: str
    partition: int
    spans: tuple[ReportSpan, ...] = ()
    damages: tuple[ReportedDamage, ...] = ()
    begins: tuple[Begin, ...] = ()
    committed: str = ""
    read: Stretch | None = None
    held: tuple[HeldSpan, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One client's work from `since_ms` to `until_ms` (its clock) in the write partitions of a home.

    `number` counts from 0 for each client and partition of `_memq_audit`: a hole is a lost report. The next report
    comes by `next_ms`, even if it is empty; none comes after `last`. When an interval needs several reports, all but
    its last one have `until_ms` = `since_ms`.
    `client` is random, one for each producer or consumer object; `name` is that of the producer or the group, or "".
    """

    client: int
    kind: Kind
    number: int
    since_ms: int
    until_ms: int
    next_ms: int
    name: str = ""
    host: str = ""
    last: bool = False
    parts: tuple[ReportPart, ...] = ()
    version: int = REPORT_VERSION


class _WireDamage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    object: Text
    block: Number
    offset: Number
    records: Number
    cause: Text
    producer: Hex = "0" * 16
    first: Hex = "0" * 16
    next: Hex = "0" * 16


class _WireSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    stage: Stage
    producer: Hex
    minute: Time
    ranges: tuple[_HexRange, ...]
    level: Annotated[int, Meta(ge=0, le=2)] = 0
    latency: tuple[tuple[Bucket, Number], ...] = ()


class _WireReportPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    topic: Text
    topic_id: TopicId
    partition: Annotated[int, Meta(ge=0, lt=1 << 32)]
    spans: tuple[_WireSpan, ...] = ()
    damages: tuple[_WireDamage, ...] = ()
    begins: tuple[Begin, ...] = ()
    committed: PositionText = ""
    read: Stretch | None = None
    held: tuple[HeldSpan, ...] = ()


class _WireReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    client: Hex
    kind: Kind
    number: Number
    since_ms: Time
    until_ms: Time
    next_ms: Time
    name: Text = ""
    host: Text = ""
    last: bool = False
    parts: tuple[_WireReportPart, ...] = ()


class _ReportVersion(msgspec.Struct):
    version: int


_decode_version = msgspec.json.Decoder(_ReportVersion).decode
_decode_wire = msgspec.json.Decoder(_WireReport).decode
_encode = msgspec.json.Encoder().encode


def home_of(topic_id: str, partition: int, homes: int) -> int:
    """Return which of the `homes` partitions of `_memq_audit` has the reports about a write partition."""
    return scope_of(bytes.fromhex(topic_id), partition) % homes


def encode_report(report: Report) -> bytes:
    """Return the report's JSON. It may be larger than REPORT_BYTES_MAX: `fitting` cuts it."""
    parts = tuple(_wire_part(part) for part in report.parts)
    return _encode(_WireReport(**_fields(report) | {"client": _hex(report.client), "parts": parts}))


def decode_report(body: bytes | bytearray | memoryview) -> Report:
    """Read a report; unknown fields are ignored.

    Raises: CorruptDataError; UnsupportedFormatError for a newer version.
    """
    if len(body) > REPORT_BYTES_MAX:
        raise CorruptDataError(f"report has {len(body)} bytes, {REPORT_BYTES_MAX} are allowed")
    try:
        version = _decode_version(body).version
        if version != REPORT_VERSION:
            raise UnsupportedFormatError(f"report has version {version}, {REPORT_VERSION} is known")
        wire = _decode_wire(body)
        if wire.since_ms > wire.until_ms or wire.until_ms > wire.next_ms:
            raise ValueError(f"times {wire.since_ms}, {wire.until_ms} and {wire.next_ms} do not ascend")
        parts = tuple(_part(part) for part in wire.parts)
        return Report(**_fields(wire) | {"client": int(wire.client, 16), "parts": parts})
    except (ValueError, RecursionError, InvalidNameError) as error:  # ValueError: msgspec's errors, and bad UTF-8
        raise CorruptDataError(f"report of {len(body)} bytes can't be read: {error}") from error


def fitting(report: Report, bytes_max: int = REPORT_BYTES_MAX) -> list[Report]:
    """Return the report, or several with its content, each at most `bytes_max` bytes."""
    pieces = _pieces(report, bytes_max)
    last = len(pieces) - 1
    return [
        msgspec.structs.replace(
            piece,
            number=report.number + at,
            until_ms=report.until_ms if at == last else report.since_ms,
            last=report.last and at == last,
        )
        for at, piece in enumerate(pieces)
    ]


def _pieces(report: Report, bytes_max: int) -> list[Report]:
    halves = () if len(encode_report(report)) <= bytes_max else _halves(report)
    return [piece for half in halves for piece in _pieces(half, bytes_max)] or [report]


def _halves(report: Report) -> tuple[Report, ...]:
    """Cut a report in two: between parts, else within its part; () when there is nothing to cut."""
    halves: Sequence[tuple[ReportPart, ...]]
    if len(report.parts) > 1:
        halves = _halved(report.parts)
    else:
        halves = [(half,) for part in report.parts for half in _halves_of_part(part)]
    return tuple(msgspec.structs.replace(report, parts=parts) for parts in halves)


def _halves_of_part(part: ReportPart) -> tuple[ReportPart, ...]:
    """Cut a part in two between spans, damages, begins or ranges, whichever it has several of.

    Begins are in the first half: they come before processed records. `committed` and `read` are in the second half:
    they state that everything before them is reported.
    """
    if part.held:
        held = ReportPart(topic=part.topic, topic_id=part.topic_id, partition=part.partition, held=part.held)
        if held != part:
            return msgspec.structs.replace(part, held=()), held
        return tuple(msgspec.structs.replace(held, held=half) for half in _halved(part.held) if len(part.held) > 1)
    rest = msgspec.structs.replace(part, spans=(), damages=(), begins=())
    if len(part.begins) > 1:
        early, late = _halved(part.begins)
        first = msgspec.structs.replace(rest, begins=early, committed="", read=None)
        return first, msgspec.structs.replace(part, begins=late)
    part = msgspec.structs.replace(part, committed="", read=None)
    for name in ("spans", "damages"):
        if len(getattr(part, name)) > 1:
            low, high = _halved(getattr(part, name))
            return msgspec.structs.replace(part, **{name: low}), msgspec.structs.replace(rest, **{name: high})
    if part.spans and len(part.spans[0].ranges) > 1:
        low, high = _halved(part.spans[0].ranges)
        lower = msgspec.structs.replace(part.spans[0], ranges=low)
        higher = msgspec.structs.replace(part.spans[0], ranges=high, latency=())
        return msgspec.structs.replace(part, spans=(lower,)), msgspec.structs.replace(rest, spans=(higher,))
    return ()


def _halved(items: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]


def _wire_part(part: ReportPart) -> _WireReportPart:
    spans = tuple(
        _WireSpan(
            **_fields(span)
            | {
                "producer": _hex(span.producer),
                "ranges": tuple((_hex(first), _hex(next_)) for first, next_ in span.ranges),
            }
        )
        for span in part.spans
    )
    damages = tuple(
        _WireDamage(**_fields(damage) | {name: _hex(getattr(damage, name)) for name in _HEX_OF_DAMAGE})
        for damage in part.damages
    )
    return _WireReportPart(**_fields(part) | {"spans": spans, "damages": damages})


def _part(wire: _WireReportPart) -> ReportPart:
    check_resource_name(wire.topic, internal=True)
    spans = tuple(
        ReportSpan(**_fields(span) | {"producer": int(span.producer, 16), "ranges": _ranges(span.ranges)})
        for span in wire.spans
    )
    damages = tuple(
        ReportedDamage(**_fields(damage) | {name: int(getattr(damage, name), 16) for name in _HEX_OF_DAMAGE})
        for damage in wire.damages
    )
    return ReportPart(**_fields(wire) | {"spans": spans, "damages": damages})


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a struct by name, unconverted: structs of wire and Python have the same names."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _hex(number: int) -> str:
    assert 0 <= number <= _HEX_MAX, f"{number} has more than 16 hex digits"
    return f"{number:016x}"


def _ranges(ranges: Sequence[_HexRange]) -> tuple[Range, ...]:
    """Read ranges, which ascend and do not touch."""
    read = tuple((int(first, 16), int(next_, 16)) for first, next_ in ranges)
    at = -1
    for first, next_ in read:
        if not at < first < next_ <= SEQUENCE_END:
            raise ValueError(f"range {first} to {next_} is empty, too high, or does not follow on {at}")
        at = next_
    return read
