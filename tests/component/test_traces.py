"""Spans from `send` to `process`: in one trace by the name of their block, linked with the user's own traces."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterable

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, StatusCode

import memq
from memq.broker.broker import Broker
from memq.broker.broker_traces import BrokerTraces
from memq.client.observers import traces
from memq.errors import TooLargeError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.observe.traces import block_context, context_in
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.testing import Cluster

TIMEOUT_S = 60.0
BLOCK_SPANS = ("batch", "upload", "publish", "fetch", "process")


class Recorded:
    """A tracer provider, and what came to it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def failed(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans(name) if span.status.status_code is StatusCode.ERROR]

    def one(self, name: str) -> ReadableSpan:
        """Return the only one that did not fail."""
        (span,) = [span for span in self.spans(name) if span.status.status_code is not StatusCode.ERROR]
        return span


def context_of(span: ReadableSpan) -> SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def links_of(span: ReadableSpan) -> set[int]:
    return {link.context.span_id for link in span.links}


async def sent_and_read(recorded: Recorded, records: int) -> list[memq.Record]:
    """Send records within a span of the user's, read them back, and return them."""
    runtime = Runtime()
    broker = Broker(
        BrokerSettings(port=0),
        runtime,
        {"main": MemoryHandler(runtime.clock)},
        MemoryQueue(runtime.clock),
        MemoryCoordinator(MemoryCluster()),
        traces=BrokerTraces(recorded.provider, runtime.clock, "broker-1"),
    )
    await broker.start()
    try:
        with recorded.provider.get_tracer("user").start_as_current_span("order"):
            async with memq.aio.Producer(
                broker.address, linger_ms=1_000, tracer_provider=recorded.provider, audit=False
            ) as producer:
                sent = [await producer.send("clicks", b"%d" % n, headers=[("a", b"1")]) for n in range(records)]
                await producer.flush()
                assert all(delivery.done() for delivery in sent)
        async with memq.aio.Consumer(
            broker.address, "clicks", end="end", tracer_provider=recorded.provider, audit=False
        ) as consumer:
            return [record async for batch in consumer for record in batch]
    finally:
        await broker.close()


def test_one_block_is_one_trace_and_links_to_what_the_user_did() -> None:
    recorded = Recorded()

    async def run() -> list[memq.Record]:
        async with asyncio.timeout(TIMEOUT_S):
            return await sent_and_read(recorded, 3)

    records = asyncio.run(run())
    order = context_of(recorded.one("order"))
    sends = recorded.spans("send")
    assert len(sends) == len(records) == 3
    assert [dict(span.attributes or {})["messaging.batch.message_count"] for span in sends] == [1, 1, 1]
    assert {context_of(span).trace_id for span in sends} == {order.trace_id}
    assert {span.parent.span_id for span in sends if span.parent} == {order.span_id}
    blocks = recorded.spans("batch")
    ids_of_traces = {context_of(span).trace_id for span in blocks}
    for name in BLOCK_SPANS:
        found = recorded.spans(name)
        assert found, f"there is no span '{name}'"
        assert {context_of(span).trace_id for span in found} <= ids_of_traces
    ids = {context_of(span).span_id for span in sends}
    assert {number for span in blocks for number in links_of(span)} == ids
    assert {number for span in recorded.spans("process") for number in links_of(span)} == ids
    assert {context.span_id for record in records if (context := context_in(record.headers))} == ids
    assert [record.headers[0] for record in records] == [("a", b"1")] * 3
    for span in (*recorded.spans("upload"), *recorded.spans("publish")):
        assert span.attributes is not None
        assert span.attributes["messaging.destination.name"] == "clicks"
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


def test_all_name_the_trace_of_a_block_alike() -> None:
    context = block_context(("clicks", 0, 7, 0))
    assert context == block_context(("clicks", 0, 7, 0))
    assert context.is_valid
    others = [block_context(block) for block in (("clicks", 1, 7, 0), ("clicks", 0, 8, 0), ("clicks", 0, 7, 1))]
    assert len({each.trace_id for each in (context, *others)}) == 4


def test_a_record_that_is_not_taken_is_a_failed_send() -> None:
    recorded = Recorded()
    with Cluster() as cluster:
        with memq.Producer(cluster.address, tracer_provider=recorded.provider) as producer:
            producer.send("clicks", b"1").result(TIMEOUT_S)
            with pytest.raises(TooLargeError):
                producer.send("clicks", bytes(2 << 20))
        with memq.Consumer(cluster.address, "clicks", end="end", tracer_provider=recorded.provider) as consumer:
            assert [record.value for batch in consumer for record in batch] == [b"1"]
    assert [dict(span.attributes or {})["error.type"] for span in recorded.failed("send")] == ["too-large"]
    assert len(recorded.spans("send")) == 2
    assert recorded.one("process").end_time is not None


def names_of(contexts: Iterable[SpanContext]) -> set[tuple[int, int]]:
    return {(context.trace_id, context.span_id) for context in contexts}


def check_one_call(recorded: Recorded, records: int) -> None:
    """The call is one span in the user's trace; it and the spans of its blocks, more than one, link to each other."""
    order, send = context_of(recorded.one("order")), recorded.one("send")
    assert send.parent is not None
    assert send.parent.span_id == order.span_id
    assert dict(send.attributes or {})["messaging.batch.message_count"] == records
    blocks = recorded.spans("batch")
    assert len(blocks) > 1
    assert sum(int(str(dict(span.attributes or {})["messaging.batch.message_count"])) for span in blocks) == records
    assert names_of(span.parent for span in blocks if span.parent) == names_of(link.context for link in send.links)
    assert all(names_of(link.context for link in span.links) == names_of([context_of(send)]) for span in blocks)


def test_a_call_of_send_many_is_one_span() -> None:
    recorded = Recorded()
    order = recorded.provider.get_tracer("user").start_as_current_span("order")
    with (
        Cluster() as cluster,
        memq.Producer(cluster.address, tracer_provider=recorded.provider, block_bytes=1_024, audit=False) as producer,
    ):
        with order:
            deliveries = producer.send_many("clicks", [bytes(400)] * 10)
        assert sum(delivery.result(TIMEOUT_S).records for delivery in deliveries) == 10
        with pytest.raises(TooLargeError):
            producer.send_many("clicks", [bytes(2 << 20)])
        assert all(not record.headers for record in cluster.records("clicks"))
    check_one_call(recorded, 10)
    (failed,) = recorded.failed("send")
    assert dict(failed.attributes or {})["error.type"] == "too-large"


def test_a_span_has_a_bounded_number_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LINKS_MAX", 3)
    recorded = Recorded()
    with (
        Cluster() as cluster,
        memq.Producer(cluster.address, tracer_provider=recorded.provider, block_bytes=1_024, audit=False) as producer,
    ):
        for delivery in producer.send_many("clicks", [bytes(400)] * 20):
            delivery.result(TIMEOUT_S)
    assert len(recorded.spans("batch")) > 3
    assert len(recorded.one("send").links) == 3


def test_a_call_of_send_many_is_one_span_with_asyncio_too() -> None:
    recorded = Recorded()

    async def run(address: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            async with memq.aio.Producer(
                address, tracer_provider=recorded.provider, block_bytes=1_024, audit=False
            ) as producer:
                with recorded.provider.get_tracer("user").start_as_current_span("order"):
                    await producer.send_many("clicks", [bytes(400)] * 10, keys=[b"%d" % n for n in range(10)])

    with Cluster() as cluster:
        asyncio.run(run(cluster.address))
    check_one_call(recorded, 10)


def test_a_batch_links_once_to_each_context_that_its_records_carry() -> None:
    recorded = Recorded()
    carried = [("traceparent", b"00-%032x-%016x-01" % (7, 9))]
    with Cluster() as cluster:
        with memq.Producer(cluster.address, linger_ms=1_000, audit=False) as producer:
            for headers in (carried, None, carried):
                producer.send("clicks", b"v", headers=headers)
        with memq.Consumer(
            cluster.address, "clicks", group="g", tracer_provider=recorded.provider, audit=False
        ) as consumer:
            batch = consumer.poll(10)
            assert batch is not None
            assert len(batch) == 3
            assert recorded.spans("process") == []
    process, fetch = recorded.one("process"), recorded.one("fetch")
    assert [link.context.span_id for link in process.links] == [9]
    assert dict(process.attributes or {})["messaging.consumer.group.name"] == "g"
    assert dict(process.attributes or {})["messaging.batch.message_count"] == 3
    assert process.parent is not None
    assert context_of(process).trace_id == context_of(fetch).trace_id
    assert dict(fetch.attributes or {})["memq.object"]


@pytest.mark.thorough
def test_client_without_a_tracer_provider_imports_no_opentelemetry() -> None:
    code = """
import sys
import memq
from memq.testing import Cluster
with Cluster() as cluster:
    with memq.Producer(cluster.address) as producer:
        producer.send("clicks", b"1").result(60)
        assert "send_many" not in vars(producer)
    with memq.Consumer(cluster.address, "clicks", end="end") as consumer:
        assert len(list(consumer)) == 1
        assert "poll" not in vars(consumer)
found = sorted(name for name in sys.modules if name.startswith("opentelemetry"))
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)
