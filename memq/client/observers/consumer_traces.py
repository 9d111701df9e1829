"""Spans of a consumer: `fetch` of each stored batch, and `process` from delivery until done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from opentelemetry.trace import Span, SpanContext, SpanKind, TracerProvider

from memq.client.consumer.batch import Batch
from memq.client.consumer.fetch.fetcher import BatchFetcher, OpenStore, ReadMode, ReadRange
from memq.errors import MemqError
from memq.format.batch import BlockPiece
from memq.format.pointer import Pointer
from memq.observe.traces import LINKS_MAX, Attributes, Block, Traces, block_context, context_in
from memq.runtime.clock import Clock
from memq.storage_handlers.confirmed_reads import ConfirmedReads


class TracedFetcher(BatchFetcher):
    """A fetcher whose fetches are spans."""

    def __init__(
        self, mode: ReadMode, read: ReadRange, open_store: OpenStore, confirmed: ConfirmedReads, traces: Traces
    ) -> None:
        super().__init__(mode, read, open_store, confirmed)
        self._traces = traces

    async def fetch(self, pointer: Pointer) -> Sequence[BlockPiece]:
        """See `BatchFetcher.fetch`."""
        began_ms = self._traces.now_ms()
        attributes: Attributes = {
            "messaging.destination.name": pointer.topic,
            "messaging.destination.partition.id": str(pointer.partition),
            "messaging.batch.message_count": pointer.records,
            "memq.object": pointer.locations[0].key if pointer.locations else "",
        }
        pieces: Sequence[BlockPiece] = ()
        failure: BaseException | None = None
        try:
            pieces = await super().fetch(pointer)
        except BaseException as error:
            failure = error
            raise
        finally:
            blocks = blocks_of(pointer.topic, pointer.partition, pieces)
            self._traces.end(self._traces.of_blocks("fetch", SpanKind.CLIENT, attributes, blocks, began_ms), failure)
        return pieces


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
