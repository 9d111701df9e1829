"""Positions of groups in Kafka: a group that Kafka does not answer for delays no other group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from memq.notification.kafka.groups import requests
from memq.notification.kafka.groups.requests import CONSUMERS_MAX, READS_AT_ONCE_MAX, Positions
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.settings import kafka_settings
from tests.brokers import until

SICK = READS_AT_ONCE_MAX + 1


class Kafka:
    """Consumers whose groups have position 7; requests and closes of those in `silent` wait until `answer` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = threading.Event()
        self.silent: set[str] = set()
        self.made: list[str] = []
        self.closed: list[str] = []
        monkeypatch.setattr(requests, "consumer_of", self._consumer)

    def _consumer(self, settings: Mapping[str, Any], complain: object) -> GroupConsumer:
        self.made.append(settings["group.id"])
        return GroupConsumer(self, settings["group.id"])

    def wait(self, group: str) -> None:
        if group in self.silent:
            self.answer.wait()


class GroupConsumer:
    """The consumer of one group."""

    def __init__(self, kafka: Kafka, group: str) -> None:
        self._kafka = kafka
        self._group = group
        self._used = threading.Lock()

    def committed(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        assert self._used.acquire(blocking=False), "two threads use one consumer"
        self._kafka.wait(self._group)
        self._used.release()
        return [TopicPartition(place.topic, place.partition, 7) for place in places]

    def close(self) -> None:
        self._kafka.wait(self._group)
        self._kafka.closed.append(self._group)


async def read(positions: Positions, group: str) -> int:
    async with asyncio.timeout(30):
        return (await positions.of(group, [("t", 0)]))[0].offset


def test_a_silent_coordinator_delays_only_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups shared one thread, and each read of a silent one took it for the whole time-out."""

    async def work() -> None:
        kafka = Kafka(monkeypatch)
        kafka.silent = {f"sick-{number}" for number in range(SICK)}
        positions = Positions(kafka_settings("kafka://localhost", {}), LastErrors())
        waiting = [asyncio.create_task(positions.of(group, [("t", 0)])) for group in sorted(kafka.silent) * 3]
        try:
            await until(lambda: len(kafka.made) == READS_AT_ONCE_MAX)
            assert await read(positions, "sound") == 7
        finally:
            kafka.answer.set()
        assert sorted(kafka.made) == [*sorted(kafka.silent), "sound"]
        await asyncio.gather(*waiting)
        await positions.close()
        assert sorted(kafka.closed) == sorted(kafka.made)

    asyncio.run(work())


def test_few_consumers_are_kept_and_one_that_hangs_at_its_close_delays_no_other_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        kafka = Kafka(monkeypatch)
        positions = Positions(kafka_settings("kafka://localhost", {}), LastErrors())
        for number in range(CONSUMERS_MAX):
            await read(positions, f"group-{number}")
        kafka.silent = {"group-0"}
        evicting = asyncio.create_task(positions.of("new", [("t", 0)]))
        await until(lambda: "new" in kafka.made)
        try:
            for number in range(1, CONSUMERS_MAX):
                assert await read(positions, f"group-{number}") == 7
        finally:
            kafka.answer.set()
        assert len(kafka.made) == CONSUMERS_MAX + 1, "idle consumers are used again"
        await evicting
        await positions.close()
        assert sorted(kafka.closed) == sorted(kafka.made)

    asyncio.run(work())
