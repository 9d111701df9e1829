"""The mark of a store: one cluster has one store, and a broker with another one does not start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest
from awscrt.checksums import crc32c

from memq.broker import assembly
from memq.broker.assembly import check_mark, open_coordinator, open_store
from memq.broker.store_mark import MISSING_READS, StoreMark
from memq.broker.sweep.sweep import Sweep
from memq.cli import main
from memq.cli.store.object_files import find_objects
from memq.errors import CorruptDataError, InvalidRequestError, InvalidSettingError, NotFoundError
from memq.format.key import store_mark_key
from memq.governor import BrokerEntry
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings, PartSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.brokers import run

CLUSTER = "c-1"
KEY = store_mark_key(CLUSTER)


class ForgetfulStore(MemoryHandler):
    """A store that answers "not found" for some reads, whatever is there."""

    missing = 0

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """Get, unless it is one of the next `missing` reads."""
        if self.missing:
            self.missing -= 1
            raise NotFoundError(f"object '{key}' does not exist")
        return await super().get(key, checked=checked)


def a_store() -> ForgetfulStore:
    return ForgetfulStore(SystemClock())


def marked(store: MemoryHandler, cluster: MemoryCluster) -> StoreMark:
    return StoreMark(CLUSTER, store, MemoryCoordinator(cluster))


def test_a_first_start_marks_both_and_later_ones_compare() -> None:
    async def work() -> None:
        store, cluster = a_store(), MemoryCluster()
        await marked(store, cluster).settle(Random(1))
        marks = await marked(store, cluster).read()
        assert marks.known == marks.found == (await store.get(KEY)).decode()
        await marked(store, cluster).settle(Random(2))
        assert await marked(store, cluster).read() == marks

    run(work())


def test_another_store_is_refused_empty_or_of_another_cluster() -> None:
    async def work() -> None:
        cluster, other = MemoryCluster(), a_store()
        await marked(a_store(), cluster).settle(Random(1))
        with pytest.raises(InvalidSettingError, match="has no mark"):
            await marked(other, cluster).settle(Random(2))
        assert [entry.key async for entry in other.list()] == [], "nothing was written there"
        await marked(other, MemoryCluster()).settle(Random(3))
        with pytest.raises(InvalidSettingError, match="has the mark") as caught:
            await marked(other, cluster).settle(Random(4))
        assert "memq accept-store --dry-run" in caught.value.hint

    run(work())


def test_the_same_bucket_copied_whole_is_the_same_store() -> None:
    async def work() -> None:
        store, copy, cluster = a_store(), a_store(), MemoryCluster()
        await marked(store, cluster).settle(Random(1))
        data = await store.get(KEY)
        await copy.put(KEY, [data], crc32c(data))
        await marked(copy, cluster).settle(Random(2))

    run(work())


def test_a_new_coordinator_takes_the_mark_that_the_store_has() -> None:
    async def work() -> None:
        store, cluster = a_store(), MemoryCluster()
        await marked(store, MemoryCluster()).settle(Random(1))
        await marked(store, cluster).settle(Random(2))
        assert not (await marked(store, cluster).read()).differ

    run(work())


def test_two_first_starts_at_once_settle_on_one_mark_or_one_store() -> None:
    async def work() -> None:
        store, cluster = a_store(), MemoryCluster()
        await asyncio.gather(*(marked(store, cluster).settle(Random(seed)) for seed in range(4)))
        cluster, stores = MemoryCluster(), [a_store(), a_store()]
        ends = await asyncio.gather(
            *(marked(each, cluster).settle(Random(1)) for each in stores), return_exceptions=True
        )
        assert sorted(type(end).__name__ for end in ends if end is not None) in ([], ["InvalidSettingError"])

    run(work())


def test_one_wrong_answer_that_the_mark_is_missing_refuses_no_start() -> None:
    async def work() -> None:
        store, cluster = a_store(), MemoryCluster()
        await marked(store, cluster).settle(Random(1))
        store.missing = MISSING_READS - 1
        await marked(store, cluster).compare()

    run(work())


def test_a_damaged_mark_is_no_other_store() -> None:
    async def work() -> None:
        store = a_store()
        await store.put(KEY, [b"mine"], crc32c(b"mine"))
        with pytest.raises(CorruptDataError, match="no mark"):
            await marked(store, MemoryCluster()).settle(Random(1))

    run(work())


def test_a_moved_store_is_accepted_once_no_broker_runs() -> None:
    async def work() -> None:
        cluster, moved = MemoryCluster(), a_store()
        before, after = marked(a_store(), cluster), marked(moved, cluster)
        await before.settle(Random(1))
        live, coordinator = BrokerEntry(id="b1", session="s", address="h:1"), MemoryCoordinator(cluster)
        await coordinator.register(live)
        with pytest.raises(InvalidRequestError, match="b1"):
            await after.accept(Random(2))
        await coordinator.unregister(live)
        assert (await after.accept(Random(2))).differ
        await after.settle(Random(3))
        with pytest.raises(InvalidSettingError):
            await before.compare()

    run(work())


def test_verify_passes_the_mark_over(tmp_path: Path) -> None:
    (tmp_path / KEY).parent.mkdir()
    (tmp_path / KEY).write_bytes(b"0" * 32)
    assert find_objects(str(tmp_path), {}).objects == ()


def test_a_sweep_leaves_the_mark_alone() -> None:
    async def work() -> None:
        store, cluster, clock = a_store(), MemoryCluster(), SystemClock()
        await marked(store, cluster).settle(Random(1))
        found = [each async for each in swept(store, cluster, clock)]
        assert found == []
        assert await store.size(KEY)

    def swept(store: MemoryHandler, cluster: MemoryCluster, clock: SystemClock) -> AsyncIterator[object]:
        sweep = Sweep(CLUSTER, store, MemoryQueue(clock), MemoryCoordinator(cluster), clock, note, 0)
        return sweep.run(-10_000, -10_000)

    notes: list[str] = []
    note: Callable[[str], None] = notes.append
    run(work())
    assert notes == []


def test_the_command_names_both_marks_and_takes_the_moved_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "lock_folder", str)  # it holds until the process ends: here all are one
    settings = BrokerSettings(cluster=CLUSTER)
    flags = ["--cluster", CLUSTER, "--coordinator", f"standalone:{tmp_path}/topics.sqlite"]

    def said(store: str, *more: str) -> str:
        code = main(["accept-store", *more, *flags, "--store", f"file:{tmp_path}/{store}"])
        captured = capsys.readouterr()
        return f"{code} {captured.out}{captured.err}"

    async def start(store: str) -> str:
        parts = PartSettings(store=f"file:{tmp_path}/{store}", coordinator=f"standalone:{tmp_path}/topics.sqlite")
        runtime = Runtime()
        coordinator, opened = open_coordinator(parts, runtime, CLUSTER), open_store(parts, runtime, CLUSTER)
        try:
            await StoreMark(CLUSTER, opened, coordinator).settle(Random(1))
        finally:
            await opened.close()
            await coordinator.close()
        return await check_mark(parts, settings)

    assert "no mark yet" in said("here", "--dry-run")
    assert "is the cluster's, " in asyncio.run(start("here"))
    assert "is that of the cluster already" in said("here", "--dry-run")
    with pytest.raises(InvalidSettingError):
        asyncio.run(start("there"))
    assert "there' would replace the one with the mark" in said("there", "--dry-run")
    with pytest.raises(InvalidSettingError):
        asyncio.run(start("there"))
    assert "there' replaces the one with the mark" in said("there")
    assert "is the cluster's, " in asyncio.run(start("there"))
