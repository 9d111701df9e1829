"""The spans of a broker: `upload` and `publish` of each batch, in the traces of its blocks."""

from __future__ import annotations

from opentelemetry.trace import SpanKind, TracerProvider, get_tracer_provider

from memq.broker.partition.batch import SealedBatch
from memq.observe.traces import Attributes, Block, Traces
from memq.runtime.clock import Clock


class BrokerTraces:
    """Spans of batches, written when each batch is finished."""

    def __init__(self, provider: TracerProvider, clock: Clock, broker: str) -> None:
        self._traces = Traces(provider, clock)
        self._broker = broker

    def uploaded(self, sealed: SealedBatch, began_ms: int) -> None:
        """Write the span of a stored batch, from `began_ms` (Unix ms) on, with all tries."""
        self._record("upload", sealed, began_ms)

    def published(self, sealed: SealedBatch, began_ms: int) -> None:
        """Write the span of a published pointer, from `began_ms` (Unix ms) on."""
        self._record("publish", sealed, began_ms)

    def _record(self, name: str, sealed: SealedBatch, began_ms: int) -> None:
        origin = sealed.origin
        blocks: list[Block] = [
            (origin.topic.name, origin.partition, producer, first) for producer, first, _ in sealed.headers.sequences()
        ]
        attributes: Attributes = {
            "messaging.destination.name": origin.topic.name,
            "messaging.destination.partition.id": str(origin.partition),
            "memq.broker": self._broker,
            "memq.epoch": origin.epoch,
            "memq.object": sealed.key,
            "memq.blocks": len(blocks),
        }
        self._traces.end(self._traces.of_blocks(name, SpanKind.INTERNAL, attributes, blocks, began_ms))


def global_traces(clock: Clock, broker: str) -> BrokerTraces:
    """Return traces for this process's tracer provider, which `opentelemetry-instrument` sets."""
    return BrokerTraces(get_tracer_provider(), clock, broker)
