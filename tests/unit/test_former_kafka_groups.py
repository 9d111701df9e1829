"""Groups that an earlier release had in Kafka, on requests that Kafka refuses or answers in part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicPartition

from memq.errors import InvalidRequestError, MemqError, NotFoundError, QueueError
from memq.notification.kafka.groups import former_groups
from memq.notification.kafka.groups.former_groups import MOVING_PAUSE_S, MOVING_S_MAX, FormerKafkaGroups
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.settings import Names, kafka_settings
from memq.topic import Committed, Position, ReadPartition, Totals
from tests.skipping_loop import now_s, run_skipping

A, B = (ReadPartition("clicks", "0a" * 16, number) for number in range(2))
TWO = {each: Committed(Position(each.partition, 7), Totals()) for each in (A, B)}
NAMES = Names("t.")


class Kafka:
    """The requests about groups, and the positions, of one group of Kafka with `members`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members: list[str] = []
        self.refusal: Callable[[], int | None] = lambda: None  # the code with which the next request is refused
        self.answered: int | None = None  # how many positions an answer has; None: all
        self.stored: list[TopicPartition] = []
        self.state = ConsumerGroupState.EMPTY
        self.errors = LastErrors()
        monkeypatch.setattr(former_groups, "Positions", lambda *given: self)
        kafka: Any = self
        self.former = FormerKafkaGroups(kafka, kafka_settings("kafka://localhost", {}), NAMES, kafka)

    def _refuse(self) -> None:
        code = self.refusal()
        if code is not None:
            raise KafkaException(KafkaError(code))

    async def store(self, group: str, offsets: list[TopicPartition]) -> Sequence[TopicPartition]:
        self._refuse()
        self.stored = offsets[: self.answered]
        return self.stored

    async def of(self, group: str, places: Sequence[object]) -> list[TopicPartition]:
        return self.stored

    async def describe(self, group: str) -> SimpleNamespace:
        members = [SimpleNamespace(client_id=name, group_instance_id=None) for name in self.members]
        return SimpleNamespace(members=members, state=self.state)

    async def delete(self, group: str) -> None:
        self._refuse()

    async def partition_counts(self) -> dict[str, int]:
        return {NAMES.kafka_topic(A): 2, "foreign": 1}


def test_positions_that_an_answer_lacks_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call returned as if Kafka had stored them."""

    async def work() -> None:
        kafka = Kafka(monkeypatch)
        for kafka.answered, lacking in ((0, 2), (1, 1)):
            with pytest.raises(QueueError, match=rf"setting {lacking} positions of group 'g' .*: kafka's answer lacks"):
                await kafka.former.store("g", TWO)
        kafka.answered = None
        await kafka.former.store("g", TWO)
        assert (await kafka.former.read("g")).committed == TWO

    asyncio.run(work())


def test_a_coordinator_that_moves_is_asked_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        kafka = Kafka(monkeypatch)
        kafka.refusal = lambda: KafkaError.NOT_COORDINATOR if now_s() < MOVING_S_MAX / 2 else None
        await kafka.former.store("g", TWO)
        assert MOVING_S_MAX / 2 <= now_s() < MOVING_S_MAX / 2 + 2 * MOVING_PAUSE_S
        kafka.refusal = lambda: KafkaError.COORDINATOR_LOAD_IN_PROGRESS
        begin_s = now_s()
        with pytest.raises(QueueError, match="setting 2 positions"):
            await kafka.former.store("g", TWO)
        assert MOVING_S_MAX <= now_s() - begin_s < MOVING_S_MAX + 2 * MOVING_PAUSE_S

    run_skipping(work())


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize(
    ("members", "error", "said"),
    [
        (["m", "n"], InvalidRequestError, "the group has 2 active members"),
        ([], QueueError, "and then that it has none"),
    ],
)
def test_a_group_with_members_is_refused_and_one_that_has_just_lost_them_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, members: list[str], error: type[MemqError], said: str, *, stores: bool
) -> None:
    async def work() -> None:
        kafka = Kafka(monkeypatch)
        kafka.members = members
        kafka.refusal = lambda: KafkaError.UNKNOWN_MEMBER_ID if stores else KafkaError.NON_EMPTY_GROUP
        with pytest.raises(error, match=said):
            await (kafka.former.store("g", TWO) if stores else kafka.former.remove("g"))

    asyncio.run(work())


def test_a_group_that_kafka_does_not_have_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        kafka = Kafka(monkeypatch)
        kafka.state = ConsumerGroupState.DEAD
        kafka.refusal = lambda: KafkaError.GROUP_ID_NOT_FOUND
        for call in (kafka.former.read("g"), kafka.former.remove("g")):
            with pytest.raises(NotFoundError, match="group 'g' is not in Kafka"):
                await call
        kafka.refusal = lambda: KafkaError.NON_EMPTY_GROUP
        await kafka.former.remove("g")

    asyncio.run(work())
