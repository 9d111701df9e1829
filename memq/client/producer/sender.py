"""The common part of both producers, and `send` of the blocking one: in Python, or compiled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from memq.client.arguments import check_tracer_provider, public_name, runtime_of
from memq.client.link_pool import CONNECT_TIMEOUT_MS, bootstrap_addresses
from memq.client.observers.reporter import reporting
from memq.client.producer.core import Observe, ProducerCore
from memq.client.producer.delayed import DeliverAfter, DeliverAt, due_ms_of, due_times_of
from memq.client.producer.delivery import AsyncDelivery, Delivery, Promise
from memq.client.producer.fields import BytesLike, HeadersLike, RecordFields, with_subject
from memq.client.producer.open_block import Route, native
from memq.client.producer.send_buffer import SendBuffer
from memq.client.producer.settings import (
    TRANSACTION_TIMEOUT_MS,
    AcksLike,
    OnAck,
    WhenFull,
    producer_settings,
)
from memq.client.transactions.undecided import TransactionChecker
from memq.errors import InvalidRequestError
from memq.kernel.rows import Lane
from memq.limits import KIB, MIB
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from memq.client.observers.traces import ProducerTraces
    from memq.encryption.encryption import Encryption


_CompiledBase: Any = object if native is None else native.SenderBase  # of the fast path into an open block


class BaseProducer(ABC, _CompiledBase):  # type: ignore[misc]
    """Settings and counters that the blocking and the asyncio producer share."""

    @public_name("Producer")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        acks: AcksLike = "all",
        codec: str = "zstd",
        linger_ms: float = 5,
        block_bytes: int = 512 * KIB,
        pending_bytes_max: int = 64 * MIB,
        when_full: WhenFull = "block",
        delivery_timeout_ms: float = 120_000,
        metadata_timeout_ms: float = 30_000,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        client_id: str = "",
        zone: str = "",
        on_ack: OnAck | None = None,
        name: str | None = None,
        audit: bool = True,
        transactional_id: str | None = None,
        transaction_group: str | None = None,
        transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
        transaction_checker: TransactionChecker | None = None,
        producer_group: str | None = None,
        encryption: Encryption | str | None = None,
        tracer_provider: TracerProvider | None = None,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._settings = producer_settings(
            acks=acks,
            codec=codec,
            linger_ms=linger_ms,
            block_bytes=block_bytes,
            pending_bytes_max=pending_bytes_max,
            when_full=when_full,
            delivery_timeout_ms=delivery_timeout_ms,
            metadata_timeout_ms=metadata_timeout_ms,
            connect_timeout_ms=connect_timeout_ms,
            client_id=client_id,
            zone=zone,
            on_ack=on_ack,
            name=name,
            audit=audit,
            transactional_id=transactional_id,
            transaction_group=transaction_group,
            transaction_timeout_ms=transaction_timeout_ms,
            transaction_checker=transaction_checker,
            producer_group=producer_group,
            encryption=encryption,
        )
        check_tracer_provider(tracer_provider)
        self._runtime = runtime_of(runtime, tls)
        observe = reporting("producer", self._settings.name) if self._settings.audit else None
        self._core = self._open(bootstrap_addresses(brokers), observe)
        self._buffer = self._core.buffer
        # The fast paths into an open block. A record with a span takes none: its headers carry the context.
        self._lanes: Mapping[str, Lane] = self._buffer.lanes
        self._put_keyed: Callable[[str, bytes, bytes, int | None], Promise | None] = self._buffer.put_keyed
        self._traces: ProducerTraces | None = None
        if tracer_provider is not None:
            from memq.client.observers.traces import ProducerTraces

            self._traces = ProducerTraces(tracer_provider, self._runtime.clock)
        compiled_plain = native is not None and self._settings.encryption is not None  # its fast path encrypts nothing
        if tracer_provider is not None or transactional_id is not None or compiled_plain:
            self._lanes, self._put_keyed = {}, _no_fast_path
        elif native is not None:
            self._use_lanes(self._buffer.lanes)
        self._closed = False

    def _check_plain(self) -> None:
        """Refuse records outside of a transaction. Raises: InvalidRequestError."""
        if self._settings.transactional_id:
            raise InvalidRequestError(
                "a transactional producer sends records in transactions only",
                hint="with producer.transaction() as t: t.send(…)",
            )

    def _named_headers(self, headers: HeadersLike | None, subject: str | None) -> HeadersLike | None:
        """Return the headers of a record, with its subject. Raises: as `with_subject`."""
        return headers if subject is None else with_subject(headers, subject, self._settings.encryption)

    def _due_ms(self, deliver_at: DeliverAt, deliver_after: DeliverAfter) -> int | None:
        """Return when a record is due (Unix ms); None for one that is not delayed."""
        if deliver_at is None and deliver_after is None:
            return None
        return due_ms_of(deliver_at, deliver_after, self._runtime.clock.wall_ms())

    def _due_times(
        self,
        deliver_at: DeliverAt | Sequence[DeliverAt],
        deliver_after: DeliverAfter | Sequence[DeliverAfter],
        count: int,
    ) -> list[int] | None:
        """Return when each of `count` records is due (Unix ms); None if they are not delayed."""
        if deliver_at is None and deliver_after is None:
            return None
        return due_times_of(deliver_at, deliver_after, count, self._runtime.clock.wall_ms())

    def _put_once(
        self, route: Route, fields: RecordFields, partition: int | None, due_ms: int | None
    ) -> Delivery | AsyncDelivery:
        """Add a record. Raises: BufferFullError when there is no room now."""
        if due_ms is None:
            return self._buffer.put(route, fields, partition)
        return self._core.delayed.add(route, fields, partition, due_ms)

    @abstractmethod
    def _open(self, addresses: Sequence[Address], observe: Observe | None) -> ProducerCore:
        """Return the core; called on the event loop on which the core runs."""


def _no_fast_path(topic: str, value: bytes, key: bytes, timestamp_ms: int | None) -> None:
    return None


class PythonSender:
    """`send` of a `Producer` without memq-native."""

    _buffer: SendBuffer
    _lanes: Mapping[str, Lane]
    _put_keyed: Callable[[str, bytes, bytes, int | None], Promise | None]
    _send_slowly: Callable[..., Delivery]

    def send(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
        partition: int | None = None,
        *,
        deliver_at: DeliverAt = None,
        deliver_after: DeliverAfter = None,
        subject: str | None = None,
    ) -> Delivery:
        """Add a record to the open block of its partition and return the block's delivery.

        Value and key are bytes-like (copied) or str (UTF-8); the value None is a null. Headers are pairs or a
        mapping. `partition`, else the key, determines the partition; without both, each block goes to the next one.
        `deliver_at` (Unix ms or datetime) or `deliver_after` (seconds or timedelta) delay the record: readers get it
        when it is due. Its ack says that it is held. With `subject`, value and headers are encrypted with the key of
        this subject, such as a person, until `memq forget`.

        Raises: TypeError; TooLargeError; NotFoundError; UnreachableError when the topic is new to this producer and no
        broker answers; BufferFullError; ClosedError; ForkedError; InvalidRequestError for a delay that is not allowed.
        """
        if deliver_at is not None or deliver_after is not None or subject is not None:
            arguments = (topic, value, key, headers, timestamp_ms, tag, partition)
            return self._send_slowly(*arguments, deliver_at, deliver_after, subject)
        # 100 ns is the goal: one look-up, one append, no lock, no call. The rule is that of `memq.kernel.rows`.
        if type(value) is bytes and headers is None and tag is None and partition is None:
            try:
                if key is None and timestamp_ms is None:
                    rows = self._lanes[topic].keyless
                    room = rows.room - (len(value) + 5)  # type: ignore[union-attr]  # None is the AttributeError below
                    if room >= 0:
                        rows.cells.append(value)  # type: ignore[union-attr]
                        rows.room = room  # type: ignore[union-attr]
                        if not rows.closed:  # type: ignore[union-attr]
                            return rows.delivery  # type: ignore[no-any-return, union-attr]  # no other kind is here
                        late = self._buffer.put_late(rows, (value,))  # type: ignore[arg-type]
                        if late is not None:
                            return cast(Delivery, late)
            except (AttributeError, KeyError, TypeError, ValueError):  # the path is closed, or the topic has no hash
                pass
            if type(key) is bytes:
                delivery = self._put_keyed(topic, value, key, timestamp_ms)
                if delivery is not None:
                    return delivery  # type: ignore[return-value]  # as above; a cast would cost 40 ns
        return self._send_slowly(topic, value, key, headers, timestamp_ms, tag, partition)


PythonSender.send.__qualname__ = "Producer.send"  # as users call it: Python's errors about its arguments have this name


class _OwnSend:
    """No `send`: that of the compiled base is used."""


if TYPE_CHECKING or native is None:  # noqa: SIM108 - a type checker wants one base class
    Sender = PythonSender
else:
    Sender = _OwnSend
