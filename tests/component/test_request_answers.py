"""Answers to requests, on virtual time: their time, their client, their content, and the end of a client."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from memq import __version__
from memq.broker.api import requests
from memq.broker.api.requests import ANSWERS_SHARE, HELD_MS_MAX
from memq.broker.ingest.quotas import ClientLimits, RatePerSecond
from memq.errors import DamagedMessageError
from memq.protocol.admin_messages import AdminRequest, CreateTopic
from memq.protocol.frames import HELLO_MAGIC, PREFIX, VERSIONS, Api, encode_forward, encode_frame
from memq.protocol.group_messages import CommitRequest, WireCommitted
from memq.protocol.messages import (
    Forward,
    Hello,
    HelloAnswer,
    MetadataRequest,
    Nack,
    PartitionRef,
    decode_message,
    encode_message,
    error_of,
)
from tests.brokers import PRODUCER, block_of, log_lines
from tests.component.served_brokers import MEMORY_BYTES, Served, open_of, served
from tests.memory_network import FULL_BYTES, Client
from tests.skipping_loop import now_s, skip

LENT_BYTES = MEMORY_BYTES // ANSWERS_SHARE // 2  # to all answers of READ together


# ---- HELLO -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("audit", "audit_ms"), [(True, 7_000), (False, 0)])
def test_a_client_that_says_hello_gets_the_cluster_the_broker_and_when_to_report(audit: bool, audit_ms: int) -> None:
    async def work(at: Served) -> None:
        client = at.network.call(at.broker.address)
        hello = Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1])
        client.say(encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello)))
        (frame,) = client.heard()
        assert (frame.api, frame.stream, frame.argument) == (Api.HELLO, 0, HELLO_MAGIC)
        answer = decode_message(frame.body, HelloAnswer)
        assert (answer.version, answer.broker, answer.cluster) == (VERSIONS[1], "one", "memq")
        assert (answer.memq, answer.audit_ms) == (__version__, audit_ms)

    served(work, audit=audit, audit_interval_ms=7_000)


@pytest.mark.parametrize("position", [b"8", b'7"'])
def test_a_request_that_changed_on_its_way_is_refused_and_may_be_sent_again(position: bytes) -> None:
    """One is another position, which would be stored; the other is no JSON, and has lost its end."""

    async def work(at: Served) -> None:
        client = at.network.call(at.broker.address)
        hello = Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1])
        client.say(encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello)))
        topic = await at.topic()
        ref = PartitionRef(topic=topic.name, topic_id=topic.id, partition=0)
        sent = CommitRequest(group="g", positions=[WireCommitted(partition=ref, pointer_offset=7, record_index=0)])
        body = encode_message(sent)
        changed = body.replace(b'"pointer_offset":7', b'"pointer_offset":' + position)
        if position == b'7"':
            changed = changed[:-4]
        client.heard()
        client.say(encode_frame(Api.COMMIT, 0, 1, changed))
        await skip(0.01)
        (frame,) = client.heard()
        error = error_of(decode_message(frame.body, Nack))
        assert isinstance(error, DamagedMessageError)
        assert "CommitRequest message" in str(error)
        client.say(encode_frame(Api.COMMIT, 0, 2, body))
        await skip(0.01)
        (frame,) = client.heard()
        assert (frame.api, frame.argument) == (Api.COMMIT, 2)

    served(work)


# ---- clients that read slowly --------------------------------------------------------------------------


def deaf(client: Client) -> None:
    """Let a client take nothing any more, and its socket be full."""
    client.wire.deaf = True
    client.wire.write(bytes(FULL_BYTES + 1))


def reading_again(client: Client) -> None:
    client.wire.deaf = False
    client.wire.taken.clear()
    del client.wire.waiting[: FULL_BYTES + 1]
    client.wire.take(len(client.wire.waiting))


def said_unread(client: Client, *frames: bytes) -> None:
    """Let frames arrive that the broker had read before it noticed that the client reads nothing."""
    client.wire.reading = True
    client.say(*frames)


def test_a_client_that_reads_no_answers_has_no_request_done_but_for_its_streams() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        deaf(client)
        create = AdminRequest(ask=CreateTopic(name="late"))
        said_unread(
            client,
            encode_frame(Api.ADMIN, 0, 1, encode_message(create)),
            encode_frame(Api.METADATA, 0, 2, b"{"),
            encode_frame(Api.OPEN, 3, 3, encode_message(open_of(topic))),
            encode_frame(Api.OPEN, 4, 4, b"{"),
        )
        await skip(5)
        assert [each.name for each in at.broker.partitions.topics()] == ["clicks"]
        reading_again(client)
        assert [(frame.api, frame.argument) for frame in client.heard()] == [(Api.ERROR, 4), (Api.OPEN, 3)]
        await skip(1)
        assert sorted((frame.api, frame.argument) for frame in client.heard()) == [(Api.ADMIN, 1), (Api.ERROR, 2)]
        assert [each.name for each in at.broker.partitions.topics()] == ["clicks", "late"]

    served(work)


def test_memory_of_an_answer_is_returned_when_its_client_has_read_it() -> None:
    async def work(at: Served) -> None:
        slow, other = at.call(), at.call()
        ask = await at.stored("k/1", LENT_BYTES)
        slow.wire.deaf = True
        slow.ask(Api.READ, ask)
        await skip(1)
        assert len(slow.wire.waiting) == LENT_BYTES + PREFIX.size
        other.ask(Api.READ, ask)
        await skip(5)
        assert other.heard() == []
        slow.wire.take(LENT_BYTES)
        await skip(1)
        assert [len(frame.body) for frame in other.heard()] == [LENT_BYTES]

    served(work)


def test_a_broker_keeps_as_much_freed_memory_as_its_answers_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(requests, "keep_freed_blocks", kept.append)

    async def work(at: Served) -> None:
        """The broker has begun."""

    served(work)
    assert kept == [MEMORY_BYTES // ANSWERS_SHARE]


# ---- clients that leave --------------------------------------------------------------------------------


class Hanging:
    """Reads of a store that hang; `ended` counts those that were given up."""

    def __init__(self, at: Served) -> None:
        self.begun = self.ended = 0
        self.gate = asyncio.Event()
        at.cluster.store.get_range = self.get_range  # type: ignore[method-assign]

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.begun += 1
        try:
            await self.gate.wait()
        finally:
            self.ended += 1
        return bytes(length)


@pytest.mark.parametrize("closes", [True, False])
def test_request_is_cancelled_when_its_client_or_the_broker_closes(closes: bool) -> None:
    async def work(at: Served) -> None:
        client, ask = at.call(), await at.stored("k/1", 10)
        hanging = Hanging(at)
        client.ask(Api.READ, ask)
        await skip(1)
        assert (hanging.begun, hanging.ended) == (1, 0)
        if closes:
            await at.broker.close()
        else:
            client.wire.abort()
            await skip(0.1)
        assert (hanging.begun, hanging.ended) == (1, 1)

    served(work)


def test_an_answer_that_comes_behind_the_end_of_its_connection_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def work(at: Served) -> None:
        client, ask = at.call(), await at.stored("k/1", 10)
        hanging = Hanging(at)
        client.ask(Api.READ, ask)
        await skip(1)
        client.wire.deaf = True
        client.say(PREFIX.pack(0, 99, 0, 0, 1))  # no api: the connection is refused, and waits until that is read
        assert not client.is_gone()
        hanging.gate.set()
        await skip(1)
        client.wire.take(1_000)
        assert [frame.api for frame in client.heard()] == [Api.ERROR]

    served(work)
    assert log_lines(caplog, logging.ERROR) == []


def test_connections_of_a_client_are_counted_until_they_end() -> None:
    async def work(at: Served) -> None:
        first, second = at.call("loader"), at.call("loader")
        assert at.broker.services.limits.clients()[1][2] == 2
        first.wire.abort()
        await skip(0.1)
        assert at.broker.services.limits.clients()[1][2] == 1
        second.wire.abort()
        await skip(0.1)
        assert at.broker.services.limits.clients()[1][2] == 0

    served(work, ClientLimits(named={"loader": RatePerSecond("hard", requests_s=10)}))


# ---- limits of clients ---------------------------------------------------------------------------------


async def times_of(client: Client, count: int, *, lasting_s: float) -> list[float]:
    """Ask for METADATA so many times at once; return when answers came, errors as -1."""
    ask = encode_message(MetadataRequest(topics=[]))
    begin_s, found = now_s(), []
    client.say(*(encode_frame(Api.METADATA, 0, number, ask) for number in range(count)))
    while now_s() - begin_s < lasting_s:
        found += [-1.0 if frame.api == Api.ERROR else now_s() - begin_s for frame in client.heard()]
        await skip(0.01)
    return found


def test_requests_over_a_soft_limit_wait_as_long_as_it_takes_and_three_seconds_at_most() -> None:
    async def work(at: Served) -> None:
        client = at.call("slow")
        found = await times_of(client, 3, lasting_s=8)
        assert found == pytest.approx([0.01, 0.01, 0.11], abs=0.02), "two tokens, and a round of a tenth of a second"
        assert len(await times_of(client, 12, lasting_s=0.2)) == 12, "what comes at once waits for the same round"
        assert await times_of(client, 1, lasting_s=8) == pytest.approx([HELD_MS_MAX / 1000], abs=0.02)
        assert await times_of(client, 1, lasting_s=1) == pytest.approx([0.01]), "the debt is worked off"

    served(work, ClientLimits(named={"slow": RatePerSecond("soft", requests_s=2)}))


def test_a_request_over_a_hard_limit_is_refused_and_costs_nothing() -> None:
    async def work(at: Served) -> None:
        client = at.call("busy")
        assert (await times_of(client, 5, lasting_s=0.1)).count(-1.0) == 3
        await skip(0.5)
        assert (await times_of(client, 3, lasting_s=0.1)).count(-1.0) == 1, "1.2 tokens came in 0.6 seconds"

    served(work, ClientLimits(named={"busy": RatePerSecond("hard", requests_s=2)}))


def test_bytes_of_answers_count_and_those_of_requests_do_not() -> None:
    async def work(at: Served) -> None:
        client, ask = at.call("reader"), await at.stored("k/1", 10_000)
        for _ in range(4):  # each of 20 bytes or so
            assert (await times_of(client, 1, lasting_s=0.02)) != [-1.0]
        assert (await at.answered(client, Api.READ, ask)).api == Api.READ
        refused = await at.error(client, Api.READ, ask)
        assert refused.code == "over-limit"
        assert 8_000 < refused.retry_after_ms < 11_000, "ten times what a second brings is owed"
        heartbeat = encode_frame(Api.HEARTBEAT, 0, 5, b"{")
        client.say(heartbeat)
        await skip(0.01)
        assert client.error().code == "damaged-message", "what keeps a group alive is not limited"

    served(work, ClientLimits(named={"reader": RatePerSecond("hard", bytes_s=1_000)}))


# ---- forwarded blocks ----------------------------------------------------------------------------------


def test_a_forwarded_block_is_answered_on_the_connection_and_its_bytes_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        monkeypatch.setattr(requests, "PENDING_BYTES_MAX", 0)
        for partition, api in ((0, Api.FORWARD), (5, Api.ERROR)):
            ask = Forward(topic=topic.name, topic_id=topic.id, partition=partition, absent_ms=0)
            block = block_of(topic, 0, [b"v"], producer=PRODUCER)
            client.say(encode_forward(41, ask, len(block)) + block)
            await skip(1)
            (frame,) = client.heard()
            assert (frame.api, frame.stream, frame.argument) == (api, 0, 41)
        pool = at.broker.services.pool
        at.broker.services.recent_batches.clear()
        assert pool.leased_bytes == at.broker.intake.slab.size

    served(work)


def test_a_forwarded_block_without_the_checksum_that_its_broker_sends_is_refused() -> None:
    """A broker of an earlier release sends none."""

    async def work(at: Served) -> None:
        topic, old, new = await at.topic(), at.network.call(at.broker.address), at.call()
        hello = Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1])
        old.say(encode_frame(Api.HELLO, 0, HELLO_MAGIC, msgspec.json.encode(hello)))
        old.heard()
        ask = Forward(topic=topic.name, topic_id=topic.id, partition=0, absent_ms=0)
        head, block = msgspec.json.encode(ask), block_of(topic, 0, [b"v"], producer=PRODUCER)
        body = len(head).to_bytes(2, "little") + head + block
        for client, code in ((new, "damaged-message"), (old, "")):
            client.say(encode_frame(Api.FORWARD, 0, 41, body))
            await skip(1)
            (frame,) = client.heard()
            assert (decode_message(frame.body, Nack).code if frame.api == Api.ERROR else "") == code

    served(work)
