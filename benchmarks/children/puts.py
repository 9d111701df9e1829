"""The limit to compare with: a bare loop of obstore PUTs, told as the handler tells obstore, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import obstore
import uvloop
from obstore.store import S3Store

from benchmarks.children.commands import Command, answer, commands_async, options
from benchmarks.children.samples import lines


async def puts(store: S3Store, told: Command, run: int) -> None:
    """Put `total_bytes` in objects of `object_bytes`, so many in flight, each under a new key."""
    size = told["object_bytes"]
    body = b"".join(lines(1_000, size // 1_000 + 1))[:size]
    keys = (f"bare/{run}/{number}" for number in range(told["total_bytes"] // size))

    async def put_each(mine: Iterator[str]) -> None:
        for key in mine:
            await obstore.put_async(store, key, [memoryview(body)], mode="create", use_multipart=False)

    began_s, cpu_s = time.monotonic(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(told["in_flight"]):
            group.create_task(put_each(keys))
    seconds = time.monotonic() - began_s
    answer(seconds=seconds, cpu_s=time.process_time() - cpu_s, total_bytes=told["total_bytes"] // size * size)


async def main() -> None:
    told = options()
    store = S3Store(
        told["bucket"],
        config={
            "endpoint": told["endpoint"],
            "region": told["region"],
            "unsigned_payload": True,
            "checksum_algorithm": "CRC64NVME",
            "disable_tagging": True,
        },
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    answer(ready=True)
    run = 0
    async for command in commands_async():
        run += 1
        await puts(store, command, run)


if __name__ == "__main__":
    uvloop.run(main())
