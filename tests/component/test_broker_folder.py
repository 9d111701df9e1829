"""A broker on a data folder: folders that a start refuses, files that it removes, a restored queue."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import signal
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.broker import dev
from memq.broker.broker import Broker
from memq.broker.data_folder import DataFolder
from memq.broker.process import Companion
from memq.broker.restore.restore import restore_folder
from memq.broker.sweep.sweep_cluster import folder_lists, folder_sweep
from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.errors import ClosedError, CorruptDataError, DeniedError, InvalidRequestError, MemqError, QueueError
from memq.format.key import object_key
from memq.format.pointer import Pointer, decode_pointer
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.network import Network
from memq.runtime.process import Signals
from memq.runtime.runtime import Runtime
from memq.runtime.sqlite_file import copy_database, write_log_into
from memq.settings import BrokerSettings
from memq.storage_handlers.files import sync_folder
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import TopicSettings
from tests.brokers import log_lines, run

BATCHES = 3
Prepare = Callable[[], Awaitable[None]]
Life = Callable[[Broker, Prepare], Awaitable[None]]


class LaterClock(SystemClock):
    """The wall clock `later_ms` ahead."""

    later_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.later_ms


class Folder:
    """A data folder; `serve` lets a broker live on it, in this process and without signals."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path / "data"
        self.clock = LaterClock()
        self.runtime = Runtime(clock=self.clock)
        self.settings = BrokerSettings(
            data=str(self.path),
            port=0,
            http_port=-1,
            memory_bytes_max=32 << 20,
            cluster="home",
            sweep_confirm_ms=1_000,
            audit=False,
        )
        self.companions: list[Companion | None] = []
        self._life: Life = self._no_life
        monkeypatch.setattr(dev, "run_broker", self._run)

    async def _no_life(self, broker: Broker, prepare: Prepare) -> None:
        """A broker that is closed at once."""

    async def _run(
        self,
        broker: Broker,
        settings: BrokerSettings,
        runtime: Runtime,
        ready: Callable[[str], None],
        prepare: Prepare,
        companion: Companion | None,
        http_network: Network,
    ) -> int:
        assert (broker.services.settings, broker.services.runtime) == (settings, runtime)
        assert runtime is self.runtime
        self.companions.append(companion)
        try:
            await broker.start()
            ready(broker.address)
            await self._life(broker, prepare)
            await broker.drain()
        finally:
            await broker.close()
        return 7

    async def serve(self, life: Life | None = None, companion: Companion | None = None, **settings: Any) -> None:
        """Let a broker live, and end it."""
        self._life = life or self._no_life
        ready: list[str] = []
        found = dataclasses.replace(self.settings, **settings)
        assert await dev.serve(found, ready.append, runtime=self.runtime, companion=companion) == 7
        assert len(ready) == 1

    async def fill(self) -> None:
        """Have batches published, and two groups of positions."""

        async def life(broker: Broker, prepare: Prepare) -> None:
            async with AsyncProducer(broker.address) as producer:
                for number in range(BATCHES):
                    await (await producer.send("clicks", b"%d" % number))

        await self.serve(life)

    async def pointers(self) -> list[Pointer]:
        """Return what the queue names, of users' topics."""
        queue = SqliteQueue(self.path / "queue.sqlite", self.clock)
        try:
            found = []
            for partition in await queue.partitions():
                if partition.topic == "clicks":
                    found += [decode_pointer(entry.body) for entry in await queue.read(partition, 0, 1 << 20)]
            return [pointer for pointer in found if pointer.locations]
        finally:
            await queue.close()

    def is_free(self) -> bool:
        """Whether no broker holds it."""
        try:
            DataFolder.open(self.path, self.runtime.random, queue_gone=True).close()
        except InvalidRequestError:
            return False
        return True

    async def stray(self) -> str:
        """Store an object that no pointer names; return its key."""
        folder = DataFolder.open(self.path, self.runtime.random)
        folder.close()
        key = object_key(folder.cluster, "gone", "0b" * 16, 0, 1, 1, 1)
        store = FilesystemHandler(folder.objects, folder.tmp)
        await store.put(key, [b"left"], crc32c(b"left"))
        await store.close()
        return key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


# ---- a damaged row ---


def test_a_damaged_row_of_a_partition_harms_that_partition_alone(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    async def first(broker: Broker, prepare: Prepare) -> None:
        async with AsyncProducer(broker.address, audit=False) as producer:
            for topic in ("harmed", "clicks"):
                await (await producer.send(topic, b"before"))

    async def then(broker: Broker, prepare: Prepare) -> None:
        await prepare()
        async with AsyncAdmin(broker.address, runtime=folder.runtime) as admin:
            assert [topic.name for topic in await admin.topics()] == ["clicks", "harmed"]
            await admin.create_topic("new")
            harmed = (await admin.topic("harmed")).topic
            with pytest.raises(CorruptDataError, match="the row of partition 0 of topic 'harmed'") as caught:
                await admin.ends([harmed])
            assert "memq restore" in caught.value.__notes__[0], "a traceback shows it"
        async with AsyncProducer(broker.address, audit=False, delivery_timeout_ms=1_000) as producer:
            for topic in ("new", "clicks"):
                await (await producer.send(topic, b"after"))
            with pytest.raises(MemqError, match=r"topic 'harmed' partition 0 .*'harmed' in the queue is damaged"):
                await (await producer.send("harmed", b"after"))

    async def work() -> None:
        await folder.serve(first)
        with closing(sqlite3.connect(folder.path / "queue.sqlite")) as file:
            assert file.execute("UPDATE partitions SET time_max = 7 WHERE topic = 'harmed'").rowcount == 1
            file.commit()
        await folder.serve(then)
        assert any("log-damaged: topic 'harmed' partition 0 is not opened: " in line for line in log_lines(caplog))

    run(work())


def test_a_damaged_row_does_not_stop_a_start_without_objects(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    async def first(broker: Broker, prepare: Prepare) -> None:
        await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)

    async def work() -> None:
        await folder.serve(first)
        with closing(sqlite3.connect(folder.path / "queue.sqlite")) as file:
            assert file.execute("UPDATE partitions SET time_max = 7 WHERE topic = 'clicks'").rowcount == 1
            file.commit()
        await folder.serve()
        assert any("log-damaged: topic 'clicks' partition 0 is not opened: " in line for line in log_lines(caplog))

    run(work())


# ---- a broker on a folder ------------------------------------------------------------------------


def test_a_broker_has_the_name_and_the_parts_of_its_folder(folder: Folder) -> None:
    async def work() -> None:
        seen: list[str] = []

        async def life(broker: Broker, prepare: Prepare) -> None:
            seen.append(broker.services.settings.cluster)
            assert not folder.is_free()
            assert broker.services.spool.disk is not None
            assert (folder.path / "spool").is_dir()

        async def companion(address: str) -> None:
            raise AssertionError("the life of the process starts it")

        await folder.serve(life, companion)
        assert folder.companions == [companion]
        assert folder.is_free()
        await folder.serve(life, cluster="other")
        assert seen[0] == seen[1]
        assert seen[0].startswith("home")

    run(work())


def test_records_are_there_after_a_restart(folder: Folder) -> None:
    async def work() -> None:
        await folder.fill()
        assert sum(pointer.records for pointer in await folder.pointers()) == BATCHES
        await folder.serve()

    run(work())


def test_the_spool_is_where_the_settings_say(folder: Folder, tmp_path: Path) -> None:
    async def work() -> None:
        await folder.serve(spool=str(tmp_path / "elsewhere"))
        assert (tmp_path / "elsewhere").is_dir()
        assert not (folder.path / "spool").exists()

    run(work())


def test_a_folder_is_free_after_a_start_that_failed(folder: Folder) -> None:
    async def work() -> None:
        async def life(broker: Broker, prepare: Prepare) -> None:
            raise DeniedError("not you")

        with pytest.raises(DeniedError):
            await folder.serve(life)
        assert folder.is_free()

    run(work())


def test_a_folder_that_lost_its_objects_is_refused(folder: Folder) -> None:
    async def work() -> None:
        await folder.serve()
        await folder.serve()  # without objects and pointers
        await folder.fill()
        objects = sorted((folder.path / "objects").rglob("*"), reverse=True)
        gone = [path for path in objects if path.is_file()]
        kept = gone[0].read_bytes()
        for path in gone:
            path.unlink()
        with pytest.raises(CorruptDataError, match="has no objects of cluster 'home") as raised:
            await folder.serve()
        assert "of topic 'clicks'" in str(raised.value)
        assert folder.is_free()
        gone[0].write_bytes(kept)
        await folder.serve()  # one is enough to know that it is the right folder

    run(work())


@pytest.mark.parametrize("lost", ["queue.sqlite", "topics.sqlite"])
def test_a_copy_without_the_log_of_a_new_file_is_refused(folder: Folder, tmp_path: Path, lost: str) -> None:
    """It began with an empty file: topics were gone, and a sweep would have deleted the objects a day later."""
    copy = tmp_path / "copy"

    async def life(broker: Broker, prepare: Prepare) -> None:
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"v"))
        shutil.copytree(folder.path, copy)

    async def work() -> None:
        await folder.serve(life)
        assert not list(folder.path.glob("*-wal")), "a clean end writes the logs into the files"
        await folder.serve()
        shutil.copytree(copy, tmp_path / "whole")
        DataFolder.open(tmp_path / "whole", folder.runtime.random).close()
        for ending in ("-wal", "-shm"):
            copy.joinpath(lost + ending).unlink()
        with pytest.raises(CorruptDataError, match=f"'{lost}-wal' is missing"):
            await folder.serve(data=str(copy))
        assert not (copy / f"{lost}-wal").exists(), "nothing was opened"

    run(work())


def test_a_start_clears_what_earlier_runs_left(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async def life(broker: Broker, prepare: Prepare) -> None:
            await prepare()

        await folder.fill()
        named = await folder.pointers()
        await folder.serve(life)
        assert lines() == [], "nothing was left"
        key = await folder.stray()
        (folder.path / "tmp" / "77-0").write_bytes(b"12345")
        await folder.serve(life)
        assert not (folder.path / "tmp" / "77-0").exists()
        (line,) = lines()
        assert "1 temporary files (5 bytes) and 0 unnamed objects (0 bytes) of an earlier run" in line
        assert (folder.path / "objects" / key).exists(), "an earlier sweep has to name it, too"
        folder.clock.later_ms = 86_400_000
        await folder.serve(life)
        assert not (folder.path / "objects" / key).exists()
        assert "0 temporary files (0 bytes) and 1 unnamed objects (4 bytes) of an earlier run" in lines()[1]
        assert await folder.pointers() == named
        assert all((folder.path / "objects" / pointer.locations[0].key).exists() for pointer in named)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if "swept-at-start" in record.getMessage()]

    with caplog.at_level(logging.WARNING):
        run(work())


# ---- restore -------------------------------------------------------------------------------------


def test_a_queue_that_is_gone_is_restored_as_a_whole(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []

    def noted(path: str | Path) -> None:
        synced.append((folder.path / "queue.sqlite").exists())
        sync_folder(path)

    monkeypatch.setattr("memq.broker.restore.restore.sync_folder", noted)

    async def work() -> None:
        await folder.fill()
        named = await folder.pointers()
        queue = folder.path / "queue.sqlite"
        for ending in ("", "-wal", "-shm"):
            queue.with_name(queue.name + ending).unlink(missing_ok=True)
        queue.with_name("queue.sqlite-wal").write_bytes(b"of the one that is gone")
        moved: list[int] = []
        report = await restore_folder(folder.path, dry_run=True, moved=moved.append, runtime=folder.runtime)
        assert {each.topic: each.records for each in report}["clicks"] == BATCHES
        assert not queue.exists()
        assert list((folder.path / "tmp").iterdir()) == []
        assert folder.is_free()
        assert moved
        assert synced == []
        again = await restore_folder(folder.path, runtime=folder.runtime)
        assert synced == [True], "the folder is synced when it has the queue"
        assert again == report
        assert list((folder.path / "tmp").iterdir()) == []
        assert [pointer.locations for pointer in await folder.pointers()] == [each.locations for each in named]
        assert folder.is_free()
        await folder.serve()

    run(work())


def test_a_restored_queue_never_lies_next_to_the_log_of_the_old_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would play that log into the new file, if the restore was killed between its last two steps."""
    there: list[bool] = []
    replace = Path.replace

    def noted(made: Path, queue: Path) -> Path:
        there.append(queue.with_name("queue.sqlite-wal").exists())
        return replace(made, queue)

    async def work() -> None:
        await folder.fill()
        queue = folder.path / "queue.sqlite"
        queue.unlink()
        queue.with_name("queue.sqlite-wal").write_bytes(b"of the one that is gone")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", noted)
            await restore_folder(folder.path, runtime=folder.runtime)
        assert there == [False]

    run(work())


@pytest.mark.parametrize("empty", [True, False])
def test_a_queue_that_is_there_keeps_what_it_has(folder: Folder, *, empty: bool) -> None:
    async def work() -> None:
        await folder.fill()
        named = await folder.pointers()
        queue = folder.path / "queue.sqlite"
        (folder.path / "tmp" / "queue.sqlite").write_bytes(b"half of an earlier restore")
        if empty:
            for ending in ("-wal", "-shm"):
                queue.with_name(queue.name + ending).unlink(missing_ok=True)
            queue.write_bytes(b"")
        report = {each.topic: each for each in await restore_folder(folder.path, runtime=folder.runtime)}
        assert (report["clicks"].records, report["clicks"].intact) == ((BATCHES, 0) if empty else (0, 1))
        assert [pointer.locations for pointer in await folder.pointers()] == [each.locations for each in named]

    run(work())


def test_a_restore_that_ends_at_its_last_step_leaves_the_old_queue(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removed the old file before the new one had its place: then only the objects were left."""

    def fails(made: Path, queue: Path) -> Path:
        raise OSError(f"no power for '{made}', '{queue}'")

    async def work() -> None:
        await folder.fill()
        named = await folder.pointers()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fails)
            with pytest.raises(OSError, match="no power"):
                await restore_folder(folder.path, runtime=folder.runtime)
        assert [pointer.locations for pointer in await folder.pointers()] == [each.locations for each in named]

    run(work())


def test_a_restored_queue_whose_log_is_not_in_its_file_does_not_appear(folder: Folder) -> None:
    """SQLite writes its log into the file at the last close, and reports no failure. The pointers were in the log."""

    async def work() -> None:
        await folder.fill()
        queue = folder.path / "queue.sqlite"
        for ending in ("", "-wal", "-shm"):
            queue.with_name(queue.name + ending).unlink(missing_ok=True)
        opened: list[sqlite3.Connection] = []

        def moved(count: int) -> None:
            if not opened:
                opened.append(sqlite3.connect(folder.path / "tmp" / "queue.sqlite"))
                opened[0].execute("BEGIN")
                opened[0].execute("SELECT count(*) FROM entries").fetchone()

        with pytest.raises(QueueError, match="in use by another program"):
            await restore_folder(folder.path, moved=moved, runtime=folder.runtime)
        assert not queue.exists()
        opened[0].close()
        report = {each.topic: each.records for each in await restore_folder(folder.path, runtime=folder.runtime)}
        assert report["clicks"] == BATCHES
        assert len(await folder.pointers()) == BATCHES

    run(work())


def test_a_queue_that_can_not_be_copied_is_not_called_damaged(tmp_path: Path) -> None:
    """The hint said to move the sound file away, and the positions of the groups with it."""
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as sound:
        sound.execute("CREATE TABLE partitions (id INTEGER)")
    with pytest.raises(QueueError, match="unable to open"):
        copy_database(tmp_path / "queue.sqlite", tmp_path / "no folder" / "queue.sqlite", "queue", QueueError)
    (tmp_path / "queue.sqlite").write_bytes(b"no database" * 1_000)
    with pytest.raises(CorruptDataError, match="not a database") as found:
        copy_database(tmp_path / "queue.sqlite", tmp_path / "copy.sqlite", "queue", QueueError)
    assert "move it away" in found.value.hint
    with pytest.raises(CorruptDataError, match="not a database") as found:
        write_log_into(tmp_path / "queue.sqlite", "queue", QueueError)
    assert "move it away" in found.value.hint


# ---- sweeps --------------------------------------------------------------------------------------


def test_a_sweep_of_a_folder_has_a_clock_of_its_own(folder: Folder) -> None:
    async def work() -> None:
        await folder.fill()
        async with folder_sweep(folder.path, lambda text: None, 1_000) as sweep:
            assert [each async for each in sweep.find(60_000, 60_000)] == []

    run(work())


def test_a_sweep_has_its_folder_alone(folder: Folder) -> None:
    async def work() -> None:
        await folder.fill()
        key = await folder.stray()
        async with folder_sweep(folder.path, lambda text: None, 1_000, runtime=folder.runtime) as sweep:
            assert not folder.is_free()
            folder.clock.later_ms = 60_000
            assert [each.key async for each in sweep.run(0, 0)] == [key]
        assert folder.is_free()
        async with folder_lists(folder.path, lambda text: None) as lists:
            assert len(await lists.pending()) == 1, "the sweep has noted what it may delete later"
            assert folder.is_free(), "a broker may run"
        with pytest.raises(ClosedError):
            await lists.pending()

    run(work())


# ---- signals -------------------------------------------------------------------------------------


@pytest.fixture
def harmless() -> Iterator[None]:
    """Let signals that nobody catches pass."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: None) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_the_first_and_the_second_signal_are_kept_apart(numbers: tuple[signal.Signals, ...], harmless: None) -> None:
    async def work() -> None:
        signals = Signals()
        seen = []
        for number in numbers:
            seen.append((signals.first.is_set(), signals.second.is_set()))
            signal.raise_signal(number)
            await asyncio.wait_for(signals.second.wait() if seen[1:] else signals.first.wait(), 5.0)
        assert seen == [(False, False), (True, False)]
        signals.close()
        for number in numbers:
            assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler), "it ends the process again"

    asyncio.run(work())
