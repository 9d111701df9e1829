"""Topics, partitions, slots, positions and names, which every part uses."""

from __future__ import annotations

import difflib
import hashlib
import re
import zlib
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import msgspec

from memq.errors import InvalidNameError, InvalidRequestError, InvalidSettingError, UnknownSettingError
from memq.kafka_words import kafka_hint
from memq.limits import BLOCK_RAW_BYTES_MAX, KIB, MIB, NAME_CHARS_MAX, PARTITIONS_MAX, PRODUCER_ID_END, SLOTS
from memq.runtime.html import table_html

RETENTION_GROUPS_MAX = 16  # that retention of one topic waits for
CLOCK_ERROR_MS = 20_000  # most difference of two clocks: W >= D + 2 (S + clock error), docs/ownership.md
AUDIT_GROUP = "_memq_auditor"  # reads what clients report; its full name adds a dash and the id of the auditors' state
BROADCAST_GROUP = "_memq_broadcast"  # begins the private groups of broadcast consumers; a dash and the name follow
Ack1 = Literal["memory", "disk"]
LimitMode = Literal["off", "observe", "soft", "hard"]  # beyond a limit: nothing, counted, slowed, refused
PartitionKey = tuple[str, int]  # topic id, write partition
CHOICES = {"ack1": get_args(Ack1), "limit_mode": get_args(LimitMode)}
STATE_TOPIC = "_memq_state"  # its partitions are service partitions: their logs are state logs, without pointers
INTERNAL_PREFIX = "_memq"  # begins the names that memq keeps for itself
NAMESPACE_END = "/"  # between the namespace and the rest of a name; once at most
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_TOPIC_ID = re.compile(r"[0-9a-f]{32}\Z")
_POSITION = re.compile(r"([0-9]{1,16}):([0-9]{1,16}):([0-9]{1,16})(?::([0-9a-f]{8}))?\Z")


def check_name(name: str, what: str = "topic", *, internal: bool = False) -> str:
    """Return `name` when it is in Kafka's grammar; `internal` allows the reserved prefix `_memq`.

    Raises: InvalidNameError, with a shortened name when it is long; TypeError for what is no str.
    """
    _check_length(name, what)
    if not _NAME.match(name) or name in (".", ".."):
        raise InvalidNameError(f"{what} name {_shown(name)} is not allowed")
    if not internal and is_internal(name):
        raise InvalidNameError(f"{what} name {_shown(name)} starts with the reserved prefix '{INTERNAL_PREFIX}'")
    return name


def check_resource_name(name: str, what: str = "topic", *, internal: bool = False) -> str:
    """Return the name of a topic, group or queue: a name, or `namespace/name`. `internal` as `check_name`.

    Raises: as `check_name`.
    """
    _check_length(name, what)
    if NAMESPACE_END not in name:
        return check_name(name, what, internal=internal)
    namespace, _, last = name.partition(NAMESPACE_END)
    if NAMESPACE_END in last:
        raise InvalidNameError(
            f"{what} name {_shown(name)} has more than one '{NAMESPACE_END}'",
            hint="write one namespace, one '/', and the name, for example 'billing/invoices'",
        )
    check_name(namespace, f"namespace of {what}", internal=internal)
    check_name(last, what, internal=internal)
    return name


def _check_length(name: str, what: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{what} must be str, not {type(name).__name__}")
    if len(name) > NAME_CHARS_MAX:
        raise InvalidNameError(f"{what} name {_shown(name)} has {len(name)} characters, {NAME_CHARS_MAX} are allowed")


def namespace_of(name: str) -> str:
    """Return the namespace of a topic, group or queue; "" for a name without one."""
    return name.partition(NAMESPACE_END)[0] if NAMESPACE_END in name else ""


def name_of_run(kind: str, *topics: str) -> str:
    """Return the name of a program that works on topics: `audit.clicks`, `audit-4.team.clicks`.

    The numbers are the lengths of the namespaces: the name of each topic has another result.
    """
    lengths = [len(namespace_of(topic)) for topic in topics]
    numbers = "".join(f"-{length}" for length in lengths) if any(lengths) else ""
    return ".".join((f"{kind}{numbers}", *(topic.replace(NAMESPACE_END, ".") for topic in topics)))


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 60 else name[:57] + "...")


def check_group(name: str) -> str:
    """Return the name of a consumer group when it may be one.

    Of the reserved names only those of auditors and of broadcast consumers.

    Raises: as `check_name`.
    """
    check_resource_name(name, "group", internal=True)  # the next line needs a str
    own = name == AUDIT_GROUP or name.startswith((f"{AUDIT_GROUP}-", f"{BROADCAST_GROUP}-"))
    return check_name(name, "group", internal=True) if own else check_resource_name(name, "group")


def is_state_topic(name: str) -> bool:
    """Whether the logs of a topic are state logs: they have no pointers, and the topic has no records."""
    return name == STATE_TOPIC


def is_internal(name: str) -> bool:
    """Whether memq keeps this name for itself."""
    return name.startswith(INTERNAL_PREFIX)


def slot_of_key(key: bytes | bytearray | memoryview) -> int:
    """Return the hash slot of a key: `crc32(key) >> 16`, 0 to 65535."""
    return zlib.crc32(key) >> 16


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a topic: guarantees and batching.

    Times in ms, sizes in bytes; 0: no bound for retention.
    From users they come through `parse_settings`, which refuses unknown names; what a coordinator or a broker says may
    be newer, and unknown ones are passed over.
    """

    retention_ms: int = 7 * 24 * 3_600_000  # how long a record stays; 0 for ever
    retention_bytes: int = 0  # how much of each partition stays, the newest; 0 for all
    retention_groups: str = ""  # groups, with commas: what they have not committed stays longer than retention says
    retention_groups_ms_max: int = 0  # but at most for so long
    expire_idle_ms: int = 0  # without records and readers for so long, the topic is deleted; 0: never
    delivery_timeout_ms: int = 120_000  # D: a block that is not acked by then is given up
    stale_publish_ms: int = 30_000  # S: the queue refuses pointers that are older
    dedup_window_ms: int = 300_000  # W: how far back a block that is sent again is known; at least D + 2 S + 40 s
    batch_bytes_max: int = 8 * MIB  # a batch is sealed at this size
    batch_blocks_max: int = 4_096  # a batch is sealed at so many blocks
    batch_age_ms_max: int = 500  # a batch is sealed at this age at the latest
    shared_objects: bool = False  # its batches go into objects with those of other topics: few PUTs for small topics
    ack1: Ack1 = "memory"  # where a block lies that is acked with 1: in the owner's memory, or on its disk (its spool)
    seal_when_idle: bool = True  # seal as soon as no batch is on its way: least latency, most PUTs
    uploads_in_flight_max: int = 4  # batches of one partition that are stored at once
    ring_slots: int = 16  # batches of one partition that are not yet acked; when it is full, producers are throttled
    record_bytes_max: int = 1 * MIB  # a record with more bytes is refused
    limit_mode: LimitMode = "off"  # beyond the limits of the whole topic: nothing, observe (counted), soft, hard
    limit_bytes_s: int = 0  # what the topic takes per second; 0: no limit
    limit_requests_s: int = 0  # blocks that the topic takes per second; 0: no limit
    write_partitions_max: int = 0  # how many write partitions the governor may make of those that it was made with
    partition_bytes_s_max: int = 16 * MIB  # a write partition that takes more is split, as far as that goes

    @property
    def late_ms(self) -> int:
        """How long after its time stamp in the queue a pointer may land."""
        return self.stale_publish_ms + CLOCK_ERROR_MS

    @property
    def reader_window_ms(self) -> int:
        """The queue time in ms that a reader remembers: W, and the greatest delay of a pointer."""
        return self.dedup_window_ms + self.late_ms

    def check(self) -> TopicSettings:
        """Return itself when the values hold, alone and together.

        Raises: InvalidSettingError naming the setting and the bound.
        """
        bounds = {
            "retention_ms": (0, 1 << 52),
            "retention_bytes": (0, 1 << 52),
            "retention_groups_ms_max": (0, 1 << 52),
            "expire_idle_ms": (0, 1 << 52),
            "delivery_timeout_ms": (1_000, 86_400_000),
            "stale_publish_ms": (1_000, 3_600_000),
            "dedup_window_ms": (1_000, 7 * 86_400_000),
            "batch_bytes_max": (4 * KIB, 256 * MIB),
            "batch_blocks_max": (1, 65_536),
            "batch_age_ms_max": (0, 600_000),
            "uploads_in_flight_max": (1, 64),
            "ring_slots": (2, 256),
            "record_bytes_max": (1, BLOCK_RAW_BYTES_MAX - 64),
            "limit_bytes_s": (0, 1 << 52),
            "limit_requests_s": (0, 1 << 52),
            "write_partitions_max": (0, PARTITIONS_MAX),
            "partition_bytes_s_max": (1, 1 << 52),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                hint = "0 keeps all records" if name in ("retention_ms", "retention_bytes") else ""
                raise InvalidSettingError(f"setting {name} = {value} is outside {low} to {high}", hint=hint)
        window = self.delivery_timeout_ms + 2 * self.late_ms
        if self.dedup_window_ms < window:
            raise InvalidSettingError(
                f"setting dedup_window_ms = {self.dedup_window_ms} is below {window}",
                hint="keep dedup_window_ms >= delivery_timeout_ms + 2 x (stale_publish_ms + 20000)",
            )
        if self.limit_mode != "off" and not (self.limit_bytes_s or self.limit_requests_s):
            raise InvalidSettingError(
                f"setting limit_mode = {self.limit_mode} limits nothing",
                hint="set limit_bytes_s or limit_requests_s, too",
            )
        if self.retention_ms and self.retention_ms < self.dedup_window_ms:
            raise InvalidSettingError(
                f"setting retention_ms = {self.retention_ms} is below dedup_window_ms = {self.dedup_window_ms}"
            )
        if 0 < self.expire_idle_ms < self.dedup_window_ms:
            raise InvalidSettingError(
                f"setting expire_idle_ms = {self.expire_idle_ms} is below dedup_window_ms = {self.dedup_window_ms}",
                hint="0 keeps idle topics",
            )
        self._check_groups()
        return self

    @property
    def kept_ms_max(self) -> int:
        """Longest age in ms of a record that retention by age keeps; logs remember names as long. 0: no limit."""
        return max(self.retention_ms, self.retention_groups_ms_max) if self.retention_ms else 0

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The groups that retention waits for."""
        return tuple(name.strip() for name in self.retention_groups.split(",")) if self.retention_groups else ()

    def _check_groups(self) -> None:
        """Refuse groups that are none, and a limit that is none. Raises: InvalidSettingError."""
        text = f"setting retention_groups = {self.retention_groups[:60]!a}"
        if len(self.waits_for) > RETENTION_GROUPS_MAX:
            raise InvalidSettingError(f"{text} has {len(self.waits_for)} groups, {RETENTION_GROUPS_MAX} are allowed")
        for name in self.waits_for:
            try:
                check_group(name)
            except InvalidNameError as error:
                raise InvalidSettingError(f"{text}: {error}", hint="write names of groups with commas") from error
        if bool(self.waits_for) != bool(self.retention_groups_ms_max):
            raise InvalidSettingError(
                f"{text} with retention_groups_ms_max = {self.retention_groups_ms_max}",
                hint="set both, or neither: retention waits for these groups, at most for so long",
            )
        least_ms = max(self.retention_ms, self.dedup_window_ms)
        if self.waits_for and self.retention_groups_ms_max < least_ms:
            raise InvalidSettingError(
                f"setting retention_groups_ms_max = {self.retention_groups_ms_max} is below {least_ms}",
                hint="keep it at least at retention_ms and dedup_window_ms",
            )


# When an altered setting holds at a running cluster; one that is not here holds from the next batch on.
_RETENTION = "from the next run of retention"
_GOVERNOR = "from the next round of the governor"
HOLDS: dict[str, str] = {
    "retention_ms": _RETENTION,
    "retention_bytes": _RETENTION,
    "retention_groups": _RETENTION,
    "retention_groups_ms_max": _RETENTION,
    "expire_idle_ms": "from the governor's next check of idle topics",
    "delivery_timeout_ms": "at once where the window of the opened partition allows it, else from its next opening",
    "stale_publish_ms": "at once if it is greater, else from the next opening of each partition",
    "dedup_window_ms": "at once if it is greater, else from the next opening of each partition",
    "record_bytes_max": "in each producer that runs, within a minute",
    "limit_mode": "at once",
    "limit_bytes_s": "at once",
    "limit_requests_s": "at once",
    "write_partitions_max": _GOVERNOR,
    "partition_bytes_s_max": _GOVERNOR,
}
NEXT_BATCH = "from the next batch"


def parse_settings(settings: dict[str, int | bool | str], base: TopicSettings) -> TopicSettings:
    """Return `base` with `settings` changed, checked.

    Raises: UnknownSettingError with a near name, InvalidSettingError.
    """
    known = TopicSettings.__struct_fields__
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = kafka_hint(name) or (f"did you mean '{near[0]}'?" if near else "")
            raise UnknownSettingError(f"unknown topic setting '{name[:60]}'", hint=hint)
    for name, value in settings.items():
        if name in CHOICES and value not in CHOICES[name]:
            raise InvalidSettingError(
                f"setting {name} = '{str(value)[:60]}' is not one of {', '.join(CHOICES[name])}",
            )
    values = {name: getattr(base, name) for name in known}
    for each in msgspec.structs.fields(TopicSettings):
        if each.name in settings:
            values[each.name] = _converted(each, settings[each.name])
    return TopicSettings(**values).check()


def _converted(setting: msgspec.structs.FieldInfo, value: int | bool | str) -> object:
    """Return the value of a setting as its type. Raises: InvalidSettingError for one of another type."""
    try:
        return msgspec.convert(value, setting.type, strict=False)
    except msgspec.ValidationError as error:
        text = f"setting {setting.name} = {ascii(value)[:60]}"
        if setting.type is bool:
            raise InvalidSettingError(f"{text} is not true or false") from error
        unit, hint = "", "write digits only"
        if "_ms" in setting.name:
            unit, hint = " of milliseconds", "write it without a unit, as 604800000 for 7 days"
        elif "bytes" in setting.name:
            unit, hint = " of bytes", "write it without a unit, as 67108864 for 64 MiB"
        raise InvalidSettingError(f"{text} is not a whole number{unit}", hint=hint) from error


class PartitionSlots(msgspec.Struct, frozen=True, kw_only=True):
    """One write partition of a topic: first and last slot, and its read partition.

    One that was joined to another has no slots any more: its range is 0 to -1.
    """

    partition: int
    slot_first: int
    slot_last: int
    read_partition: int

    @property
    def takes_records(self) -> bool:
        """Whether new records go to it."""
        return self.slot_first <= self.slot_last


class Truncation(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's order for one read partition: retention removes the entries below the offset `before`.

    `time_ms` is the second witness: an entry with a later queue time stays. The offset alone would remove other
    entries after the log was lost and restored with new offsets.
    """

    partition: int
    before: int
    time_ms: int

    def covers(self, offset: int, time_ms: int) -> bool:
        """Whether the entry at this offset, with this queue time, is to be removed."""
        return offset < self.before and time_ms <= self.time_ms


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as the coordinator stores it. `id` is 32 hex digits, never used again.

    `version` counts alterations.
    `partitions` are in the order of their numbers; `map_version` and `map_changed_ms` are those of their slots.
    `truncations` has the last order of an operator for each read partition that has one. A topic that was sealed at
    `sealed_ms` (Unix ms, 0: never) takes no records. It has `ended` when all acked records of live brokers are in its
    logs. `idle_mark`, `idle_since_ms` and `expiring` are the governor's notes about an idle topic
    (`memq.broker.upkeep.idle_topics`).
    """

    name: str
    id: str
    created_ms: int
    settings: TopicSettings = TopicSettings()
    map_version: int = 1
    map_changed_ms: int = 0
    partitions: tuple[PartitionSlots, ...] = ()
    version: int = 1
    truncations: tuple[Truncation, ...] = ()
    sealed_ms: int = 0
    ended: bool = False
    idle_mark: str = ""
    idle_since_ms: int = 0
    expiring: bool = False

    def _repr_html_(self) -> str:
        """Return name, id, partitions and settings as a table, for notebooks."""
        facts = [("id", self.id), ("partitions", len(self.taking)), *msgspec.structs.asdict(self.settings).items()]
        return table_html(("topic", self.name), facts)

    @property
    def id_bytes(self) -> bytes:
        """The topic id as its 16 bytes."""
        return bytes.fromhex(self.id)

    @property
    def read_partitions(self) -> int:
        """How many read partitions the topic has."""
        return 1 + max(part.read_partition for part in self.partitions)

    def fault(self) -> str:
        """Return what is wrong with the id or the map of a topic that another process sent; "" for nothing."""
        if not _TOPIC_ID.match(self.id):
            return f"topic id {_shown(self.id)} is not 32 hex digits"
        at = 0
        for number, part in enumerate(self.partitions):
            if part.partition != number or not 0 <= part.read_partition < len(self.partitions):
                return f"partition {part.partition} with read partition {part.read_partition} is at index {number}"
        for part in self.taking:
            if part.slot_first != at:
                return f"slots of partition {part.partition} begin at {part.slot_first}, not at {at}"
            at = part.slot_last + 1
        return "" if at == SLOTS else f"partitions have {at} of {SLOTS} slots"

    @property
    def taking(self) -> list[PartitionSlots]:
        """The write partitions that new records go to, by their slots."""
        parts = [part for part in self.partitions if part.takes_records]
        return sorted(parts, key=lambda part: part.slot_first)

    def read_partition_of(self, partition: int) -> ReadPartition:
        """Return the read partition that the pointers of a write partition go to."""
        return ReadPartition(self.name, self.id, self.partitions[partition].read_partition)

    def truncation_of(self, partition: ReadPartition) -> Truncation | None:
        """Return the last order to truncate a read partition, None without one."""
        return next((each for each in self.truncations if each.partition == partition.partition), None)

    def writers_of(self, partition: ReadPartition) -> list[int]:
        """Return the write partitions whose pointers go to a read partition."""
        return [part.partition for part in self.partitions if part.read_partition == partition.partition]


def producer_id_of(name: str) -> int:
    """Return the producer id of a name: 63 bits of its SHA-256, never 0; 0 for no name."""
    return _id_of("producer", name) if name else 0


def secret_producer_id(secret: str) -> int:
    """Return the id of a producer that drew a secret: only its holder can say that it is this producer."""
    return _id_of("secret", secret)


def writer_id(name: str) -> int:
    """Return the id of a writer that stages: it is remembered as a named producer is, and is none."""
    return _id_of("writer", name)


def shard_id(topic_id: str, partition: int, life: int = 0) -> int:
    """Return the id of a service partition in pointers of partitions that get held records of it."""
    return _id_of("shard", f"{topic_id}/{partition}/{life}")


def _id_of(what: str, name: str) -> int:
    digest = hashlib.sha256(f"memq {what} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (PRODUCER_ID_END - 1) + 1


def equal_slots(count: int) -> tuple[PartitionSlots, ...]:
    """Share the 65,536 slots evenly among `count` write partitions, each with a read partition."""
    if not 1 <= count <= PARTITIONS_MAX:
        raise InvalidRequestError(f"{count} partitions are outside 1 to {PARTITIONS_MAX}")
    edges = [SLOTS * number // count for number in range(count + 1)]
    return tuple(
        PartitionSlots(partition=n, slot_first=edges[n], slot_last=edges[n + 1] - 1, read_partition=n)
        for n in range(count)
    )


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A consumer's position: the next record to deliver. As text `0:17:3`.

    `mark` identifies the last pointer that was read before it (`Committed`), 0 if it is unknown. It is no part of the
    order: positions with different marks are equal. A reader that starts at a position with a mark is refused if the
    log was cut before it. `marked_text` is the text with the mark, `0:17:3:1a2b3c4d`; `parse` reads both.
    """

    read_partition: int
    pointer_offset: int
    record_index: int = 0
    mark: int = field(default=0, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.read_partition}:{self.pointer_offset}:{self.record_index}"

    @property
    def marked_text(self) -> str:
        """The position as text, with its mark if it has one: store it to continue there later."""
        return f"{self}:{self.mark:08x}" if self.mark else str(self)

    @property
    def offset(self) -> int:
        """The position as one growing integer that fits Kafka's int64: pointer offset << 24 | record index."""
        return self.pointer_offset << 24 | self.record_index

    @classmethod
    def at_offset(cls, read_partition: int, offset: int) -> Position:
        """Return the position whose `offset` is this one."""
        return cls(read_partition, offset >> 24, offset & 0xFFFFFF)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse `read partition:pointer offset:record index`, with or without `:mark` of 8 hex digits.

        Raises: InvalidRequestError for any other text; TypeError for what is none.
        """
        if not isinstance(text, str):
            raise TypeError(f"a position is parsed from text as '0:17:3', not from {type(text).__name__}")
        found = _POSITION.match(text)
        if found is None:
            raise InvalidRequestError(f"bad position '{text[:60]}'", hint="write it as 0:17:3")
        return cls(int(found[1]), int(found[2]), int(found[3]), int(found[4] or "0", 16))


@dataclass(frozen=True, slots=True, order=True)
class ReadPartition:
    """One partition of the notification queue: a topic created again under the same name has another id."""

    topic: str
    topic_id: str
    partition: int


def read_partitions(topic: Topic) -> list[ReadPartition]:
    """Return the read partitions of a topic."""
    return [ReadPartition(topic.name, topic.id, number) for number in range(topic.read_partitions)]


@dataclass(frozen=True, slots=True)
class Totals:
    """How much a write partition committed: records and stored bytes, since its creation."""

    records: int = 0
    bytes: int = 0

    def plus(self, records: int, count: int) -> Totals:
        """Return these totals with `records` records in `count` bytes added."""
        return Totals(self.records + records, self.bytes + count)


Covered = tuple[tuple[int, int, tuple[int, ...]], ...]  # see `Committed`


@dataclass(frozen=True, slots=True)
class Committed:
    """A group's stored state of a read partition: next position, totals, mark, and covered batches.

    The mark identifies the last pointer that was read: the one before the position, or the one in which it is
    (`pointer_mark`). 0 if it is unknown.

    `covered` names the batches before the position, for a log with other offsets (G5). For each write partition it has
    its number, an epoch below which all batches are covered, and pairs of an epoch and its next batch sequence. It is
    empty if that is unknown, or takes more than COVERED_MAX write partitions, or epochs of one.

    `tried` has records from the position on whose handlers gave no answer: offset (`Record.offset`) and number of such
    tries. It has TRIED_MAX records at most, and 1 to TRIES_MAX tries of each.
    """

    position: Position
    totals: Totals = field(default_factory=Totals)
    mark: int = 0
    covered: Covered = ()
    tried: tuple[tuple[int, int], ...] = ()

    @property
    def marked_position(self) -> Position:
        """The position with the mark."""
        return replace(self.position, mark=self.mark)
