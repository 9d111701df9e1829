"""The options of `format("memq")`: a table of names and meanings, read into a picklable value. Pure.

Names are case-insensitive, as everywhere in Spark. Keys and passwords are no options, because plans and logs show
options. Every machine finds them as clients do: in the environment, the settings file, or its role.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from memq.client.consumer.record_filter import filter_of
from memq.errors import InvalidSettingError, UnknownSettingError
from memq.limits import KIB, MIB
from memq.settings import did_you_mean, parse_size, parse_unix_ms
from memq.topic import Position, check_resource_name

COLUMNS = {
    "key": "BINARY",
    "value": "BINARY",
    "headers": "ARRAY<STRUCT<name: STRING, value: BINARY>>",
    "tag": "STRING",
    "timestamp": "TIMESTAMP",
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "record_index": "INT",
    "producer_id": "BIGINT",
    "sequence": "BIGINT",
    "object": "STRING",
    "damage": "STRING",
    "orphan": "BOOLEAN",
}
# `damage` makes a row of each damaged block that was skipped, in place of its records; `orphan` marks objects that
# no pointer would have named, which only a read by `path` can meet. Both come only when they are asked for.
DEFAULT_COLUMNS = tuple(name for name in COLUMNS if name not in ("damage", "orphan"))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MISSING_S = 30  # as long as a consumer that passes over damage asks
_NUMBER = re.compile(r"[0-9]{1,16}\Z")  # `isdigit` takes "²", and `int` no text of over 4,300 digits
_POSITION = re.compile(r"(?:(?P<topic>[^=,]+)=)?(?P<position>\d+:\d+:\d+(?::[0-9a-f]{8})?)\Z")

DESCRIPTIONS = {
    "brokers": "HOST:PORT of a broker, several with commas: they know topics, pointers and stores; else MEMQ_BROKERS",
    "queue": "sqlite:FILE or kafka://HOST:PORT,…: pointers are read there, and no broker is asked; needs store",
    "store": "file:FOLDER or s3://BUCKET/PREFIX?endpoint=…: where the objects are, instead of what brokers say",
    "config": "settings file on every machine, for the sections [s3] and [kafka]; else as `memq` finds it",
    "profile": "profile of the settings file",
    "topics": "names of topics, with commas",
    "path": "objects by listing alone, of a folder or s3://BUCKET/…/topics/NAME: no queue is asked",
    "columns": "columns to read, with commas; damage can only be had so",
    "tags": "only records with one of these tags, written as those of a consumer",
    "where": "only records whose headers meet this condition, as amount > 100 AND region = 'EU'",
    "start": "beginning, end, a time (RFC 3339 or epoch ms), or positions 0:17:3, with commas; topic=0:17:3 of several",
    "end": "where to stop, as start; a stream has none",
    "schema": "DDL of the values' fields: they are decoded, and replace the column value",
    "valueformat": "what values are with schema: json or avro",
    "avroschema": "the schema that values were written with, as JSON, for avro",
    "onmalformed": "a value that is not what schema says: fail, or null in all its fields",
    "ondamaged": "a block that is damaged, cut or missing: fail, or skip: all others are read",
    "missingseconds": "how long to ask for an object that a pointer names and the store lacks, before it is damage",
    "dedup": "on: what was sent again is read once; raw: all that is stored",
    "partitionbytes": "stored bytes of one Spark partition, about",
    "prefetchbytes": "stored bytes that a task holds ahead",
    "maxbytespertrigger": "stored bytes of one micro-batch, at least one batch of memq",
    "maxrecordspertrigger": "stored records of one micro-batch",
    "onexpired": "retention took what a stream was to read next: fail, or skip",
    "auditname": "name by which a stream reports to the live audit, as a group; else it does not",
}
_SPELLED: tuple[str, ...] = ("valueFormat", "avroSchema", "onMalformed", "onDamaged", "partitionBytes", "prefetchBytes")
_SECRET = re.compile(r"secret|password|token|access.?key|sasl", re.IGNORECASE)


def table_ddl(columns: tuple[str, ...], fields: str) -> str:
    """Return the DDL of a read: `columns`, with decoded `fields` in place of the value, if any.

    Raises: InvalidSettingError if the columns have no value to decode.
    """
    if fields and "value" not in columns:
        raise InvalidSettingError("option 'schema' decodes the column value, which 'columns' lacks", hint="add value")
    return ", ".join(fields if fields and name == "value" else f"{name} {COLUMNS[name]}" for name in columns)


def fields_at(names: Sequence[str], columns: tuple[str, ...], fields: str) -> range:
    """Return the indexes of the decoded fields in `names`, the columns of a table of `table_ddl`.

    A field may be called `value`, which it replaces, or like a column that is not read. Raises: InvalidSettingError for
    a field with the name of another column (Spark ignores the case of letters), and for a different table.
    """
    first = columns.index("value") if fields else 0
    found = range(first, first + len(names) - len(columns) + 1) if fields else range(0)
    others = [name for name in columns if name != "value"]
    twice = [names[number] for number in found if names[number].lower() in others]
    if twice:
        left = [name for name in columns if name not in {each.lower() for each in twice}]
        raise InvalidSettingError(
            f"option 'schema' has fields with names of columns: {', '.join(twice)}", hint=f"columns = {','.join(left)}"
        )
    own = [name for number, name in enumerate(names) if number not in found]
    strange = [name for name in own if name not in columns]
    if strange or (fields and own != others):
        raise InvalidSettingError(
            f"Spark was given a schema of its own, with {', '.join(strange or names)[:120]}",
            hint="leave .schema(…) out; the option 'schema' has the fields of values, the option 'columns' the rest",
        )
    return found


def read_given(given: Mapping[str, str], spelling: Mapping[str, str], foreign: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the given options by lower-case names.

    `spelling` has the valid names in their usual spelling. `foreign` options, which are Spark's own, are ignored.
    Raises: UnknownSettingError with a "did you mean".
    """
    normalized = {name.lower(): value.strip() for name, value in given.items() if name.lower() not in foreign}
    for name in normalized:
        if name in spelling:
            continue
        if _SECRET.search(name):
            raise UnknownSettingError(
                f"option '{name}' is refused: options appear in plans and logs",
                hint="give keys by the environment of every machine, or by the file that option 'config' names",
            )
        raise UnknownSettingError(f"unknown option '{name}'", hint=did_you_mean(name, tuple(spelling.values())))
    return normalized


def read_choice(normalized: Mapping[str, str], name: str, spelled: str, choices: tuple[str, ...]) -> str:
    """Return the given one of `choices`, by default the first. Raises: InvalidSettingError."""
    value = normalized.get(name, choices[0])
    if value.lower() not in choices:
        raise InvalidSettingError(
            f"option '{spelled}' = '{value[:60]}' is none of {', '.join(choices)}", hint=did_you_mean(value, choices)
        )
    return value.lower()


_SPELLED += ("missingSeconds", "maxBytesPerTrigger", "maxRecordsPerTrigger", "onExpired", "auditName")
SPELLING = {name: name for name in DESCRIPTIONS} | {name.lower(): name for name in _SPELLED}  # for people
Kind = Literal["batch", "streaming"]
_NOT_FOR: dict[Kind, tuple[str, ...]] = {
    "streaming": ("end", "path"),
    "batch": ("maxbytespertrigger", "maxrecordspertrigger", "onexpired", "auditname"),
}

Point = str | int | dict[tuple[str, int], Position]  # beginning, end; Unix ms; positions by topic and read partition


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of a read.

    `start` and `end` as in `memq.Consumer`; bounds are in bytes and records, 0 for none.
    """

    brokers: str | None = None
    queue: str = ""
    store: str = ""
    config: str | None = None
    profile: str | None = None
    topics: tuple[str, ...] = ()
    path: str = ""
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    start: Point = "beginning"
    end: Point = "end"
    schema: str = ""
    value_format: str = "json"
    avro_schema: str = field(default="", repr=False)
    fail_malformed: bool = True
    skip_damaged: bool = False
    missing_s: int = MISSING_S
    dedup: bool = True
    partition_bytes: int = 128 * MIB
    prefetch_bytes: int = 64 * MIB
    trigger_bytes_max: int = 0
    trigger_records_max: int = 0
    skip_expired: bool = False
    audit_name: str = ""
    tags: str | None = None
    where: str | None = None


def read_options(given: Mapping[str, str], kind: Kind | None = None) -> ReadOptions:
    """Parse the options of a batch read, a stream, or of either if that is not known yet.

    Raises: UnknownSettingError with a "did you mean", InvalidSettingError; InvalidNameError for topics;
    InvalidFilterError.
    """
    normalized = read_given(given, SPELLING)
    for name in normalized:
        if kind is not None and name in _NOT_FOR[kind]:
            raise InvalidSettingError(f"option '{SPELLING[name]}' is not for a {kind} read", hint="leave it out")
    _check_together(normalized)
    filter_of(normalized.get("tags"), normalized.get("where"))
    named = [name.strip() for name in normalized.get("topics", "").split(",") if name]
    topics = tuple(check_resource_name(name, internal=True) for name in named)
    return ReadOptions(
        brokers=normalized.get("brokers") or None,
        queue=normalized.get("queue", ""),
        store=normalized.get("store", ""),
        config=normalized.get("config") or None,
        profile=normalized.get("profile") or None,
        topics=topics,
        path=normalized.get("path", ""),
        columns=_columns(normalized.get("columns", "")),
        start=_point("start", normalized.get("start", "beginning"), topics),
        end=_point("end", normalized.get("end", "end"), topics),
        schema=normalized.get("schema", ""),
        value_format=_choice(normalized, "valueformat", ("json", "avro")),
        avro_schema=normalized.get("avroschema", ""),
        fail_malformed=_choice(normalized, "onmalformed", ("fail", "null")) == "fail",
        skip_damaged=_choice(normalized, "ondamaged", ("fail", "skip")) == "skip",
        missing_s=_bounded(normalized, "missingseconds", MISSING_S, 0, _whole, "a whole number"),
        dedup=_choice(normalized, "dedup", ("on", "raw")) == "on",
        partition_bytes=_size(normalized, "partitionbytes", 128 * MIB, 64 * KIB),
        prefetch_bytes=_size(normalized, "prefetchbytes", 64 * MIB, 64 * KIB),
        trigger_bytes_max=_size(normalized, "maxbytespertrigger", 0, 1),
        trigger_records_max=_number(normalized, "maxrecordspertrigger"),
        skip_expired=_choice(normalized, "onexpired", ("fail", "skip")) == "skip",
        audit_name=check_resource_name(normalized["auditname"], "group") if normalized.get("auditname") else "",
        tags=normalized.get("tags"),
        where=normalized.get("where"),
    )


def _check_together(normalized: Mapping[str, str]) -> None:
    """Check that the source of records is given, and only once."""
    if not normalized.get("topics") and not normalized.get("path"):
        raise InvalidSettingError("one of the options 'topics' and 'path' is needed", hint="topics = clicks")
    for name in ("topics", "queue", "store"):
        if normalized.get("path") and normalized.get(name):
            raise InvalidSettingError(
                f"options 'path' and '{name}' exclude each other",
                hint="path says where objects are, and of which topic",
            )
    if normalized.get("queue") and normalized.get("brokers"):
        raise InvalidSettingError("options 'brokers' and 'queue' exclude each other", hint="brokers know the queue")
    if normalized.get("queue") and not normalized.get("store"):
        raise InvalidSettingError("option 'queue' needs 'store': no broker is asked", hint="store = s3://BUCKET/PREFIX")
    if normalized.get("auditname") and normalized.get("queue"):
        raise InvalidSettingError("option 'auditName' needs 'brokers': reports go to them", hint="leave 'queue' out")
    if normalized.get("auditname") and normalized.get("dedup") == "raw":
        raise InvalidSettingError("option 'auditName' needs dedup = on: raw copies are doubled", hint="leave one out")
    if normalized.get("valueformat") == "avro" and not (normalized.get("avroschema") and normalized.get("schema")):
        raise InvalidSettingError("valueFormat = avro needs the options 'schema' and 'avroSchema'", hint="give both")


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip()) or DEFAULT_COLUMNS
    for name in names:
        if name not in COLUMNS:
            raise InvalidSettingError(f"option 'columns' has '{name}'", hint=did_you_mean(name, tuple(COLUMNS)))
    if len(set(names)) < len(names):
        raise InvalidSettingError(f"option 'columns' has a name twice: {', '.join(names)}", hint="name each once")
    return names


def _point(name: str, text: str, topics: tuple[str, ...]) -> Point:
    """Read a start or end: a word, a time, or positions."""
    if text in ("beginning", "end"):
        return text
    parts = [_POSITION.match(part.strip()) for part in text.split(",")]
    if all(parts):
        return dict(_position(name, part, topics) for part in parts if part is not None)
    if _NUMBER.match(text):
        return parse_unix_ms(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidSettingError(
            f"option '{name}' = '{text[:60]}' is neither a position nor a time",
            hint="write beginning, end, 2026-01-31T12:00:00Z, epoch milliseconds, or positions such as 0:17:3",
        )
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _position(name: str, part: re.Match[str], topics: tuple[str, ...]) -> tuple[tuple[str, int], Position]:
    topic = (part["topic"] or "").strip() or (topics[0] if len(topics) == 1 else "")
    if topic not in topics:
        raise InvalidSettingError(
            f"option '{name}' has position {part['position']} of no topic that is read", hint="write TOPIC=0:17:3"
        )
    position = Position.parse(part["position"])
    return (topic, position.read_partition), position


def _choice(normalized: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    return read_choice(normalized, name, SPELLING[name], choices)


def _size(normalized: Mapping[str, str], name: str, default: int, low: int) -> int:
    return _bounded(normalized, name, default, low, parse_size, "a size such as 128MiB")


def _number(normalized: Mapping[str, str], name: str) -> int:
    return _bounded(normalized, name, 0, 1, _whole, "a whole number")


def _whole(text: str) -> int | None:
    return int(text) if _NUMBER.match(text) else None


def _bounded(
    normalized: Mapping[str, str], name: str, default: int, low: int, parse: Callable[[str], int | None], what: str
) -> int:
    if not normalized.get(name):
        return default
    value = parse(normalized[name])
    if value is None or not low <= value <= 1 << 52:
        raise InvalidSettingError(
            f"option '{SPELLING[name]}' = '{normalized[name][:60]}' is not from {low} to {1 << 52}",
            hint=f"write {what}",
        )
    return value
