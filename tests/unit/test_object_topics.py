"""The topics of an object, on which READ of it needs a permission."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from awscrt.checksums import crc32c

from memq.broker.permissions.object_topics import ObjectTopics
from memq.errors import StoreError
from memq.format.key import object_key, shared_object_key, staged_object_key
from memq.permissions import Resource, ResourceKind, topic_resource
from memq.runtime.clock import SystemClock
from memq.storage_handlers import confirmed_reads
from memq.storage_handlers.memory import MemoryHandler
from tests.unit.bare_cluster import newer
from tests.unit.sealed_batches import OTHER, SHARED, TOPIC

KEY = shared_object_key("memq", "b", 1, 0, 2_006)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read damaged objects again at once."""
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


class Store(MemoryHandler):
    """Counts reads of sizes."""

    reads = 0

    async def size(self, key: str) -> int:
        self.reads += 1
        return await super().size(key)


def topics_on(store: MemoryHandler) -> ObjectTopics:
    return ObjectTopics(cast(Any, SimpleNamespace(stores={"main": store}, settings=SimpleNamespace(cluster="memq"))))


def resources(key: str, body: bytes = SHARED, store: str = "main") -> list[Resource]:
    async def work() -> list[Resource]:
        made = Store(SystemClock())
        await made.put(key, [body], crc32c(body))
        return await topics_on(made).resources(store, key)

    return asyncio.run(work())


def test_an_object_has_the_topics_of_all_its_batches() -> None:
    both = [topic_resource(TOPIC.name), topic_resource(OTHER.name)]
    assert resources(KEY) == both
    assert resources(staged_object_key("memq", "w", 1, 2_006)) == both
    own = object_key("memq", TOPIC.name, TOPIC.id, 0, 4, 6, 2_006)
    assert resources(own, b"its key has the topic") == [topic_resource(TOPIC.name)]


def unknown(key: str, store: str = "main") -> list[Resource]:
    """Return what needs the permission on all topics."""
    return [Resource(ResourceKind.OBJECT, f"{store}/{key}")]


@pytest.mark.parametrize("body", [newer(SHARED), b"x" * 500, b""])
def test_an_object_whose_index_can_not_be_read_needs_the_permission_on_all_topics(body: bytes) -> None:
    assert resources(KEY, body) == unknown(KEY)


def test_objects_of_no_topic_other_clusters_and_other_stores_need_it_too() -> None:
    assert resources("memq/states/x/1") == unknown("memq/states/x/1")
    other = KEY.replace("memq/", "other/")
    assert resources(other) == unknown(other)
    assert resources(KEY, store="second") == unknown(KEY, "second")


def test_an_index_is_read_once_and_an_outage_is_not_remembered() -> None:
    async def work() -> None:
        store = Store(SystemClock())
        await store.put(KEY, [SHARED], crc32c(SHARED))
        topics = topics_on(store)
        size, store.size = store.size, failing  # type: ignore[method-assign]
        with pytest.raises(StoreError):
            await topics.resources("main", KEY)
        store.size = size  # type: ignore[method-assign]
        for _ in range(3):
            assert len(await topics.resources("main", KEY)) == 2
        assert store.reads == 1

    async def failing(key: str) -> int:
        raise StoreError("not now")

    asyncio.run(work())
