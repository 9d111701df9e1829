"""`memq audit` and records that brokers hold: in a ring, for a next owner, on disk; around a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memq.audit.collector import audit
from memq.audit.finding import Kind, Outcome
from memq.audit.held import AskHeld, HeldAnswer, Sought
from memq.audit.opened_topic import opened_topic
from memq.audit.verdict import Verdict
from memq.broker.api import cluster_requests
from memq.broker.broker import Broker
from memq.broker.spool.files import SpoolFiles, sizes_in
from memq.errors import SpoolError
from memq.format.pointer import decode_pointer
from memq.limits import SOUGHT_RANGES_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, DescribeHeld, WireRecords
from memq.protocol.frames import AckLevel, Api, encode_frame
from memq.protocol.messages import Close, Nack, decode_message, encode_message
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition, Topic, TopicSettings
from tests.brokers import PRODUCER, BareClient, block_of, until, write_frame
from tests.component.cluster_rig import Rig, rig
from tests.component.faulty_brokers import gate_of, left_behind, replayed, seize, taken

LATER_MS = 3_600_000  # when no late pointer can land any more


async def said(broker: Broker, *, later_ms: int = 0, between: AskHeld | None = None) -> Verdict:
    """Audit the topic through a broker; `between` stands in the way of the question to all brokers."""
    async with opened_topic(broker.address, "clicks") as opened:
        ask = opened.ask_held if between is None else between
        now_ms = Runtime().clock.wall_ms() + later_ms
        return await audit(opened.topic, opened.queue, opened.read, now_ms, ask_held=ask)


def counts(verdict: Verdict) -> dict[Kind, int]:
    """Return how many records have no pointer, by what that means."""
    kinds = (Kind.LOST, Kind.HELD, Kind.HOLE)
    return {kind: verdict.finding(kind).count for kind in kinds if verdict.finding(kind).count}


async def ended(client: BareClient, next_sequence: int, *, stream: int = 1) -> None:
    """Say where the producer ends, and wait until that is in the queue."""
    client.write(encode_frame(Api.CLOSE, stream, 5, encode_message(Close(next_sequence=next_sequence))))
    while (await client.frame()).api != Api.CLOSE:
        pass


async def ended_at(broker: Broker, topic: Topic, next_sequence: int) -> None:
    """Have the producer continue at a broker, and end there."""
    client = await BareClient.connect(broker)
    await client.open(topic, acks=AckLevel.ONE, sequence=next_sequence, stream=3)
    await ended(client, next_sequence, stream=3)
    await client.close()


async def published(cluster: Rig, topic: Topic, count: int) -> None:
    """Wait until so many records are in the queue."""
    read = ReadPartition(topic.name, topic.id, 0)

    def there() -> bool:
        return sum(decode_pointer(entry.body).records for entry in cluster.queue.log(read).entries) >= count

    await until(there)


def test_records_in_a_ring_are_held_and_the_end_states_their_acks() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            gate = gate_of(cluster)
            topic, client = await taken(one, settings=TopicSettings(), blocks=2)
            await ended(client, 4)
            found = await said(one)
            assert (counts(found), found.outcome) == ({Kind.HELD: 4}, Outcome.INCOMPLETE)
            (finding,) = found.finding(Kind.HELD).findings
            assert finding.ranges == ((0, 4),)
            (pointer,) = (
                pointer
                for pointer in (decode_pointer(entry.body) for entry in cluster.queue.log(_log(topic)).entries)
                if pointer.ended
            )
            assert [end.acks for end in pointer.ended] == [1]
            gate.set()
            await published(cluster, topic, 4)
            assert (await said(one)).outcome is Outcome.CLEAN
            await client.close()

    asyncio.run(work())


def test_a_record_that_moves_to_the_queue_between_two_readings_is_neither_lost_nor_held() -> None:
    """It is in no pointer that was read before the question, and no broker holds it any more when it is asked."""

    async def work(before: bool) -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            gate = gate_of(cluster)
            _, client = await taken(one, settings=TopicSettings(), blocks=2)
            await ended(client, 4)
            async with opened_topic(one.address, "clicks") as opened:
                answers: list[HeldAnswer] = []

                async def ask(topic: Topic, sought: list[Sought]) -> HeldAnswer:
                    if not before:
                        answers.append(await opened.ask_held(topic, sought))
                    gate.set()
                    await published(cluster, topic, 4)
                    if before:
                        answers.append(await opened.ask_held(topic, sought))
                    return answers[0]

                found = await said(one, later_ms=LATER_MS, between=ask)  # type: ignore[arg-type]  # a list is given
            assert [len(answer.held) for answer in answers] == [0 if before else 1]
            assert (counts(found), found.outcome) == ({}, Outcome.CLEAN)
            await client.close()

    asyncio.run(work(True))
    asyncio.run(work(False))


def test_records_held_by_no_broker_are_lost_once_no_late_pointer_can_land() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            gate = gate_of(cluster)
            topic, client = await taken(one, settings=TopicSettings(), blocks=2)
            await one.close()  # with its memory
            await client.close()
            gate.set()
            again = await cluster.start("one")
            await ended_at(again, topic, 4)
            found = await said(again)
            assert counts(found) == {Kind.HOLE: 4}
            assert "may still land" in found.finding(Kind.HOLE).findings[0].cause
            found = await said(again, later_ms=60_000)
            assert (counts(found), found.outcome) == ({Kind.LOST: 4}, Outcome.LOST)

    asyncio.run(work())


def test_a_broker_that_is_gone_may_hold_what_was_acked_with_1_until_it_is_back_and_has_brought_it(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            two = await cluster.start("two")
            there = await seize(cluster, topic, two)
            await ended_at(two, topic, 6)
            found = await said(two, later_ms=LATER_MS)
            assert (counts(found), found.outcome) == ({Kind.HOLE: 6}, Outcome.INCOMPLETE)
            assert found.finding(Kind.HOLE).findings[0].cause == "broker 'one' may hold them, and is not there"
            gate = gate_of(cluster)
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            found = await said(two, later_ms=LATER_MS)
            assert (counts(found), again.services.counters.replayed_blocks) == ({Kind.HELD: 6}, 0), "on its disk"
            await until(lambda: len(again.partitions.forwarder) == 3)
            assert counts(await said(two, later_ms=LATER_MS)) == {Kind.HELD: 6}, "in its memory"
            gate.set()
            assert await replayed(cluster, again, topic, tmp_path) == [("two", 6)]
            assert (await said(two, later_ms=LATER_MS)).finding(Kind.HELD).count == 0
            assert (await said(two, later_ms=LATER_MS)).passed
            await there.close()

    asyncio.run(work())


def test_the_memory_of_a_broker_that_is_gone_holds_nothing_after_ten_minutes() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            gate = gate_of(cluster)
            topic, client = await taken(one, settings=TopicSettings(), blocks=1)
            await one.close()
            await client.close()
            gate.set()
            two = await cluster.start("two")
            there = await seize(cluster, topic, two)
            await ended_at(two, topic, 2)
            found = await said(two, later_ms=500_000)
            assert counts(found) == {Kind.HOLE: 2}, "it may have lost the coordinator only"
            assert counts(await said(two, later_ms=700_000)) == {Kind.LOST: 2}
            await there.close()

    asyncio.run(work())


def test_missing_records_acked_with_all_are_lost_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            two = await cluster.start("two")
            there = await seize(cluster, topic, two)
            client = await BareClient.connect(two)
            await client.open(topic, acks=AckLevel.ALL)
            client.write(write_frame(block_of(topic, 0, [b"a", b"b"])))
            while (await client.frame()).argument != 2:
                pass
            await ended(client, 5)  # as if three more had been acked
            found = await said(two)
            assert (counts(found), found.outcome) == ({Kind.LOST: 3}, Outcome.LOST)
            await client.close()
            await there.close()

    asyncio.run(work())


class FailingDisk(SpoolFiles):
    """A disk that lists its segments, and can't read them."""

    async def read(self, name: str) -> bytes:
        raise SpoolError("the disk can't read")


def test_a_segment_that_its_broker_can_not_read_leaves_its_records_in_doubt(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            (name,) = sizes_in(tmp_path)
            two = await cluster.start("two")
            there = await seize(cluster, topic, two)
            await ended_at(two, topic, 6)
            await cluster.start("one", spool=FailingDisk(tmp_path))
            found = await said(two, later_ms=LATER_MS)
            assert counts(found) == {Kind.HOLE: 6}
            assert f"segment {name} of its spool can't be read" in found.finding(Kind.HOLE).findings[0].cause
            await there.close()

    asyncio.run(work())


async def asked(client: BareClient, ask: DescribeHeld) -> AdminAnswer | Nack:
    """Send one question, and return the answer or the refusal."""
    client.write(encode_frame(Api.ADMIN, 0, 9, encode_message(AdminRequest(ask=ask))))
    frame = await client.frame()
    if frame.api == Api.ADMIN:
        return decode_message(frame.body, AdminAnswer)
    return decode_message(frame.body, Nack)


def test_a_question_has_bounds_and_a_long_answer_says_that_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_requests, "HELD_RANGES_MAX", 1)

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            gate = gate_of(cluster)
            topic, client = await taken(one, settings=TopicSettings(), blocks=2)

            def question(*ranges: tuple[int, int], broker: str = "one", topic_id: str = topic.id) -> DescribeHeld:
                sought = [WireRecords(partition=0, producer=f"{PRODUCER:016x}", ranges=list(ranges))]
                return DescribeHeld(broker=broker, topic="clicks", topic_id=topic_id, sought=sought)

            found = await asked(client, question((1, 9)))
            assert isinstance(found, AdminAnswer)
            assert found.held is not None
            assert [each.ranges for each in found.held] == [[(0, 4)]], "whole runs"
            assert found.unread == []
            await client.open(topic, acks=AckLevel.ONE, sequence=8)
            client.write(write_frame(block_of(topic, 8, [b"c"])))
            while (await client.frame()).argument != 9:
                pass
            found = await asked(client, question((0, 9)))
            assert isinstance(found, AdminAnswer)
            assert found.unread == ["it holds over 1 ranges of them"]
            many = question(*((2 * number, 2 * number + 1) for number in range(SOUGHT_RANGES_MAX + 1)))
            for wrong, code in (
                (many, "invalid-request"),
                (question((3, 3)), "invalid-request"),
                (question((0, 1), broker="two"), "not-found"),
                (question((0, 1), topic_id="f" * 32), "not-found"),
            ):
                refused = await asked(client, wrong)
                assert isinstance(refused, Nack)
                assert refused.code == code, refused
            gate.set()
            await client.close()

    asyncio.run(work())


def _log(topic: Topic) -> ReadPartition:
    return ReadPartition(topic.name, topic.id, 0)
