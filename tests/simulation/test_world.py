"""The scheduler and the loop: virtual time, pauses, kills, asyncio's tools; same seed, same trace."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from memq.simulation.world.network import NetworkFaults, Switch
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import SimulationError, World
from tests.simulation.toy import echo_client, echo_server


def toy_hash(seed: int, clients: int = 3) -> str:
    done: list[str] = []
    with World(seed) as world:
        switch = Switch(world, NetworkFaults())
        world.spawn("server", echo_server(switch))
        world.run(1)
        for number in range(clients):
            world.spawn(f"client-{number}", echo_client(switch, "server", 20, done))
        world.run(done=lambda: len(done) == clients)
        return world.trace.hash()


def test_same_seed_same_trace() -> None:
    assert toy_hash(1) == toy_hash(1)
    assert toy_hash(1) != toy_hash(2)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_same_trace_in_another_process(hash_seed: str) -> None:
    code = "from tests.simulation.test_world import toy_hash; print(toy_hash(7))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == toy_hash(7)


def test_time_is_virtual_and_timers_are_never_early() -> None:
    seen: list[float] = []

    async def main(node: SimNode) -> None:
        loop = asyncio.get_running_loop()
        begin = node.clock.monotonic()
        wall = node.clock.wall_ms()
        await asyncio.sleep(3600)
        seen.append(node.clock.monotonic() - begin)
        assert abs(node.clock.wall_ms() - wall - 3_600_000) < 1_000
        deadline = loop.time() + 0.1
        loop.call_at(deadline, lambda: seen.append(loop.time() - deadline))
        await asyncio.sleep(1)

    with World(1) as world:
        world.spawn("a", main)
        world.run()
        assert 3601 < world.now < 3602
    assert 3600 <= seen[0] < 3600.1
    assert 0 <= seen[1] < 0.1


def test_asyncio_tools_work() -> None:
    log: list[str] = []

    async def worker(name: str, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            log.append(f"{name} cancelled")
            raise
        return name

    async def failing_group() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(worker(f"w{number}", 100))
            await asyncio.sleep(0)
            raise ValueError("stop")

    async def main(node: SimNode) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.5)
        assert list(await asyncio.gather(worker("a", 2), worker("b", 1))) == ["a", "b"]
        with pytest.raises(ExceptionGroup):
            await failing_group()
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(1, event.set)
        await event.wait()
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        waiting = asyncio.create_task(queue.get())
        await queue.put(3)
        assert await waiting == 3
        log.append("end")

    with World(5) as world:
        world.spawn("a", main)
        world.run()
    assert log[-1] == "end"
    assert sorted(log[:-1]) == sorted(f"w{number} cancelled" for number in range(20))


def test_sets_of_tasks_have_one_order() -> None:
    async def idle() -> None:
        await asyncio.sleep(1)

    orders: list[list[str]] = []

    async def main(node: SimNode) -> None:
        tasks = {asyncio.create_task(idle()) for _ in range(50)}
        orders.append([task.get_name() for task in tasks])
        done, pending = await asyncio.wait(tasks)
        assert not pending
        orders.append([task.get_name() for task in done])

    ballast = []
    for _ in range(2):
        with World(1) as world:
            world.spawn("a", main)
            world.run()
        ballast.append(bytearray(12_345))
    assert orders[0] == orders[2]
    assert orders[1] == orders[3]


def test_a_paused_node_does_nothing_and_its_timers_come_late() -> None:
    seen: list[float] = []

    async def main(node: SimNode) -> None:
        await asyncio.sleep(2)
        seen.append(node.world.now)

    with World(1) as world:
        node = world.spawn("a", main)
        world.run(1)
        node.pause(10)
        world.run()
    assert 11 <= seen[0] < 11.1


def test_a_killed_node_never_runs_again_and_its_finally_has_no_effect() -> None:
    effects: list[str] = []

    async def stubborn(node: SimNode) -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(5)
            effects.append("slept")
        finally:
            loop.call_soon(effects.append, "soon")
            child = asyncio.create_task(asyncio.sleep(1))
            await child
            effects.append("after await")

    with World(1) as world:
        node = world.spawn("a", stubborn)
        world.run(1)
        node.kill()
        world.run(20)
        assert effects == []
    assert effects == []


def test_a_coroutine_that_ignores_its_end_delays_no_other_one() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waits")

    async def ignores() -> None:
        for _ in range(20):
            try:
                await asyncio.sleep(60)
            except GeneratorExit:
                ended.append("ignores")

    async def main(_node: SimNode) -> None:
        others = [asyncio.create_task(each) for each in (waits(), ignores())]
        await asyncio.gather(*others)

    with World(1) as world:
        world.spawn("a", main)
        world.run(1)
    assert ended[:2] == ["ignores", "waits"]


def test_a_new_incarnation_takes_the_name() -> None:
    seen: list[int] = []

    async def main(node: SimNode) -> None:
        seen.append(node.index)
        await asyncio.sleep(100)

    with World(1) as world:
        world.spawn("a", main).kill()
        world.spawn("a", main)
        world.run(1)
        with pytest.raises(AssertionError, match="a lives"):
            world.spawn("a", main)
    assert seen == [1]


def test_an_unhandled_exception_fails_the_run_with_the_seed() -> None:
    async def main(node: SimNode) -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)

    with World(99) as world:
        world.spawn("a", main)
        with pytest.raises(SimulationError, match=r"seed 99 at 1\.\d+ s: .*ZeroDivisionError"):
            world.run()


def test_a_task_whose_error_nobody_asked_for_fails_the_run() -> None:
    async def wrong() -> None:
        raise ValueError("nobody asks")

    async def main(node: SimNode) -> None:
        asyncio.create_task(wrong())  # noqa: RUF006  that is the point
        await asyncio.sleep(1)

    with World(1) as world:
        world.spawn("a", main)
        with pytest.raises(SimulationError, match="nobody asks"):
            world.run()


def test_a_busy_loop_lets_time_continue() -> None:
    async def main(node: SimNode) -> None:
        deadline = node.clock.monotonic() + 0.5
        while node.clock.monotonic() < deadline:  # noqa: ASYNC110  the busy loop is what is tested
            await asyncio.sleep(0)

    with World(1) as world:
        world.spawn("a", main)
        world.run()
        assert world.now >= 0.5
        assert world.steps > 1_000


def test_endless_runs_are_found() -> None:
    async def main(node: SimNode) -> None:
        while True:  # noqa: ASYNC110  the endless loop is what is tested
            await asyncio.sleep(0)

    with World(1) as world:
        world.spawn("a", main)
        with pytest.raises(SimulationError, match="no end"):
            world.run(steps_max=1_000)


def test_a_check_runs_after_the_steps() -> None:
    async def main(node: SimNode) -> None:
        await asyncio.sleep(1)
        node.name = "wrong"
        await asyncio.sleep(1)

    with World(1) as world:
        node = world.spawn("a", main)
        world.add_check(lambda: world.fail("found") if node.name == "wrong" else None)
        with pytest.raises(SimulationError, match="found"):
            world.run()
        assert world.now < 1.1
