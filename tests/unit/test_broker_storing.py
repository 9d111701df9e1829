"""An object is put until it is stored, while a batch needs it and its key is valid."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from awscrt.checksums import crc32c

from memq.broker.ingest.slabs import Slab, SlabPool
from memq.broker.partition import storing
from memq.broker.partition.batch import ObjectBody, Origin, SealedBatch
from memq.broker.partition.storing import (
    BACKOFF_S_MAX,
    LOGGED_TRIES,
    STORE_TIMEOUT_S,
    UPLOADS_IN_FLIGHT_MAX,
    SharedObjects,
    key_valid_s,
    store_object,
)
from memq.broker.services import Services
from memq.errors import ObjectExistsError, StoreError
from memq.format.blocks.header import Buffer
from memq.format.object import BatchEntry
from memq.kernel.header_table import table_of
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.brokers import block_of, log_lines
from tests.partition_owners import Opening
from tests.skipping_loop import run_skipping, skip
from tests.unit.sealed_batches import TOPIC

PARTS: list[bytes | memoryview] = [b"one", b"two"]
BODY = ObjectBody("memq/one", PARTS, crc32c(b"onetwo"), 6)


class FailingStore(MemoryHandler):
    """Its first puts fail, or hang; `asked_s` are the times of all."""

    def __init__(self, opening: Opening, fails: Sequence[Exception | None]) -> None:
        super().__init__(opening.clock)
        self.fails = list(fails)
        self.asked_s: list[float] = []

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        self.asked_s.append(asyncio.get_running_loop().time())
        if self.fails:
            error = self.fails.pop(0)
            if error is None:
                await asyncio.get_running_loop().create_future()  # for ever
            else:
                raise error
        await skip(0.25)
        await super().put(key, buffers, checksum)


def services_on(fails: Sequence[Exception | None]) -> tuple[Services, FailingStore]:
    opening = Opening()
    store = FailingStore(opening, fails)
    return replace(opening.services, stores={"main": store}, settings=BrokerSettings(sweep_age_ms=600_000)), store


def test_a_put_that_fails_is_tried_again_after_a_pause_that_doubles(caplog: pytest.LogCaptureFixture) -> None:
    pauses_s = [0.1, 0.2, 0.4, BACKOFF_S_MAX, BACKOFF_S_MAX]

    async def work() -> None:
        services, store = services_on([StoreError("it is down"), RuntimeError(), *[StoreError("still")] * 3])
        await skip(3.0)
        assert await store_object(services, BODY, "batch 7") == 3.0, "no store dates it earlier"
        assert [later - first for first, later in pairwise(store.asked_s)] == pytest.approx(pauses_s)
        assert store.objects == {BODY.key: b"onetwo"}
        counters = services.counters
        assert (counters.store_retries, counters.stored_objects, counters.stored_bytes) == (5, 1, 6)
        assert counters.store_seconds.sum_s == pytest.approx(sum(pauses_s) + 0.25)

    run_skipping(work())
    assert log_lines(caplog) == [
        "store-retry: batch 7, try 1: it is down",
        "store-retry: batch 7, try 2: RuntimeError()",
        *(f"store-retry: batch 7, try {number}: still" for number in (3, 4, 5)),
    ]


def test_a_broker_logs_the_hint_of_a_failing_put_and_the_later_tries_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        gone = StoreError("not stored", hint="the folder of the store is gone")
        services, _ = services_on([gone] * 300)
        await store_object(services, BODY, "batch 7")

    run_skipping(work())
    lines = log_lines(caplog)
    assert lines[:LOGGED_TRIES] == [
        f"store-retry: batch 7, try {number}: not stored; the folder of the store is gone"
        for number in range(1, LOGGED_TRIES + 1)
    ]
    assert 2 <= len(lines) - LOGGED_TRIES <= 4


def test_a_put_that_hangs_is_one_that_fails() -> None:
    async def work() -> None:
        services, store = services_on([None])
        assert await store_object(services, BODY, "batch 7") == 0.0
        assert store.asked_s == pytest.approx([0.0, STORE_TIMEOUT_S + 0.1])

    run_skipping(work())


def test_other_bytes_under_the_key_end_it() -> None:
    async def work() -> None:
        services, store = services_on([ObjectExistsError("others")])
        with pytest.raises(ObjectExistsError, match="others"):
            await store_object(services, BODY, "batch 7")
        assert (services.counters.store_retries, services.counters.stored_objects) == (0, 0)
        assert len(store.asked_s) == 1

    run_skipping(work())


def test_nothing_is_put_that_is_wanted_no_more() -> None:
    async def work() -> None:
        services, store = services_on([StoreError("it is down")] * 3)
        assert await store_object(services, BODY, "batch 7", lambda: len(store.asked_s) < 2) is None
        assert len(store.asked_s) == 2

    run_skipping(work())


def test_a_key_is_used_for_half_of_the_age_of_the_sweep() -> None:
    async def work() -> None:
        services, store = services_on([StoreError("it is down")] * 9)
        services = replace(services, settings=BrokerSettings(sweep_age_ms=2_400))
        assert key_valid_s(services.settings) == 1.2
        assert await store_object(services, BODY, "batch 7") is None
        assert store.asked_s == pytest.approx([0.0, 0.1, 0.3, 0.7]), "the next one would come at 1.2 s"

    run_skipping(work())


# ---- shared objects: what goes together, when it leaves, and what is given back -------------------


class Sharing:
    """The shared objects of one broker, and batches that its partitions store."""

    def __init__(self, *, fails: Sequence[Exception | None] = ()) -> None:
        services, self.handler = services_on(fails)
        self.services = replace(services, pool=SlabPool(64_000, 1_000))
        self.age_s = self.services.settings.shared_age_ms_max / 1000
        self.died: list[BaseException] = []
        self.shared = SharedObjects(self.services, self.died.append)
        self.batches: list[tuple[SealedBatch, bytes]] = []
        self.slabs: list[Slab] = []

    def batch(self, partition: int, blocks: int = 1) -> SealedBatch:
        """Return a batch of small blocks that lie in a slab of their own."""
        slab = self.services.pool.lease(1_000)
        assert slab is not None
        found = [block_of(TOPIC, number, [b"%d" % partition], partition=partition) for number in range(blocks)]
        data = b"".join(found)
        slab.view[: len(data)] = data
        ends = list(accumulate(map(len, found), initial=0))
        views, headers = table_of([(slab, start, end) for start, end in pairwise(ends)])
        entry = BatchEntry(0, len(data), 1_000, 0, blocks, 0, blocks, partition, 1)
        origin = Origin("memq", "one", "main", TOPIC, partition, 1)
        batch = SealedBatch(origin, entry, views, headers, [])
        self.batches.append((batch, data))
        self.slabs.append(slab)
        return batch

    def store(self, partition: int, blocks: int = 1) -> asyncio.Task[float]:
        """Store a batch in the background; its partition lets go of the slab when that has ended."""
        batch, slab = self.batch(partition, blocks), self.slabs[-1]

        async def store() -> float:
            try:
                return await self.shared.store(batch, [slab])
            finally:
                self.services.pool.release(slab)

        return asyncio.create_task(store())

    def sound(self) -> list[list[int]]:
        """Return the partitions in each object, in order, after reading every batch at its place."""
        found: dict[str, list[int]] = {key: [] for key in self.handler.objects}
        for each, data in self.batches:
            if each.key in found:
                assert self.handler.objects[each.key][each.offset :].startswith(data)
                found[each.key].append(each.entry.partition)
        return list(found.values())


def test_batches_within_a_moment_share_an_object_and_give_their_slabs_back() -> None:
    async def work() -> None:
        sharing = Sharing()
        first = sharing.store(0)
        await skip(sharing.age_s / 2)
        second = sharing.store(1, blocks=2)
        assert not sharing.handler.asked_s
        await asyncio.gather(first, second)
        assert sharing.handler.asked_s == [pytest.approx(sharing.age_s)]
        assert sharing.sound() == [[0, 1]]
        await sharing.store(2)
        assert sharing.sound() == [[0, 1], [2]]
        assert sharing.services.pool.leased_bytes == 0
        await sharing.shared.stop()
        assert not sharing.died

    run_skipping(work())


@pytest.mark.parametrize("bound", ["bytes", "batches"])
def test_an_object_that_is_full_leaves_at_once_and_the_next_one_has_its_own_time(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    async def work() -> None:
        sharing = Sharing()
        if bound == "batches":
            monkeypatch.setattr(storing, "SHARED_BATCHES_MAX", 2)
        else:
            monkeypatch.setattr(storing, "SHARED_BYTES_MAX", 2 * len(block_of(TOPIC, 0, [b"0"])))
        tasks = [sharing.store(0)]
        await skip(sharing.age_s / 2)
        tasks += [sharing.store(1), sharing.store(2)]
        await asyncio.gather(*tasks)
        half_s = sharing.age_s / 2
        assert sharing.handler.asked_s == [pytest.approx(half_s), pytest.approx(half_s + sharing.age_s)]
        assert sharing.sound() == [[0, 1], [2]]

    run_skipping(work())


def test_an_object_has_no_more_blocks_than_its_index_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(storing, "OBJECT_BLOCKS_MAX", 4)
        sharing = Sharing()
        await asyncio.gather(*(sharing.store(partition, blocks=2) for partition in range(5)))
        assert sharing.sound() == [[0, 1], [2, 3], [4]]

    run_skipping(work())


def test_a_batch_that_nobody_waits_for_is_not_stored_alone_and_its_slab_comes_back() -> None:
    async def work() -> None:
        sharing = Sharing()
        lonely = sharing.store(0)
        await skip(0)
        lonely.cancel()
        await skip(sharing.age_s + 1)
        assert not sharing.handler.asked_s
        assert sharing.services.pool.leased_bytes == 0
        given_up, wanted = sharing.store(1), sharing.store(2)
        await skip(0)
        given_up.cancel()
        await wanted
        assert sharing.sound() == [[1, 2]], "its bytes may be there: no pointer names them"
        assert sharing.services.pool.leased_bytes == 0

    run_skipping(work())


def test_an_object_that_nobody_waits_for_any_more_is_not_tried_again() -> None:
    async def work() -> None:
        sharing = Sharing(fails=[StoreError("it is away")] * 1_000)
        lonely = sharing.store(0)
        await skip(sharing.age_s + 1)
        lonely.cancel()
        await skip(1)
        tried = len(sharing.handler.asked_s)
        assert tried > 1
        await skip(60)
        assert len(sharing.handler.asked_s) == tried
        assert sharing.services.pool.leased_bytes == 0

    run_skipping(work())


def test_so_many_objects_are_put_at_once_and_the_next_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(storing, "SHARED_BATCHES_MAX", 1)
        sharing = Sharing()
        await asyncio.gather(*(sharing.store(partition) for partition in range(UPLOADS_IN_FLIGHT_MAX + 1)))
        assert sharing.handler.asked_s == [pytest.approx(0.0)] * UPLOADS_IN_FLIGHT_MAX + [pytest.approx(0.25)]

    run_skipping(work())


def test_a_key_that_an_earlier_run_has_used_is_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        sharing = Sharing(fails=[ObjectExistsError("others")])
        await sharing.store(0)
        await sharing.store(1)
        assert sharing.sound() == [[0], [1]]
        assert len(sharing.handler.asked_s) == 3

    run_skipping(work())
    assert "start-epoch-taken: others" in log_lines(caplog)


def test_a_stop_ends_what_waits_and_puts_nothing_more() -> None:
    async def work() -> None:
        sharing = Sharing()
        leaving = sharing.store(0)
        await skip(sharing.age_s + 0.1)
        gathering = sharing.store(1)
        await skip(0)
        await sharing.shared.stop()
        await asyncio.wait([leaving, gathering])
        assert leaving.cancelled()
        assert gathering.cancelled()
        await skip(sharing.age_s + 1)
        assert len(sharing.handler.asked_s) == 1
        assert sharing.services.pool.leased_bytes == 0

    run_skipping(work())
