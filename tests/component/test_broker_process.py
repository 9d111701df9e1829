"""The life of a process that is one broker: it serves until a signal or a failure, drains, and ends with a code."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from memq import kernel
from memq.broker import process
from memq.broker.broker import Broker
from memq.broker.partitions import Partitions
from memq.broker.process import run_broker
from memq.broker.services import Services
from memq.client.producer.producer import AsyncProducer
from memq.errors import DeniedError, InvalidRequestError, QueueError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import VERSION
from memq.notification.memory import MemoryQueue
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.brokers import run
from tests.memory_network import memory_runtime
from tests.skipping_loop import run_skipping, skip


class Pressed:
    """Signals that the test gives."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.closed = False

    def close(self) -> None:
        """Note it."""
        self.closed = True


class Life:
    """One process with a broker on parts in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signals: Pressed | None = None
        self.log: list[str] = []
        self.ready = asyncio.Event()
        self.address = ""
        monkeypatch.setattr(process, "Signals", self._signals)

    def _signals(self) -> Pressed:
        self.signals = Pressed()
        return self.signals

    def begin(self, runtime: Runtime | None = None, **settings: Any) -> asyncio.Task[int]:
        """Start to serve; `ready` is set when clients can come."""
        runtime = runtime or Runtime()
        given = {"port": 0, "http_port": -1, "memory_bytes_max": 32 << 20, "audit": False} | settings
        found = BrokerSettings(**given)
        coordinator = MemoryCoordinator(MemoryCluster())
        store = MemoryHandler(runtime.clock)
        self.broker = Broker(found, runtime, {"main": store}, MemoryQueue(runtime.clock), coordinator)
        work = run_broker(self.broker, found, runtime, self._came, self.prepare, self._companion)
        return asyncio.create_task(work)

    def _came(self, address: str) -> None:
        self.log.append("ready")
        self.address = address
        self.ready.set()

    async def prepare(self) -> None:
        assert self.broker.address, "the broker has started"
        self.log.append("prepare")

    async def _companion(self, address: str) -> None:
        assert address == self.address
        self.log.append("companion")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.log.append("companion ends")


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(monkeypatch)


def held_back(life: Life) -> asyncio.Event:
    """Let the drain of the broker wait; return what is set when it begins."""
    begun = asyncio.Event()

    async def drain() -> None:
        life.log.append("drain")
        begun.set()
        await asyncio.get_running_loop().create_future()

    life.broker.drain = drain  # type: ignore[method-assign]  # it never ends
    return begun


def test_a_signal_ends_it_after_a_drain(life: Life) -> None:
    async def work() -> None:
        ends = life.begin()
        await life.ready.wait()
        async with AsyncProducer(life.address) as producer:
            await (await producer.send("clicks", b"1"))
        assert not ends.done()
        assert life.signals is not None
        life.signals.first.set()
        assert await ends == 0
        assert life.log == ["prepare", "ready", "companion", "companion ends"]
        assert life.signals.closed
        assert life.broker.held_blocks() == []

    run(work())


def test_its_start_is_logged_with_address_version_and_kernel(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        ends = life.begin(broker_id="b-7")
        await life.ready.wait()
        assert life.signals is not None
        life.signals.first.set()
        assert await ends == 0

    with caplog.at_level(logging.INFO, logger="memq"):
        run(work())
    (line,) = [text for text in caplog.messages if text.startswith("broker-started: ")]
    expected = f"broker 'b-7' at {life.address}, memq {VERSION}, kernel: {kernel.description()}"
    assert line == f"broker-started: {expected}"


@pytest.mark.parametrize("held", [0, 3])
def test_a_second_signal_gives_the_drain_up_and_names_what_is_lost(
    life: Life, held: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        ends = life.begin()
        await life.ready.wait()
        begun = held_back(life)
        blocks = life.broker.held_blocks() if not held else ["block"] * held
        life.broker.held_blocks = lambda: blocks  # type: ignore[method-assign]  # of the test
        assert life.signals is not None
        life.signals.first.set()
        await begun.wait()
        assert not ends.done()
        assert life.log[-2:] == ["companion ends", "drain"], "what runs beside the broker ends first"
        life.signals.second.set()
        assert await ends == 1

    with caplog.at_level(logging.ERROR), pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "block_list", lambda blocks: f"{len(blocks)} blocks")
        run(work())
    assert ("3 blocks" in caplog.text) is bool(held)


def test_a_broker_that_fails_ends_the_process_with_1(life: Life) -> None:
    async def work() -> None:
        ends = life.begin()
        await life.ready.wait()
        life.broker.failure = QueueError("away")
        life.broker.failed.set()
        assert await ends == 1
        assert life.log[-1] == "companion ends"
        assert life.signals is not None
        assert life.signals.closed

    run(work())


def test_a_broker_that_fails_in_its_drain_ends_with_1_and_names_what_is_lost(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        ends = life.begin()
        await life.ready.wait()
        begun = held_back(life)
        life.broker.held_blocks = lambda: ["block"] * 3  # type: ignore[method-assign]  # of the test
        assert life.signals is not None
        life.signals.first.set()
        await begun.wait()
        life.broker.failure = QueueError("away")
        life.broker.failed.set()
        async with asyncio.timeout(20):
            assert await ends == 1

    with caplog.at_level(logging.ERROR), pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "block_list", lambda blocks: f"{len(blocks)} blocks")
        run(work())
    assert "3 blocks" in caplog.text


def test_a_drain_that_fails_is_logged_and_ends_with_1(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        ends = life.begin()
        await life.ready.wait()

        async def drain() -> None:
            raise QueueError("away")

        life.broker.drain = drain  # type: ignore[method-assign]  # it fails
        assert life.signals is not None
        life.signals.first.set()
        assert await ends == 1

    with caplog.at_level(logging.ERROR):
        run(work())
    assert "drain-failed" in caplog.text
    assert "away" in caplog.text


def test_a_start_that_fails_is_closed_and_never_ready(life: Life) -> None:
    async def work() -> None:
        async def refused() -> None:
            raise DeniedError("not you")

        life.prepare = refused  # type: ignore[method-assign]  # the last step before clients can come
        with pytest.raises(DeniedError, match="not you"):
            await life.begin()
        assert life.log == []
        assert life.signals is not None
        assert life.signals.closed

    run(work())


def test_the_http_port_is_there_before_clients_and_names_its_setting_when_it_is_taken(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        ends = life.begin(http_port=0)
        await life.ready.wait()
        signals = life.signals
        assert signals is not None
        (address,) = [word for word in caplog.text.split() if word.startswith("http://") and "healthz" in word]
        port = parse_address(address.removeprefix("http://").partition("/")[0])[1]
        with pytest.raises(InvalidRequestError) as raised:
            await life.begin(http_port=port)
        assert "this one has the settings host and http_port" in (raised.value.hint or "")
        signals.first.set()
        assert await ends == 0

    with caplog.at_level(logging.INFO):
        run(work())


def test_signals_are_given_back_before_the_close_which_may_hang(life: Life) -> None:
    async def work() -> None:
        ends = life.begin()
        await life.ready.wait()
        signals, close = life.signals, life.broker.close
        assert signals is not None

        async def noted() -> None:
            life.log.append("signals closed" if signals.closed else "signals held")
            await close()

        life.broker.close = noted  # type: ignore[method-assign]  # it is watched
        signals.first.set()
        assert await ends == 0
        assert life.log[-1] == "signals closed"

    run(work())


@pytest.mark.parametrize(("governs", "deletes"), [(True, True), (True, False), (False, True)])
def test_retention_runs_at_its_interval_and_the_sweep_where_the_broker_governs_and_deletes(
    life: Life, governs: bool, deletes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[int, bool]] = []

    async def noted(services: Services, partitions: Partitions, *, sweeps: bool) -> None:
        assert (services, partitions) == (life.broker.services, life.broker.partitions)
        looks.append((round(asyncio.get_running_loop().time()), sweeps))

    monkeypatch.setattr(process, "run_upkeep", noted)

    async def work() -> None:
        ends = life.begin(
            memory_runtime()[0], retention_interval_ms=30_000, sweep_age_ms=400_000, delete_objects=deletes
        )
        if not governs:
            life.broker.governor = None
        await life.ready.wait()
        life.broker.services.swept.pending_objects = 3
        await skip(225)
        assert life.broker.services.swept.pending_objects == 3 * governs, "who does not govern does not know"
        assert life.signals is not None
        life.signals.first.set()
        assert await ends == 0

    run_skipping(work())
    assert [at_s for at_s, _ in looks] == [30, 60, 90, 120, 150, 180, 210]
    assert [at_s for at_s, sweeps in looks if sweeps] == [120] * (governs and deletes)


def test_a_new_governor_sweeps_at_once_if_a_pass_is_due(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    async def noted(services: Services, partitions: Partitions, *, sweeps: bool) -> None:
        passes.extend([round(asyncio.get_running_loop().time())] * sweeps)

    monkeypatch.setattr(process, "run_upkeep", noted)

    async def work() -> None:
        ends = life.begin(memory_runtime()[0], retention_interval_ms=30_000, sweep_age_ms=400_000)
        governor, life.broker.governor = life.broker.governor, None
        await life.ready.wait()
        await skip(135)  # a pass was due at 120 s
        life.broker.governor = governor
        assert await life.broker.govern()
        await skip(120)
        assert life.signals is not None
        life.signals.first.set()
        assert await ends == 0

    run_skipping(work())
    assert passes == [150], "the next one is due at 250 s"
