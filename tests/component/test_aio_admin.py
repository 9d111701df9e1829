"""The asyncio admin on a broker in this process: bounds of requests, topics, groups and positions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest

from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.settings import Point
from memq.client.group_admin import GROUPS_NAMED_MAX
from memq.client.link_pool import LinkPool
from memq.client.producer.producer import AsyncProducer
from memq.client.topic_admin import ANSWER_S
from memq.errors import (
    ClosedError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
    UnreachableError,
)
from memq.format.report import AUDIT_TOPIC
from memq.limits import PARTITIONS_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, DrainBroker
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import Metadata, TopicMetadata, decode_message
from memq.protocol.wire_types import WireBroker
from memq.topic import Position, Topic, TopicSettings, equal_slots
from tests.brokers import run, running_broker
from tests.stepped_time import step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, silent_at, toy_topic, turns
from tests.unit.toy_broker import run as run_toy

NOBODY = "127.0.0.1:1"
TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=1, settings=TopicSettings(), partitions=equal_slots(1))


def with_admin(test: Callable[[Broker, AsyncAdmin], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            await test(broker, admin)

    run(main())


async def fill(broker: Broker, records: int, partitions: int = 1) -> None:
    """Send records one by one, each a batch of its own, to the partitions in turn."""
    async with AsyncProducer(broker.address, audit=False, codec="none") as producer:
        for number in range(records):
            await (await producer.send("clicks", b"%d" % number, partition=number % partitions))


@pytest.mark.parametrize("partitions", [0, -1, PARTITIONS_MAX + 1])
def test_the_number_of_partitions_has_bounds(partitions: int) -> None:
    async def work() -> None:
        async with AsyncAdmin(NOBODY, connect_timeout_ms=1) as admin:
            with pytest.raises(InvalidRequestError, match=f"{partitions} partitions are outside 1 to"):
                await admin.create_topic("clicks", partitions=partitions)
            for within in (1, PARTITIONS_MAX):
                with pytest.raises(UnreachableError):
                    await admin.create_topic("clicks", partitions=within)

    asyncio.run(work())


def test_a_setting_is_sent_when_it_fits_into_a_request() -> None:
    async def work() -> None:
        async with AsyncAdmin(NOBODY, connect_timeout_ms=1) as admin:
            for fits in (2**63 - 1, -(2**63) + 1, True, "text"):
                with pytest.raises(UnreachableError):
                    await admin.create_topic("clicks", settings={"retention_ms": fits})
            for beyond in (2**63, -(2**63)):
                with pytest.raises(InvalidSettingError, match="beyond 2"):
                    await admin.alter_topic("clicks", settings={"retention_ms": beyond})

    asyncio.run(work())


def test_topics_are_listed_by_name_and_memqs_own_on_demand() -> None:
    async def test(broker: Broker, admin: AsyncAdmin) -> None:
        assert admin.cluster == ""
        assert await admin.topics() == []
        assert admin.cluster
        for name in ("b", "a"):
            made = await admin.create_topic(name, partitions=2)
            assert (made.name, len(made.partitions)) == (name, 2)
        assert [topic.name for topic in await admin.topics()] == ["a", "b"]
        again = await admin.create_topic("a", exist_ok=True)
        assert len(again.partitions) == 2
        altered = await admin.alter_topic("a", settings={"retention_ms": 3_600_000})
        assert altered.settings.retention_ms == 3_600_000
        found = await admin.topic("a")
        assert [owner.address for owner in found.owners] == [broker.address] * 2
        for ask in (admin.topic("c"), admin.delete_topic("c"), admin.alter_topic("c", settings={})):
            with pytest.raises(NotFoundError):
                await ask
        await admin.delete_topic("b")
        assert [topic.name for topic in await admin.topics()] == ["a"]
        with pytest.raises(InvalidNameError):
            await admin.create_topic("_memq_mine")

    with_admin(test)


def test_ends_and_totals_are_those_of_each_partition() -> None:
    async def test(broker: Broker, admin: AsyncAdmin) -> None:
        topic = await admin.create_topic("clicks", partitions=3)
        empty = await admin.create_topic("empty")
        await fill(broker, 5, 2)
        ends = await admin.ends([topic, empty])
        assert (ends["empty"], ends["clicks"][2]) == ({0: 0}, 0)
        assert ends["clicks"][0] == ends["clicks"][1] + 1 > 3
        totals = await admin.end_totals(topic)
        assert {number: each.records for number, each in totals.items()} == {0: 3, 1: 2, 2: 0}
        assert totals[0].bytes > totals[1].bytes > totals[2].bytes == 0

    with_admin(test)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (lambda at: "beginning", {0: 0, 1: 0}),
        (lambda at: "end", {0: 3, 1: 2}),
        (lambda at: datetime(1990, 1, 1, tzinfo=UTC), {0: 0, 1: 0}),
        (lambda at: datetime(2990, 1, 1, tzinfo=UTC), {0: 3, 1: 2}),
        (lambda at: [Position(1, at + 1)], {1: 1}),
        (lambda at: Position(0, at + 1), {0: 1}),
        (lambda at: {("clicks", 0): Position(0, at + 2), ("other", 1): Position(1, 1)}, {0: 2}),
        (lambda at: [], {}),
    ],
)
def test_a_group_is_put_where_it_is_wanted(where: Callable[[int], Point], expected: dict[int, int]) -> None:
    """`expected` are the records that lie before, by partition; the first one is at offset `at` = 1."""

    async def test(broker: Broker, admin: AsyncAdmin) -> None:
        await admin.create_topic("clicks", partitions=2)
        await fill(broker, 5, 2)
        to = where(1)
        with pytest.raises(NotFoundError, match="billing") as missing:
            await admin.reset_group("billing", "clicks", to)
        assert missing.value.hint == "there are no groups"
        planned = await admin.reset_group("billing", "clicks", to, dry_run=True, new_ok=True)
        assert await admin.groups() == []
        done = await admin.reset_group("billing", "clicks", to, new_ok=True)
        assert done == planned
        assert [each.topic_partition for each in done] == [TopicPartition("clicks", number) for number in expected]
        assert all(each.before is None for each in done)
        if not expected:
            assert await admin.groups() == []
            return
        shown = await admin.group("billing")
        assert (shown.group, shown.members) == ("billing", ())
        lags = {each.topic_partition.partition: each.lag.records for each in shown.partitions}
        assert {number: {0: 3, 1: 2}[number] - lags[number] for number in expected} == expected
        assert {number: lags[number] for number in (0, 1) if number not in expected} == {
            number: {0: 3, 1: 2}[number] for number in (0, 1) if number not in expected
        }, "what nobody has read yet is lag as well"
        again = await admin.reset_group("billing", "clicks", "end")
        before = {each.topic_partition.partition: each.before for each in again}
        assert before == {
            number: next((d.after for d in done if d.topic_partition.partition == number), None) for number in (0, 1)
        }

    with_admin(test)


def test_a_position_within_a_batch_counts_its_records() -> None:
    async def test(broker: Broker, admin: AsyncAdmin) -> None:
        await admin.create_topic("clicks")
        async with AsyncProducer(broker.address, audit=False) as producer:
            for _ in range(2):
                (delivery,) = await producer.send_many("clicks", [b"v"] * 10)
                await delivery
        place = Position(0, 2, 4)  # in the second batch: the first pointer is that of the opening
        await admin.reset_group("billing", "clicks", place, new_ok=True)
        (shown,) = (await admin.group("billing")).partitions
        assert (shown.position, shown.lag.records) == (place, 6)
        await admin.reset_group("billing", "clicks", "beginning")
        (shown,) = (await admin.group("billing")).partitions
        (totals,) = (await admin.end_totals((await admin.topic("clicks")).topic)).values()
        assert (shown.lag.records, shown.lag.bytes) == (totals.records, totals.bytes)

    with_admin(test)


def test_a_partition_that_is_not_there_is_named() -> None:
    async def test(broker: Broker, admin: AsyncAdmin) -> None:
        await admin.create_topic("clicks", partitions=2)
        for to in (Position(2, 0), {("clicks", 2): Position(2, 0)}, [Position(0, 0), Position(7, 0)]):
            with pytest.raises(NotFoundError, match=r"topic 'clicks' has no partition [27]") as missing:
                await admin.reset_group("billing", "clicks", to, new_ok=True)
            assert missing.value.hint == "it has 2, from 0 on"
        for ask in (admin.clients("nobody"), admin.load("nobody"), admin.drain_broker("nobody")):
            with pytest.raises(NotFoundError, match="broker 'nobody' is not running"):
                await ask
        (here,) = await admin.brokers()
        assert here.address == broker.address
        assert (await admin.load(here.broker)) is not None
        assert next(each.client for each in await admin.clients(here.broker)) == "default"
        plan = await admin.plan()
        assert plan.changes == ()

    with_admin(test)


def test_groups_that_there_are_help_who_misspells_one() -> None:
    async def test(broker: Broker, admin: AsyncAdmin) -> None:
        await admin.create_topic("clicks")
        names = [f"g{number:02}" for number in range(GROUPS_NAMED_MAX + 1)]
        for name in reversed(names[:-1]):
            await admin.reset_group(name, "clicks", "end", new_ok=True)
        assert await admin.groups() == names[:-1]
        with pytest.raises(NotFoundError) as missing:
            await admin.group("g")
        assert missing.value.hint == f"the groups are: {', '.join(names[:-1])}"
        await admin.reset_group(names[-1], "clicks", "end", new_ok=True)
        with pytest.raises(NotFoundError) as missing:
            await admin.group("g")
        assert missing.value.hint == f"the groups are: {', '.join(names[:-1])}, …"
        await admin.delete_group(names[0])
        assert await admin.groups() == names[1:]
        with pytest.raises(NotFoundError):
            await admin.delete_group(names[0])

    with_admin(test)


def test_a_groups_members_and_memqs_own_groups() -> None:
    async def test(broker: Broker, admin: AsyncAdmin) -> None:
        await admin.create_topic("clicks", partitions=2)
        await fill(broker, 4, 2)
        async with AsyncConsumer(broker.address, "clicks", group="_memq_auditor", audit=False) as consumer:
            seen = 0
            while seen < 4:
                batch = await consumer.poll(10)
                assert batch is not None
                seen += len(batch.values())
            await consumer.commit()
            assert await admin.groups() == []
            assert await admin.groups(internal=True) == ["_memq_auditor"]
            shown = await admin.group("_memq_auditor")
            (member,) = shown.members
            assert [each.member for each in shown.partitions] == [member, member]
            assert [each.lag.records for each in shown.partitions] == [0, 0]
        topic = await broker.partitions.create(AUDIT_TOPIC, 1, TopicSettings(), exist_ok=True, internal=True)
        await admin.reset_group("g", topic.name, "beginning", new_ok=True)
        assert {each.topic_partition.topic for each in (await admin.group("g")).partitions} == {AUDIT_TOPIC}
        await admin.delete_group("_memq_auditor")
        assert await admin.groups(internal=True) == ["g"]

    with_admin(test)


def test_a_topic_is_shown_as_the_broker_knows_it_now() -> None:
    ids = iter(["aa" * 16, "bb" * 16])

    def serve(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.METADATA:
            found = TopicMetadata(topic=toy_topic(topic_id=next(ids)))
            connection.answer(frame, Metadata(cluster="toy", topics=[found], unconfirmed=["clicks"]))
        return frame.api == Api.METADATA

    async def test(broker: ToyBroker) -> None:
        broker.script = serve
        async with AsyncAdmin(broker.address) as admin:
            assert [(await admin.topic("clicks")).topic.id[:2] for _ in range(2)] == ["aa", "bb"]

    run_toy(test)


def test_a_close_ends_the_questions_that_wait() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = silent_at(Api.METADATA)
        admin = AsyncAdmin(broker.address)
        waiting = asyncio.create_task(admin.topic("clicks"))
        await broker.until(lambda: len(broker.connections) == 1)
        await turns()
        await admin.close()
        with pytest.raises(ClosedError, match="the client was closed while it asked for topic 'clicks'"):
            await waiting

    run_toy(test)


ASKS: dict[str, Callable[[AsyncAdmin], Awaitable[object]]] = {
    "create_topic": lambda admin: admin.create_topic("clicks"),
    "topics": lambda admin: admin.topics(),
    "topic": lambda admin: admin.topic("clicks"),
    "ends": lambda admin: admin.ends([TOPIC]),
    "end_totals": lambda admin: admin.end_totals(TOPIC),
    "extents": lambda admin: admin.extents([TOPIC]),
    "count": lambda admin: admin.count("clicks", Position(0, 1), Position(0, 2)),
    "alter_topic": lambda admin: admin.alter_topic("clicks", settings={"linger_ms": 5}),
    "delete_topic": lambda admin: admin.delete_topic("clicks"),
    "seal_topic": lambda admin: admin.seal_topic("clicks"),
    "unseal_topic": lambda admin: admin.unseal_topic("clicks"),
    "truncate_topic": lambda admin: admin.truncate_topic("clicks", "end"),
    "groups": lambda admin: admin.groups(),
    "group": lambda admin: admin.group("g"),
    "reset_group": lambda admin: admin.reset_group("g", "clicks", "end"),
    "delete_group": lambda admin: admin.delete_group("g"),
    "brokers": lambda admin: admin.brokers(),
    "plan": lambda admin: admin.plan(),
    "drain_broker": lambda admin: admin.drain_broker("broker-1"),
    "clients": lambda admin: admin.clients("broker-1"),
    "load": lambda admin: admin.load("broker-1"),
    "delayed": lambda admin: admin.delayed("clicks"),
    "delayed_topics": lambda admin: admin.delayed_topics(),
    "queues": lambda admin: admin.queues(),
    "transactions": lambda admin: admin.transactions(),
    "commit_transaction": lambda admin: admin.commit_transaction("job"),
    "abort_transaction": lambda admin: admin.abort_transaction("job"),
    "begin_pop": lambda admin: admin.begin_pop("clicks", "g"),
    "pop_groups": lambda admin: admin.pop_groups(),
    "pop_request": lambda admin: admin.pop_request("clicks", "g", start="beginning", lease=60, attempts_max=0),
    "delete_pop": lambda admin: admin.delete_pop("clicks@g"),
    "permissions": lambda admin: admin.permissions(),
    "change_permissions": lambda admin: admin.change_permissions(),
    "quotas": lambda admin: admin.quotas(),
    "change_quotas": lambda admin: admin.change_quotas(),
    "quota_use": lambda admin: admin.quota_use("alice"),
    "namespaces": lambda admin: admin.namespaces(),
    "namespace": lambda admin: admin.namespace("team"),
    "change_namespaces": lambda admin: admin.change_namespaces(),
    "users": lambda admin: admin.users(),
    "put_user": lambda admin: admin.put_user("alice", "a long password"),
    "remove_user": lambda admin: admin.remove_user("alice"),
    "test_permission": lambda admin: admin.test_permission("alice", "read", "topic", "clicks"),
}


def test_every_question_waits_for_a_broker_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reach(pool: LinkPool, timeout_s: float) -> None:
        raise UnreachableError(f"nobody within {timeout_s} s")

    monkeypatch.setattr(LinkPool, "reach", reach)

    async def work() -> None:
        async with AsyncAdmin(NOBODY, connect_timeout_ms=7_000) as admin:
            for ask in ASKS.values():
                with pytest.raises(UnreachableError, match="nobody within 7"):
                    await ask(admin)

    run(work())
    public = {name for name in dir(AsyncAdmin) if not name.startswith("_")} - {"close", "cluster"}
    assert public == set(ASKS), "each method is tried"


def test_a_drain_may_take_longer_than_other_questions() -> None:
    asked: list[tuple[ToyConnection, Frame]] = []

    def hold(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.ADMIN:
            return False
        if isinstance(decode_message(frame.body, AdminRequest).ask, DrainBroker):
            asked.append((connection, frame))
        else:
            here = WireBroker(broker="toy", address=connection.broker.address)
            connection.answer(frame, AdminAnswer(brokers=[here]))
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = hold
        async with AsyncAdmin(broker.address, runtime=stepped_runtime()) as admin:
            draining = asyncio.create_task(admin.drain_broker("toy"))
            await broker.until(lambda: bool(asked))
            step(ANSWER_S + 1)
            await turns()
            assert not draining.done()
            connection, frame = asked[0]
            connection.answer(frame, AdminAnswer())
            await draining

    run_toy(test)
