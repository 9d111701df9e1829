"""Programs of a user in `memq.simulation`: a correct one holds under faults, and a wrong one is found."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memq.errors import ClosedError, InvalidRequestError, MemqError
from memq.simulation import NotSimulatedError, Process, Simulation, SimulationError
from memq.simulation.simulation import Level, Program

ORDERS = 40
AT_ONCE = 5  # orders, handled in 2.5 s: a kill in between shows a commit that came too early
SEEDS = range(6)


def make_orders(acked: list[bytes]) -> Program:
    """Return a program that sends orders until each is acked, and continues where its last life ended."""

    async def program(process: Process) -> None:
        while len(acked) < ORDERS:
            try:
                async with process.producer() as producer:
                    while len(acked) < ORDERS:
                        values = [b"order %d" % (len(acked) + number) for number in range(AT_ONCE)]
                        for delivery in [await producer.send("orders", value) for value in values]:
                            await delivery
                        acked.extend(values)
                        await asyncio.sleep(process.random.uniform(0, 2))
            except MemqError:
                await asyncio.sleep(0.2)

    return program


def make_worker(done: list[bytes], *, commits_first: bool) -> Program:
    """Return a program that reads orders as a group and handles each: `commits_first` loses orders at a kill."""

    async def program(process: Process) -> None:
        while True:
            try:
                async with process.consumer("orders", group="workers", auto_commit=False) as consumer:
                    async for batch in consumer:
                        if commits_first:
                            await consumer.commit(batch)
                        for record in batch:
                            await asyncio.sleep(0.5)
                            done.append(record.value or b"")
                        if not commits_first:
                            await consumer.commit(batch)
            except MemqError:
                await asyncio.sleep(0.2)

    return program


def missing(seed: int, *, commits_first: bool, level: Level = "breezy") -> set[bytes]:
    """Run orders and two workers, and return the acked orders that no worker has handled."""
    acked: list[bytes] = []
    done: list[bytes] = []
    with Simulation(seed, level=level, topic="orders", partitions=2) as simulation:
        simulation.start("shop", make_orders(acked))
        for number in range(2):
            simulation.start(f"worker-{number}", make_worker(done, commits_first=commits_first))
        for _ in range(4):
            simulation.run(7.0)
            simulation.kill("worker-0")
        simulation.heal()
        simulation.run(120.0, done=lambda: len(acked) == ORDERS and set(acked) <= set(done))
        stored = Counter(record.value for record in simulation.records())
    assert len(acked) == ORDERS
    assert set(acked) <= set(stored)
    return set(acked) - set(done)


def test_a_worker_that_commits_what_it_has_handled_misses_nothing() -> None:
    assert [missing(seed, commits_first=False) for seed in SEEDS] == [set()] * len(SEEDS)


def test_a_worker_that_commits_first_is_found() -> None:
    assert any(missing(seed, commits_first=True) for seed in SEEDS)


def test_the_same_seed_gives_the_same_run_and_another_seed_another_one() -> None:
    def moments(seed: int) -> list[float]:
        acked: list[bytes] = []
        seen: list[float] = []

        async def watch(process: Process) -> None:
            while len(acked) < ORDERS:
                count = len(acked)
                await asyncio.sleep(0.01)
                if len(acked) > count:
                    seen.append(process.now_s())

        with Simulation(seed, topic="orders") as simulation:
            simulation.start("shop", make_orders(acked))
            simulation.start("watch", watch)
            simulation.run(60.0)
            simulation.finish()
        return seen

    assert moments(5) == moments(5)
    assert moments(5) != moments(6)


def test_an_exception_of_a_program_ends_the_run_with_seed_time_and_cause() -> None:
    async def program(process: Process) -> None:
        await asyncio.sleep(3)
        raise ValueError("a fault of the program")

    with Simulation(11, level="calm") as simulation:
        simulation.start("worker", program)
        with pytest.raises(SimulationError, match=r"^seed 11 at 4\.\d+ s: worker died: ValueError") as caught:
            simulation.run(60.0)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: asyncio.to_thread(len, ""), "a thread (run_in_executor"),
        (
            lambda: asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", 1),
            "a real socket (create_connection",
        ),
        (
            lambda: asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0),
            "a real socket (create_server",
        ),
        (lambda: asyncio.create_subprocess_exec("true"), "a subprocess (subprocess_exec"),
        (lambda: asyncio.create_subprocess_shell("true"), "a subprocess (subprocess_shell"),
    ],
)
def test_a_call_that_the_simulation_does_not_have_is_named(call: Callable[[], Awaitable[Any]], what: str) -> None:
    """Also in a program that tries again after each error of memq."""

    async def program(_: Process) -> None:
        try:
            await call()
        except MemqError:
            await asyncio.sleep(0.2)

    with Simulation(11, level="calm") as simulation:
        simulation.start("shop", program)
        with pytest.raises(SimulationError) as found:
            simulation.run(10.0)
    assert isinstance(found.value.__cause__, NotSimulatedError)
    assert f"shop: a program of a simulation can't use {what}" in str(found.value)
    assert "may use tasks, events, timeouts, asyncio.sleep" in str(found.value)


def test_a_program_that_is_no_coroutine_function_is_named() -> None:
    def program(process: Process) -> None:
        pass

    with Simulation(11, level="calm") as simulation:
        simulation.start("worker", program)  # type: ignore[arg-type]  # a mistake of a user
        with pytest.raises(SimulationError, match="program 'worker' is no coroutine function"):
            simulation.run(5.0)


def test_a_program_that_does_not_return_is_named() -> None:
    async def program(process: Process) -> None:
        await asyncio.get_running_loop().create_future()

    with Simulation(1, level="calm") as simulation:
        simulation.start("worker", program)
        with pytest.raises(SimulationError, match=r"after 5 s without faults, still running: worker$"):
            simulation.finish(5.0)


def test_a_process_that_is_killed_paused_or_isolated_continues() -> None:
    lives: list[int] = []
    ticks: list[float] = []

    async def program(process: Process) -> None:
        lives.append(process.life)
        async with process.admin() as admin:
            await admin.create_topic(f"life-{process.life}")
        while simulation.now_s < 60.0:
            ticks.append(simulation.now_s)
            await asyncio.sleep(0.1)

    with Simulation(1, level="calm", brokers=2) as simulation:
        simulation.start("worker", program)
        simulation.run(10.0)
        simulation.kill("worker", down_s=2.0)
        simulation.run(10.0)
        simulation.pause("worker", 5.0)
        simulation.run(10.0)
        simulation.isolate("worker", 5.0)
        simulation.kill(simulation.brokers[0])
        simulation.finish()
        assert simulation.records("life-2") == []
    assert lives == [1, 2]
    gaps = sorted(after - before for before, after in pairwise(ticks))[-2:]
    assert 2.0 <= gaps[0] < 2.5
    assert 4.9 <= gaps[1] < 5.5


@pytest.mark.parametrize("name", ["shop", "broker-0"])
def test_heal_ends_a_pause(name: str) -> None:
    async def shop(process: Process) -> None:
        async with process.producer() as producer:
            await (await producer.send("events", b"order"))

    with Simulation(2, level="calm", brokers=1) as simulation:
        simulation.start("shop", shop)
        simulation.pause(name, 1_000_000)
        simulation.run(0.5)
        simulation.finish(60)
        assert simulation.now_s < 60
        assert [record.value for record in simulation.records()] == [b"order"]


def test_impossible_arguments_of_a_simulation_are_refused() -> None:
    async def program(process: Process) -> None:
        """End at once."""

    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"level": "rainy"}, "no level 'rainy'\nhint: levels are calm, breezy, stormy, sleepy"),
        ({"brokers": 0}, "brokers is 0, allowed are 1 to 10"),
        ({"partitions": 65}, "partitions is 65, allowed are 1 to 64"),
        ({"topic": "a b"}, "topic"),
        ({"settings": {"no_such": 1}}, "no_such"),
    )
    for arguments, words in wrong:
        with pytest.raises(InvalidRequestError, match=words):
            Simulation(1, **arguments)
    simulation = Simulation(1, level="calm")
    with pytest.raises(ClosedError, match="hint: use it as `with Simulation"):
        simulation.start("worker", program)
    with pytest.raises(ClosedError, match="not entered"):
        assert simulation.brokers

    async def inside() -> None:
        with simulation:
            raise AssertionError("it was entered in an event loop")

    with pytest.raises(InvalidRequestError, match="inside an event loop"):
        asyncio.run(inside())
    with simulation:
        simulation.start("worker", program)
        with pytest.raises(InvalidRequestError, match="a process is named 'worker'"):
            simulation.start("worker", program)
        with pytest.raises(InvalidRequestError, match="a process is named 'broker-0'"):
            simulation.start("broker-0", program)
        with pytest.raises(InvalidRequestError, match="runs inside another one"), Simulation(2):
            pass
        for call in (simulation.run, simulation.finish, lambda seconds: simulation.pause("worker", seconds)):
            for seconds in (-1.0, float("nan"), float("inf")):
                with pytest.raises(InvalidRequestError, match="is no duration in seconds"):
                    call(seconds)
        simulation.isolate("worker", 0.5)  # before its first step
        with pytest.raises(InvalidRequestError, match="no process is named 'x'\nhint: there are broker-0"):
            simulation.kill("x")
        simulation.finish()


def test_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/testing.md", "exec"), {"__name__": "page"})
