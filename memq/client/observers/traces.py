"""Spans of producers and consumers.

A producer has `send` per record, with its context in the headers, and `batch` per block. A call of `send_many` is one
`send`: its records go in as columns, and carry nothing. A consumer has `fetch` of each stored batch, and `process` from
delivery until done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from opentelemetry.trace import Span, SpanContext, SpanKind, TracerProvider

from memq.client.consumer.batch import Batch
from memq.client.consumer.fetch.fetcher import BatchFetcher, OpenStore, ReadMode, ReadRange
from memq.client.producer.delivery import Ack, Promise
from memq.client.producer.fields import HeadersLike, header_pairs
from memq.errors import MemqError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import Buffer
from memq.format.pointer import Pointer
from memq.observe.traces import HEADERS, LINKS_MAX, Attributes, Block, Traces, block_context, context_in, headers_of
from memq.runtime.clock import Clock
from memq.storage_handlers.confirmed_reads import ConfirmedReads

SPANS_MAX = 1_000  # of one block, that wait for its ack; further ones end without it

Headers = list[tuple[str, bytes | None]]


class TracedFetcher(BatchFetcher):
    """A fetcher whose fetches are spans."""

    def __init__(
        self, mode: ReadMode, read: ReadRange, open_store: OpenStore, confirmed: ConfirmedReads, traces: Traces
    ) -> None:
        super().__init__(mode, read, open_store, confirmed)
        self._traces = traces

    async def fetch(self, pointer: Pointer, sent: Buffer | None = None) -> Sequence[BlockPiece]:
        """See `BatchFetcher.fetch`."""
        began_ms = self._traces.now_ms()
        pieces: Sequence[BlockPiece] = ()
        failure: BaseException | None = None
        try:
            pieces = await super().fetch(pointer, sent)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(pointer, pieces, began_ms, failure)
        return pieces

    def cut_sent(self, pointer: Pointer, data: Buffer) -> Sequence[BlockPiece] | None:
        """See `BatchFetcher.cut_sent`."""
        began_ms = self._traces.now_ms()
        pieces = super().cut_sent(pointer, data)
        if pieces is not None:
            self._end(pointer, pieces, began_ms, None)
        return pieces

    def _end(
        self, pointer: Pointer, pieces: Sequence[BlockPiece], began_ms: int, failure: BaseException | None
    ) -> None:
        attributes: Attributes = {
            "messaging.destination.name": pointer.topic,
            "messaging.destination.partition.id": str(pointer.partition),
            "messaging.batch.message_count": pointer.records,
            "memq.object": pointer.locations[0].key if pointer.locations else "",
        }
        blocks = blocks_of(pointer.topic, pointer.partition, pieces)
        self._traces.end(self._traces.of_blocks("fetch", SpanKind.CLIENT, attributes, blocks, began_ms), failure)


class ConsumerTraces:
    """The `process` span of the batch that is handed out now; from the user's own thread."""

    def __init__(self, provider: TracerProvider, clock: Clock, group: str | None) -> None:
        self._traces = Traces(provider, clock)
        self._group = group
        self._span: Span | None = None

    def fetcher(
        self, mode: ReadMode, read: ReadRange, open_store: OpenStore, confirmed: ConfirmedReads
    ) -> BatchFetcher:
        """Return a fetcher whose fetches are spans."""
        return TracedFetcher(mode, read, open_store, confirmed, self._traces)

    def handed(self, batch: Batch) -> None:
        """Begin to process: in the trace of the first block, linked with what the records carry."""
        blocks = blocks_of(batch.topic, batch.write_partition, batch.pieces)
        attributes: Attributes = {
            "messaging.destination.name": batch.topic,
            "messaging.destination.partition.id": str(batch.partition),
            "messaging.batch.message_count": len(batch),
            "messaging.consumer.group.name": self._group or "",
        }
        parent = block_context(blocks[0]) if blocks else None
        links = islice(contexts_of(batch), LINKS_MAX)
        self._span = self._traces.begin("process", SpanKind.CONSUMER, attributes, parent=parent, links=links)

    def done(self) -> None:
        """The batch is done: the next one is asked for, or the consumer is closed."""
        span, self._span = self._span, None
        if span is not None:
            self._traces.end(span)


def blocks_of(topic: str, partition: int, pieces: Sequence[BlockPiece]) -> list[Block]:
    """Return the names of those blocks that are whole."""
    headers = [piece.header for piece in pieces if piece.header is not None]
    return [(topic, partition, header.producer_id, header.first_sequence) for header in headers]


def contexts_of(batch: Batch) -> Iterator[SpanContext]:
    """Yield the contexts that records carry, each once; what is damaged carries none."""
    seen: dict[int, None] = {}
    try:
        for headers in batch.headers():
            found = context_in(headers)
            if found is not None and found.span_id not in seen:
                seen[found.span_id] = None
                yield found
    except MemqError:
        return


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
        """Begin a `send` of records; it ends after this call, and when the blocks that took them are settled.

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
