"""Spans of a producer: `send` per record, with its context in the headers, and `batch` per block.

A call of `send_many` is one `send`: its records go in as columns, and carry nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import Span, SpanContext, SpanKind, TracerProvider

from memq.client.producer.delivery import Ack, Promise
from memq.client.producer.fields import HeadersLike, header_pairs
from memq.observe.traces import HEADERS, LINKS_MAX, Traces, block_context, headers_of
from memq.runtime.clock import Clock

SPANS_MAX = 1_000  # of one block, that wait for its ack; further ones end without it

Headers = list[tuple[str, bytes | None]]


class Sent:
    """The span of one call: it ends when the call and all blocks with its records are settled."""

    __slots__ = ("blocks", "error", "left", "links", "over", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.blocks: dict[Promise, None] = {}
        self.left = 0  # of the blocks, that are not settled
        self.links = 0
        self.over = False
        self.error: BaseException | None = None

    def headers(self, given: HeadersLike | None) -> Headers:
        """Return the headers of the record, with the context of its span in place of any other."""
        pairs = header_pairs(given) if given is not None else ()
        return [*(pair for pair in pairs if pair[0] not in HEADERS), *headers_of(self.span)]


class ProducerTraces:
    """Holds the `send` spans of each block until that is settled. From any thread."""

    def __init__(self, provider: TracerProvider, clock: Clock) -> None:
        self._traces = Traces(provider, clock)
        self._lock = threading.Lock()
        self._open: dict[Promise, list[Sent]] = {}

    @contextmanager
    def sending(self, topic: str, records: int = 1) -> Iterator[Sent]:
        """Begin a `send` of records; it ends behind this, and when the blocks that took them are settled.

        It ends with the error of the call when not all records were taken.
        """
        attributes: dict[str, str | int] = {
            "messaging.destination.name": topic,
            "messaging.batch.message_count": records,
        }
        sent = Sent(self._traces.begin("send", SpanKind.PRODUCER, attributes))
        try:
            yield sent
        except BaseException as error:
            self._over(sent, error)
            raise
        self._over(sent)

    def taken(self, sent: Sent, deliveries: Iterable[Promise]) -> None:
        """Let a `send` wait for what becomes of blocks that took its records."""
        for delivery in deliveries:
            with self._lock:
                if delivery in sent.blocks:
                    continue
                waiting = self._open.get(delivery)
                new = waiting is None
                if waiting is None:
                    waiting = self._open[delivery] = []
                if len(waiting) < SPANS_MAX:
                    waiting.append(sent)
                    sent.blocks[delivery] = None
                    sent.left += 1
            if new:
                self._when_settled(delivery)

    def _over(self, sent: Sent, error: BaseException | None = None) -> None:
        with self._lock:
            sent.over = True
            sent.error = error or sent.error
            ended = not sent.left
        if ended:
            self._traces.end(sent.span, sent.error)

    def _when_settled(self, delivery: Promise) -> None:
        began_ms = self._traces.now_ms()
        delivery.when_done(lambda: self._settled(delivery, began_ms))

    def _settled(self, delivery: Promise, began_ms: int) -> None:
        outcome = delivery.outcome
        with self._lock:
            waiting = self._open.pop(delivery, [])
        if isinstance(outcome, Ack):
            context = block_context((outcome.topic, outcome.partition, outcome.producer_id, outcome.first_sequence))
            for sent in waiting:
                if sent.links < LINKS_MAX:
                    sent.links += 1
                    sent.span.add_link(context)
            self._batch(outcome, [sent.span.get_span_context() for sent in waiting], began_ms)
        with self._lock:  # not before: a span that has ended takes no link
            for sent in waiting:
                sent.left -= 1
                sent.error = sent.error or (None if isinstance(outcome, Ack) else outcome)
            ended = [sent for sent in waiting if sent.over and not sent.left]
        for sent in ended:
            self._traces.end(sent.span, sent.error)

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
