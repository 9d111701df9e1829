"""A client's metadata of the cluster: topics, owners and brokers, from answers of any broker."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest

from memq.client.link_pool import LinkPool
from memq.client.metadata import ANSWER_TIMEOUT_S, ClusterMetadata
from memq.errors import (
    ClosedError,
    InvalidNameError,
    NotFoundError,
    NotReadyError,
    ProtocolError,
    UnreachableError,
)
from memq.format.pointer import Pointer, decode_pointer
from memq.format.report import AUDIT_TOPIC
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import Metadata, MetadataRequest, Owner, TopicMetadata, decode_message
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


def test_a_name_that_no_topic_may_have_is_refused_without_a_question() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(NOBODY)
        metadata = ClusterMetadata(stepped_runtime(), pool)
        with pytest.raises(InvalidNameError):
            await metadata.topic("two words")
        await pool.close()
        broker.topics = {AUDIT_TOPIC: toy_topic(AUDIT_TOPIC)}
        own = pool_of(broker)
        assert (await ClusterMetadata(stepped_runtime(), own).topic(AUDIT_TOPIC)).topic.name == AUDIT_TOPIC
        await own.close()

    run(test)


def test_an_answer_names_the_brokers_to_ask_and_their_zones() -> None:
    async def test(broker: ToyBroker) -> None:
        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.METADATA:
                connection.answer(frame, Metadata(cluster="toy", brokers=["h:7", "h:8"], zones=["x", "y"]))
            return frame.api == Api.METADATA

        broker.script = serve
        pool = pool_of(broker, zone="y")
        await ClusterMetadata(stepped_runtime(), pool).refresh("clicks")
        assert set(pool.candidates()) == {address_of(broker), ("h", 7), ("h", 8)}
        assert [pool.is_preferred(("h", port)) for port in (7, 8)] == [False, True]
        await pool.close()

    run(test)


def test_nothing_is_kept_of_a_question_that_was_answered_and_a_close_ends_the_others() -> None:
    def kept_tasks() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.Task) for each in gc.get_objects())

    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        metadata = ClusterMetadata(stepped_runtime(), pool)
        await metadata.refresh("clicks")
        kept = kept_tasks()
        for _ in range(9):
            await metadata.refresh("clicks")
        assert kept_tasks() < kept + 9
        broker.script = silent_at(Api.METADATA)
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(metadata.refresh("clicks"))
        await asyncio.sleep(0)
        await metadata.close()
        assert asyncio.all_tasks() - before <= {waiting}
        with pytest.raises(ClosedError):
            await waiting
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


def test_ids_that_no_broker_confirmed_are_known_until_one_is_confirmed() -> None:
    former, present = "ab" * 16, "cd" * 16
    answers = [(former, False), (present, False), (former, False), (present, True)]

    async def test(broker: ToyBroker) -> None:
        def answer(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api != Api.METADATA:
                return False
            topic_id, confirmed = answers[0]
            found = owned("h:1", topic_id=topic_id)
            connection.answer(frame, msgspec.structs.replace(found, unconfirmed=[] if confirmed else ["clicks"]))
            return True

        broker.script = answer
        pool = pool_of(broker)
        metadata, shown = ClusterMetadata(stepped_runtime(), pool), list[tuple[bool, bool]]()
        while answers:
            await metadata.refresh("clicks")
            shown.append((metadata.is_unconfirmed("clicks", former), metadata.is_unconfirmed("clicks", present)))
            if len(answers) == 4:
                metadata.doubt("clicks", former)
            del answers[0]
        assert shown == [(True, False), (True, True), (True, True), (True, False)]
        await metadata.close()
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
        (mapped((1, 0, 65_535, 0)), "partition 1 with read partition 0 is at index 0"),
        (mapped((0, 0, 65_535, 1 << 62)), "is at index 0"),
        (mapped((0, 0, 65_535, -1)), "is at index 0"),
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
