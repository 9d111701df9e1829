"""The transport of kombu: each message is an item of a queue, leased until its task is acked.

Source: kombu's interface for transports, `kombu.transport.virtual`.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kombu.transport import virtual
from kombu.utils.json import dumps

from memq.celery.leases import Leases
from memq.client.admin import Admin
from memq.client.queue.items import QueueItem
from memq.client.queue.sync_queue import Queue
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
from memq.runtime.tls import Tls

DEFAULT_PORT = 9876
LEASE_S = 60.0
CONNECT_S = 5.0
PREFETCH = 10  # items of each queue in one poll, if the consumer sets no prefetch count
PURGE_ITEMS = 1_000  # acked in one request
IDLE_S = 0.05  # between two polls while no consumer takes messages
_PRIORITY_MAX = 9
_SSL_NAMES = {"ca_certs": "ca_file", "certfile": "cert_file", "keyfile": "key_file", "password": "key_password"}


class QoS(virtual.QoS):  # type: ignore[misc]
    """Unacked messages of a channel; acks, rejects and returns go to the queue."""

    def ack(self, delivery_tag: str) -> None:
        """Ack the item of a message."""
        self.channel.connection.leases.settle(delivery_tag, Queue.ack)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """With `requeue`, give the item back; else make it dead.

        `memq queue redrive` makes dead items ready again.
        """
        kind = NackKind.FAILED if requeue else NackKind.DEAD
        self.channel.connection.leases.settle(delivery_tag, lambda queue, item: queue.nack(item, kind=kind))
        super().ack(delivery_tag)

    def restore_unacked(self) -> list[Any]:
        """Give back the items that have not begun, without counting an attempt: the consumer has ended."""
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
        """Return the queues of this channel, each with the number of items that its consumers take now."""
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
        """Declare an exchange. Only this process knows its bindings. Raises: InvalidRequestError for a fanout."""
        if type == "fanout" and not options.get("passive"):
            raise InvalidRequestError(
                f"exchange '{exchange}' is a fanout, which leased queues do not have",
                hint="use direct or topic exchanges; a memq topic with broadcast consumers reaches all processes",
            )
        super().exchange_declare(exchange, type, **options)


class Transport(virtual.Transport):  # type: ignore[misc]
    """A connection of kombu to the brokers of a cluster.

    Options (`broker_transport_options`): `visibility_timeout` is the lease in s (60), which is extended while a worker
    has the message. `queue_name_prefix` is the first part of the queues' names in memq. `brokers` has addresses, with
    commas, in place of those of the URL. `broker_use_ssl` has `ca_certs`, `certfile`, `keyfile`, `password`.
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
        """Give back unacked items, and disconnect."""
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
            threading.Event().wait(min(limit_s, IDLE_S))
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
        """Return the next number: queues take turns when a consumer takes fewer items than it has queues."""
        self._turn += 1
        return self._turn


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
