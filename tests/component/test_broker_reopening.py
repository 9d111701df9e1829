"""A partition that is opened again, on virtual time: its owner's memory, and a log with a damaged entry."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from memq.broker.partition import known_blocks
from memq.broker.partition.known_blocks import RECENT_BATCHES
from memq.broker.partition.opening import LOST_RETRY_S
from memq.broker.partition.ownership import Phase
from memq.errors import LogCutError
from memq.format.pointer import Pointer, decode_pointer, encode_pointer
from memq.limits import MIB
from memq.notification import Entries, Publication
from memq.protocol.admin_messages import AdminRequest, BeginProducer
from memq.protocol.frames import Api
from memq.protocol.messages import Close
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, TopicSettings, read_partitions
from tests.brokers import PRODUCER, block_of, log_lines, write_frame
from tests.component.cluster_rig import Rig
from tests.component.served_brokers import Served, open_of, served
from tests.memory_network import Client
from tests.partition_owners import READ, Owner
from tests.skipping_loop import run_skipping, skip

RETENTION_MS = 600_000


async def log_of(cluster: Rig, topic: Topic) -> list[Pointer]:
    entries = await cluster.queue.read(read_partitions(topic)[0], 0, MIB)
    return [decode_pointer(entry.body) for entry in entries]


@pytest.mark.parametrize(("retention_ms", "known"), [(RETENTION_MS, []), (0, [7])])
def test_a_named_producer_is_forgotten_with_the_records_of_its_time(retention_ms: int, known: list[int]) -> None:
    async def work(at: Served) -> None:
        settings = TopicSettings(retention_ms=retention_ms)
        topic = await at.broker.partitions.create("clicks", 1, settings, exist_ok=False)
        ask = BeginProducer(topic=topic.name, topic_id=topic.id, partition=0, producer=f"{7:016x}")
        assert (await at.admin(at.call(), ask)).instance is not None
        await at.broker.close()
        found = []
        for wait_ms in (RETENTION_MS // 3, RETENTION_MS):
            await skip(wait_ms / 1_000)
            again = await at.cluster.start("one", audit=False)
            next_ = Served(at.cluster, again, at.network)
            await at.answered(next_.call(), Api.OPEN, open_of(topic), stream=9)
            pointer = (await log_of(at.cluster, topic))[-1]
            assert pointer.kind == "opened"
            found.append([each.producer for each in pointer.named])
            await again.close()
        assert found == [[7], known]

    served(work)


def test_a_damaged_entry_of_a_log_is_named_counted_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        (read,) = read_partitions(topic)
        await at.cluster.queue.publish(Publication(read, 0, 0, 1, b'{"kind": "data"'))
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        client.say(write_frame(block_of(topic, 0, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK]
        assert at.broker.services.counters.damaged_pointers == 1

    served(work)
    (line,) = log_lines(caplog)
    assert line.startswith("pointer-damaged: topic 'clicks' partition 0 offset 0: ")


def test_a_partition_whose_log_was_lost_is_opened_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        client.say(write_frame(block_of(topic, 0, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        await at.broker.close()
        (read,) = read_partitions(topic)
        entries = list(at.cluster.queue.logs[read].entries)
        at.cluster.queue.logs[read].entries.clear()
        again = await at.cluster.start("one", audit=False)
        next_ = Served(at.cluster, again, at.network)
        client = next_.call()
        client.ask(Api.OPEN, open_of(topic, sequence=1), stream=9)
        await skip(LOST_RETRY_S + 1)
        assert again.services.lost_logs.keys() == {(topic.id, 0)}
        assert client.error().code == "not-ready", "it was being opened for ten seconds"
        refused = await next_.error(client, Api.OPEN, open_of(topic, sequence=1), stream=9)
        assert (refused.code, refused.retry_after_ms) == ("log-lost", 200)
        at.cluster.queue.logs[read].entries[:] = entries
        await skip(LOST_RETRY_S + 1)
        assert again.services.lost_logs == {}
        assert (await next_.answered(client, Api.OPEN, open_of(topic, sequence=1), stream=9)).api == Api.OPEN
        assert again.failure is None

    served(work)
    assert {line.partition(":")[0] for line in log_lines(caplog)} == {"log-lost"}


def sequences_in(log: list[Pointer]) -> set[int]:
    """Return the sequences that the pointers of a log name, of all producers."""
    named = [span for pointer in log for producer in pointer.producers for span in producer.ranges]
    return {number for first, end in named for number in range(first, end)}


def test_an_owner_whose_log_lost_its_end_takes_lost_blocks_as_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    """Its own memory still has these blocks: an ack from there would be an ack of records that are in no log."""

    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        for sequence in (0, 1):
            client.say(write_frame(block_of(topic, sequence, [b"v"], producer=PRODUCER), stream=9))
            await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK, Api.ACK]
        del at.cluster.queue.logs[read_partitions(topic)[0]].entries[-1:]
        client.say(write_frame(block_of(topic, 2, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.REDIRECT]
        await at.answered(client, Api.OPEN, open_of(topic, sequence=1), stream=10)
        client.say(write_frame(block_of(topic, 1, [b"v"], producer=PRODUCER), stream=10))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK]
        assert sequences_in(await log_of(at.cluster, topic)) == {0, 1, 2}

    served(work)
    lost = "topic 'clicks' partition 0: the queue put a pointer at offset 2, below 3"
    assert log_lines(caplog)[0].startswith(f"log-lost: {lost}")


def test_an_opening_whose_log_was_cut_behind_its_read_begins_again() -> None:
    """It has read blocks that are in no log any more: an owner with this knowledge would ack their copies."""

    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        for sequence in (0, 1):
            client.say(write_frame(block_of(topic, sequence, [b"v"], producer=PRODUCER), stream=9))
            await skip(1)
        await at.broker.close()
        queue, log = at.cluster.queue, at.cluster.queue.logs[read_partitions(topic)[0]]
        publish, left = queue.publish, len(log.entries) - 1

        async def cut(publication: Publication) -> int:
            if decode_pointer(publication.body).kind == "opened":
                queue.publish = publish  # type: ignore[method-assign]
                del log.entries[left:]
            return await publish(publication)

        queue.publish = cut  # type: ignore[method-assign]  # a log that is cut between the read and the publish
        again = await at.cluster.start("one", audit=False)
        next_ = Served(at.cluster, again, at.network)
        client = next_.call()
        client.ask(Api.OPEN, open_of(topic, sequence=1), stream=9)
        await skip(LOST_RETRY_S + 1)
        assert client.error().code == "not-ready"
        await next_.answered(client, Api.OPEN, open_of(topic, sequence=1), stream=9)
        client.say(write_frame(block_of(topic, 1, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK]
        assert sequences_in(await log_of(at.cluster, topic)) == {0, 1}

    served(work)


def test_an_owner_whose_log_was_replaced_says_so_acks_nothing_and_drains(caplog: pytest.LogCaptureFixture) -> None:
    cut = False

    async def work(at: Served) -> None:
        nonlocal cut
        topic, client = await at.topic(), at.call()
        queue, read = at.cluster.queue, at.cluster.queue.read

        async def shown(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            if cut:
                raise LogCutError("the end is 1, after it was 2")
            return await read(partition, offset, bytes_max)

        queue.read = shown  # type: ignore[method-assign]  # a log that is replaced
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        client.say(write_frame(block_of(topic, 0, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK]
        await skip(60)  # paused
        cut = True
        for sequence in (1, 2):
            client.say(write_frame(block_of(topic, sequence, [b"v"], producer=PRODUCER), stream=9))
            await skip(1)
        assert Api.ACK not in {frame.api for frame in client.heard()}
        assert at.broker.services.lost_logs.keys() == {(topic.id, 0)}
        assert (await at.error(client, Api.CLOSE, Close(next_sequence=3), stream=9)).code == "log-lost"
        ask = BeginProducer(topic=topic.name, topic_id=topic.id, partition=0, producer=f"{8:016x}")
        assert (await at.error(at.call(), Api.ADMIN, AdminRequest(ask=ask))).code == "log-lost"
        async with asyncio.timeout(5):
            await at.broker.drain()
        assert at.broker.held_blocks() == []
        assert at.broker.failure is None

    served(work)
    assert "log-lost: topic 'clicks' partition 0: the end is 1, after it was 2; restart" in log_lines(caplog)[0]


def test_an_end_that_comes_while_a_lost_log_is_opened_is_refused_and_holds_up_no_drain() -> None:
    cut = False

    async def work(at: Served) -> None:
        nonlocal cut
        topic, client = await at.topic(), at.call()
        queue, read = at.cluster.queue, at.cluster.queue.read
        answers = asyncio.Event()
        answers.set()

        async def shown(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            if cut:
                await answers.wait()
                raise LogCutError("the end is 1, after it was 2")
            return await read(partition, offset, bytes_max)

        queue.read = shown  # type: ignore[method-assign]  # a log that is replaced
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        client.say(write_frame(block_of(topic, 0, [b"v"], producer=PRODUCER), stream=9))
        await skip(60)  # paused
        cut = True
        client.say(write_frame(block_of(topic, 1, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        assert at.broker.services.lost_logs.keys() == {(topic.id, 0)}
        answers.clear()
        await skip(LOST_RETRY_S)
        assert at.broker.services.lost_logs == {}, "the next try has begun"
        client.heard()
        client.ask(Api.CLOSE, Close(next_sequence=2), stream=9)
        await skip(1)
        answers.set()
        await skip(1)
        assert client.error().code == "log-cut"
        async with asyncio.timeout(5):
            await at.broker.drain()

    served(work)


def test_a_comparison_that_finds_the_log_cut_ends_the_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """It would be repeated for half of the sweep's safety age, and a drain would wait for it."""

    async def work() -> None:
        owner = Owner()
        owner.own.become(Phase.OWNING)
        await owner.queue.create([READ], 30_000)

        compared = 0

        async def compare() -> None:
            nonlocal compared
            compared += 1
            assert compared == 1, "it is compared again"
            raise LogCutError("the end is 1, after it was 2")

        with pytest.raises(LogCutError):
            await owner.publisher.publish(owner.batch, 0, compare=compare)
        assert owner.own.phase is Phase.FENCED

    run_skipping(work())
    assert [line.partition(":")[0] for line in log_lines(caplog)] == ["log-lost"]


@pytest.mark.parametrize("others", [1, 5, 40])
def test_an_opening_passes_over_what_other_partitions_put_into_its_log_for_long(others: int) -> None:
    """Its own last pointer lies before all of theirs, and all are older than what an opening reads at first."""

    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        (read,) = read_partitions(topic)
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        client.say(write_frame(block_of(topic, 0, [b"v", b"w"], producer=PRODUCER), stream=9))
        await skip(1)
        await at.broker.close()
        (own, data) = await log_of(at.cluster, topic)
        other = msgspec.structs.replace(own, partition=1)
        for _ in range(others):
            now_ms = at.cluster.runtime.clock.wall_ms()
            await at.cluster.queue.publish(Publication(read, 1, 1, now_ms, encode_pointer(other)))
        await skip(topic.settings.dedup_window_ms / 1_000 + CLOCK_ERROR_MS / 1_000 + 60)
        again = await at.cluster.start("one", audit=False)
        next_ = Served(at.cluster, again, at.network)
        await at.answered(next_.call(), Api.OPEN, open_of(topic, sequence=2), stream=9)
        opened = (await log_of(at.cluster, topic))[-1]
        assert (opened.kind, opened.partition, opened.epoch) == ("opened", 0, 2)
        assert (opened.totals.records, opened.totals.bytes) == (2, data.stored_bytes)

    served(work)


@pytest.mark.parametrize("named", [True, False])
def test_the_end_of_an_epoch_says_since_when_named_producers_are_remembered(named: bool) -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        ask = BeginProducer(topic=topic.name, topic_id=topic.id, partition=0, producer=f"{7:016x}")
        if named:
            assert (await at.admin(client, ask)).instance is not None
        else:
            await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        await skip(30)
        await at.broker.drain()
        entries = await at.cluster.queue.read(read_partitions(topic)[0], 0, MIB)
        opened_ms = [entry.time_ms for entry in entries if decode_pointer(entry.body).kind == "opened"][-1]
        last = decode_pointer(entries[-1].body)
        assert (last.kind, last.named_ms) == ("closed", opened_ms if named else 0)

    served(work)


def test_higher_epoch_that_a_comparison_reads_ends_the_epoch_before_a_publish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        for number in range(RECENT_BATCHES + 2):
            client.say(write_frame(block_of(topic, number, [b"v"], producer=PRODUCER), stream=9))
            await skip(0.2)
        assert {frame.api for frame in client.heard()} == {Api.ACK}
        (read,) = read_partitions(topic)
        higher = msgspec.structs.replace((await log_of(at.cluster, topic))[0], epoch=2, broker="two")
        now_ms = at.cluster.runtime.clock.wall_ms()
        await at.cluster.queue.publish(Publication(read, 0, 2, now_ms, encode_pointer(higher)))
        await at.answered(client, Api.OPEN, open_of(topic), stream=8)
        client.say(write_frame(block_of(topic, 0, [b"v"], producer=PRODUCER), stream=8))
        await skip(0.2)
        assert [frame.api for frame in client.heard()] == [Api.THROTTLE], "it is compared first"
        client.say(write_frame(block_of(topic, RECENT_BATCHES + 2, [b"v"], producer=PRODUCER), stream=9))
        await skip(0.2)
        assert {frame.api for frame in client.heard()} == {Api.REDIRECT}
        assert (at.broker.services.counters.fenced, at.broker.services.counters.publish_retries) == (1, 0)

    served(work)
    assert [line.partition(":")[0] for line in log_lines(caplog)] == ["fenced"], "not refused by the queue"


def test_so_many_repeated_blocks_are_looked_up_at_once_and_the_next_ones_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "CLAIMS_MAX", 1)

    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        for producer in range(1, RECENT_BATCHES + 4):
            await sent(at, client, topic, producer)
        await skip(1)
        client.heard()
        found = []
        for _ in range(3):
            for producer in (1, 2):
                await at.answered(client, Api.OPEN, open_of(topic, producer=f"{producer:016x}"), stream=producer)
            for producer in (1, 2):
                client.say(write_frame(block_of(topic, 0, [b"v"], producer=producer), stream=producer))
            await skip(0.2)
            found.append([(frame.stream, frame.api) for frame in client.heard()])
        wait, done = Api.THROTTLE, Api.ACK
        assert found == [[(1, wait), (2, wait)], [(1, done), (2, wait)], [(1, done), (2, done)]]

    served(work)


async def sent(at: Served, client: Client, topic: Topic, producer: int) -> None:
    """Open a stream of a producer and send its first block."""
    client.ask(Api.OPEN, open_of(topic, producer=f"{producer:016x}"), stream=producer)
    await skip(0.1)
    assert Api.OPEN in [frame.api for frame in client.heard()]
    client.say(write_frame(block_of(topic, 0, [b"v"], producer=producer), stream=producer))
