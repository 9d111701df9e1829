"""A rolling upgrade: an older broker reads a newer one's data, and keeps its new fields."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from memq.errors import UnknownSettingError
from memq.governor.registry import encode_topic
from memq.governor.standalone import StandaloneCoordinator
from memq.protocol.messages import Metadata, TopicMetadata, decode_message, encode_message
from memq.runtime.clock import SystemClock
from memq.runtime.sqlite_file import checksum
from memq.topic import Topic, TopicSettings, equal_slots, parse_settings
from tests.contract.coordinators import topic

NEWER: dict[str, Any] = {"tomorrow": {"a": [1, 2]}}


def of_tomorrow(known: Topic) -> bytes:
    """Return a topic as a newer broker stores it: with fields at each level that this one does not know."""
    body = json.loads(msgspec.json.encode(known))
    for place in (body, body["settings"], body["partitions"][1]):
        place |= NEWER
    return json.dumps(body).encode()


def test_newer_fields_are_ignored_and_kept() -> None:
    before = of_tomorrow(topic())
    known = msgspec.json.decode(before, type=Topic)
    assert known == topic()
    altered = replace(known, settings=TopicSettings(retention_ms=0), partitions=equal_slots(3))
    after = encode_topic(altered, before)
    assert msgspec.json.decode(after, type=Topic) == altered
    body = json.loads(after)
    assert [place["tomorrow"] for place in (body, body["settings"], body["partitions"][1])] == 3 * [NEWER["tomorrow"]]
    assert "tomorrow" not in body["partitions"][0] | body["partitions"][2]
    assert json.loads(encode_topic(altered)) == json.loads(msgspec.json.encode(altered))


def test_a_user_names_only_settings_that_there_are() -> None:
    with pytest.raises(UnknownSettingError, match="unknown topic setting 'retention_mss'") as caught:
        parse_settings({"retention_mss": 5}, TopicSettings())
    assert caught.value.hint == "did you mean 'retention_ms'?"


def test_clients_pass_over_settings_of_a_newer_broker() -> None:
    report = Metadata(cluster="test", topics=[TopicMetadata(topic=topic(), owners=[])])
    body = json.loads(encode_message(report))
    body["topics"][0]["topic"]["settings"] |= NEWER
    assert decode_message(json.dumps(body).encode(), Metadata) == report


def test_a_file_that_a_newer_broker_has_written_is_changed_by_an_older_one(tmp_path: Path) -> None:
    file = tmp_path / "topics.sqlite"

    async def alter(known: Topic | None) -> Topic:
        coordinator = StandaloneCoordinator(file, "test", SystemClock())
        try:
            if known is None:
                await coordinator.create_topic(topic())
            else:
                await coordinator.alter_topic(replace(known, settings=TopicSettings(retention_ms=0)))
            return (await coordinator.topics())[0]
        finally:
            await coordinator.close()

    stored = asyncio.run(alter(None))
    with sqlite3.connect(file) as connection:
        row = (stored.id, of_tomorrow(stored))
        connection.execute("UPDATE topics SET body = ?, checksum = ?", (row[1], checksum("topics", row)))
    connection.close()
    assert asyncio.run(alter(stored)).settings.retention_ms == 0
    with sqlite3.connect(file) as connection:
        ((body,),) = connection.execute("SELECT body FROM topics").fetchall()
    connection.close()
    assert json.loads(body)["settings"]["tomorrow"] == NEWER["tomorrow"]
    assert json.loads(body)["settings"]["retention_ms"] == 0
