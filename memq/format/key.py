"""Keys of objects: computed once, at the seal, so that a repeated put finds its own object.

    <cluster>/topics/<topic>/<topic id, 8 hex>/<hh>/<date>/<hour>/<partition>-<epoch>-<batch sequence>
    <cluster>/topics/<namespace>/-/<topic>/<topic id, 8 hex>/… for a topic `<namespace>/<topic>`
    <cluster>/shared/<hh>/<date>/<hour>/<broker>-<start epoch>-<sequence>
    <cluster>/staged/<writer>/objects/<hh>/<date>/<hour>/<id, 16 hex>
    <cluster>/staged/<writer>/commits/<batch id>
    <cluster>/staged/<writer>/decided/<batch id>
    <cluster>/topics/<topic>/<topic id, 8 hex>/cold/manifests/<read partition>-<number>
    <cluster>/topics/<topic>/<topic id, 8 hex>/cold/{objects,parts}/<hh>/<date>/<hour>/<id, 16 hex>
    <cluster>/state/<topic>/<topic id, 8 hex>/<read partition>/<epoch>-<offset>/<part>
    <cluster>/held/<hh>/<date>/<hour>/<id, 16 hex>
    <cluster>/store-mark
    <cluster>/sweep/{pending,kept}/<digest of a prefix, 16 hex>/<since>-<digest of the content, 16 hex>

`hh` is the low byte of crc32 of the last part, in hex: 256 prefixes for the store to split on. Numbers are
zero-padded, so that a listing of one hour has a partition's objects in order; times are UTC.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from memq.errors import InvalidNameError, InvalidRequestError
from memq.topic import NAMESPACE_END, check_name

HELD_KIND = "object of held blocks"
RUN_KIND = "run of held blocks"
DECIDED_KIND = "mark of a committed staged batch"
STORE_MARK = "store-mark"  # last part of its key; no key of an object with batches ends so
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SEALED_MS_END = 253_402_300_800_000  # year 10000
_LAST_PARTS = r"(?P<hh>[0-9a-f]{2})/(?P<date>\d{4}-\d\d-\d\d)/(?P<hour>\d\d)/(?P<last>[^/]+)"
_NAMESPACE_END_IN_KEY = "/-/"  # between a namespace and a topic; no topic id, so no prefix begins another one
_TOPIC_PREFIX = r"(?P<cluster>[^/]+)/topics/(?P<topic>[^/]+(?:/-/[^/]+)?)/(?P<id>[0-9a-f]{8})/"
_PREFIX_OF_TOPIC = re.compile(_TOPIC_PREFIX, re.ASCII)
_FOLDER_OF_TOPIC = re.compile(r"(?P<cluster>[^/]+)/topics/(?P<topic>[^/]+(?:/-/[^/]+)?)/(?!-/)", re.ASCII)
_TOPIC_KEY = re.compile(_TOPIC_PREFIX + _LAST_PARTS, re.ASCII)
_COMPACTION_KEY = re.compile(rf"{_TOPIC_PREFIX}cold/objects/{_LAST_PARTS}", re.ASCII)
_SHARED_KEY = re.compile(rf"(?P<cluster>[^/]+)/shared/{_LAST_PARTS}", re.ASCII)
_TOPIC_LAST = re.compile(r"(\d{5,10})-(\d{10})-(\d{16})", re.ASCII)
_SHARED_LAST = re.compile(r"(.+)-(\d{10})-(\d{16})", re.ASCII)
_COMPACTION_LAST = re.compile(r"[0-9a-f]{16}", re.ASCII)
_SWEEP_KEY = re.compile(r"([^/]+)/sweep/(pending|kept)/([0-9a-f]{16})/(\d{16})-[0-9a-f]{16}", re.ASCII)
_STATE_KEY = re.compile(
    r"(?P<cluster>[^/]+)/state/(?P<topic>[^/]+)/(?P<id>[0-9a-f]{8})/(\d{5,10})/(\d{10})-(\d{16})/(\d{4})", re.ASCII
)
_RUN_KEY = re.compile(
    r"(?P<cluster>[^/]+)/state/(?P<topic>[^/]+)/(?P<id>[0-9a-f]{8})/(\d{5,10})/runs/[0-9a-f]{16}", re.ASCII
)
_COMPACTION_MANIFEST_LAST = re.compile(r"(\d{5,10})-(\d{16})", re.ASCII)
_WITHOUT_BATCHES = {
    what: re.compile(rf"(.*/)?{ending}", re.ASCII | re.DOTALL)
    for what, ending in (
        ("store mark", STORE_MARK),
        ("list of a sweep", r"sweep/(pending|kept)/[0-9a-f]{16}/\d{16}-[0-9a-f]{16}"),
        ("manifest of a staged batch", r"commits/\d{19}"),
        (DECIDED_KIND, r"staged/[^/]+/decided/\d{19}"),
        ("manifest of compacted batches", r"cold/manifests/\d{5,10}-\d{16}"),
        ("snapshot of a state log", r"state/[^/]+/[0-9a-f]{8}/\d{5,10}/\d{10}-\d{16}/\d{4}"),
        (RUN_KIND, r"state/[^/]+/[0-9a-f]{8}/\d{5,10}/runs/[0-9a-f]{16}"),
        (HELD_KIND, r"held/[0-9a-f]{2}/\d{4}-\d\d-\d\d/\d\d/[0-9a-f]{16}"),
        ("part of a manifest", r"cold/parts/[0-9a-f]{2}/\d{4}-\d\d-\d\d/\d\d/[0-9a-f]{16}"),
    )
}


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The content of a topic object's key: first 8 hex digits of the topic id, hour of the seal."""

    cluster: str
    topic: str
    topic_id: str
    partition: int
    epoch: int
    batch_sequence: int
    hour_ms: int


@dataclass(frozen=True, slots=True)
class SweepListKey:
    """The content of a sweep list's key: whether objects are `kept`, digest of their prefix, time."""

    kept: bool
    digest: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class SharedObjectKey:
    """The content of the key of an object with batches of several topics."""

    cluster: str
    broker: str
    start_epoch: int
    sequence: int
    hour_ms: int


@dataclass(frozen=True, slots=True)
class LargeObjectKey:
    """The content of the key of a large object with compacted batches of one topic."""

    cluster: str
    topic: str
    topic_id: str
    object_id: int
    hour_ms: int


@dataclass(frozen=True, slots=True)
class StateKey:
    """The content of the key of a snapshot's part: the log, and epoch and offset of the snapshot."""

    cluster: str
    topic: str
    topic_id: str  # its first 8 hex digits
    partition: int
    epoch: int
    offset: int
    part: int

    @property
    def order(self) -> tuple[int, int]:
        """Epoch and offset: the later of two snapshots of one log has the higher pair."""
        return self.epoch, self.offset


def object_key(
    cluster: str, topic: str, topic_id: str, partition: int, epoch: int, batch_sequence: int, sealed_ms: int
) -> str:
    """Return the key of one batch's object; `topic_id` is the whole id, 32 hex digits."""
    assert 0 <= partition < 1 << 32, f"partition {partition}"
    last = f"{partition:05d}-{_number(epoch, 10)}-{_number(batch_sequence, 16)}"
    return f"{topic_prefix(cluster, topic, topic_id)}{_dated(last, sealed_ms)}"


def shared_object_key(cluster: str, broker: str, start_epoch: int, sequence: int, sealed_ms: int) -> str:
    """Return the key of an object with batches of several topics."""
    last = f"{broker}-{_number(start_epoch, 10)}-{_number(sequence, 16)}"
    return f"{shared_prefix(cluster)}{_dated(last, sealed_ms)}"


def shared_prefix(cluster: str) -> str:
    """Return the prefix of the objects that topics share."""
    return f"{cluster}/shared/"


def staged_prefix(cluster: str) -> str:
    """Return the key prefix of the objects that writers stage, and of the manifests of their batches."""
    return f"{cluster}/staged/"


def staged_object_key(cluster: str, writer: str, object_id: int, created_ms: int) -> str:
    """Return the key of an object that a writer stages; `object_id` has 64 random bits."""
    return f"{staged_prefix(cluster)}{writer}/objects/{_dated(f'{object_id:016x}', created_ms)}"


def manifest_key(cluster: str, writer: str, batch_id: int) -> str:
    """Return the key of the manifest of a writer's batch: the first put decides the batch."""
    return f"{manifest_prefix(cluster, writer)}{_number(batch_id, 19)}"


def manifest_prefix(cluster: str, writer: str) -> str:
    """Return the common prefix of the keys of a writer's manifests; they ascend with its batch ids."""
    return f"{staged_prefix(cluster)}{writer}/commits/"


def is_manifest_key(key: str) -> bool:
    """Whether a key is that of the manifest of a staged batch."""
    parts = key.split("/")
    return parts[1:2] == ["staged"] and parts[3:4] == ["commits"]


def decided_key(manifest: str) -> str:
    """Return the key of the mark that the transaction of this manifest is committed."""
    cluster, kind, writer, _, batch = manifest.split("/")
    return f"{cluster}/{kind}/{writer}/decided/{batch}"


def manifest_of_mark(key: str) -> str:
    """Return the key of the manifest of a mark, "" if the key is of no mark."""
    parts = key.split("/")
    if parts[1:2] != ["staged"] or parts[3:4] != ["decided"]:
        return ""
    return "/".join([*parts[:3], "commits", *parts[4:]])


def topics_prefix(cluster: str) -> str:
    """Return the prefix of all objects that belong to one topic each."""
    return f"{cluster}/topics/"


def topic_prefix(cluster: str, topic: str, topic_id: str) -> str:
    """Return the prefix of all objects of one topic."""
    return f"{topics_prefix(cluster)}{topic.replace(NAMESPACE_END, _NAMESPACE_END_IN_KEY)}/{topic_id[:8]}/"


def topic_prefix_of(key: str) -> str:
    """Return the prefix of the topic to which a key belongs; "" for another key."""
    match = _PREFIX_OF_TOPIC.match(key)
    return match[0] if match else ""


def topic_of_folder(prefix: str) -> tuple[str, str] | None:
    """Return cluster and topic of a prefix with the folder of one topic; None for other prefixes."""
    match = _FOLDER_OF_TOPIC.match(prefix)
    return (match["cluster"], _topic_in(match)) if match else None


def _topic_in(match: re.Match[str]) -> str:
    """Return the name of the topic of a key."""
    return match["topic"].replace(_NAMESPACE_END_IN_KEY, NAMESPACE_END)


def compaction_prefix(cluster: str, topic: str, topic_id: str) -> str:
    """Return the key prefix of a topic's large objects, manifests and parts."""
    return f"{topic_prefix(cluster, topic, topic_id)}cold/"


def large_object_key(cluster: str, topic: str, topic_id: str, object_id: int, created_ms: int) -> str:
    """Return the key of a large object; `object_id` has 64 random bits."""
    return f"{compaction_prefix(cluster, topic, topic_id)}objects/{_dated(f'{object_id:016x}', created_ms)}"


def manifest_part_key(cluster: str, topic: str, topic_id: str, object_id: int, created_ms: int) -> str:
    """Return the key of the part of a manifest that has the pointers into the large object of the same id."""
    return f"{compaction_prefix(cluster, topic, topic_id)}parts/{_dated(f'{object_id:016x}', created_ms)}"


def compaction_manifests_prefix(cluster: str, topic: str, topic_id: str) -> str:
    """Return the prefix of the manifests of a topic."""
    return f"{compaction_prefix(cluster, topic, topic_id)}manifests/"


def compaction_manifest_prefix(cluster: str, topic: str, topic_id: str, partition: int) -> str:
    """Return the common prefix of the keys of all manifests of a read partition."""
    return f"{compaction_manifests_prefix(cluster, topic, topic_id)}{partition:05d}-"


def compaction_manifest_key(cluster: str, topic: str, topic_id: str, partition: int, number: int) -> str:
    """Return the key of a manifest: they ascend with their numbers."""
    return f"{compaction_manifest_prefix(cluster, topic, topic_id, partition)}{_number(number, 16)}"


def compaction_manifest_number(key: str) -> tuple[int, int]:
    """Return read partition and number of a manifest by its key; (0, 0) for another key."""
    last = _COMPACTION_MANIFEST_LAST.fullmatch(key.rpartition("/")[2])
    return (int(last[1]), int(last[2])) if last else (0, 0)


def states_prefix(cluster: str) -> str:
    """Return the prefix of the snapshots of all state logs."""
    return f"{cluster}/state/"


def state_prefix(cluster: str, topic: str, topic_id: str, partition: int) -> str:
    """Return the prefix of the snapshots of a state log, which is one read partition of a topic."""
    return f"{states_prefix(cluster)}{topic}/{topic_id[:8]}/{partition:05d}/"


def state_snapshot_key(cluster: str, topic: str, topic_id: str, partition: int, epoch: int, offset: int) -> str:
    """Return the first part of the keys of a snapshot.

    It has the state below `offset`, and the owner of `epoch` stored it.
    """
    return f"{state_prefix(cluster, topic, topic_id, partition)}{_number(epoch, 10)}-{_number(offset, 16)}"


def state_part_key(snapshot_key: str, part: int) -> str:
    """Return the key of one part of a snapshot, counted from 0."""
    return f"{snapshot_key}/{_number(part, 4)}"


def parse_state_key(key: str) -> StateKey | None:
    """Return the content of the key of a snapshot's part, None for another key."""
    match = _STATE_KEY.fullmatch(key)
    if match is None or not _are_names(match["cluster"], match["topic"]):
        return None
    return StateKey(match["cluster"], match["topic"], match["id"], *(int(match[group]) for group in range(4, 8)))


def run_key(cluster: str, topic: str, topic_id: str, partition: int, object_id: int) -> str:
    """Return the key of an object of a state log's run; `object_id` has 64 random bits."""
    return f"{state_prefix(cluster, topic, topic_id, partition)}runs/{object_id:016x}"


def is_run_key(key: str) -> bool:
    """Whether this is the key of an object of a run."""
    match = _RUN_KEY.fullmatch(key)
    return match is not None and _are_names(match["cluster"], match["topic"])


def held_prefix(cluster: str) -> str:
    """Return the prefix of the objects of held blocks."""
    return f"{cluster}/held/"


def held_object_key(cluster: str, object_id: int, created_ms: int) -> str:
    """Return the key of an object of held blocks; `object_id` has 64 random bits."""
    return f"{held_prefix(cluster)}{_dated(f'{object_id:016x}', created_ms)}"


def store_mark_key(cluster: str) -> str:
    """Return the key of the object that identifies the store of a cluster; no sweep lists or deletes it."""
    return f"{cluster}/{STORE_MARK}"


def sweep_prefix(cluster: str) -> str:
    """Return the prefix of the lists of objects that no pointer names."""
    return f"{cluster}/sweep/"


def sweep_lists_prefix(cluster: str, prefix: str, *, kept: bool) -> str:
    """Return the common prefix of the keys of all lists of objects below `prefix`."""
    return f"{sweep_prefix(cluster)}{'kept' if kept else 'pending'}/{sweep_digest(prefix)}/"


def sweep_digest(prefix: str) -> str:
    """Return the digest that replaces a prefix in the keys of sweep lists."""
    return hashlib.blake2b(prefix.encode(), digest_size=8).hexdigest()


def sweep_list_key(cluster: str, prefix: str, since_ms: int, content: bytes, *, kept: bool) -> str:
    """Return the key of a list of objects below `prefix`; lists with equal content have equal keys."""
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{sweep_lists_prefix(cluster, prefix, kept=kept)}{_number(since_ms, 16)}-{digest}"


def parse_sweep_list_key(key: str) -> SweepListKey | None:
    """Return the content of a sweep list's key, None for another key."""
    match = _SWEEP_KEY.fullmatch(key)
    return SweepListKey(match[2] == "kept", match[3], int(match[4])) if match else None


def kind_without_batches(path: str) -> str:
    """Return the kind of a stored file that has no batches, by the end of its path; "" for other files."""
    return next((what for what, pattern in _WITHOUT_BATCHES.items() if pattern.fullmatch(path)), "")


def has_many_batches(key: str) -> bool:
    """Whether an object with this key holds many batches: one that topics share, or a large one."""
    return key.split("/")[1:2] == ["shared"] or _COMPACTION_KEY.fullmatch(key) is not None


def writer_of(key: str) -> str:
    """Return the writer that staged the object with this key."""
    return key.split("/")[2]


def is_staged_object(key: str) -> bool:
    """Whether a writer staged the object with this key; false for the manifests of its batches."""
    parts = key.split("/")
    return parts[1:2] == ["staged"] and parts[3:4] == ["objects"]


def is_large_object(key: str) -> bool:
    """Whether this is the key of a large object."""
    return _COMPACTION_KEY.fullmatch(key) is not None


def parse_object_key(key: str) -> ObjectKey | SharedObjectKey | LargeObjectKey:
    """Return the content of a key.

    Raises: InvalidRequestError for a key that memq does not write.
    """
    for pattern, read in _READERS:
        match = pattern.fullmatch(key)
        parsed = read(match) if match else None
        if parsed is not None:
            return parsed
    raise InvalidRequestError(f"{key[:120]!a} is not the key of a memq object")


def _parse_topic_key(match: re.Match[str]) -> ObjectKey | None:
    last = _TOPIC_LAST.fullmatch(match["last"])
    hour_ms = _hour_ms(match)
    topic = _topic_in(match)
    if last is None or hour_ms is None or not _are_names(match["cluster"], *topic.split(NAMESPACE_END)):
        return None
    numbers = (int(last[1]), int(last[2]), int(last[3]))
    return ObjectKey(match["cluster"], topic, match["id"], *numbers, hour_ms)


def _parse_shared_key(match: re.Match[str]) -> SharedObjectKey | None:
    last = _SHARED_LAST.fullmatch(match["last"])
    hour_ms = _hour_ms(match)
    if last is None or hour_ms is None or not _are_names(match["cluster"], last[1]):
        return None
    return SharedObjectKey(match["cluster"], last[1], int(last[2]), int(last[3]), hour_ms)


def _parse_large_key(match: re.Match[str]) -> LargeObjectKey | None:
    last = _COMPACTION_LAST.fullmatch(match["last"])
    hour_ms = _hour_ms(match)
    topic = _topic_in(match)
    if last is None or hour_ms is None or not _are_names(match["cluster"], *topic.split(NAMESPACE_END)):
        return None
    return LargeObjectKey(match["cluster"], topic, match["id"], int(last[0], 16), hour_ms)


_READERS: tuple[
    tuple[re.Pattern[str], Callable[[re.Match[str]], ObjectKey | SharedObjectKey | LargeObjectKey | None]], ...
]
_READERS = ((_TOPIC_KEY, _parse_topic_key), (_SHARED_KEY, _parse_shared_key), (_COMPACTION_KEY, _parse_large_key))


def _are_names(*names: str) -> bool:
    try:
        return all(check_name(name, internal=True) for name in names)
    except InvalidNameError:
        return False


def _hour_ms(match: re.Match[str]) -> int | None:
    """Return the hour of a key in Unix ms; None if hour or prefix is not as memq writes it."""
    if match["hh"] != _prefix(match["last"]):
        return None
    try:
        year, month, day = map(int, match["date"].split("-"))
        hour = datetime(year, month, day, int(match["hour"]), tzinfo=UTC)
    except ValueError:
        return None
    return (hour - _EPOCH) // timedelta(milliseconds=1)


def _dated(last: str, sealed_ms: int) -> str:
    assert 0 <= sealed_ms < _SEALED_MS_END, f"sealed at {sealed_ms} ms"
    sealed = _EPOCH + timedelta(milliseconds=sealed_ms)
    return f"{_prefix(last)}/{sealed:%Y-%m-%d/%H}/{last}"


def _prefix(last: str) -> str:
    return f"{zlib.crc32(last.encode()) & 0xFF:02x}"


def _number(value: int, digits: int) -> str:
    assert value >= 0, f"{value} is below 0"
    text = f"{value:0{digits}d}"
    assert len(text) == digits, f"{value} does not fit {digits} digits"
    return text
