"""The spans of a producer: `send` for each record, whose context goes into its headers, and `batch` for each block."""

from __future__ import annotations

import threading

from opentelemetry.trace import Span, SpanContext, SpanKind, TracerProvider

from memq.client.delivery import Ack, Promise
from memq.client.fields import HeadersLike, header_pairs
from memq.clock import Clock
from memq.traces import HEADERS, Traces, block_context, headers_of

SPANS_MAX = 1_000  # of one block, that are open until it is acked; further ones end when the record was taken

Headers = list[tuple[str, bytes | None]]


class ProducerTraces:
    """Holds the `send` spans of each block until that is settled. From any thread."""

    def __init__(self, provider: TracerProvider, clock: Clock) -> None:
        self._traces = Traces(provider, clock)
        self._lock = threading.Lock()
        self._open: dict[Promise, list[Span]] = {}

    def begin(self, topic: str, headers: HeadersLike | None) -> tuple[Span, Headers]:
        """Begin a `send`; return it, and the headers of the record with its context in place of any other."""
        span = self._traces.begin("send", SpanKind.PRODUCER, {"messaging.destination.name": topic})
        given = header_pairs(headers) if headers is not None else ()
        return span, [*(pair for pair in given if pair[0] not in HEADERS), *headers_of(span)]

    def refused(self, span: Span, error: BaseException) -> None:
        """End the `send` of a record that was not taken."""
        self._traces.end(span, error)

    def taken(self, span: Span, delivery: Promise) -> None:
        """Let a `send` wait for what becomes of its block."""
        with self._lock:
            spans = self._open.get(delivery)
            if spans is not None and len(spans) < SPANS_MAX:
                spans.append(span)
                return
            new = spans is None
            if new:
                self._open[delivery] = [span]
        if new:
            began_ms = self._traces.now_ms()
            delivery.when_done(lambda: self._settled(delivery, began_ms))
        else:
            self._traces.end(span)

    def _settled(self, delivery: Promise, began_ms: int) -> None:
        with self._lock:
            spans = self._open.pop(delivery, [])
        outcome = delivery.outcome
        error = None if isinstance(outcome, Ack) else outcome
        if isinstance(outcome, Ack):
            block = (outcome.topic, outcome.partition, outcome.producer_id, outcome.first_sequence)
            for span in spans:
                span.add_link(block_context(block))
            self._batch(outcome, [span.get_span_context() for span in spans], began_ms)
        for span in spans:
            self._traces.end(span, error)

    def _batch(self, ack: Ack, sends: list[SpanContext], began_ms: int) -> None:
        block = (ack.topic, ack.partition, ack.producer_id, ack.first_sequence)
        attributes: dict[str, str | int] = {
            "messaging.destination.name": ack.topic,
            "messaging.destination.partition.id": str(ack.partition),
            "messaging.batch.message_count": ack.records,
            "memq.producer.id": f"{ack.producer_id:016x}",
            "memq.sequence.first": ack.first_sequence,
        }
        span = self._traces.begin(
            "batch", SpanKind.CLIENT, attributes, began_ms=began_ms, parent=block_context(block), links=sends
        )
        self._traces.end(span)
