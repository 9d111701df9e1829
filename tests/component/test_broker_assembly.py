"""The parts of a broker by URL: each is opened, checked before a start, and always closed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.broker import assembly
from memq.broker.assembly import (
    NAMESAKE_TIMEOUT_S,
    check_part,
    check_pointers,
    open_coordinator,
    open_queue,
    open_store,
    serve_cluster,
)
from memq.broker.broker import Broker
from memq.broker.restore.restore import restore_cluster
from memq.broker.spool.files import SpoolFiles
from memq.broker.sweep.sweep_cluster import cluster_lists, cluster_sweep
from memq.errors import (
    DeniedError,
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    UnknownSettingError,
    UnreachableError,
)
from memq.format.key import object_key
from memq.governor import BrokerEntry
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.network import Address, Network
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings, PartSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic, TopicSettings, equal_slots, read_partitions
from tests.skipping_loop import run_skipping, skipping_runtime

SETTINGS = BrokerSettings(cluster="c-1", port=0, http_port=-1, memory_bytes_max=32 << 20)
PARTS = PartSettings(store="mine:a", queue="mine:b", coordinator="mine:c")
TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=1, settings=TopicSettings(), partitions=equal_slots(2))


class Parts:
    """Parts in memory under the scheme `mine`; `log` has what was opened, checked and closed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.brokers: list[Broker] = []
        self.entries: list[BrokerEntry] = []
        self.failing: dict[str, MemqError] = {}
        self.cluster = MemoryCluster()
        self.runtime = skipping_runtime()
        self.queue = MemoryQueue(self.runtime.clock)
        self.store = MemoryHandler(self.runtime.clock)
        self.patch = monkeypatch
        monkeypatch.setitem(assembly.STORES, "mine", self._opens("store", lambda: self.store))
        monkeypatch.setitem(assembly.QUEUES, "mine", self._opens("queue", lambda: self.queue))
        coordinator = self._opens("coordinator", lambda: MemoryCoordinator(self.cluster))
        monkeypatch.setitem(assembly.COORDINATORS, "mine", coordinator)
        monkeypatch.setattr(assembly, "run_broker", self._run)

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.failing:
            raise self.failing[what]

    def _opens(self, name: str, make: Callable[[], Any]) -> Any:
        def opens(settings: PartSettings, runtime: Runtime, cluster: str) -> Any:
            assert (settings, runtime, cluster) == (PARTS, self.runtime, "c-1")
            self.note(f"open {name}")
            part = make()
            part.close = self._noted(f"close {name}")
            if name == "coordinator":
                part.governor = self._noted("ask governor")
                part.brokers = self._noted("ask brokers", self.entries)
            elif name == "queue":
                part.check = self._noted("check queue")
            else:
                part.check = self._noted("check store")
            return part

        return opens

    def _noted(self, what: str, answer: object = None) -> Any:
        async def call(**options: bool) -> object:
            self.note(" ".join([what, *(f"{name}={value}" for name, value in options.items())]))
            return answer

        return call

    async def _run(
        self, broker: Broker, settings: BrokerSettings, runtime: Runtime, ready: Any, http_network: Network
    ) -> int:
        assert (broker.services.settings, broker.services.runtime) == (settings, runtime)
        self.note("run")
        self.brokers.append(broker)
        ready("an address")
        return 7

    async def serve(self, settings: BrokerSettings = SETTINGS, parts: PartSettings = PARTS) -> Broker:
        """Serve until the broker ends; return it."""
        ready: list[str] = []
        code = await serve_cluster(settings, parts, ready.append, runtime=self.runtime)
        assert (code, ready) == (7, ["an address"])
        return self.brokers[-1]

    def links(self, *found: Any) -> list[tuple[str, int, str]]:
        """Let links meet one of `found` after the other; return where each goes, and from which program."""
        left, asked = list(found), list[tuple[str, int, str]]()

        async def connect(runtime: Runtime, owner: None, address: Address, *, client: str) -> Any:
            asked.append((*address, client))
            each = left.pop(0)
            if isinstance(each, MemqError):
                raise each
            if each is None:
                await asyncio.get_running_loop().create_future()  # for ever
            return each

        self.patch.setattr(assembly, "connect_link", connect)
        return asked


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


def assembled(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


CLOSED = ["close queue", "close store", "close coordinator"]


# ---- a start -------------------------------------------------------------------------------------


def test_a_broker_with_another_store_than_its_cluster_does_not_run(parts: Parts) -> None:
    async def work() -> None:
        await parts.serve()
        first, parts.store = parts.store, MemoryHandler(parts.runtime.clock)
        with pytest.raises(InvalidSettingError, match="has no mark"):
            await parts.serve()
        assert parts.log.count("run") == 1
        assert parts.log[-3:] == CLOSED
        parts.store = first
        await parts.serve()

    assembled(work())


def test_a_broker_runs_on_the_parts_that_its_settings_name(parts: Parts) -> None:
    async def work() -> None:
        broker = await parts.serve()
        services = broker.services
        assert (services.store, services.queue) == (parts.store, parts.queue)
        assert services.spool.disk is None
        assert services.traces is None
        assert services.settings is SETTINGS
        at = parts.log.index("run")
        assert parts.log[:3] == ["open coordinator", "open store", "open queue"]
        assert sorted(parts.log[3:at]) == [
            "ask brokers",
            "ask governor",
            "check queue",
            "check store deletes=True",
        ], "before clients can come"
        assert parts.log[at + 1 :] == CLOSED

    assembled(work())


@pytest.mark.parametrize(
    ("failing", "closed"),
    [
        ("open store", CLOSED[2:]),
        ("open queue", CLOSED[1:]),
        ("ask governor", CLOSED),
        ("ask brokers", CLOSED),
        ("check queue", CLOSED),
        ("check store deletes=True", CLOSED),
        ("run", CLOSED),
    ],
)
def test_start_that_fails_closes_the_parts_that_it_opened(parts: Parts, failing: str, closed: list[str]) -> None:
    async def work() -> None:
        parts.failing = {failing: DeniedError("not you")}
        with pytest.raises(DeniedError, match="not you"):
            await parts.serve()
        at = parts.log.index(failing)
        assert [each for each in parts.log[at + 1 :] if each.startswith("close")] == closed
        assert "run" not in parts.log[:at]
        assert ("ask brokers" in parts.log) is (at > 3), "a coordinator that never answered is not waited for"

    assembled(work())


def test_a_broker_on_every_interface_is_advertised_by_the_name_of_its_machine(parts: Parts) -> None:
    async def work() -> None:
        parts.runtime = dataclasses.replace(parts.runtime, host="machine-7")
        for host, advertise, expected in (
            ("0.0.0.0", "", "machine-7:0"),
            ("::", "", "machine-7:0"),
            ("0.0.0.0", "outside:99", "outside:99"),
            ("127.0.0.1", "", ""),
        ):
            broker = await parts.serve(dataclasses.replace(SETTINGS, host=host, advertise=advertise, insecure=True))
            assert broker.services.settings.advertise == expected

    assembled(work())


def test_a_spool_is_opened_in_the_folder_of_the_settings_and_closed_first(parts: Parts, tmp_path: Path) -> None:
    async def work() -> None:
        folder = tmp_path / "spool"
        close = SpoolFiles.close

        async def noted(spool: SpoolFiles) -> None:
            parts.note("close spool")
            await close(spool)

        parts.patch.setattr(SpoolFiles, "close", noted)
        broker = await parts.serve(dataclasses.replace(SETTINGS, spool=str(folder)))
        assert broker.services.spool.disk is not None
        assert parts.log[-4:] == ["close spool", *CLOSED]

    assembled(work())


def test_limits_of_clients_come_from_their_section(parts: Parts) -> None:
    async def work() -> None:
        sections: Any = {"clients": {"batch-job": ("nonsense", "memq.toml")}}
        limited = dataclasses.replace(PARTS, sections=sections)
        parts.patch.setitem(assembly.COORDINATORS, "mine", lambda *_: MemoryCoordinator(parts.cluster))
        parts.patch.setitem(assembly.STORES, "mine", lambda *_: parts.store)
        parts.patch.setitem(assembly.QUEUES, "mine", lambda *_: parts.queue)
        with pytest.raises(InvalidSettingError, match="batch-job"):
            await parts.serve(parts=limited)

    assembled(work())


# ---- the id of a broker --------------------------------------------------------------------------


def entry(broker_id: str, number: int = 1) -> BrokerEntry:
    return BrokerEntry(id=broker_id, session=f"{number}", address=f"host-{number}:9")


@pytest.mark.parametrize(
    ("broker", "cluster", "refused"), [("broker-1", "c-1", True), ("broker-1", "c-2", False), ("other", "c-1", False)]
)
def test_a_broker_that_runs_under_the_same_id_is_not_replaced(
    parts: Parts, broker: str, cluster: str, *, refused: bool
) -> None:
    async def work() -> None:
        closed: list[str] = []
        parts.entries += [entry("broker-0", 0), entry("broker-1", 1)]
        asked = parts.links(SimpleNamespace(broker=broker, cluster=cluster, close=lambda: closed.append("link")))
        if refused:
            with pytest.raises(InvalidSettingError, match="a broker at host-1:9 runs under the id 'broker-1' already"):
                await parts.serve()
            assert "run" not in parts.log
        else:
            await parts.serve()
        assert (asked, closed) == ([("host-1", 9, "memq-broker")], ["link"])
        assert parts.log[-3:] == CLOSED

    assembled(work())


def test_a_dead_broker_and_one_that_hangs_are_replaced(parts: Parts) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        parts.entries += [entry("broker-1", 1), entry("broker-1", 2), entry("broker-2", 3)]
        asked = parts.links(UnreachableError("nobody listens"), None)
        await parts.serve()
        assert [host for host, *_ in asked] == ["host-1", "host-2"]
        assert loop.time() == pytest.approx(NAMESAKE_TIMEOUT_S)

    assembled(work())


# ---- checks without a start ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "checked", "text"),
    [
        ("store", "check store deletes=True", "mine:a answers, and lets memq do what it has to"),
        ("queue", "check queue", "mine:b answers, and lets memq do what it has to"),
        ("coordinator", "ask brokers", "mine:c answers"),
    ],
)
def test_each_part_is_checked_alone(parts: Parts, name: str, checked: str, text: str) -> None:
    async def work() -> None:
        calls = [f"open {name}", checked, f"close {name}"]
        assert await check_part(name, PARTS, SETTINGS, runtime=parts.runtime) == text
        assert parts.log == calls
        parts.log.clear()
        parts.failing = {checked: DeniedError("not you")}
        with pytest.raises(DeniedError):
            await check_part(name, PARTS, SETTINGS, runtime=parts.runtime)
        assert parts.log == calls, "closed also when the check fails"

    assembled(work())


def test_a_store_that_memq_may_not_delete_from_is_checked_without_it(parts: Parts) -> None:
    async def work() -> None:
        await check_part("store", PARTS, dataclasses.replace(SETTINGS, delete_objects=False), runtime=parts.runtime)
        assert parts.log[1] == "check store deletes=False"

    assembled(work())


async def with_topic(parts: Parts) -> None:
    await MemoryCoordinator(parts.cluster).create_topic(TOPIC)
    await parts.queue.create(list(read_partitions(TOPIC)), 30_000)


def test_pointers_are_compared_with_objects(parts: Parts) -> None:
    async def work() -> None:
        await with_topic(parts)
        assert await check_pointers(PARTS, SETTINGS, runtime=parts.runtime) == []
        assert parts.log[-3:] == CLOSED
        await parts.queue.drop(list(read_partitions(TOPIC)))
        key = object_key("c-1", TOPIC.name, TOPIC.id, 0, 1, 1, 1)
        await parts.store.put(key, [b"x"], crc32c(b"x"))
        parts.log.clear()
        with pytest.raises(InvalidRequestError, match="clicks"):
            await check_pointers(PARTS, SETTINGS, runtime=parts.runtime)
        assert parts.log[-3:] == CLOSED

    assembled(work())


# ---- sweeps and restores of a cluster ------------------------------------------------------------


def test_a_sweep_of_a_cluster_has_its_parts_until_it_ends(parts: Parts) -> None:
    async def work() -> None:
        async with cluster_sweep("c-1", PARTS, lambda text: None, 5, runtime=parts.runtime) as sweep:
            assert [each async for each in sweep.find(0, 0)] == []
            assert parts.log[:3] == ["open coordinator", "open store", "open queue"]
            assert not any(each.startswith("close") for each in parts.log)
        assert parts.log[-3:] == CLOSED
        parts.log.clear()
        parts.failing = {"open queue": DeniedError("not you")}
        with pytest.raises(DeniedError):
            async with cluster_sweep("c-1", PARTS, lambda text: None, 5, runtime=parts.runtime):
                raise AssertionError("it is not opened")
        assert parts.log[-2:] == ["close store", "close coordinator"], "the store stayed open"

    assembled(work())


def test_the_lists_of_a_cluster_need_its_store_alone(parts: Parts) -> None:
    async def work() -> None:
        async with cluster_lists("c-1", PARTS, lambda text: None, runtime=parts.runtime):
            assert parts.log == ["open store"]
        assert parts.log == ["open store", "close store"]

    assembled(work())


def test_a_cluster_is_restored_while_none_of_its_brokers_runs(parts: Parts) -> None:
    async def work() -> None:
        await MemoryCoordinator(parts.cluster).create_topic(TOPIC)
        for dry_run in (True, False):
            parts.log.clear()
            (report,) = await restore_cluster("c-1", PARTS, dry_run=dry_run, runtime=parts.runtime)
            assert (report.topic, report.pointers) == ("clicks", 0)
            assert parts.log == ["open coordinator", "open store", "open queue", *["ask brokers"] * 2, *CLOSED]
            made = [await exists(parts.queue, number) for number in range(2)]
            assert made == [not dry_run] * 2
        parts.log.clear()
        parts.entries += [entry("broker-1"), entry("broker-2")]
        with pytest.raises(InvalidRequestError, match="brokers run: broker-1, broker-2"):
            await restore_cluster("c-1", PARTS, runtime=parts.runtime)
        assert parts.log == ["open coordinator", "open store", "open queue", "ask brokers", *CLOSED]

    assembled(work())


def test_a_restore_during_which_a_broker_comes_back_fails(parts: Parts) -> None:
    create = parts.queue.create

    async def creating(partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        parts.entries[:] = [entry("broker-1")]
        await create(partitions, stale_publish_ms)

    async def work() -> None:
        await MemoryCoordinator(parts.cluster).create_topic(TOPIC)
        parts.patch.setattr(parts.queue, "create", creating)
        with pytest.raises(InvalidRequestError, match="brokers run: broker-1") as caught:
            await restore_cluster("c-1", PARTS, runtime=parts.runtime)
        assert "run memq restore again" in caught.value.hint

    assembled(work())


def test_a_cluster_without_topics_is_not_restored_from_a_store_that_has_objects(parts: Parts) -> None:
    """It exited with 0 and restored nothing: a wrong setting `coordinator` looked like a success."""

    async def work() -> None:
        assert await restore_cluster("c-1", PARTS, runtime=parts.runtime) == []
        for number in range(2):
            key = object_key("c-1", TOPIC.name, TOPIC.id, 0, 1, number, 1)
            await parts.store.put(key, [b"x"], crc32c(b"x"))
        with pytest.raises(InvalidRequestError, match="knows no topic, and the store has 2 objects of clicks"):
            await restore_cluster("c-1", PARTS, runtime=parts.runtime)
        (found,) = await restore_cluster("c-1", PARTS, dry_run=True, runtime=parts.runtime)
        assert (found.topic, found.objects, found.pointers, len(found.findings)) == ("clicks", 2, 0, 1)

    assembled(work())


async def exists(queue: MemoryQueue, number: int) -> bool:
    try:
        await queue.span(read_partitions(TOPIC)[number])
    except MemqError:
        return False
    return True


# ---- URLs ----------------------------------------------------------------------------------------


def test_a_cluster_on_files_has_a_folder_for_each_part(tmp_path: Path) -> None:
    async def work() -> None:
        runtime = Runtime()
        parts = PartSettings(
            store=f"file:{tmp_path}/a/objects",
            queue=f"sqlite:{tmp_path}/b/queue.sqlite",
            coordinator=f"standalone:///{tmp_path}/c/topics.sqlite",
        )
        store = open_store(parts, runtime, "c-1")
        await store.check(deletes=True)
        await store.put("c-1/x", [b"value"], crc32c(b"value"))
        assert bytes(await store.get("c-1/x")) == b"value"
        assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["objects", "objects.tmp"]
        await store.close()
        queue = open_queue(parts, runtime, "c-1")
        await queue.check()
        await queue.close()
        assert (tmp_path / "b" / "queue.sqlite").exists()
        coordinator = open_coordinator(parts, runtime, "c-1")
        assert list(await coordinator.topics()) == []
        with pytest.raises(InvalidRequestError):
            open_coordinator(parts, runtime, "c-1")  # one broker alone
        await coordinator.close()
        assert (tmp_path / "c" / "topics.sqlite").exists()

    asyncio.run(work())


def test_a_misspelt_key_of_a_section_is_refused_though_the_store_is_a_folder(tmp_path: Path) -> None:
    right = PartSettings(store=f"file:{tmp_path}/objects", sections={"s3": {"region": ("eu-1", "memq.toml")}})
    open_store(right, Runtime(), "c-1")
    wrong = dataclasses.replace(right, sections={"s3": {"regoin": ("eu-1", "memq.toml")}})
    with pytest.raises(UnknownSettingError, match=r"unknown setting 'regoin' in \[s3\] from memq.toml") as refused:
        open_store(wrong, Runtime(), "c-1")
    assert "region" in refused.value.hint


@pytest.mark.parametrize(
    ("url", "text", "hint"),
    [
        ("flie:/data", "setting store = 'flie:/data' is no known kind of store", "file"),
        ("/data", "is no known kind of store", "write it as file:… or s3:…"),
        ("file://host/data", "setting store = 'file://host/data' names no path", "write file:PATH or file:///PATH"),
        ("file:", "names no path", "write file:PATH"),
        ("file:/data?x=1", "names no path", "write file:PATH"),
        ("file:/data#x", "names no path", "write file:PATH"),
    ],
)
def test_a_url_that_names_nothing_is_refused_with_a_hint(url: str, text: str, hint: str) -> None:
    with pytest.raises(InvalidSettingError, match=text) as raised:
        open_store(PartSettings(store=url), Runtime(), "c-1")
    assert hint in (raised.value.hint or "")
