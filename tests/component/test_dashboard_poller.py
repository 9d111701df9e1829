"""The poller of the dashboard over a real cluster: which topics each round requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import pytest

import memq
from memq.audit.dashboard import poller as poller_module
from memq.audit.dashboard.poller import Poller
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import About, TopicRow
from memq.client.admin import AsyncAdmin
from memq.client.log_answers import LogAnswers
from memq.runtime.runtime import Runtime
from memq.testing import Cluster
from memq.topic import Topic, Totals

TOPICS = 5
TIMEOUT_S = 60.0


class Counting(AsyncAdmin):
    """An admin that notes the topics whose totals it is asked for."""

    def __init__(self, brokers: str) -> None:
        super().__init__(brokers)
        self.asked: list[str] = []

    async def end_totals(self, topic: Topic, partitions: Iterable[int] | None = None) -> LogAnswers[int, Totals]:
        self.asked.append(topic.name)
        return await super().end_totals(topic, partitions)

    def taken(self) -> list[str]:
        """Return what was asked since the last look."""
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        for number in range(TOPICS):
            cluster.create_topic(f"t{number}")
        yield cluster


@pytest.fixture
def producer(cluster: Cluster) -> Iterator[memq.Producer]:
    """A producer that has sent to each topic, so that nothing more comes into the queue by itself."""
    with memq.Producer(cluster.address, audit=False) as producer:
        for number in range(TOPICS):
            producer.send(f"t{number}", b"0").result(TIMEOUT_S)
        yield producer


def test_only_topics_that_have_grown_are_asked_for_their_totals(
    cluster: Cluster, producer: memq.Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "TOTALS_MAX", 2)
    monkeypatch.setattr(poller_module, "ENDS_MAX", 4)  # so a round begins where the last one ended

    async def run() -> None:
        admin, feed = Counting(cluster.address), Feed("test")
        poller = Poller(
            admin, None, feed, Runtime(), About(cluster="", audited=False, acknowledge=False, contents=False)
        )

        async def look() -> list[str]:
            await poller.poll_topics()
            await poller.poll_totals()
            return admin.taken()

        def rate(name: str) -> float | None:
            row = feed.board.get("topic", name)
            assert isinstance(row, TopicRow)
            return row.records_s

        async with admin, asyncio.timeout(TIMEOUT_S):
            assert [await look() for _ in range(3)] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
            assert [await look() for _ in range(4)] == [[]] * 4
            assert [rate(f"t{number}") for number in range(TOPICS)] == [0.0] * TOPICS
            await asyncio.to_thread(lambda: producer.send("t3", b"1").result(TIMEOUT_S))
            assert sorted([*await look(), *await look()]) == ["t3"]
            await poller.poll_topics()
            assert [rate(f"t{number}") for number in (0, 1, 2, 4)] == [0.0] * 4
            assert (rate("t3") or 0.0) >= 0.0  # another look may have followed at once
            await admin.delete_topic("t0")
            await admin.create_topic("t0")
            assert "t0" in [*await look(), *await look()]

    asyncio.run(run())
