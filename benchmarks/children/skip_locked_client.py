"""Producers and workers of a queue in a table of PostgreSQL: `FOR UPDATE SKIP LOCKED`, as pgmq and others do.

Each call has a connection of its own, and commits before it returns. Statements are prepared, values are binary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import uvloop

from benchmarks.children.commands import Command, answer, commands_async, options
from benchmarks.children.queue_client import together
from benchmarks.children.samples import lines

TABLE = """
CREATE TABLE IF NOT EXISTS items (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, priority smallint NOT NULL, ready_at timestamptz NOT NULL,
    attempts integer NOT NULL DEFAULT 0, payload bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS items_order ON items (priority, ready_at, id);
"""
ENQUEUE = "INSERT INTO items (priority, ready_at, payload) SELECT 5, now(), unnest(%b::bytea[])"
LEASE = """
UPDATE items SET ready_at = now() + interval '300 s', attempts = attempts + 1
WHERE id IN (
    SELECT id FROM items WHERE ready_at <= now() ORDER BY priority, ready_at, id LIMIT %b FOR UPDATE SKIP LOCKED
)
RETURNING id, attempts, payload
"""
ACK = "DELETE FROM items WHERE id = ANY(%b::bigint[])"
Connection = psycopg.AsyncConnection[Any]
PAUSE_S = 0.005


async def fill(connections: list[Connection], params: Command) -> None:
    """Insert items, many by each statement."""
    payloads = lines(params["size"], params["many"])
    free = list(connections)

    async def producer(items: int) -> int:
        connection, calls = free.pop(), items // len(payloads)
        for _ in range(calls):
            await connection.execute(ENQUEUE, [payloads], prepare=True)
        return calls * len(payloads)

    answer(**await together(producer, params["tasks"], params["items"]))


async def drain(connections: list[Connection], params: Command) -> None:
    """Lease items and delete them."""
    free = list(connections)

    async def worker(items: int) -> int:
        connection, left = free.pop(), items
        while left:
            cursor = connection.cursor(binary=True)
            await cursor.execute(LEASE, [min(params["many"], left)], prepare=True)
            found = await cursor.fetchall()
            if not found:
                await asyncio.sleep(PAUSE_S)
                continue
            await connection.execute(ACK, [[id_ for id_, *_ in found]], prepare=True)
            left -= len(found)
        return items

    answer(**await together(worker, params["tasks"], params["items"]))


async def serve(url: str, calls: int) -> None:
    """Do what the parent says."""
    work: dict[str, Callable[[list[Connection], Command], Awaitable[None]]] = {"fill": fill, "drain": drain}
    connections = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in range(calls)]
    await connections[0].execute(TABLE)
    answer(ready=True)
    async for params in commands_async():
        await work[params["command"]](connections, params)
    for connection in connections:
        await connection.close()


if __name__ == "__main__":
    uvloop.run(serve(options()["url"], options()["calls"]))
