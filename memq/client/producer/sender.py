"""`send` of a blocking producer: in Python, or by the compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from memq.client.producer.delayed import DeliverAfter, DeliverAt
from memq.client.producer.delivery import Delivery, Promise
from memq.client.producer.fields import BytesLike, HeadersLike
from memq.client.producer.open_block import native
from memq.client.producer.send_buffer import SendBuffer
from memq.kernel.rows import Lane


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
    ) -> Delivery:
        """Add a record to the open block of its partition and return the block's delivery.

        Value and key are bytes-like (copied) or str (UTF-8); the value None is a null. Headers are pairs or a
        mapping. `partition`, else the key, determines the partition; without both, each block goes to the next one.
        `deliver_at` (Unix ms or datetime) or `deliver_after` (seconds or timedelta) delay the record: readers get it
        when it is due. Its ack says that it is held.

        Raises: TypeError; TooLargeError; NotFoundError; UnreachableError when the topic is new to this producer and no
        broker answers; BufferFullError; ClosedError; ForkedError; InvalidRequestError for a delay that is not allowed.
        """
        if deliver_at is not None or deliver_after is not None:
            arguments = (topic, value, key, headers, timestamp_ms, tag, partition)
            return self._send_slowly(*arguments, deliver_at, deliver_after)
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


class CompiledSender:
    """`send` of a `Producer` with a memq-native whose own `send` knows no delays."""

    _put_plain: Callable[..., Delivery | None]
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
    ) -> Delivery:
        """See `PythonSender.send`."""
        if deliver_at is None and deliver_after is None and headers is None and tag is None and partition is None:
            delivery = self._put_plain(topic, value, key, timestamp_ms)
            if delivery is not None:
                return delivery
        return self._send_slowly(topic, value, key, headers, timestamp_ms, tag, partition, deliver_at, deliver_after)


class _OwnSend:
    """No `send`: that of the compiled base is used."""


CompiledSender.send.__doc__ = PythonSender.send.__doc__
CompiledSender.send.__qualname__ = PythonSender.send.__qualname__


def _knows_delays() -> bool:
    return "deliver_at" in (native.SenderBase.send.__text_signature__ or "")


if TYPE_CHECKING or native is None:  # a type checker wants one of them
    Sender = PythonSender
elif _knows_delays():
    Sender = _OwnSend
else:
    Sender = CompiledSender
