"""Hostile connections of all kinds next to 50 good producers, which keep 90 % of their rate."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

import memq.aio
from memq.runtime.clock import SystemClock
from tests.hostile_connections import pace
from tests.servers import dev_server
from tests.soak import SOAKING, report

PRODUCERS = 50
RATE = 20  # records per second of each producer
FEW, MANY = 300, 5_000
LEAST = 0.9
CLOCK = SystemClock()


@contextmanager
def attacked(port: int, count: int) -> Iterator[None]:
    """Keep hostile connections to a port, from a process of their own."""
    attacker = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile_connections", str(port), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        yield
    finally:
        attacker.communicate(timeout=60)
    assert attacker.returncode == 0


async def acked(producers: list[memq.aio.Producer], seconds: float) -> int:
    """Return how many records were acked: each producer sends at its rate, and waits for each ack."""
    count = 0
    until_s = CLOCK.monotonic() + seconds

    async def send(producer: memq.aio.Producer) -> None:
        nonlocal count
        due_s = CLOCK.monotonic()
        while due_s < until_s:
            await (await producer.send("clicks", b"x" * 100))
            count += CLOCK.monotonic() <= until_s
            due_s += 1 / RATE
            await pace(max(0.0, due_s - CLOCK.monotonic()))

    async with asyncio.TaskGroup() as group:
        for producer in producers:
            group.create_task(send(producer))
    return count


async def rates(address: str, port: int, count: int, seconds: float) -> tuple[int, int]:
    """Return the records acked without an attack and during one."""
    async with AsyncExitStack() as stack:
        producers = [await stack.enter_async_context(memq.aio.Producer(address, acks=1)) for _ in range(PRODUCERS)]
        await acked(producers, 2.0)  # streams are open
        quiet = await acked(producers, seconds)
        with attacked(port, count):
            return quiet, await acked(producers, seconds)


def check(folder: Path, count: int, seconds: float) -> None:
    with dev_server(folder / "data", "--no-audit") as server:
        quiet, during = asyncio.run(rates(server.address, server.port, count, seconds))
    report(f"{count} hostile connections: {during} records acked, {quiet} without them")
    assert quiet >= LEAST * PRODUCERS * RATE * seconds, "the machine is too busy for these producers"
    assert during >= LEAST * quiet


def test_producers_keep_their_rate_next_to_hostile_connections(tmp_path: Path) -> None:
    check(tmp_path, FEW, 5.0)


@pytest.mark.soak
@pytest.mark.skipif(not SOAKING, reason="5,000 connections: make soak")
def test_producers_keep_their_rate_next_to_thousands_of_hostile_connections(tmp_path: Path) -> None:
    check(tmp_path, MANY, 60.0)
