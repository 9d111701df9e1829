"""A client's metadata of the cluster, and requests to any broker: to another one if the first is gone."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from memq.client.broker_router import BrokerRouter
from memq.client.link_pool import LinkPool
from memq.client.metadata import ANSWER_TIMEOUT_S, ClusterMetadata
from memq.errors import (
    ClosedError,
    DeniedError,
    DrainingError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    ProtocolError,
    TimedOutError,
    UnreachableError,
)
from memq.format.pointer import Pointer, decode_pointer
from memq.limits import READ_BYTES_MAX
from memq.protocol.frames import Api, Frame, encode_frame
from memq.protocol.messages import (
    Metadata,
    MetadataRequest,
    Owner,
    ReadRequest,
    TopicMetadata,
    decode_message,
)
from memq.topic import PartitionSlots, Topic
from tests.skipping_loop import run_skipping, skipping_runtime
from tests.stepped_time import step, stepped_runtime
from tests.unit.queue_model import Block, Log
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, pool_of, run, silent_at, toy_topic, until

NOBODY = ("127.0.0.1", 1)
RETRY_S_MAX = 1.0
ASK = MetadataRequest(topics=[])


def test_questions_at_the_same_time_are_one_question() -> None:
    asked: list[tuple[list[str] | None, bool]] = []

    def note(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.METADATA:
            request = decode_message(frame.body, MetadataRequest)
            asked.append((request.topics, request.create))
        return False

    async def test(broker: ToyBroker) -> None:
        broker.script = note
        pool = pool_of(broker)
        heard: list[str] = []
        metadata = ClusterMetadata(stepped_runtime(), pool, lambda topic: heard.append(topic.name))
        assert metadata.cluster == ""
        both = await asyncio.gather(
            metadata.refresh("clicks"), metadata.refresh("nothing"), metadata.refresh("clicks", create=True)
        )
        assert [found.topic.name if found else None for found in both] == ["clicks", None, "clicks"]
        assert asked == [(["clicks", "nothing"], False), (["clicks"], True)]
        assert heard == ["clicks", "clicks"]
        assert (metadata.cluster, metadata.known("nothing")) == ("toy", None)
        assert metadata.known("clicks") is both[2]
        await metadata.refresh("clicks")
        assert len(asked) == 3, "a question that comes later is one of its own"
        del broker.topics["clicks"]
        assert await metadata.refresh("clicks") is None
        assert metadata.known("clicks") is None
        broker.topics = {name: toy_topic(name) for name in ("a", "b")}
        assert [each.topic.name for each in await metadata.all_topics()] == ["a", "b"]
        del broker.topics["a"]
        await metadata.all_topics()
        assert (metadata.known("a"), metadata.known("b") is None) == (None, False)
        await metadata.close()
        await pool.close()

    run(test)


def test_a_topic_is_asked_for_until_a_broker_answers_or_time_is_up() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        metadata = ClusterMetadata(stepped_runtime(), pool)
        refusals = iter(range(3))

        def refuse(connection: ToyConnection, frame: Frame) -> bool:
            refused = frame.api == Api.METADATA and next(refusals, None) is not None
            if refused:
                connection.refuse(frame, NotReadyError("starting"))
            return refused

        broker.script = refuse
        assert (await metadata.topic("clicks")).topic.name == "clicks"
        broker.script = silent_at(Api.METADATA)
        assert (await metadata.topic("clicks")).topic.name == "clicks", "it is known"
        broker.script = lambda connection, frame: False
        with pytest.raises(NotFoundError, match="topic 'nothing' does not exist"):
            await metadata.topic("nothing")
        refusals = iter(range(10**9))
        broker.script = refuse
        with pytest.raises(UnreachableError, match="no broker answers: starting"):
            await metadata.topic("other", timeout_s=0.1)
        await metadata.close()
        await pool.close()

    run(test)


@pytest.mark.parametrize("seed", range(8))
def test_a_topic_is_asked_for_no_longer_than_its_time(seed: int) -> None:
    async def work() -> None:
        runtime = skipping_runtime(seed)
        metadata = ClusterMetadata(runtime, LinkPool(runtime, []))
        with pytest.raises(UnreachableError, match="no broker answers"):
            await metadata.topic("clicks", timeout_s=3.0)
        assert 3.0 - RETRY_S_MAX <= runtime.clock.monotonic() < 3.0

    run_skipping(work())


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_second_broker_is_asked_when_the_first_one_can_not_confirm_its_answer(confirmed: bool) -> None:
    asked: list[str] = []

    def note(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.METADATA:
            return False
        asked.append(connection.broker.address)
        unconfirmed = [] if confirmed or len(asked) > 1 else ["clicks"]
        connection.answer(frame, Metadata(cluster="toy", brokers=[], topics=[], missing=[], unconfirmed=unconfirmed))
        return True

    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            one.script = other.script = note
            pool = pool_of(one, other)
            answer = await ClusterMetadata(stepped_runtime(), pool, lambda topic: None).ask(ASK)
            assert answer.unconfirmed == []
            assert len(set(asked)) == len(asked) == (1 if confirmed else 2)
            await pool.close()

    run(test)


def test_a_silent_broker_is_left_and_the_next_one_asked() -> None:
    async def test(silent: ToyBroker) -> None:
        async with ToyBroker() as broker:
            pool = pool_of(silent, broker)
            metadata = ClusterMetadata(stepped_runtime(), pool)
            await pool.session(address_of(silent))
            seen: list[Frame] = []

            def see(connection: ToyConnection, frame: Frame) -> bool:
                seen.append(frame)
                return True

            silent.script = see
            asked = asyncio.create_task(metadata.ask(ASK))
            await silent.until(lambda: len(seen) == 1)
            step(ANSWER_TIMEOUT_S)
            assert (await asked).brokers == [broker.address]
            await until(lambda: not silent.connections)
            assert [session.link.address for session in pool.sessions()] == [address_of(broker)]
            broker.script = silent_at(Api.METADATA)
            waiting = asyncio.create_task(metadata.refresh("clicks"))
            await asyncio.sleep(0)
            await metadata.close()
            with pytest.raises(ClosedError, match="was closed while it asked for topic 'clicks'"):
                await waiting
            await pool.close()

    run(test)


def test_brokers_that_do_not_answer_are_each_named_with_their_reason() -> None:
    async def test(silent: ToyBroker) -> None:
        pool = pool_of(silent, NOBODY)
        metadata = ClusterMetadata(stepped_runtime(), pool)
        await pool.session(address_of(silent))
        seen: list[Frame] = []

        def see(connection: ToyConnection, frame: Frame) -> bool:
            seen.append(frame)
            return True

        silent.script = see
        asked = asyncio.create_task(metadata.ask(ASK))
        await silent.until(lambda: len(seen) == 1)
        step(ANSWER_TIMEOUT_S)
        with pytest.raises(UnreachableError, match="no broker answers: ") as caught:
            await asked
        reasons = str(caught.value).removeprefix("no broker answers: ").split("; ")
        assert len(reasons) == 2
        assert {silent.address in reasons[0], "127.0.0.1:1" in reasons[1]} == {True}
        await metadata.close()
        await pool.close()

    run(test)


def owned(*addresses: str, topic_id: str = "ab" * 16) -> Metadata:
    owners = [Owner(partition=number, address=each, broker=f"b{each}") for number, each in enumerate(addresses)]
    topic = toy_topic(partitions=len(addresses), topic_id=topic_id)
    return Metadata(cluster="toy", brokers=["h:9"], topics=[TopicMetadata(topic=topic, owners=owners)])


def test_owners_are_found_by_topic_and_partition() -> None:
    async def test(broker: ToyBroker) -> None:
        answers = [owned("h:1", "", "h:3")]

        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.METADATA:
                connection.answer(frame, answers[0])
            return frame.api == Api.METADATA

        broker.script = serve
        pool = pool_of(broker)
        metadata = ClusterMetadata(stepped_runtime(), pool)
        await metadata.refresh("clicks")
        here = "ab" * 16
        assert [metadata.owner("clicks", here, number) for number in range(4)] == [("h", 1), None, ("h", 3), None]
        for name, topic_id in (("clicks", "cd" * 16), ("other", here)):
            with pytest.raises(NotFoundError, match="does not exist any more"):
                metadata.owner(name, topic_id, 0)
        metadata.moved("clicks", "cd" * 16, 0, "h:7")  # of the topic that was there before
        metadata.moved("other", here, 0, "h:7")
        metadata.moved("clicks", here, 1, "h:8")
        assert [metadata.owner("clicks", here, number) for number in range(3)] == [("h", 1), ("h", 8), ("h", 3)]
        answers[0] = owned("h:5", topic_id="cd" * 16)
        await metadata.refresh("clicks")
        assert metadata.owner("clicks", "cd" * 16, 0) == ("h", 5)
        await metadata.close()
        await pool.close()

    run(test)


def mapped(*parts: tuple[int, int, int, int], topic_id: str = "ab" * 16) -> Topic:
    names = ("partition", "slot_first", "slot_last", "read_partition")
    slots = tuple(PartitionSlots(**dict(zip(names, part, strict=True))) for part in parts)
    return Topic(name="clicks", id=topic_id, created_ms=0, partitions=slots)


@pytest.mark.parametrize(
    ("topic", "fault"),
    [
        (mapped(), "have 0 of 65536 slots"),
        (mapped((0, 0, 65_535, 0), topic_id="zz"), "topic id 'zz' is not 32 hex digits"),
        (mapped((1, 0, 65_535, 0)), "partition 1 with read partition 0 is at place 0"),
        (mapped((0, 0, 65_535, 1 << 62)), "is at place 0"),
        (mapped((0, 0, 65_535, -1)), "is at place 0"),
        (mapped((0, 0, 65_534, 0)), "have 65535 of 65536 slots"),
        (mapped((0, 0, 65_536, 0)), "have 65537 of 65536 slots"),
        (mapped((0, 0, 9, 0), (1, 9, 65_535, 1)), "slots of partition 1 begin at 9, not at 10"),
    ],
)
def test_a_topic_that_no_client_can_use_is_a_fault_of_the_broker(topic: Topic, fault: str) -> None:
    async def test(broker: ToyBroker) -> None:
        broker.topics["clicks"] = topic
        pool = pool_of(broker)
        metadata = ClusterMetadata(stepped_runtime(), pool)
        with pytest.raises(ProtocolError, match=fault):
            await metadata.topic("clicks")
        broker.topics["clicks"] = mapped((0, 0, 9, 0), (1, 0, -1, 1), (2, 10, 65_535, 1))  # partition 1 was joined
        assert (await metadata.topic("clicks")).topic.read_partitions == 2
        await metadata.close()
        await pool.close()

    run(test)


def pointer_of(topic: str, partition: int, broker: str) -> Pointer:
    log = Log()
    log.batch(Block(1, 0))
    found = decode_pointer(log.entries[0].body)
    return type(found)(
        **{name: getattr(found, name) for name in found.__struct_fields__}
        | {"topic": topic, "partition": partition, "broker": broker}
    )


def test_a_batch_is_looked_for_at_its_writer_and_then_at_the_owner_of_its_partition() -> None:
    async def test(broker: ToyBroker) -> None:
        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.METADATA:
                connection.answer(frame, owned("h:1", "", "h:3"))
            return frame.api == Api.METADATA

        broker.script = serve
        pool = pool_of(broker)
        metadata = ClusterMetadata(stepped_runtime(), pool)
        assert metadata.holders(pointer_of("clicks", 0, "bh:1")) == []
        await metadata.refresh("clicks")
        assert metadata.holders(pointer_of("clicks", 0, "bh:3")) == [("h", 3), ("h", 1)]
        assert metadata.holders(pointer_of("clicks", 0, "bh:1")) == [("h", 1)]
        assert metadata.holders(pointer_of("clicks", 2, "gone")) == [("h", 3)]
        assert metadata.holders(pointer_of("clicks", 1, "gone")) == []
        assert metadata.holders(pointer_of("other", 0, "bh:1")) == []
        await metadata.close()
        await pool.close()

    run(test)


# ---- any broker ----------------------------------------------------------------------------------


class Counted:
    """Serves METADATA and READ, counts them by broker, and refuses as often as it is asked to."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.reads: list[tuple[int, int]] = []
        self.refusals: list[MemqError] = []
        self.silent = False

    def __call__(self, connection: ToyConnection, frame: Frame) -> bool:
        if frame.api not in (Api.METADATA, Api.READ):
            return False
        self.asked[connection.broker.address] += 1
        if self.refusals:
            connection.refuse(frame, self.refusals.pop(0))
        elif not self.silent:
            if frame.api == Api.METADATA:
                return False
            request = decode_message(frame.body, ReadRequest)
            self.reads.append((request.offset, request.length))
            body = b"%d:%d;" % (request.offset, request.length)
            connection.transport.write(encode_frame(Api.READ, 0, frame.argument, body))
        return True


async def ask_any(broker: BrokerRouter, timeout_s: float = 5.0) -> Metadata:
    return await broker(Api.METADATA, ASK, Metadata, timeout_s=timeout_s)


def test_a_broker_that_leaves_is_replaced_by_another_and_the_question_asked_again() -> None:
    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            counted = Counted()
            one.script = other.script = counted
            pool = pool_of(one, other)
            anyone = BrokerRouter(pool)
            for _ in range(3):
                await ask_any(anyone)
            assert sorted(counted.asked.values()) == [3], "one connection, as long as it lasts"
            counted.refusals = [DrainingError("leaving")]
            await ask_any(anyone)
            assert sum(counted.asked.values()) == 5
            counted.refusals = [DrainingError("leaving"), UnreachableError("gone")]
            with pytest.raises(UnreachableError, match="no broker answers METADATA: leaving; gone"):
                await ask_any(anyone)
            counted.refusals = [DeniedError("not you")]
            with pytest.raises(DeniedError):
                await ask_any(anyone)
            counted.refusals = [MovedError("elsewhere")]
            with pytest.raises(MovedError):
                await anyone.once(Api.METADATA, ASK, Metadata, timeout_s=5.0)
            before = sum(counted.asked.values())
            counted.refusals = [DrainingError("leaving")]
            with pytest.raises(DrainingError):
                await anyone.once(Api.METADATA, ASK, Metadata, timeout_s=5.0)
            assert sum(counted.asked.values()) == before + 1, "it is asked once"
            await pool.close()

    run(test)


@pytest.mark.parametrize("refusal", [DrainingError("leaving"), UnreachableError("its coordinator does not answer")])
def test_a_question_that_one_broker_refuses_is_asked_of_another_one(refusal: MemqError) -> None:
    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            for refusing, serving in ((one, other), (other, one)):
                counted, refusals = Counted(), Counted()
                refusals.refusals = [refusal] * 9
                refusing.script, serving.script = refusals, counted
                pool = pool_of(refusing)
                anyone = BrokerRouter(pool)
                with pytest.raises(UnreachableError, match="no broker answers METADATA: "):
                    await ask_any(anyone)
                assert refusals.asked[refusing.address] == 2, "the only one is asked again"
                pool.learn([address_of(serving)], [])
                assert (await ask_any(anyone)).cluster == "toy"
                assert (refusals.asked[refusing.address], counted.asked[serving.address]) == (3, 1)
                assert (await ask_any(anyone)).cluster == "toy"
                assert counted.asked[serving.address] == 2, "it is asked from then on"
                await pool.close()

    run(test)


def test_a_question_is_asked_again_when_another_one_gives_the_connection_up() -> None:
    """It failed at once with the other question's name and time."""

    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        await ask_any(anyone)
        counted.silent = True
        first = asyncio.create_task(ask_any(anyone, 30.0))
        await broker.until(lambda: counted.asked[broker.address] == 2)
        step(27)
        second = asyncio.create_task(ask_any(anyone, 30.0))
        await broker.until(lambda: counted.asked[broker.address] == 3)
        counted.silent = False
        step(4)
        with pytest.raises(TimedOutError, match="did not answer METADATA in 30 s"):
            await first
        assert (await second).cluster == "toy"
        await pool.close()

    run(test)


def test_all_questions_that_a_lost_connection_leaves_open_are_asked_again() -> None:
    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        await ask_any(anyone)
        counted.silent = True
        waiting = asyncio.gather(ask_any(anyone), ask_any(anyone))
        await broker.until(lambda: counted.asked[broker.address] == 3)
        counted.silent = False
        broker.cut()
        assert [answer.cluster for answer in await waiting] == ["toy", "toy"]
        assert (counted.asked[broker.address], len(broker.connections)) == (5, 1)
        await pool.close()

    run(test)


def test_a_silent_connection_is_dropped_and_the_next_question_gets_a_fresh_one() -> None:
    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        await ask_any(anyone)
        (connection,) = broker.connections
        counted.silent = True
        waiting = asyncio.create_task(ask_any(anyone))
        await broker.until(lambda: counted.asked[broker.address] == 2)
        step(5)
        with pytest.raises(TimedOutError):
            await waiting
        assert counted.asked[broker.address] == 2, "it is not asked again: the answer may only be late"
        await until(lambda: connection not in broker.connections)
        counted.silent = False
        await ask_any(anyone)
        assert len(broker.connections) == 1
        await pool.close()

    run(test)


def test_an_error_that_a_broker_names_leads_to_no_other_broker() -> None:
    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            counted = Counted()
            one.script = other.script = counted
            pool = pool_of(one, other)
            for broker in (one, other):
                await pool.session(address_of(broker))
            anyone = BrokerRouter(pool)
            for _ in range(16):
                counted.refusals = [DeniedError("not you")]
                with pytest.raises(DeniedError):
                    await ask_any(anyone)
            assert list(counted.asked.values()) == [16]
            assert len(pool.sessions()) == 2
            await pool.close()

    run(test)


def test_without_brokers_each_is_named() -> None:
    async def test(broker: ToyBroker) -> None:
        dead = [("127.0.0.1", port) for port in range(1, 8)]
        with pytest.raises(UnreachableError, match="no broker can be reached: ") as caught:
            await ask_any(BrokerRouter(pool_of(*dead)))
        assert str(caught.value).count("can't reach") == 5

    run(test)


def test_a_large_range_is_read_in_pieces() -> None:
    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        assert await anyone.read("main", "k", 7, 10) == b"7:10;"
        most = READ_BYTES_MAX
        assert await anyone.read("main", "k", 0, most) == b"0:%d;" % most
        found = await anyone.read("main", "k", 5, 2 * most + 1)
        assert found == b"5:%d;%d:%d;%d:1;" % (most, 5 + most, most, 5 + 2 * most)
        counted.refusals = [UnreachableError("gone")]
        with pytest.raises(UnreachableError):
            await anyone.read("main", "k", 0, 1)
        counted.silent = True
        waiting = asyncio.create_task(anyone.read("main", "k", 0, 1))
        before = sum(counted.asked.values())
        await broker.until(lambda: sum(counted.asked.values()) > before)
        step(30)
        with pytest.raises(TimedOutError, match="READ in 30 s"):
            await waiting
        await until(lambda: not broker.connections)
        await pool.close()

    run(test)


def test_a_batch_is_read_from_who_may_hold_it_else_from_any_broker() -> None:
    async def test(writer: ToyBroker) -> None:
        async with ToyBroker() as other:
            counted = Counted()
            writer.script = other.script = counted
            pool = pool_of(other)
            pointer = pointer_of("clicks", 0, "writer")
            holders = [NOBODY, address_of(writer)]
            anyone = BrokerRouter(pool, lambda asked: holders if asked is pointer else [])
            read = anyone.near(pointer)
            assert await read("main", "k", 0, 1) == b"0:1;"
            assert counted.asked == {writer.address: 1}, "the first one can't be reached"
            assert await anyone.read("main", "k", 0, 1) == b"0:1;"
            assert counted.asked == {writer.address: 1, other.address: 1}
            holders.clear()
            await read("main", "k", 0, 1)
            assert counted.asked == {writer.address: 1, other.address: 2}
            await pool.close()
            zoned = pool_of(other, writer, zone="y")
            zoned.learn([address_of(other), address_of(writer)], ["y", "x"])
            far = BrokerRouter(zoned, lambda asked: [address_of(writer)])
            await far.near(pointer)("main", "k", 0, 1)
            assert counted.asked == {writer.address: 1, other.address: 3}, "what is in another zone is not asked"
            both = BrokerRouter(zoned, lambda asked: [address_of(writer), address_of(other)])
            await both.near(pointer)("main", "k", 0, 1)
            assert counted.asked == {writer.address: 1, other.address: 4}, "the next one is, when it is in this zone"
            await zoned.close()

    run(test)
