"""The transport: a message of Celery is an item of a queue, leased until its task is acked.

Source: kombu's interface for transports, `kombu.transport.virtual`.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from memq.client.admin import Admin
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import Queue
from memq.errors import (
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    OutcomeUnknownError,
    RetryableError,
)
from memq.limits import DELAY_MS_MAX
from memq.queues.decisions import ItemOutcome, NackKind
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.tls import Tls

DEFAULT_PORT = 9876
LEASE_S = 60.0
CONNECT_S = 5.0
PREFETCH = 10  # items of a poll, if the consumer sets no prefetch count
PURGE_ITEMS = 1_000  # of a step
_PRIORITY_MAX = 9
_SSL_NAMES = {"ca_certs": "ca_file", "certfile": "cert_file", "keyfile": "key_file", "password": "key_password"}
_RENEWALS = 3  # of a lease before it ends
_RENEWAL_S = 0.25  # between two checks: the shortest lease has 1 s

_events = EventLog(SystemClock())

# kombu's decoder of JSON makes numbers, times and ids of values, by names in the payload
_FOREIGN = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)


class QoS(virtual.QoS):  # type: ignore[misc]
    """Unacked messages of a channel; acks, rejects and returns go to the queue."""

    def ack(self, delivery_tag: str) -> None:
        """End the item of a message."""
        self.channel.connection.leases.settle(delivery_tag, Queue.ack)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give the item back, or declare it dead: `memq queue` shows dead items, and sends them back."""
        kind = NackKind.FAILED if requeue else NackKind.DEAD
        self.channel.connection.leases.settle(delivery_tag, lambda queue, item: queue.nack(item, kind=kind))
        super().ack(delivery_tag)

    def restore_unacked(self) -> list[Any]:
        """Give all items back without an attempt counted: the consumer has ended before they began."""
        self._flush()
        tags = list(self._delivered)
        self._delivered.clear()
        self.channel.connection.leases.give_back(tags)
        return []


class Channel(virtual.Channel):  # type: ignore[misc]
    """Publishes into queues, and consumes from them."""

    QoS = QoS
    supports_fanout = False
    default_priority = 0
    max_priority = _PRIORITY_MAX

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        self.acked_at_once: set[str] = set()

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any], consumer_tag: str, **options: Any
    ) -> None:
        """Consume from a queue. With `no_ack` an item is acked before its delivery."""
        super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        (self.acked_at_once.add if no_ack else self.acked_at_once.discard)(queue)

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> virtual.Message | None:
        """Return the next message of a queue; None if none is ready."""
        found = self.connection.receive({queue: 1}, 0.0)
        if not found:
            return None
        raw = self.connection.leases.hold(found[0])
        if raw is None:
            return None
        message = self.Message(raw, channel=self)
        self.qos.append(message, message.delivery_tag)
        if no_ack:
            self.qos.ack(message.delivery_tag)
        return message

    def wanted(self) -> dict[str, int]:
        """Return how many items of each queue this channel takes now."""
        if self.closed or not self._consumers or not self.qos.can_consume():
            return {}
        queues = list(dict.fromkeys(self._active_queues))
        most = self.qos.can_consume_max_estimate()
        most = PREFETCH * len(queues) if most is None else most
        turn = self.connection.next_turn() % len(queues)
        chosen = (queues[turn:] + queues[:turn])[:most]
        return {queue: most // len(chosen) for queue in chosen}

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        headers = message.get("headers") or {}
        self.connection.queue.enqueue(
            self.connection.name_of(queue),
            dumps(message).encode(),
            priority=self._get_message_priority(message, reverse=True),
            deliver_after=due_in_s(headers.get("eta"), self.connection.clock.wall_ms() / 1_000),
            lease=self.connection.lease_s,
        )

    def _size(self, queue: str) -> int:
        name = self.connection.name_of(queue)
        counts = self.connection.queue.queues(name).get(name)
        return 0 if counts is None else counts.ready + counts.delayed

    def _purge(self, queue: str) -> int:
        ended = 0
        while found := self.connection.receive({queue: PURGE_ITEMS}, 0.0):
            ended += self.connection.queue.ack_many(found).count(ItemOutcome.ACKED)
        return ended

    def _restore(self, message: virtual.Message) -> None:
        self.qos.reject(message.delivery_tag, requeue=True)

    def exchange_declare(self, exchange: str | None = None, type: str = "direct", **options: Any) -> None:  # noqa: A002
        """Declare an exchange. Bindings are of this process. Raises: InvalidRequestError for a fanout."""
        if type == "fanout" and not options.get("passive"):
            raise InvalidRequestError(
                f"exchange '{exchange}' is a fanout, which leased queues do not have",
                hint="use direct or topic exchanges; a memq topic with broadcast consumers reaches all processes",
            )
        super().exchange_declare(exchange, type, **options)


class Transport(virtual.Transport):  # type: ignore[misc]
    """A connection of kombu to the brokers of a cluster.

    Options (`broker_transport_options`): `visibility_timeout`, the lease in s, which is renewed while a worker holds a
    message (60); `queue_name_prefix`; `brokers`, more addresses with commas. `broker_use_ssl` has `ca_certs`,
    `certfile`, `keyfile`, `password`.
    """

    Channel = Channel
    driver_type = "memq"
    driver_name = "memq"
    default_port = DEFAULT_PORT
    can_parse_url = True  # several addresses
    polling_interval = None
    implements = virtual.Transport.implements.extend(
        asynchronous=False, exchange_type=frozenset(["direct", "topic"]), heartbeats=False
    )
    connection_errors = (*virtual.Transport.connection_errors, RetryableError, OutcomeUnknownError)
    channel_errors = (*virtual.Transport.channel_errors, MemqError)

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        chosen = dict(client.transport_options or {})
        self.clock = SystemClock()
        self.lease_s = float(chosen.get("visibility_timeout", LEASE_S))
        self._prefix = str(chosen.get("queue_name_prefix", ""))
        self._brokers = chosen.get("brokers") or addresses_of(client.hostname or "", client.port or DEFAULT_PORT)
        self._tls = tls_of(client.ssl)
        self._turn = 0
        self.queue: Queue  # from `establish_connection` on: kombu makes transports that it never connects
        self.leases: Leases

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL as it is: it has no password."""
        return uri

    def driver_version(self) -> str:
        """Return memq's version."""
        import memq

        return memq.__version__

    def establish_connection(self) -> Transport:
        """Ask a broker, so that an address without one fails here. Raises: UnreachableError."""
        connect_ms = round(1_000 * (self.client.connect_timeout or CONNECT_S))
        with Admin(self._brokers, connect_timeout_ms=connect_ms, tls=self._tls) as admin:
            admin.brokers()
        self.queue = Queue(self._brokers, tls=self._tls)
        self.leases = Leases(self.queue)
        return super().establish_connection()  # type: ignore[no-any-return]

    def close_connection(self, connection: Any) -> None:
        """Give back what is unacked, and disconnect."""
        super().close_connection(connection)
        self.leases.close()
        self.queue.close()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver messages to the consumers of all channels; wait for the first one up to `timeout` s.

        Raises: TimeoutError when none came.
        """
        homes: dict[str, Channel] = {}
        wanted: dict[str, int] = {}
        for channel in self.channels:
            for queue, count in channel.wanted().items():
                homes[queue], wanted[queue] = channel, count
        limit_s = self.lease_s if timeout is None else timeout
        if not wanted:
            self.clock_wait(min(limit_s, 0.05))
            raise TimeoutError
        found = self.receive(wanted, limit_s)
        if not found:
            raise TimeoutError
        held = [(item.queue.removeprefix(self._prefix), self.leases.hold(item)) for item in found]
        for queue, raw in held:
            if raw is None:
                continue
            if queue in homes[queue].acked_at_once:
                self.leases.settle(raw["properties"]["delivery_tag"], Queue.ack)
            self._deliver(raw, queue)

    def receive(self, wanted: Mapping[str, int], wait_s: float) -> list[QueueItem]:
        """Lease items of queues."""
        return self.queue.dequeue({self.name_of(queue): count for queue, count in wanted.items()}, wait=wait_s)

    def name_of(self, queue: str) -> str:
        """Return the name of a queue in memq."""
        return f"{self._prefix}{queue}"

    def next_turn(self) -> int:
        """Return a number that grows: queues take turns if not all get a message."""
        self._turn += 1
        return self._turn

    def clock_wait(self, seconds: float) -> None:
        """Wait while no consumer takes messages."""
        threading.Event().wait(seconds)


class Leases:
    """The items that consumers of a connection hold, by delivery tag. A thread renews their leases.

    A worker acks from other threads than the one that consumes.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._items: dict[str, QueueItem] = {}
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, item: QueueItem) -> dict[str, Any] | None:
        """Keep an item until it is settled; return its message, with a delivery tag of its own.

        An item that is no message of kombu is dead, and None is returned: it would stop each consumer that gets it.
        """
        tag = f"{item.id}/{item.lease.grant}"
        with self._lock:
            self._items[tag] = item
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="memq leases of celery", daemon=True)
                self._thread.start()
        try:
            raw: dict[str, Any] = loads(item.payload)
            if encoding := raw["properties"].get("body_encoding"):  # else the consumer would fail at the delivery
                virtual.Channel.codecs[encoding].decode(raw["body"])
            raw["properties"]["delivery_tag"] = tag
            if item.attempt > 1:
                raw["redelivered"] = True
                raw["properties"]["delivery_info"]["redelivered"] = True
        except _FOREIGN as error:
            _events.warning("celery.foreign-item", f"item {item.id} is dead now: {error!r}")
            self.settle(tag, lambda queue, held: queue.nack(held, kind=NackKind.DEAD))
            return None
        return raw

    def settle(self, tag: str, change: Callable[[Queue, QueueItem], object]) -> None:
        """Ack an item, or give it back. One whose lease is over is logged: another worker may have it.

        Raises: RetryableError, OutcomeUnknownError when no broker answered.
        """
        with self._lock:
            item = self._items.get(tag)
        if item is None:
            return
        try:
            change(self._queue, item)
        except (RetryableError, OutcomeUnknownError):
            raise
        except MemqError as error:
            _events.warning("celery.not-settled", f"message {item.id}: {error}")
        with self._lock:
            self._items.pop(tag, None)

    def give_back(self, tags: Iterable[str]) -> None:
        """Return items whose work has not begun; if no broker answers, their leases end."""
        with self._lock:
            items = [item for tag in tags if (item := self._items.pop(tag, None)) is not None]
        try:
            if items:
                self._queue.nack_many(items, kind=NackKind.UNUSED)
        except MemqError as error:
            _events.warning("celery.not-returned", f"{len(items)} messages come again when their leases end: {error}")

    def close(self) -> None:
        """End the thread."""
        self._end.set()

    def _renew(self) -> None:
        while not self._end.wait(_RENEWAL_S):
            for lease_s, held in self._due().items():
                self._extend(held, lease_s)

    def _due(self) -> dict[float, dict[str, QueueItem]]:
        """Return the items whose leases are to be renewed now, by the lease that their publisher chose."""
        now_s, due = self._clock.monotonic(), dict[float, dict[str, QueueItem]]()
        with self._lock:
            for tag, item in self._items.items():
                if item.lease_s and item.until_s - now_s < item.lease_s * (1 - 1 / _RENEWALS):
                    due.setdefault(item.lease_s, {})[tag] = item
        return due

    def _extend(self, held: dict[str, QueueItem], lease_s: float) -> None:
        try:
            outcomes = self._queue.extend_many(list(held.values()), lease_s)
        except MemqError as error:
            _events.warning("celery.not-renewed", f"leases of {len(held)} messages: {error}")
        else:
            lost = [tag for tag, outcome in zip(held, outcomes, strict=True) if outcome is not ItemOutcome.EXTENDED]
            with self._lock:
                for tag in lost:
                    if self._items.pop(tag, None) is not None:
                        _events.warning("celery.lease-lost", f"message {held[tag].id}: another worker may have it")


def addresses_of(url: str, port: int) -> str:
    """Return the addresses in a URL, each with a port (default `port`). Raises: InvalidSettingError."""
    rest = url.partition("://")[2] if "://" in url else url
    hosts = rest.removesuffix("/") or "127.0.0.1"
    if set("/@?#") & set(hosts):
        hint = "write memq://HOST:PORT, or memq://HOST:PORT,HOST2:PORT2"
        raise InvalidSettingError(f"{url[:200]!r} is no URL of brokers", hint=hint)
    each = [host.strip() for host in hosts.split(",")]
    return ",".join(host if ":" in host.rpartition("]")[2] else f"{host}:{port}" for host in each)


def due_in_s(eta: object, now_s: float) -> float:
    """Return the seconds until the time of a task, as Celery writes it in ISO 8601; 0 if it has none."""
    if not isinstance(eta, str) or not eta:
        return 0.0
    try:
        due = datetime.datetime.fromisoformat(eta)
    except ValueError:
        return 0.0
    if due.tzinfo is None:
        due = due.replace(tzinfo=datetime.UTC)
    return min(max(0.0, due.timestamp() - now_s), DELAY_MS_MAX / 1_000)


def tls_of(ssl: object) -> Tls | None:
    """Return the certificates of `broker_use_ssl`. Raises: InvalidSettingError."""
    if not ssl or ssl is True:
        return None if not ssl else Tls()
    if not isinstance(ssl, Mapping):
        raise InvalidSettingError("broker_use_ssl is neither a bool nor a mapping")
    unknown: Sequence[str] = [name for name in ssl if name not in _SSL_NAMES]
    if unknown:
        raise InvalidSettingError(
            f"broker_use_ssl has no '{unknown[0]}' with memq", hint=f"known are {', '.join(_SSL_NAMES)}"
        )
    files: dict[str, Any] = {_SSL_NAMES[name]: str(value) for name, value in ssl.items() if value}
    return Tls(**files)
