"""Blocks acked with 1 outlive their epoch: the next owner gets them once, and answers when they are safe."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.partition.opening import claim_epoch
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.spool import forwarding
from memq.broker.spool.unpublished_blocks import UnpublishedBlock, UnpublishedBlocks
from memq.errors import (
    DamagedMessageError,
    DrainingError,
    IdentityConflictError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    ProtocolError,
    TooOldError,
)
from memq.format.blocks.header import parse_header
from memq.format.pointer import Pointer, encode_pointer
from memq.notification import Entries, Publication
from memq.protocol.admin_messages import AdminRequest, DescribeCluster
from memq.protocol.frames import (
    HELLO_MAGIC,
    VERSIONS,
    AckLevel,
    Api,
    add_checksum,
    decode_forward,
    encode_forward,
    encode_frame,
    take_checksum,
)
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import Forward, Hello, HelloAnswer, Nack, decode_message, encode_message, error_of
from memq.runtime.network import parse_address
from memq.topic import ReadPartition, Topic, TopicSettings
from tests.brokers import PRODUCER, BareClient, block_of, write_frame
from tests.component.cluster_rig import Rig, rig
from tests.component.faulty_brokers import QUICK, gate_of, pointers, seize, seized

PATIENT = TopicSettings(stale_publish_ms=1_000, seal_when_idle=False, batch_age_ms_max=600_000)


async def until_sealed(broker: Broker, topic: Topic) -> TopicProcessor:
    """Let the loop turn until a batch is on its way to the store."""
    processors = broker.partitions.processors
    while not any(slot.sealed_ms for each in processors.values() for slot in each.ring):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    return processors[topic.id, 0]


def test_a_fenced_owner_hands_what_it_acked_with_1_to_the_next_one() -> None:
    async def work() -> None:
        async with seized(AckLevel.ONE) as found:
            found.gate.set()
            await found.one.drain()
            assert await found.records() == [("two", 3)]
            assert len(found.one.partitions.forwarder) == 0

    asyncio.run(work())


def test_a_partition_is_claimed_only_once_its_last_owner_that_lives_has_drained_it() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one, two = await cluster.start("one"), await cluster.start("two")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            name = two.services.settings.broker_id
            entry = msgspec.structs.replace(cluster.owner(topic), broker=name, session=one.services.session)
            cluster.shared.apply(cluster.shared.registry.set_assignment(entry))
            with pytest.raises(NotReadyError, match="is drained by 'one'"):
                await claim_epoch(two.services, topic, 0, 0)
            released = msgspec.structs.replace(cluster.owner(topic), session="")
            cluster.shared.apply(cluster.shared.registry.set_assignment(released))
            assert await claim_epoch(two.services, topic, 0, 0) == released.epoch + 1
            assert await claim_epoch(two.services, topic, 0, 700) == 701, "above what the queue shows, at the first try"

    asyncio.run(work())


def test_absent_blocks_are_dated_by_the_start_of_the_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes into the queue while the answer is on its way was not looked for."""

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            clock, read, asked_s = one.services.runtime.clock, one.services.queue.read, list[float]()

            async def noted(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
                asked_s.append(clock.monotonic())
                return await read(partition, offset, 1)  # a page of one entry

            one.services.queue.read = noted  # type: ignore[method-assign]  # the moments of its calls
            slab, block = one.services.pool.lease(1_000), block_of(topic, 0, [b"v"])
            assert slab is not None
            slab.view[: len(block)] = block
            held = UnpublishedBlocks(topic, 0, 0, 0.0, one.services.pool.release)
            held.add(UnpublishedBlock(parse_header(block), slab, 0, len(block)))
            one.services.pool.release(slab)  # it has a reference of its own
            for _ in range(3):
                opened = Pointer(kind="opened", cluster="c", topic="clicks", topic_id=topic.id, partition=0, epoch=1)
                body = encode_pointer(opened)
                await one.services.queue.publish(Publication(held.topic.read_partition_of(0), 0, 1, 1, body))
            brought: asyncio.Future[float] = asyncio.get_running_loop().create_future()

            async def taken(owner: object, slab: object, start: int, end: int, absent_s: float) -> None:
                brought.set_result(absent_s)
                await asyncio.get_running_loop().create_future()

            monkeypatch.setattr(forwarding, "take_forwarded", taken)
            one.partitions.forwarder.take(held)
            assert await brought <= asked_s[-1]
            assert held.read_to >= 3, "not the first page alone"

    asyncio.run(work())


def test_block_that_its_producer_resends_is_published_once() -> None:
    async def work() -> None:
        async with seized(AckLevel.ONE) as found:
            await found.there.open(found.topic, stream=1, acks=AckLevel.ONE)  # the producer: its ack was lost
            found.there.write(write_frame(block_of(found.topic, 0, [b"a", b"b", b"c"])))
            assert (await found.there.frame()).argument == 3
            found.gate.set()
            await found.one.drain()
            assert await found.records() == [("two", 3)]
            assert found.one.held_blocks() == []

    asyncio.run(work())


def test_a_copy_of_a_handed_over_block_that_was_acked_with_1_outlives_the_epoch_that_acked_it() -> None:
    """The broker that forwarded the block may die: then only this owner has it, and has acked it."""

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            gate = gate_of(cluster)
            link, now_s = await link_to(cluster, one), cluster.runtime.clock.monotonic()
            block = block_of(topic, 0, [b"a", b"b", b"c"])
            handed = asyncio.create_task(forward(link, topic, 0, memoryview(block), now_s))
            await until_sealed(one, topic)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ONE)
            client.write(write_frame(block))
            assert (await client.frame()).argument == 3
            link.close()  # its broker is killed
            with pytest.raises(MemqError):
                await handed
            two = await cluster.start("two")
            there = await seize(cluster, topic, two)
            gate.set()
            await one.drain()
            assert [(each.broker, each.records) for each in await pointers(cluster, topic) if each.records] == [
                ("two", 3)
            ]
            for each in (client, there):
                await each.close()
            await two.close()

    asyncio.run(work())


def test_a_block_acked_with_1_whose_sequences_others_have_by_now_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It can't be stored with the other one under the same identity, and is no copy that may be dropped in silence."""

    async def work() -> None:
        async with seized(AckLevel.ONE) as found:
            await found.there.open(found.topic, stream=1)
            found.there.write(write_frame(block_of(found.topic, 0, [b"x", b"y", b"z"])))
            found.gate.set()
            assert (await found.there.frame()).argument == 3
            with pytest.raises(IdentityConflictError, match=f"sequences 0 to 2 of producer {PRODUCER:016x}"):
                await found.one.drain()
            assert await found.records() == [("two", 3)]
            counters = found.one.services.counters
            assert (counters.given_up_blocks, counters.conflicting_blocks, counters.forwarded_blocks) == (1, 1, 0)

    asyncio.run(work())
    (given_up,) = [line for line in caplog.messages if line.startswith("given-up")]
    assert f"producer {PRODUCER:016x} sequences 0 to 2, acks=one" in given_up


def test_a_partition_that_comes_back_takes_its_own_blocks_and_a_drain_waits_for_them() -> None:
    async def work() -> None:
        async with seized(AckLevel.ONE) as found:
            await found.there.close()
            again = await seize(found.cluster, found.topic, found.one)
            found.gate.set()
            await found.two.close()
            await found.one.drain()
            assert await found.records() == [("one", 3)]
            await again.close()

    asyncio.run(work())


def test_a_block_of_acks_all_is_left_to_its_producer() -> None:
    async def work() -> None:
        async with seized(AckLevel.ALL) as found:
            found.gate.set()
            assert (await found.client.frame()).api == Api.REDIRECT
            await found.one.drain()
            assert await found.records() == []

    asyncio.run(work())


# ---- the receiver ------------------------------------------------------------------------------


async def link_to(cluster: Rig, broker: Broker) -> Link:
    return await connect_link(cluster.runtime, None, parse_address(broker.address))


async def forward(link: Link, topic: Topic, partition: int, block: memoryview, absent_s: float) -> None:
    absent_ms = link.clock_ms(absent_s)
    await link.forward(Forward(topic=topic.name, topic_id=topic.id, partition=partition, absent_ms=absent_ms), block)


def test_owner_answers_a_forwarded_block_after_its_pointer_and_checks_its_age() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            gate = gate_of(cluster)
            link = await link_to(cluster, one)
            now_s = cluster.runtime.clock.monotonic()
            block = memoryview(block_of(topic, 0, [b"a"]))
            work = asyncio.create_task(forward(link, topic, 0, block, now_s))
            again = asyncio.create_task(forward(link, topic, 0, block, now_s))
            await until_sealed(one, topic)
            assert not work.done()
            gate.set()
            await asyncio.gather(work, again)
            assert [each.records for each in await pointers(cluster, topic)] == [0, 1]
            await forward(link, topic, 0, block, now_s)
            assert [each.records for each in await pointers(cluster, topic)] == [0, 1], "it was there already"
            with pytest.raises(TooOldError, match="block 7 was searched for over 120000 ms ago"):
                await forward(link, topic, 0, memoryview(block_of(topic, 7, [b"a"])), now_s - 121)
            with pytest.raises(NotFoundError):
                await forward(link, topic, 5, block, now_s)
            link.close()

    asyncio.run(work())


def test_owner_seals_forwarded_blocks_without_waiting_for_more() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, PATIENT, exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ONE)
            client.write(write_frame(block_of(topic, 0, [b"a", b"b"])))
            assert (await client.frame()).argument == 2
            link = await link_to(cluster, one)
            now_s = cluster.runtime.clock.monotonic()
            handed = [
                block_of(topic, first, [b"c"], producer=77) for first in range(20)
            ]  # more than the ring has slots
            own = block_of(topic, 0, [b"a", b"b"])  # it is there already, in the open batch
            await asyncio.gather(*(forward(link, topic, 0, memoryview(block), now_s) for block in (*handed, own)))
            assert sum(each.records for each in await pointers(cluster, topic)) == 22
            link.close()
            await client.close()

    asyncio.run(work())


def test_an_owner_that_is_being_drained_says_so_and_takes_no_block() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            gate = gate_of(cluster)
            link = await link_to(cluster, one)
            now_s = cluster.runtime.clock.monotonic()
            before = asyncio.create_task(forward(link, topic, 0, memoryview(block_of(topic, 0, [b"a"])), now_s))
            processor = await until_sealed(one, topic)
            draining = asyncio.create_task(processor.drain())
            await asyncio.sleep(0)
            with pytest.raises(DrainingError, match="is being drained"):
                await forward(link, topic, 0, memoryview(block_of(topic, 1, [b"b"])), now_s)
            gate.set()
            await asyncio.gather(before, draining)
            link.close()

    asyncio.run(work())


def test_owner_that_loses_its_epoch_refuses_a_forwarded_block() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            two = await cluster.start("two")
            gate_of(cluster)
            link = await link_to(cluster, one)
            now_s = cluster.runtime.clock.monotonic()
            work = asyncio.create_task(forward(link, topic, 0, memoryview(block_of(topic, 0, [b"a"])), now_s))
            (await until_sealed(one, topic)).fail(MovedError("it moved"))
            with pytest.raises(MovedError):
                await work
            link.close()
            await two.close()

    asyncio.run(work())


def test_a_head_that_is_none_is_refused_and_so_is_what_is_no_block() -> None:
    message = Forward(topic="t", topic_id="0" * 32, partition=0, absent_ms=-5)
    frame = encode_forward(3, message, 10) + b"0123456789"
    body = frame[16:]
    found, start = decode_forward(body)
    assert (found, body[start:]) == (msgspec.structs.replace(message, request=3), b"0123456789")
    for wrong in (b"", b"\x00", b"\xff\xff", body[:20], b"\x02\x00[]", b"\x02\x00{}"):
        with pytest.raises(ProtocolError):
            decode_forward(wrong)

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            client = await BareClient.connect(one)
            changed = msgspec.structs.replace(message, topic=topic.name, topic_id=topic.id)
            damaged = bytearray(block_of(topic, 0, [b"a"], producer=PRODUCER))
            damaged[-1] ^= 1
            client.write(encode_forward(4, changed, len(damaged)) + damaged)
            answer = await client.frame()
            assert (answer.api, answer.argument) == (Api.ERROR, 4)
            assert decode_message(answer.body, Nack).kind == "corrupt-data"
            await client.close()

    asyncio.run(work())


async def with_checksums(broker: Broker) -> BareClient:
    client = await BareClient.connect(broker, hello=False)
    hello = Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1], frame_checksums=True)
    client.write(encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello)))
    assert decode_message((await client.frame()).body, HelloAnswer).frame_checksums
    return client


@pytest.mark.parametrize("request_id", [3, 5])
def test_a_forward_whose_request_id_was_changed_is_damage(request_id: int) -> None:
    """Its prefix has no checksum, and the answer would settle another block."""

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, QUICK, exist_ok=False)
            client = await with_checksums(one)
            message = Forward(topic=topic.name, topic_id=topic.id, partition=0, absent_ms=0)
            block = block_of(topic, 0, [b"a"], producer=PRODUCER)
            frame = bytearray(encode_forward(4, message, len(block)) + block)
            frame[8] = request_id
            client.write(bytes(frame))
            answer = take_checksum(await client.frame())
            await client.close()
            assert (answer.api, answer.argument) == (Api.ERROR, 0)
            assert isinstance(error_of(decode_message(answer.body, Nack)), DamagedMessageError)

    asyncio.run(work())


def test_a_request_that_became_a_forward_is_asked_again() -> None:
    """One bit makes FORWARD, which has no checksum, out of ADMIN: the program got a ProtocolError."""

    async def work() -> None:
        async with rig() as cluster:
            client = await with_checksums(await cluster.start("one"))
            (frame,) = add_checksum(encode_frame(Api.ADMIN, 0, 9, encode_message(AdminRequest(ask=DescribeCluster()))))
            client.write(frame[:4] + bytes([frame[4] ^ 1]) + frame[5:])
            answer = take_checksum(await client.frame())
            await client.close()
            assert (answer.api, answer.argument) == (Api.ERROR, 9)
            assert isinstance(error_of(decode_message(answer.body, Nack)), DamagedMessageError)

    asyncio.run(work())
