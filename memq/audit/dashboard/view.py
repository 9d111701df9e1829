"""Values of the pages, typed, as JSON. None means unknown and is never shown as 0. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

SPARK_MINUTES = 60
PREVIEW_CHARS_MAX = 400


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The subject of this dashboard and its permissions.

    `trouble` says why values may be stale, or is "".
    `cluster` is "" until a broker has answered.
    """

    cluster: str
    audited: bool
    acknowledge: bool
    contents: bool
    trouble: str = ""


class TopicRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the overview.

    Lag is that of the group that is furthest behind, unknown when that of a group is; `p99_ms` from send to queue.
    `spark` has the records of each of the last SPARK_MINUTES whole minutes, the newest last.
    """

    name: str
    partitions: int
    records_s: float | None = None
    bytes_s: float | None = None
    lag_records: int | None = None
    lag_seconds: float | None = None
    lost: int | None = None
    doubled: int | None = None
    corrupt: int | None = None
    word: str | None = None
    p99_ms: float | None = None
    spark: tuple[int | None, ...] = ()


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """How far a consumer group is in one topic.

    The lag is None when a log does not answer; `error` is the reason.
    """

    group: str
    topic: str
    members: int
    lag_records: int | None
    lag_bytes: int | None
    lag_seconds: float | None
    error: str = ""


class PartitionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A write partition of a topic: its owner ("" if none) and the number of records ever written.

    `error` is why its log did not answer, "" when it did.
    """

    partition: int
    owner: str
    records: int | None = None
    error: str = ""


class Clients(msgspec.Struct, frozen=True, kw_only=True):
    """Reporting clients: their number, the silent ones, and the first by name, silent ones first."""

    total: int
    silent: int
    shown: tuple[dict[str, Any], ...]


class BrokerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A live broker. `breakers` are the stores whose circuit breaker is open."""

    broker: str
    address: str
    zone: str
    governs: bool
    draining: bool
    partitions: int
    bytes_s: int
    capacity_bytes_s: int | None = None
    memory_bytes: int | None = None
    memory_bytes_max: int | None = None
    ring_batches: int | None = None
    uploads: int | None = None
    breakers: tuple[str, ...] | None = None


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A topic over time: entry i of each column covers `minutes` minutes from `first + i * minutes`.

    `counts` has records by stage or verdict, `latency_ms` the quantiles 0.5, 0.9 and 0.99 by stage, `heat` the records
    committed by partition, `marks` by partition and column what is wrong there, `lag` and `lag_ms` that of the group,
    `words` the verdicts.
    """

    first: int
    minutes: int
    counts: dict[str, tuple[int | None, ...]]
    latency_ms: dict[str, tuple[tuple[float, float, float] | None, ...]]
    heat: dict[int, tuple[int | None, ...]]
    words: tuple[str | None, ...]
    marks: dict[int, dict[int, str]] = {}
    lag: tuple[int | None, ...] = ()
    lag_ms: tuple[int | None, ...] = ()


class TopicPage(msgspec.Struct, frozen=True, kw_only=True):
    """All of one topic. `group` is the one whose reading `history` shows, "" when there is none.

    `groups` of all.
    """

    name: str
    id: str
    settings: dict[str, int | bool | str]
    partitions: tuple[PartitionRow, ...]
    groups: tuple[GroupRow, ...] | None
    group: str
    history: History


class RecordRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record in a search or a tail. Key, value and headers are None where contents are masked or null."""

    topic: str
    position: str
    timestamp_ms: int
    tag: str | None
    key: str | None
    value: str | None
    headers: tuple[tuple[str, str], ...] | None
    key_bytes: int | None
    value_bytes: int | None


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a search.

    `complete` is False when there may be more, for the reason `why`.
    """

    records: tuple[RecordRow, ...]
    searched: int
    complete: bool
    why: str = ""


class DelayedRow(msgspec.Struct, frozen=True, kw_only=True):
    """How many delayed records of a topic wait, and when the next one is due (Unix ms)."""

    topic: str
    records: int
    next_ms: int


class DelayedTopics(msgspec.Struct, frozen=True, kw_only=True):
    """Delayed records: the number of topics and of records, and the first topics, most records first."""

    total: int
    records: int
    shown: tuple[DelayedRow, ...]


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """The items of a queue by state. The oldest ready one was due at `oldest_ms` (Unix ms), or None.

    `rates` has items per second by event: enqueued, leased, redelivered, acked, dead. It is empty for idle queues.
    """

    queue: str
    ready: int
    leased: int
    delayed: int
    dead: int
    oldest_ms: int | None
    rates: dict[str, float] = {}


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """Queues of items: their number, the sums of their items, and the queues with the oldest ready items."""

    total: int
    ready: int
    leased: int
    delayed: int
    dead: int
    shown: tuple[QueueRow, ...]


class TransactionRow(msgspec.Struct, frozen=True, kw_only=True):
    """An undecided transaction: its producer, state, times, and blocks by topic.

    `group` is the one whose positions it moves, "" for none.
    `tries` is the number of questions about a prepared one to its producer group.
    """

    transactional_id: str
    group: str
    state: str
    tries: int
    open_s: int
    timeout_s: float
    blocks: dict[str, int]


class OpenTransactions(msgspec.Struct, frozen=True, kw_only=True):
    """Open transactions: their number, and the oldest ones."""

    total: int
    shown: tuple[TransactionRow, ...]


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """The number of waiting dead letters of a group.

    It is None when a log does not answer; `error` is the reason.
    """

    group: str
    waiting: int | None
    error: str = ""


class LetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter. Key and value are None where contents are masked or null.

    A masked `cause` is the class of the exception, None for other causes.
    """

    position: str
    topic: str
    origin: str
    state: str
    attempts: int
    dead_ms: int
    cause: str | None
    tag: str | None
    key: str | None
    value: str | None
    key_bytes: int | None
    value_bytes: int | None


class LetterPage(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest waiting dead letters of a group. `complete` is False when there are more."""

    group: str
    letters: tuple[LetterRow, ...]
    complete: bool


class BlockRow(msgspec.Struct, frozen=True, kw_only=True):
    """A block of an object by the object's index, with the result of its check: "" when sound."""

    number: int
    topic: str
    partition: int
    offset: int
    length: int
    producer: str
    first: int
    records: int
    least_ms: int
    greatest_ms: int
    error: str = ""


class ObjectPage(msgspec.Struct, frozen=True, kw_only=True):
    """An object that was read again and checked.

    `error` says what is wrong with it as a whole, "" when nothing is.
    """

    store: str
    key: str
    bytes: int
    broker: str
    created_ms: int
    blocks: tuple[BlockRow, ...]
    error: str = ""


class BlockPage(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one block, `records` from number `first` on of `total`."""

    first: int
    total: int
    records: tuple[RecordRow, ...]
    error: str = ""


def preview(data: bytes | None) -> str | None:
    """Return the beginning of bytes as text, as hex digits where they are not UTF-8."""
    if data is None:
        return None
    part = data[: 4 * PREVIEW_CHARS_MAX]
    try:
        text = part.decode(errors="strict" if len(part) == len(data) else "ignore")
    except UnicodeDecodeError:
        text = "0x" + part.hex()
    return text if len(text) <= PREVIEW_CHARS_MAX else text[:PREVIEW_CHARS_MAX] + "…"
