"""Settings of the Kafka queue, and names in Kafka, which begin with their prefix. Pure.

memq has few settings of its own. The section may also set those of librdkafka, except the ones in `OWN`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memq.errors import InvalidNameError, InvalidSettingError
from memq.limits import KIB, MIB, NAME_CHARS_MAX
from memq.settings import Section, did_you_mean, read_section, rules_of, section_setting
from memq.topic import NAMESPACE_END, ReadPartition, namespace_of

_SERVER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s,/:\[\]]+)(:(?P<port>\d{1,5}))?\Z")
_REFRESH = "topic.metadata.refresh.interval.ms"
_AGE = "metadata.max.age.ms"
_AGE_PER_REFRESH = 3  # without `_AGE`, librdkafka keeps the metadata of a topic for so many refreshes
_AGE_MS_MAX = (2**31 - 1) // 1_000  # librdkafka 2.16 multiplies it by 1,000 in 32 bits
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")  # Python reads bytes that are not UTF-8 as surrogates
SETUP_MS_MIN = 1_000  # librdkafka refuses a shorter time for a connection
SOURCE_SESSION_MS = 6_000
POLL_INTERVAL_MS = 300_000  # that of librdkafka; it refuses a session timeout that is longer
_INTERVALS = {
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 1_000,  # so that clients reconnect within a second after Kafka has recovered
    "retry.backoff.ms": 50,
    "retry.backoff.max.ms": 1_000,
    _REFRESH: 30_000,
}
_FETCH_BACKOFFS = {"fetch.error.backoff.ms": 50, "fetch.queue.backoff.ms": 10}
_PENDING_MAX = 100_000  # pointers that wait for Kafka
_SOURCE_KIB = 16 * KIB  # 16 MiB of records that a copy has fetched and not read
_POSITIONS_KIB = 1  # a consumer that reads positions fetches no records
_GONE = "groups are on memq's state logs"
_LIBRDKAFKA = re.compile(r"[a-z][a-z0-9]*([._][a-z0-9]+)*\Z")

# Settings of librdkafka that memq sets itself, because its guarantees depend on them; and the reason.
OWN = {
    "acks": "a pointer counts when every in-sync replica has it",
    "request.required.acks": "a pointer counts when every in-sync replica has it",
    "bootstrap.servers": "queue = kafka://HOST:PORT names them",
    "metadata.broker.list": "queue = kafka://HOST:PORT names them",
    "enable.idempotence": "a retried pointer must not be there twice",
    "enable.auto.commit": "positions are committed by consumers only",
    "enable.auto.offset.store": "positions are committed by consumers only",
    "group.id": "memq names the groups of its copies",
    "group.instance.id": _GONE,
    "group.protocol": _GONE,
    "session.timeout.ms": "session_timeout_ms_min sets it for copies",
    "heartbeat.interval.ms": _GONE,
    "max.poll.interval.ms": "it must be longer than a session",
    "message.max.bytes": "a pointer must fit",
    "client.id": "memq sets it",
    "partition.assignment.strategy": _GONE,
    "message.timeout.ms": "publish_timeout_ms sets it",
    "delivery.timeout.ms": "publish_timeout_ms sets it",
    "batch.num.messages": "a stale pointer must be refused alone",
    "default.topic.config": "its settings can be set without it",
    "delivery.report.only.error": "each pointer needs its report",
    "transactional.id": "pointers are not transactions",
    "isolation.level": "pointers are not transactions",
    "auto.offset.reset": "the queue looks for the begin itself",
    "compression.codec": "pointers are small, and one at a time",
}
# Settings of memq's own in an earlier release, as `kafka_settings` spells them.
_FORMER = {"group.members.max": _GONE, "static.members": _GONE}
_TOPIC = re.compile(r"(?P<topic>.+)\.(?P<id>[0-9a-f]{32})(-(?P<namespace>[1-9][0-9]{0,2}))?\Z", re.DOTALL | re.ASCII)


class Names:
    """Names under one prefix, which lets several clusters of memq, and other programs, share a Kafka.

    A Kafka topic is named `<prefix><topic>.<topic id>`. So a topic that is created again under the same name gets
    another Kafka topic. No two names differ only in `.` and `_`, which Kafka's metrics do not distinguish.
    That of `billing/invoices` is `<prefix>billing.invoices.<topic id>-7`: the number is the length of the namespace.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def kafka_topic(self, partition: ReadPartition) -> str:
        """Return the Kafka topic that holds a read partition.

        Raises: InvalidNameError when the name is too long.
        """
        namespace = len(namespace_of(partition.topic))
        topic, end = partition.topic.replace(NAMESPACE_END, "."), f"-{namespace}" if namespace else ""
        name = f"{self._prefix}{topic}.{partition.topic_id}{end}"
        if len(name) > NAME_CHARS_MAX:
            most = NAME_CHARS_MAX - len(name) + len(partition.topic)
            raise InvalidNameError(
                f"topic name '{partition.topic[:40]}...' has {len(partition.topic)} characters, "
                f"with Kafka as the queue {most} are allowed",
                hint="choose a shorter name for the topic, or a shorter prefix in [kafka]",
            )
        return name

    def read_partition(self, kafka_topic: str, number: int) -> ReadPartition | None:
        """Return the read partition of a partition of a Kafka topic; None for topics that are not memq's."""
        found = _TOPIC.match(kafka_topic.removeprefix(self._prefix))
        if found is None or not kafka_topic.startswith(self._prefix):
            return None
        topic, namespace = found["topic"], int(found["namespace"] or 0)
        if namespace:
            if topic[namespace : namespace + 1] != "." or len(topic) == namespace + 1:
                return None
            topic = f"{topic[:namespace]}{NAMESPACE_END}{topic[namespace + 1 :]}"
        return ReadPartition(topic, found["id"], number)

    def kafka_group(self, group: str) -> str:
        """Return the Kafka group of a consumer group."""
        return self._prefix + group

    def group(self, kafka_group: str) -> str | None:
        """Return the consumer group of a Kafka group; None for groups that are not memq's."""
        return kafka_group.removeprefix(self._prefix) if kafka_group.startswith(self._prefix) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Settings of the queue.

    `library` has librdkafka's names, `servers` comes from the queue's URL.
    """

    prefix: str = section_setting(
        "memq.", "first part of the name of every Kafka topic of this cluster, and of its groups of an earlier release"
    )
    replication_factor: int = section_setting(-1, "copies of each Kafka topic; -1 for Kafka's own default", -1, 100)
    min_insync_replicas: int = section_setting(0, "copies that must have a pointer; 0 for Kafka's own default", 0, 100)
    request_timeout_ms: int = section_setting(10_000, "timeout of a request", 100, 300_000)
    publish_timeout_ms: int = section_setting(20_000, "timeout of one attempt to publish", 100, 600_000)
    pending_bytes_max: int = section_setting(64 * MIB, "bound on pointers that wait for Kafka", 128 * KIB, 1 << 31)
    cache_bytes_max: int = section_setting(16 * MIB, "bound on the newest pointers in memory", 64 * KIB, 1 << 34)
    fetchers_max: int = section_setting(2, "consumers that read older pointers; each reads many partitions", 1, 16)
    followed_idle_ms: int = section_setting(
        60_000, "time for which a partition is still followed after a wait", 1_000, 86_400_000
    )
    session_timeout_ms_min: int = section_setting(
        6_000, "least session timeout that Kafka allows, for copies of its topics", 100, 3_600_000
    )
    servers: str = ""
    library: Mapping[str, str] = field(default_factory=dict)

    def client(self) -> dict[str, Any]:
        """Return the settings of every librdkafka client: servers, timeouts, pass-through settings."""
        patience_ms = max(self.request_timeout_ms, SETUP_MS_MIN)
        return {
            "socket.timeout.ms": patience_ms,
            # While Kafka hangs, connections fill its backlog, and the kernel retries at growing intervals. With
            # librdkafka's default of 30 s, a client reconnected only 5 to 7 s after Kafka had recovered.
            "socket.connection.setup.timeout.ms": patience_ms,
            **_INTERVALS,
            **self.library,
            "bootstrap.servers": self.servers,
        }

    def producer(self) -> dict[str, Any]:
        """Return the additional settings of the producer."""
        return self.client() | {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,
            "batch.num.messages": 1,  # Kafka refuses a whole batch for one stale record of another write partition
            "message.timeout.ms": self.publish_timeout_ms,
            "queue.buffering.max.kbytes": self.pending_bytes_max // KIB,
            "queue.buffering.max.messages": _PENDING_MAX,
        }

    def reader(self, fetch_wait_ms: int, queued_bytes_max: int) -> dict[str, Any]:
        """Return the settings of a consumer without group: manual assignment, no commits."""
        return self.client() | {
            "group.id": f"{self.prefix}_memq-readers",  # librdkafka requires a group; no consumer joins it
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "check.crcs": True,  # a pointer has no checksum: one bit of its JSON can make it another pointer
            "auto.offset.reset": "earliest",
            "allow.auto.create.topics": False,
            "fetch.wait.max.ms": fetch_wait_ms,
            **_FETCH_BACKOFFS,
            "queued.max.messages.kbytes": queued_bytes_max // KIB,
        }

    def source(self, group: str) -> dict[str, Any]:
        """Return the settings of the consumer that copies foreign topics: it manages its own offsets."""
        session_ms = max(SOURCE_SESSION_MS, self.session_timeout_ms_min)
        return self.client() | {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "check.crcs": True,
            "auto.offset.reset": "earliest",  # retention has removed the records before
            "isolation.level": "read_committed",
            "allow.auto.create.topics": False,
            "session.timeout.ms": session_ms,
            "max.poll.interval.ms": max(POLL_INTERVAL_MS, session_ms),
            "queued.max.messages.kbytes": _SOURCE_KIB,
        }

    def positions(self, group: str) -> dict[str, Any]:
        """Return the settings of a consumer that reads a group's positions. It never joins, nor fetches."""
        return self.client() | {
            "group.id": group,
            "client.id": "memq-positions",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "allow.auto.create.topics": False,
            "queued.max.messages.kbytes": _POSITIONS_KIB,
        }


def kafka_settings(url: str, section: Section, called: str = "kafka") -> KafkaSettings:
    """Return the settings of `kafka://HOST:PORT,…` and the section `[kafka]` or another one.

    Other names of the section are librdkafka's, such as `security.protocol`. In TOML it may also be a table, and in
    the environment it is MEMQ_KAFKA_SECURITY_PROTOCOL. librdkafka checks these names and their values.
    Raises: InvalidSettingError, UnknownSettingError.
    """
    own: dict[str, tuple[object, str]] = {}
    library: dict[str, str] = {}
    for name, (value, origin) in _flat(section).items():
        if name in rules_of(KafkaSettings):
            own[name] = (value, origin)
            continue
        dotted = name if name == "log_level" else name.replace("_", ".")
        if "." not in dotted and dotted not in ("acks", "debug", "log_level"):
            raise InvalidSettingError(
                f"unknown setting '{name}' in [{called}] from {origin}",
                hint=did_you_mean(name, rules_of(KafkaSettings)),
            )
        refused = OWN | _FORMER
        if dotted in refused or not _LIBRDKAFKA.match(dotted):
            why = refused.get(dotted, "it is no name of librdkafka")
            raise InvalidSettingError(
                f"setting '{name}' in [{called}] from {origin} can't be set: {why}", hint="leave it out"
            )
        library[dotted] = text = str(value).lower() if isinstance(value, bool) else str(value)
        if _NOT_TEXT.search(text):
            raise InvalidSettingError(
                f"setting '{name}' in [{called}] from {origin} is no text in UTF-8, or contains a zero byte",
                hint="librdkafka takes text alone: correct the value",
            )
    found = replace(read_section(called, own, KafkaSettings), servers=_servers(url), library=library)
    _check_prefix(found.prefix)
    _check_copies(found)
    _check_metadata_age(library, called)
    return found


def _flat(section: Mapping[str, tuple[object, str]]) -> dict[str, tuple[object, str]]:
    """Return the settings under dotted names, which TOML parses as nested tables."""
    flat: dict[str, tuple[object, str]] = {}
    for name, (value, origin) in section.items():
        if isinstance(value, Mapping):
            inner = {f"{name}.{key}": (part, origin) for key, part in value.items()}
            flat.update(_flat(inner))
        else:
            flat[name] = (value, origin)
    return flat


def _servers(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    servers = [part.strip() for part in rest.rstrip("/").split(",")]
    if scheme != "kafka" or not separator or not all(_is_server(server) for server in servers):
        raise InvalidSettingError(
            f"'{url[:120]}' does not name a Kafka", hint="write it as kafka://HOST:PORT,HOST:PORT"
        )
    return ",".join(server if re.search(r":\d+\Z", server) else f"{server}:9092" for server in servers)


def _is_server(text: str) -> bool:
    match = _SERVER.match(text)
    return match is not None and int(match["port"] or 9092) in range(
        1, 65_536
    )  # librdkafka would use port 34463 for 99999


def _check_metadata_age(library: Mapping[str, str], called: str) -> None:
    """Refuse an age beyond 32 bits of µs: librdkafka would forget each topic at once, and read no pointer."""
    name, times = (_AGE, 1) if _AGE in library else (_REFRESH, _AGE_PER_REFRESH)
    text = library.get(name, "")
    if text.isdecimal() and int(text) * times > _AGE_MS_MAX:
        raise InvalidSettingError(
            f"{name} = {text} in [{called}] is too long: librdkafka counts the age of what it knows in 32 bits",
            hint=f"set it to {_AGE_MS_MAX // times} or less, or leave it out",
        )


def _check_copies(found: KafkaSettings) -> None:
    if 0 <= found.replication_factor < found.min_insync_replicas:
        raise InvalidSettingError(
            f"[kafka] has min_insync_replicas = {found.min_insync_replicas}, "
            f"but replication_factor = {found.replication_factor}: no pointer would ever count",
            hint="set replication_factor to one more than min_insync_replicas",
        )


def _check_prefix(prefix: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,100}", prefix):
        raise InvalidSettingError(
            f"setting prefix = '{prefix[:60]}' in [kafka] is not allowed", hint="use at most 100 of A-Z a-z 0-9 . _ -"
        )
