"""The dead letters of a group from Python: listed, read, sent back, purged; and their place in the audit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import memq
from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.listener.dead_letter_queue import waiting_letters
from memq.client.listener.retry_records import (
    LetterNote,
    OriginalRecord,
    RetryNote,
    letter_headers,
    read_retry,
    retry_topic_settings,
)
from memq.client.listener.retry_topics import RetryTopics
from memq.client.producer.delivery import AsyncDelivery
from memq.errors import InvalidNameError, InvalidRequestError, InvalidSettingError, NotFoundError, StoreError
from memq.testing import Cluster
from memq.topic import Position
from tests.component.live_reports import ReceivedReports


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        for name, partitions in (("billing.dead-letters", 1), ("billing.retry", 8)):
            cluster.create_topic(name, partitions=partitions, settings=retry_topic_settings(name))
        yield cluster


def letter(cluster: Cluster, *values: str, cut: bool = False) -> None:
    """Store letters in one batch."""
    with memq.Producer(cluster.address, audit=False) as producer:
        for value in values:
            note = LetterNote(
                OriginalRecord("orders", Position(1, 2, int(value)), 77), "dead", 3, 88, f"no {value}", cut
            )
            headers = letter_headers(note, () if cut else (("a", b"1"),))
            producer.send(
                "billing.dead-letters", None if cut else value, key="k", headers=headers, tag=None if cut else "web"
            )


def waiting(queue: memq.DeadLetterQueue) -> list[str]:
    return [(each.value or b"cut").decode() for each in queue.letters()]


def test_letters_have_all_of_their_record_and_the_cause(cluster: Cluster) -> None:
    letter(cluster, "0", "1")
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        first, second = queue.letters()
        assert queue.letters(1) == [first]
        assert queue.letter(second.position) == second
    assert (first.topic, first.origin, first.timestamp_ms) == ("orders", Position(1, 2, 0), 77)
    assert (first.state, first.attempts, first.dead_ms, first.cause) == ("dead", 3, 88, "no 0")
    assert (first.value, first.key, first.headers, first.tag) == (b"0", b"k", (("a", b"1"),), "web")


def test_letters_go_back_into_a_retry_topic_with_its_settings(cluster: Cluster) -> None:
    """The send made a deleted topic again, with one partition and the retention of any topic."""
    letter(cluster, "0")
    with memq.Admin(cluster.address) as admin:
        admin.delete_topic("billing.retry")
        with memq.DeadLetterQueue(cluster.address, "billing") as queue:
            assert queue.redrive() == 1
        made = admin.topic("billing.retry").topic
    assert (len(made.partitions), made.settings.retention_groups) == (8, "billing.retry")


def test_a_record_that_is_no_letter_hides_no_letters(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    letter(cluster, "0")
    with memq.Producer(cluster.address, audit=False) as producer:
        producer.send("billing.dead-letters", "of a user").result(10)
    letter(cluster, "1")
    stranger = cluster.records("billing.dead-letters")[1].position
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        assert (waiting(queue), queue.strangers) == (["0", "1"], [stranger])
        assert [each.value for each in queue.letters(1)] == [b"0"]
        assert main(["dlq", "list", "billing", "-b", cluster.address]) == 0
        said = capsys.readouterr()
        assert said.out.count("no 0") == said.out.count("no 1") == 1
        assert said.err == f"memq: 1 record passed over, since not a dead letter: {stranger}\n"
        assert (queue.redrive(), queue.strangers) == (2, [stranger])
        assert (waiting(queue), queue.strangers) == ([], [])
    assert [record.value for record in cluster.records("billing.retry")] == [b"0", b"1"]


def test_letters_are_sent_back_oldest_first_each_once(cluster: Cluster) -> None:
    letter(cluster, "0", "1", "2")
    letter(cluster, "3", "4")
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        assert queue.redrive(2) == 2
        assert waiting(queue) == ["2", "3", "4"]
        assert queue.redrive() == 3
        assert waiting(queue) == []
        assert queue.redrive() == 0
    retries = cluster.records("billing.retry")
    assert [record.value for record in retries] == [b"0", b"1", b"2", b"3", b"4"]
    note, headers = read_retry(retries[0].headers)
    assert (note.origin, note.attempt, note.error) == (OriginalRecord("orders", Position(1, 2, 0), 77), 1, "no 0")
    assert (headers, retries[0].key, retries[0].tag, retries[0].partition) == ((("a", b"1"),), b"k", "web", 0)
    assert note.letter == str(cluster.records("billing.dead-letters")[0].position)


def test_letters_that_come_during_the_call_wait_for_the_next_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter(cluster, "0")
    enqueue = RetryTopics.enqueue_retry

    async def fail_again(side: RetryTopics, note: RetryNote, *fields: Any) -> AsyncDelivery:
        await side.send_letter(LetterNote(note.origin, "dead", 1, 99, "again"), b"1", None, (), None)
        return await enqueue(side, note, *fields)

    monkeypatch.setattr(RetryTopics, "enqueue_retry", fail_again)
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        assert queue.redrive() == 1
        assert waiting(queue) == ["1"]


def test_a_call_that_fails_is_repeated_without_a_loss(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    letter(cluster, "0")
    letter(cluster, "1")
    commits = 0
    commit = AsyncConsumer.commit

    async def die_before_the_second_commit(consumer: AsyncConsumer, batch: memq.Batch | None = None) -> None:
        nonlocal commits
        commits += 1
        if commits == 2:
            raise StoreError("killed")
        await commit(consumer, batch)

    monkeypatch.setattr(AsyncConsumer, "commit", die_before_the_second_commit)
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        with pytest.raises(StoreError):
            queue.redrive()
        assert waiting(queue) == ["1"]
        assert queue.redrive() == 1
    assert [record.value for record in cluster.records("billing.retry")] == [b"0", b"1", b"1"]


def test_a_letter_without_its_value_is_not_sent_back_and_not_lost(cluster: Cluster) -> None:
    letter(cluster, "0", cut=True)
    letter(cluster, "1")
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        assert queue.redrive() == 1
        (left,) = queue.letters()
    assert (left.cut, left.origin, left.cause) == (True, Position(1, 2, 0), "no 0")
    assert [record.value for record in cluster.records("billing.retry")] == [b"1"]


def test_purged_letters_do_not_wait_any_more(cluster: Cluster) -> None:
    letter(cluster, "0", "1", "2")
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        assert queue.purge(1) == 1
        assert waiting(queue) == ["1", "2"]
        assert queue.purge() == 2
        assert waiting(queue) == []
    assert not cluster.records("billing.retry")


def test_the_waiting_letters_of_each_group_are_counted(cluster: Cluster) -> None:
    cluster.create_topic("shipping.dead-letters")
    letter(cluster, "0", "1", "2")

    async def count() -> dict[str, int]:
        async with AsyncAdmin(cluster.address) as admin:
            return await waiting_letters(admin)

    assert asyncio.run(count()) == {"billing": 3, "shipping": 0}
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        queue.purge(1)
    assert asyncio.run(count()) == {"billing": 2, "shipping": 0}


def test_an_operator_who_reads_a_letter_is_no_reader_for_the_audit() -> None:
    with Cluster(audit=True, audit_interval_ms=100) as cluster:
        cluster.create_topic("billing.dead-letters")
        letter(cluster, "0")
        audit_topic = ReceivedReports(cluster)
        with memq.DeadLetterQueue(cluster.address, "billing") as queue:
            (found,) = queue.letters()
            assert queue.letter(found.position) == found
        with memq.Consumer(cluster.address, "billing.dead-letters", start="beginning", end="end") as consumer:
            assert [len(batch) for batch in consumer] == [1]
        audit_topic.until(lambda: any(each.last for each in audit_topic.reports))
    assert len({each.client for each in audit_topic.reports if each.kind == "consumer"}) == 1


def test_an_asyncio_queue_does_the_same(cluster: Cluster) -> None:
    letter(cluster, "0")

    async def test() -> None:
        async with memq.aio.DeadLetterQueue(cluster.address, "billing") as queue:
            (found,) = await queue.letters()
            assert await queue.letter(found.position) == found
            assert await queue.redrive() == 1
            assert await queue.purge() == 0

    asyncio.run(test())


def test_mistakes_are_named(cluster: Cluster) -> None:
    with memq.DeadLetterQueue(cluster.address, "nobody") as queue:
        for call in (queue.letters, queue.redrive, queue.purge):
            with pytest.raises(NotFoundError, match="group 'nobody' has no dead-letter topic"):
                call()
        with pytest.raises(NotFoundError, match="group 'nobody' has no dead-letter topic"):
            queue.letter(Position(0, 1))
    letter(cluster, "0")
    with memq.DeadLetterQueue(cluster.address, "billing") as queue:
        with pytest.raises(NotFoundError, match="no letter at position 0:99:0"):
            queue.letter(Position(0, 99))
        for count in (0, (1 << 40) + 1):
            with pytest.raises(InvalidSettingError, match="count"):
                queue.redrive(count)
            with pytest.raises(InvalidSettingError, match="limit"):
                queue.letters(count)
        assert len(queue.letters(1 << 40)) == len(queue.letters(1)) == 1
        with pytest.raises(TypeError):
            queue.letter("0:1:0")  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError):
        memq.DeadLetterQueue(cluster.address, "_memq")
    with memq.Producer(cluster.address, audit=False) as producer:
        producer.send("billing.dead-letters", "not of memq")
    stranger = cluster.records("billing.dead-letters")[-1].position
    with memq.DeadLetterQueue(cluster.address, "billing") as queue, pytest.raises(InvalidRequestError, match="no dead"):
        queue.letter(stranger)
