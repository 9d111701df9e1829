"""The move of groups of an earlier release, with real processes: a data folder, and Kafka."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.client.group_migration import migrate_groups
from memq.errors import InvalidRequestError
from memq.groups.remote import RemoteGroups
from memq.notification.kafka.settings import Names
from memq.notification.sqlite.queue import SqliteQueue
from memq.protocol.link import connect_link
from memq.runtime.clock import SystemClock
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import Committed, Position, Totals, read_partitions
from memq_localstack.servers import Server
from tests.brokers import run
from tests.contract.sqlite_files import put_member
from tests.integration.kafka import joined_in_kafka, kafka_queue
from tests.integration.queued_broker import broker_on
from tests.servers import dev_server


def test_a_broker_of_a_folder_moves_the_groups_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a folder: the broker moves them itself with the first request, so the command finds none."""
    data = tmp_path / "data"
    with dev_server(data) as server:
        assert main(["topic", "create", "clicks", "-b", server.address]) == 0
    old_groups(data, "report")
    with dev_server(data) as server:
        assert main(["group", "migrate", "--dry-run", "--json", "-b", server.address]) == 0
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert shown == [{"group": "report", "positions": 1, "members": ["m"], "moved": False}]
        assert main(["group", "list", "--json", "-b", server.address]) == 0
        assert json.loads(capsys.readouterr().out) == ["report"]
        assert main(["group", "describe", "report", "--json", "-b", server.address]) == 0
        described = json.loads(capsys.readouterr().out)
        assert [each["position"] for each in described["partitions"]] == ["0:7:3"]
        assert described["members"] == []
        assert described["generation"] >= 1, "generations never go back"
        assert main(["group", "migrate", "-b", server.address]) == 0
        assert "moved" not in capsys.readouterr().out


def test_groups_in_kafka_are_moved_with_index_totals_and_mark(kafka: Server) -> None:
    async def work() -> None:
        queue = kafka_queue(kafka.address, prefix="moved.")
        try:
            async with broker_on(queue) as broker:
                async with AsyncAdmin(broker.address) as admin:
                    topic = await admin.create_topic("clicks", partitions=2)
                logs = read_partitions(topic)
                kafka_topic = Names("moved.").kafka_topic(logs[0])
                commit_in_kafka(kafka, "moved.report", kafka_topic, {0: (17, "memq1 3 1000 123456 77"), 1: (4, "")})
                commit_in_kafka(kafka, "foreign.report", kafka_topic, {0: (1, "")})
                link = await connect_link(Runtime(), None, parse_address(broker.address), client="test")
                member = RemoteGroups(link.request)
                with pytest.raises(InvalidRequestError, match="1 groups of an earlier release, first 'report'"):
                    await member.committed("report", logs)
                with joined_in_kafka(kafka, "moved.report", kafka_topic):
                    (refused,) = [one async for one in migrate_groups(broker.address)]
                    assert isinstance(refused.error, InvalidRequestError)
                    assert "1 active members" in str(refused.error)
                (moved,) = [one async for one in migrate_groups(broker.address)]
                assert (moved.group, moved.positions, moved.error) == ("report", 2, None)
                assert await member.committed("report", logs) == {
                    logs[0]: Committed(Position(0, 17, 3), Totals(1_000, 123_456), 77),
                    logs[1]: Committed(Position(1, 4), Totals()),
                }
                assert await queue.former.names() == []
                link.close()
        finally:
            await queue.close()

    run(work())


# ---- inside ----------------------------------------------------------------------------------------


def old_groups(data: Path, group: str) -> None:
    """Put a group with an active member and a position into the queue of a data folder."""

    async def work() -> None:
        queue = SqliteQueue(data / "queue.sqlite", SystemClock())
        try:
            (log,) = await queue.partitions("clicks")
            at = Committed(Position(0, 7, 3), Totals(10, 100))
            await queue.former.store(group, {log: at})
        finally:
            await queue.close()

    run(work())
    with closing(sqlite3.connect(data / "queue.sqlite")) as file, file:
        put_member(file, group, "m", int(SystemClock().monotonic() * 1_000), session_ms=3_600_000)


def commit_in_kafka(kafka: Server, group: str, topic: str, offsets: dict[int, tuple[int, str]]) -> None:
    """Store the positions of a group as a hosted member of an earlier release did."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    parts = [TopicPartition(topic, number, offset, metadata=text) for number, (offset, text) in offsets.items()]
    for _ in range(1_000):  # a Kafka that has just started creates its topic of positions
        answers = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, parts)])
        with suppress(KafkaException):
            if all(each.error is None for each in answers[group].result(60).topic_partitions):
                return
        admin.poll(0.05)
    raise AssertionError("Kafka stores no positions")
