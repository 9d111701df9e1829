"""The proof that a queue has lost a log: the objects, logs and answers that it uses, in memory."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from memq.compaction.reader import ManifestFiles
from memq.errors import DeniedError, InvalidRequestError, LogLostError, MemqError, NotFoundError, QueueError, StoreError
from memq.format.key import (
    compaction_manifest_key,
    shared_object_key,
    shared_prefix,
    staged_object_key,
    topic_prefix,
)
from memq.notification import Span
from memq.storage_handlers import confirmed_reads
from memq.topic import PartitionSlots, ReadPartition, Topic, TopicSettings, equal_slots, read_partitions
from tests.unit.bare_cluster import CLUSTER, SHARING, Cluster, compaction_manifest, indexed, newer, part_of, topic_of


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed read is repeated at once."""
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


CLICKS, VIEWS = topic_of("clicks"), topic_of("views")


async def refused(cluster: Cluster) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await cluster.logs.check()
    return str(caught.value)


# ---- the check of a start ------------------------------------------------------------------------


def test_an_empty_log_is_lost_where_it_had_an_owner_and_the_store_has_a_batch_of_it() -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.topic(VIEWS, queue=False)  # its making was interrupted: the topics behind it count all the same
        key = await cluster.batch(await cluster.topic(CLICKS))
        assert await cluster.lost() == [
            f"topic 'clicks' partition 0: the queue shows nothing of it, the store has '{key}'"
        ]
        cluster.topics.gone.add(CLICKS.id)
        assert await cluster.lost() == [], "its deletion took the log"

    asyncio.run(work())


@pytest.mark.parametrize("omits", [0, 1])
def test_one_listing_that_omits_the_objects_makes_no_new_log_of_a_lost_one(omits: int) -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.batch(await cluster.topic(CLICKS))
        cluster.store.omits = omits
        assert len(await cluster.lost()) == 1
        cluster.store.omits = omits
        assert not await opens(cluster, CLICKS)
        await cluster.batch(await cluster.topic(VIEWS, queue=False))
        cluster.store.omits = omits
        assert "the queue does not have all of topic 'views'" in await refused(cluster)

    asyncio.run(work())


def test_an_empty_log_that_never_had_an_owner_is_none_that_was_lost() -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.batch(await cluster.topic(CLICKS, epoch=0))
        assert await cluster.lost() == []
        assert cluster.store.listed == [], "nothing is asked of the store"

    asyncio.run(work())


def test_a_start_of_a_queue_that_is_whole_reads_neither_assignments_nor_listings() -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.batch(await cluster.topic(CLICKS, entries=1))
        assert await cluster.lost() == []
        assert (cluster.topics.asked, cluster.store.listed) == (0, [])

    asyncio.run(work())


@pytest.mark.parametrize(("silent", "starts"), [(0, True), (1, True), (2, True), (3, False), (4, False)])
def test_a_start_needs_the_answers_of_half_of_all_logs(silent: int, starts: bool) -> None:
    async def work() -> None:
        cluster = Cluster()
        wide = await cluster.topic(topic_of("wide", 4), entries=1)
        cluster.queue.sick = frozenset(read_partitions(wide)[:silent])
        found: list[int] = []
        check = cluster.logs.check(lambda partition, _: found.append(partition.partition))
        if starts:
            assert await check == []
            assert found == list(range(silent))
            return
        with pytest.raises(QueueError, match="0 does not answer"):
            await check

    asyncio.run(work())


@pytest.mark.parametrize("tolerant", [False, True])
def test_an_answer_that_does_not_pass_ends_the_check(tolerant: bool) -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.topic(VIEWS, entries=1)
        denied = read_partitions(await cluster.topic(CLICKS, entries=1))[0]
        span = cluster.queue.span

        async def deny(partition: ReadPartition) -> Span:
            if partition == denied:
                raise DeniedError("no right to read")
            return await span(partition)

        cluster.queue.span = deny  # type: ignore[method-assign]
        with pytest.raises(DeniedError, match="no right to read"):
            await cluster.logs.check((lambda partition, error: None) if tolerant else None)

    asyncio.run(work())


def test_a_topic_without_its_logs_and_with_objects_is_refused() -> None:
    async def work() -> None:
        cluster = Cluster()
        key = await cluster.batch(await cluster.topic(CLICKS, queue=False))
        assert await refused(cluster) == f"the queue does not have all of topic 'clicks', the store has '{key}'"

    asyncio.run(work())


@pytest.mark.parametrize(
    ("lost", "others", "starts"),
    [
        ([SHARING], [], False),
        ([SHARING], [TopicSettings()], False),
        ([SHARING], [SHARING], True),
        ([SHARING], [SHARING, TopicSettings()], True),
        ([TopicSettings()], [], True),
        ([SHARING, TopicSettings()], [], False),
        ([], [TopicSettings()], True),
    ],
)
def test_shared_objects_show_a_loss_where_no_topic_that_shares_is_known(
    lost: list[TopicSettings],
    others: list[TopicSettings],
    starts: bool,
) -> None:
    async def work() -> None:
        cluster = Cluster()
        for number, settings in enumerate(lost):
            await cluster.topic(topic_of(f"lost{number}", 1, settings), queue=False)
        for number, settings in enumerate(others):
            await cluster.topic(topic_of(f"other{number}", 1, settings), entries=1)
        await cluster.put(shared_object_key(CLUSTER, "b", 1, 0, 1_000))
        if starts:
            assert await cluster.lost() == []
        else:
            assert "does not have all of topic 'lost0'" in await refused(cluster)

    asyncio.run(work())


@pytest.mark.parametrize(("lost", "others", "starts"), [(1, 0, False), (1, 1, True), (0, 1, True), (0, 0, True)])
def test_staged_objects_show_a_loss_where_no_topic_is_known_at_all(lost: int, others: int, starts: bool) -> None:
    async def work() -> None:
        cluster = Cluster()
        for number in range(lost):
            await cluster.topic(topic_of(f"lost{number}"), queue=False)
        for number in range(others):
            await cluster.topic(topic_of(f"other{number}"), entries=1)
        await cluster.put(staged_object_key(CLUSTER, "nightly", 7, 1_000))
        if starts:
            assert await cluster.lost() == []
        else:
            assert "does not have all of topic 'lost0'" in await refused(cluster)

    asyncio.run(work())


# ---- the proof of one log ------------------------------------------------------------------------


async def opens(cluster: Cluster, topic: Topic, *, claimed: bool = True, partition: int = 0) -> bool:
    try:
        await cluster.logs.check_opening(topic, partition, claimed=claimed)
    except LogLostError:
        return False
    return True


def test_a_log_that_shows_something_is_opened_without_a_listing() -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.batch(await cluster.topic(CLICKS, entries=1))
        assert await opens(cluster, CLICKS)
        assert cluster.store.listed == []

    asyncio.run(work())


def test_a_log_that_two_share_who_never_had_an_owner_is_opened_without_a_listing() -> None:
    async def work() -> None:
        cluster = Cluster()
        first, second = equal_slots(2)
        shared = (first, PartitionSlots(partition=1, slot_first=0, slot_last=-1, read_partition=first.read_partition))
        topic = await cluster.topic(msgspec.structs.replace(CLICKS, partitions=shared), epoch=0)
        await cluster.batch(topic, second.partition)
        assert await opens(cluster, topic, claimed=False)
        assert cluster.store.listed == []
        cluster.topics.epochs[topic.id, 1] = 1
        assert not await opens(cluster, topic, claimed=False)
        cluster.topics.epochs[topic.id, 1] = 0
        assert not await opens(cluster, topic, claimed=True), "the other one does not show that it had no owner"

    asyncio.run(work())


def test_only_a_denied_listing_leaves_a_log_unproven() -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.batch(await cluster.topic(CLICKS))
        assert not await opens(cluster, CLICKS)
        cluster.store.failure = DeniedError("s3:ListBucket is missing")
        assert await opens(cluster, CLICKS), "nobody sweeps there either"
        cluster.store.failure = StoreError("503")
        with pytest.raises(StoreError):
            await opens(cluster, CLICKS)

    asyncio.run(work())


def test_a_log_that_vanishes_while_it_is_proved_is_lost_and_one_that_does_not_answer_is_not_proved() -> None:
    async def work(error: MemqError) -> bool:
        cluster = Cluster()
        await cluster.batch(await cluster.topic(CLICKS))
        spans: list[Any] = [Span(0, 0), error]

        async def span(partition: ReadPartition) -> Span:
            answer = spans.pop(0)
            if isinstance(answer, MemqError):
                raise answer
            return cast("Span", answer)

        cluster.queue.span = span  # type: ignore[method-assign]
        return await opens(cluster, CLICKS)

    assert not asyncio.run(work(NotFoundError("no log")))
    with pytest.raises(QueueError):
        asyncio.run(work(QueueError("no answer")))


def test_an_object_of_another_kind_or_partition_proves_nothing() -> None:
    async def work() -> None:
        cluster = Cluster()
        wide = await cluster.topic(topic_of("wide", 2))
        prefix = topic_prefix(CLUSTER, wide.name, wide.id)
        await cluster.put(f"{prefix}00/no-key-of-memq")
        await cluster.batch(wide, 1)
        assert await opens(cluster, wide)
        assert not await opens(cluster, wide, partition=1), "a foreign name before it hides no object"

    asyncio.run(work())


def test_a_compacted_part_proves_that_the_log_held_something_and_a_manifest_that_does_not_read_too() -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.topic(CLICKS)
        await ManifestFiles(CLUSTER, cluster.store).publish(compaction_manifest(CLICKS))
        assert await opens(cluster, CLICKS), "retention took all parts"
        await ManifestFiles(CLUSTER, cluster.store).publish(
            msgspec.structs.replace(compaction_manifest(CLICKS, part_of(0)), number=2)
        )
        with pytest.raises(LogLostError, match="the store has 'part-0'"):
            await cluster.logs.check_opening(CLICKS, 0, claimed=True)
        await cluster.put(compaction_manifest_key(CLUSTER, CLICKS.name, CLICKS.id, 0, 3), b"damaged")
        assert not await opens(cluster, CLICKS)

    asyncio.run(work())


def test_shared_objects_are_not_listed_for_a_topic_that_never_shared_them() -> None:
    """There may be millions of them."""

    async def work() -> None:
        cluster = Cluster()
        altered = msgspec.structs.replace(VIEWS, version=2)  # which may have ended the sharing
        for topic in (await cluster.topic(CLICKS), await cluster.topic(altered)):
            cluster.store.listed.clear()
            assert await opens(cluster, topic, partition=0)
            assert (shared_prefix(CLUSTER) in cluster.store.listed) is (topic is altered)

    asyncio.run(work())


def test_a_shared_object_proves_a_loss_by_its_index_and_others_that_do_not_read_hide_it_not() -> None:
    async def work() -> None:
        cluster = Cluster()
        wide = await cluster.topic(topic_of("wide", 2, SHARING))
        other = await cluster.topic(topic_of("other", 1, SHARING), epoch=0)
        cluster.store.gone = f"{shared_prefix(CLUSTER)}00"
        keys = [shared_object_key(CLUSTER, "b", 1, number, 1_000) for number in range(5)]
        keys.sort()
        await cluster.put(keys[0], b"damaged")
        await cluster.put(keys[1], newer(indexed(wide, 0)))
        await cluster.put(keys[2], indexed(other, 0))
        await cluster.put(keys[3], indexed(wide, 1))
        assert await opens(cluster, wide, partition=0)
        with pytest.raises(LogLostError, match=keys[3]):
            await cluster.logs.check_opening(wide, 1, claimed=True)
        cluster.store.get_range = failing  # type: ignore[method-assign]
        with pytest.raises(StoreError):
            await opens(cluster, wide, partition=1)

    asyncio.run(work())


async def failing(key: str, offset: int, length: int) -> bytes:
    raise StoreError("503")
