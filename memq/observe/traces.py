"""Names of OpenTelemetry spans, and how those of one block are related.

Theory. A record carries the context of its `send` in a header (W3C `traceparent`), but a broker never opens a block,
so it can't see it. Yet everybody who touches a block knows it by name: topic, write partition, producer id and first
sequence. The id of its trace is a hash of that name: `batch` (producer), `upload`, `publish` (broker) and `fetch`
(consumer) are in one trace without a byte on the wire. The traces of the user's own work are linked with it: `batch`
links to every `send`, and `process` to the contexts that it finds in the records' headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice

from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from memq.errors import MemqError
from memq.runtime.clock import Clock

LINKS_MAX = 128  # of one span, as SDKs have it by default
HEADERS = ("traceparent", "tracestate")
Block = tuple[str, int, int, int]  # topic, write partition, producer id, first sequence
Attributes = dict[str, str | int]


def block_context(block: Block) -> SpanContext:
    """Return the context that all spans of a block have as their parent.

    The same wherever it is asked for.
    """
    digest = blake2b("\n".join(map(str, block)).encode(), digest_size=24).digest()
    trace, span = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")
    return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def context_in(headers: Iterable[tuple[str, bytes | None]]) -> SpanContext | None:
    """Return the context in a record's headers, None without one: the parent of its processing."""
    carried = {name: value.decode("latin-1") for name, value in headers if name in HEADERS and value is not None}
    if not carried:
        return None
    found = get_current_span(TraceContextTextMapPropagator().extract(carried)).get_span_context()
    return found if found.is_valid else None


def headers_of(span: Span) -> list[tuple[str, bytes]]:
    """Return the headers that carry a span's context."""
    carried: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carried, set_span_in_context(span))
    return [(name, value.encode()) for name, value in carried.items()]


class Traces:
    """Makes spans by a tracer provider. Times are Unix ms of the clock that memq runs on."""

    def __init__(self, provider: TracerProvider, clock: Clock) -> None:
        self._tracer = provider.get_tracer("memq")
        self._clock = clock

    def now_ms(self) -> int:
        """Return the time."""
        return self._clock.wall_ms()

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        *,
        began_ms: int | None = None,
        parent: SpanContext | None = None,
        links: Iterable[SpanContext] = (),
    ) -> Span:
        """Begin a span, now or at `began_ms`, in the caller's own trace or under `parent`."""
        context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
        return self._tracer.start_span(
            name,
            context,
            kind,
            {"messaging.system": "memq", **attributes},
            [Link(each) for each in islice(links, LINKS_MAX)],
            (self.now_ms() if began_ms is None else began_ms) * 1_000_000,
        )

    def end(self, span: Span, error: BaseException | None = None) -> None:
        """End a span, as failed when there is an error."""
        if error is not None:
            span.set_attribute("error.type", error.code if isinstance(error, MemqError) else type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(self.now_ms() * 1_000_000)

    def of_blocks(
        self, name: str, kind: SpanKind, attributes: Attributes, blocks: Sequence[Block], began_ms: int
    ) -> Span:
        """Begin a span about several blocks: in the trace of the first, linked with those of the others."""
        contexts = map(block_context, islice(blocks, LINKS_MAX + 1))
        return self.begin(name, kind, attributes, began_ms=began_ms, parent=next(contexts, None), links=contexts)
