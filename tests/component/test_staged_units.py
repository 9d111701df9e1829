"""The owner of a target publishes a staged part once, where its pieces lie, under the number of its unit (H3, H4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.broker.holds import staged_parts
from memq.broker.holds.staged_parts import take_staged_unit
from memq.broker.holds.taking import IncomingUnit, UnitBlock
from memq.client.bulk.staged_writer import StagedWriter
from memq.errors import NotReadyError, StoreError
from memq.format.key import manifest_key
from memq.format.pointer import Pointer
from memq.format.staged_manifest import Manifest, encode_manifest, manifest_under
from memq.storage_handlers import confirmed_reads
from memq.storage_handlers.confirmed_reads import read_sealed
from memq.topic import writer_id
from tests.brokers import run
from tests.component.test_unit_taking import OTHER, SHARD, Target
from tests.partition_owners import GatedQueue, owning, turns

WRITER = "nightly"


class StagedTarget(Target):
    """An owner, and manifests of staged batches in its store."""

    async def batch(self, number: int, *records: int) -> str:
        """Stage a batch with an object of so many records each; return the key of its manifest."""
        found = []
        for count in records:
            writer = StagedWriter("memq", {self.topic.name: self.topic}, self.store, WRITER)
            await writer.add_many(self.topic.name, [b"value"] * count)
            found += await writer.finish()
        now_ms = self.broker.services.runtime.clock.wall_ms()
        manifest = Manifest(
            cluster="memq",
            writer=WRITER,
            batch_id=number,
            store="main",
            created_ms=now_ms,
            objects=tuple(found),
            atomic=True,
        )
        key, body = manifest_key("memq", WRITER, number), encode_manifest(manifest)
        await self.store.put(key, [body], crc32c(body))
        return key

    async def take_part(self, number: int, manifest: str, *, shard: int = SHARD, behind: int = 0) -> None:
        unit = IncomingUnit(shard, number, behind, [UnitBlock(manifest, 0, 0, None)])
        await take_staged_unit(self.processor, unit)

    def last_unit(self, shard: int = SHARD) -> int:
        own = self.processor.own
        assert own is not None
        return own.named.last_unit(shard)


def on_staged_target(work: Callable[[StagedTarget], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test at an owner, without pauses between reads."""
    monkeypatch.setattr(confirmed_reads, "MISSING_CONFIRMED_S", 0.0)
    monkeypatch.setattr(confirmed_reads, "MISSING_LIST_PAUSE_S", 0.0)
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)

    async def begin() -> None:
        async with owning() as (broker, _, topic):
            await work(StagedTarget(broker, topic))

    run(begin())


def facts(found: list[Pointer]) -> list[tuple[int, int, list[int]]]:
    """Return records, number of the writer's last piece, and units of each pointer."""
    return [
        (
            each.records,
            max((name.last_sequence for name in each.named if name.producer == writer_id(WRITER)), default=0),
            [name.last_sequence for name in each.named if name.producer in (SHARD, OTHER)],
        )
        for each in found
    ]


def test_a_target_publishes_all_pieces_and_the_last_pointer_has_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        key = await target.batch(7, 2, 1, 3)
        for _ in range(2):
            await target.take_part(1, key)
            assert facts(await target.batches()) == [(2, 1, []), (1, 2, []), (3, 3, [1])]
        await target.take(2, target.put(1))
        assert target.last_unit() == 2

    on_staged_target(work, monkeypatch)


def test_a_batch_that_another_transaction_has_committed_is_not_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        key = await target.batch(7, 2, 1)
        await target.take_part(1, key)
        await target.take_part(2, key)
        await target.take_part(1, key, shard=OTHER)
        assert len(await target.batches()) == 2
        assert (target.last_unit(), target.last_unit(OTHER), target.lost()) == (2, 1, 0)

    on_staged_target(work, monkeypatch)


def test_requests_at_once_publish_a_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        key = await target.batch(7, 2, 1)
        await asyncio.gather(*(target.take_part(1, key) for _ in range(3)))
        assert facts(await target.batches()) == [(2, 1, []), (1, 2, [1])]

    on_staged_target(work, monkeypatch)


def test_a_part_without_its_object_is_passed_over_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        for number, missing in enumerate(("/objects/", "/commits/"), 1):
            key = await target.batch(number, 2)
            for name in [name for name in target.store.objects if f"/{WRITER}{missing}" in name]:
                await target.store.delete(name)
            await target.take_part(number, key)
            assert (target.last_unit(), target.lost()) == (number, number)
        assert await target.batches() == []
        await target.take_part(3, await target.batch(3, 1))
        assert facts(await target.batches()) == [(1, 1, [3])]

    on_staged_target(work, monkeypatch)


def test_a_long_part_without_its_last_object_is_passed_over_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of a partition get all of a transaction or nothing, also if one request has not room for the pieces."""
    monkeypatch.setattr(staged_parts, "STAGED_PIECES_MAX", 2)

    async def work(target: StagedTarget) -> None:
        whole, key = await target.batch(1, 1, 1, 1), await target.batch(2, 1, 1, 1)
        manifest, _ = await read_sealed(target.store, key, manifest_under)
        await target.store.delete(manifest.objects[-1].key)
        await target.take_part(1, whole)
        await target.take_part(2, key)
        assert facts(await target.batches()) == [(1, 1, []), (1, 2, []), (1, 3, [1])]
        assert (target.last_unit(), target.lost()) == (2, 1)
        first, _ = await read_sealed(target.store, whole, manifest_under)
        await target.store.delete(first.objects[-1].key)
        await target.take_part(1, whole, shard=OTHER)
        assert target.lost() == 1, "pieces that the log has are not read again"

    on_staged_target(work, monkeypatch)


def test_a_part_waits_while_the_store_lists_an_object_that_it_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        key = await target.batch(7, 2)
        (name,) = [name for name in target.store.objects if "/objects/" in name]
        listed = [entry async for entry in target.store.list(name)]
        data = target.store.objects[name]
        await target.store.delete(name)

        async def lists(prefix: str) -> object:
            for entry in listed:
                yield entry

        with monkeypatch.context() as patch:
            patch.setattr(target.store, "list", lists)
            with pytest.raises(StoreError, match="the store lists all of them"):
                await target.take_part(1, key)
        assert (target.last_unit(), target.lost()) == (0, 0)
        target.store.objects[name], target.store.modified_ms[name] = data, 0
        await target.take_part(1, key)
        assert facts(await target.batches()) == [(2, 1, [1])]

    on_staged_target(work, monkeypatch)


def test_a_sealed_target_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        key, topic = await target.batch(7, 2), target.processor.topic
        target.processor.topic = msgspec.structs.replace(topic, sealed_ms=5, version=topic.version + 1)
        with pytest.raises(NotReadyError, match="its staged parts wait until it is unsealed"):
            await target.take_part(1, key)
        assert await target.batches() == []

    on_staged_target(work, monkeypatch)


def test_a_part_is_published_at_any_age_while_a_state_log_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        key, services = await target.batch(7, 2), target.broker.services
        wall_ms = services.runtime.clock.wall_ms
        monkeypatch.setattr(services.runtime.clock, "wall_ms", lambda: wall_ms() + 10 * services.settings.staged_age_ms)
        await target.take_part(1, key)
        assert facts(await target.batches()) == [(2, 1, [1])]

    on_staged_target(work, monkeypatch)


def test_a_second_request_waits_for_the_pieces_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: StagedTarget) -> None:
        key = await target.batch(7, 2)
        queue = GatedQueue.close_gate(target.broker.services.queue)
        tasks = [asyncio.create_task(target.take_part(1, key)) for _ in range(2)]
        await turns(50)
        assert not any(task.done() for task in tasks)
        queue.gate.set()
        await asyncio.gather(*tasks)
        assert facts(await target.batches()) == [(2, 1, [1])]

    on_staged_target(work, monkeypatch)
