"""The live audit's topics: a topic that a broker does not list is requested by name before it is dropped."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from memq.audit.live import audited_topics
from memq.audit.live.audited_topics import AuditedTopics, find_topic
from memq.errors import InvalidNameError, NotFoundError, NotReadyError, UnreachableError
from memq.format.report import AUDIT_TOPIC
from memq.protocol.messages import Metadata, MetadataRequest, TopicMetadata
from memq.topic import Topic
from tests.unit.audited import TOPIC

AGAIN = replace(TOPIC, id="0b" * 16)


class Brokers:
    """One lists the topics in `listed`; the coordinator has those that `exist`."""

    def __init__(self, *exist: Topic, listed: tuple[Topic, ...] = ()) -> None:
        self.exist = exist
        self.listed = listed
        self.asked: list[str] = []
        self.topics = AuditedTopics(self.list, self.find)

    async def list(self) -> tuple[Topic, ...]:
        return self.listed

    async def find(self, name: str) -> Topic:
        self.asked.append(name)
        if not name.isidentifier():
            raise InvalidNameError("not a name")
        found = next((topic for topic in self.exist if topic.name == name), None)
        if found is None:
            raise NotFoundError("no such topic")
        return found


def test_a_topic_that_a_report_is_about_is_asked_for_and_one_that_is_gone_only_once() -> None:
    async def work() -> None:
        brokers = Brokers(TOPIC)
        for _ in range(2):
            await brokers.topics.learn(TOPIC.name, TOPIC.id)
            await brokers.topics.learn(TOPIC.name, AGAIN.id)
            await brokers.topics.learn("a name", "0c" * 16)
            await brokers.topics.learn(AUDIT_TOPIC, "0d" * 16)
        assert brokers.topics.by_id == {TOPIC.id: TOPIC}
        assert brokers.asked == [TOPIC.name, TOPIC.name, "a name"]

    asyncio.run(work())


@pytest.mark.parametrize(("exists", "left"), [((TOPIC,), {TOPIC.id: TOPIC}), ((), {}), ((AGAIN,), {})])
def test_a_topic_that_is_not_listed_any_more_is_kept_while_it_exists(
    exists: tuple[Topic, ...], left: dict[str, Topic]
) -> None:
    async def work() -> None:
        brokers = Brokers(*exists, listed=(TOPIC,))
        await brokers.topics.refresh()
        assert brokers.topics.by_id == {TOPIC.id: TOPIC}
        brokers.listed = ()
        await brokers.topics.refresh()
        assert brokers.topics.by_id == left

    asyncio.run(work())


def test_topics_stay_as_they_are_while_nobody_answers() -> None:
    async def work() -> None:
        async def find(_name: str) -> Topic:
            raise UnreachableError("no broker answers")

        brokers = Brokers(listed=(TOPIC,))
        topics = AuditedTopics(brokers.list, find)
        await topics.refresh()
        brokers.listed = ()
        with pytest.raises(UnreachableError):
            await topics.refresh()
        assert topics.by_id == {TOPIC.id: TOPIC}

    asyncio.run(work())


def test_an_earlier_topic_of_the_name_that_the_coordinator_did_not_confirm_is_no_end_of_the_later_one() -> None:
    async def work() -> None:
        answer = Metadata(cluster="c", brokers=[], topics=[TopicMetadata(topic=TOPIC, owners=[])])
        answer.unconfirmed = [TOPIC.name]

        async def ask(request: MetadataRequest) -> Metadata:
            assert request.topics == [TOPIC.name]
            return answer

        topics = AuditedTopics(Brokers().list, partial(find_topic, ask))
        with pytest.raises(NotReadyError):
            await topics.learn(TOPIC.name, AGAIN.id)
        answer.unconfirmed, answer.topics[0].topic = [], AGAIN
        await topics.learn(TOPIC.name, AGAIN.id)
        assert topics.by_id == {AGAIN.id: AGAIN}
        answer.topics, answer.missing = [], [TOPIC.name]
        await topics.refresh()
        assert topics.by_id == {}

    asyncio.run(work())


def test_only_so_many_topics_that_are_gone_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(audited_topics, "GONE_MAX", 2)
        brokers = Brokers()
        for id_ in ("a", "b", "c", "a", "c"):
            await brokers.topics.learn(TOPIC.name, id_)
        assert len(brokers.asked) == 4, "a was forgotten, c was not"

    asyncio.run(work())
