"""The `send` span of a call: it ends with the call and the last of its blocks, and links to each of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from memq.client.observers import traces
from memq.client.observers.traces import ProducerTraces
from memq.client.producer.delivery import Ack, Delivery
from memq.errors import MemqError, TimedOutError, UnreachableError
from memq.observe.traces import block_context
from memq.protocol.frames import AckLevel
from tests.component.test_traces import Recorded, context_of, links_of

LATE = TimedOutError("no ack in time")


@dataclass
class Wall:
    """A clock that the test sets."""

    ms: int = 1_000

    def wall_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1_000


def ack(first: int, records: int = 1) -> Ack:
    return Ack("clicks", 3, 0xAB, first, records, AckLevel.ALL)


def link_to(first: int) -> int:
    return block_context(("clicks", 3, 0xAB, first)).span_id


def settle(delivery: Delivery, outcome: Ack | MemqError) -> None:
    for callback in delivery.settle(outcome):
        callback()


def times_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time // 1_000_000, span.end_time // 1_000_000


def error_of(span: ReadableSpan) -> object:
    return dict(span.attributes or {}).get("error.type")


def test_a_send_ends_with_its_last_block_and_links_to_all_of_them() -> None:
    recorded, wall = Recorded(), Wall()
    tracing = ProducerTraces(recorded.provider, wall)
    one, other = Delivery(), Delivery()
    with tracing.sending("clicks", 3) as sent:
        tracing.taken(sent, [one, one, other])
    wall.ms = 2_000
    settle(one, ack(0, 2))
    assert recorded.spans("send") == []
    batch = recorded.one("batch")
    assert times_of(batch) == (1_000, 2_000)
    assert batch.parent is not None
    assert batch.parent.span_id == link_to(0)
    assert dict(batch.attributes or {}) == {
        "messaging.system": "memq",
        "messaging.destination.name": "clicks",
        "messaging.destination.partition.id": "3",
        "messaging.batch.message_count": 2,
        "memq.producer.id": "00000000000000ab",
        "memq.sequence.first": 0,
    }
    wall.ms = 3_000
    settle(other, ack(2))
    send = recorded.one("send")
    assert (times_of(send), links_of(send)) == ((1_000, 3_000), {link_to(0), link_to(2)})
    assert [links_of(span) for span in recorded.spans("batch")] == [{context_of(send).span_id}] * 2
    assert (len(send.links), error_of(send)) == (2, None)


def test_a_send_does_not_end_before_its_call() -> None:
    recorded = Recorded()
    tracing = ProducerTraces(recorded.provider, Wall())
    early, late = Delivery(), Delivery()
    settle(early, ack(0))
    with tracing.sending("clicks", 2) as sent:
        tracing.taken(sent, [early, late])
        settle(late, ack(1))
        assert recorded.spans("send") == []
    assert links_of(recorded.one("send")) == {link_to(0), link_to(1)}
    with tracing.sending("clicks"):
        pass
    assert len(recorded.spans("send")) == 2, "one without a block ends with its call"


@pytest.mark.parametrize(
    ("first", "second", "own", "expected"),
    [
        (LATE, ack(1), None, LATE.code),
        (ack(0), LATE, None, LATE.code),
        (LATE, UnreachableError("gone"), None, LATE.code),
        (LATE, ack(1), ValueError("its own"), "ValueError"),
        (ack(0), ack(1), ValueError("its own"), "ValueError"),
    ],
)
def test_a_send_fails_with_the_error_of_its_call_or_else_of_its_first_block_that_failed(
    first: Ack | MemqError, second: Ack | MemqError, own: Exception | None, expected: str
) -> None:
    recorded = Recorded()
    tracing = ProducerTraces(recorded.provider, Wall())
    blocks = [Delivery(), Delivery()]

    def send() -> None:
        with tracing.sending("clicks", 2) as sent:
            tracing.taken(sent, blocks)
            settle(blocks[0], first)
            if own is not None:
                raise own

    if own is None:
        send()
    else:
        with pytest.raises(ValueError, match="its own"):
            send()
    settle(blocks[1], second)
    (span,) = recorded.failed("send")
    assert error_of(span) == expected
    assert len(recorded.spans("batch")) == sum(isinstance(each, Ack) for each in (first, second))


def test_so_many_sends_wait_for_a_block_and_further_ones_end_with_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "SPANS_MAX", 2)
    recorded = Recorded()
    tracing = ProducerTraces(recorded.provider, Wall())
    block = Delivery()
    for _ in range(3):
        with tracing.sending("clicks") as sent:
            tracing.taken(sent, [block])
    assert [links_of(span) for span in recorded.spans("send")] == [set()]
    settle(block, ack(0))
    assert [links_of(span) for span in recorded.spans("send")] == [set(), {link_to(0)}, {link_to(0)}]
    assert len(recorded.one("batch").links) == 2


def test_the_context_of_a_record_takes_the_place_of_any_other() -> None:
    tracing = ProducerTraces(Recorded().provider, Wall())
    with tracing.sending("clicks") as sent:
        own = sent.headers(None)
        assert [name for name, _ in own] == ["traceparent"]
        given = [("traceparent", b"of the caller"), ("a", b"1"), ("tracestate", b"x=y")]
        assert sent.headers(given) == [("a", b"1"), *own]
