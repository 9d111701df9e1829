"""Producers and workers of a leased queue in one process, on one event loop; each command returns its CPU and times."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

import memq.aio
from benchmarks.children.commands import Command, answer, commands_async, options
from benchmarks.children.samples import lines
from memq.broker.process import calm_collector

LEASE_S = 300.0
STAMP = struct.Struct("<d")
WAIT_S = 5.0
Work = Callable[["memq.aio.Queue", Command], Coroutine[Any, Any, None]]


async def together(work: Callable[[int], Coroutine[Any, Any, int]], tasks: int, items: int) -> dict[str, float]:
    """Let `tasks` calls do their share of the items; return rate and CPU."""
    began_s, cpu_s = time.monotonic(), time.process_time()
    done = sum(await asyncio.gather(*(work(items // tasks) for _ in range(tasks))))
    assert done == items, f"{done} of {items} items"
    return {"cpu_s": time.process_time() - cpu_s, "seconds": time.monotonic() - began_s, "items": done}


async def fill(queue: memq.aio.Queue, params: Command) -> None:
    """Enqueue items by `enqueue_many`; a single one by `enqueue`."""
    payloads = lines(params["size"], params["many"])

    async def producer(items: int) -> int:
        calls = items // len(payloads)
        for _ in range(calls):
            if len(payloads) == 1:
                await queue.enqueue(params["queue"], payloads[0], lease=LEASE_S)
            else:
                await queue.enqueue_many(params["queue"], payloads, lease=LEASE_S)
        return calls * len(payloads)

    answer(**await together(producer, params["tasks"], params["items"]))


async def drain(queue: memq.aio.Queue, params: Command) -> None:
    """Lease items and ack them; each ack asks for the next items."""

    async def worker(items: int) -> int:
        name, many, left = params["queue"], params["many"], items
        found = await queue.dequeue({name: min(many, left)}, wait=WAIT_S)
        while found:
            left -= len(found)
            if left:
                outcomes, following = await queue.ack_and_dequeue(found, {name: min(many, left)}, wait=WAIT_S)
            else:
                outcomes, following = await queue.ack_many(found), []
            assert set(outcomes) == {"acked"}, outcomes
            found = following
        return items - left

    answer(**await together(worker, params["tasks"], params["items"]))


async def pace(queue: memq.aio.Queue, params: Command) -> None:
    """Enqueue items one by one at a fixed rate, each with the time of its call."""
    rest, began_s, calls = lines(params["size"], 1)[0][STAMP.size :], time.monotonic(), list[asyncio.Task[str]]()
    for number in range(params["items"]):
        await asyncio.sleep(began_s + number / params["rate"] - time.monotonic())
        calls.append(
            asyncio.create_task(queue.enqueue(params["queue"], STAMP.pack(time.monotonic()) + rest, lease=LEASE_S))
        )
    await asyncio.gather(*calls)
    answer(late_s=time.monotonic() - began_s - params["items"] / params["rate"])


async def follow(queue: memq.aio.Queue, params: Command) -> None:
    """Take items as they come; return the seconds from the call that enqueued each to the call that got it."""
    delays_s: list[float] = []

    async def worker() -> None:
        while len(delays_s) < params["items"]:
            found = await queue.dequeue({params["queue"]: params["many"]}, wait=WAIT_S)
            now_s = time.monotonic()
            if not found:
                return
            delays_s.extend(now_s - STAMP.unpack_from(item.payload)[0] for item in found)
            await queue.ack_many(found)

    await asyncio.gather(*(worker() for _ in range(params["tasks"])))
    assert len(delays_s) == params["items"], f"{len(delays_s)} of {params['items']} items"
    answer(delays_s=delays_s)


async def probe(queue: memq.aio.Queue, params: Command) -> None:
    """Lease a few items again and again, and ack them; return the seconds of each lease, and until the first one."""
    delays_s, began_s, first_s = list[float](), time.monotonic(), 0.0
    for number in range(params["calls"]):
        asked_s = time.monotonic()
        found = await queue.dequeue({params["queue"]: params["many"]}, wait=WAIT_S)
        delays_s.append(time.monotonic() - asked_s)
        first_s = first_s or time.monotonic() - began_s
        assert len(found) == params["many"], f"{len(found)} items in call {number}"
        await queue.ack_many(found)
    answer(delays_s=delays_s, first_s=first_s)


WORK: dict[str, Work] = {"fill": fill, "drain": drain, "pace": pace, "follow": follow, "probe": probe}


async def serve(address: str) -> None:
    """Do what the parent says."""
    async with memq.aio.Queue(address) as queue:
        answer(ready=True)
        async for params in commands_async():
            await WORK[params["command"]](queue, params)


if __name__ == "__main__":
    calm_collector()
    uvloop.run(serve(options()["address"]))
