"""The limit to compare with: a bare loop of obstore PUTs, with the handler's options."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import obstore
import uvloop
from obstore.store import S3Store

from benchmarks.children.commands import Command, answer, commands_async, options
from benchmarks.children.samples import lines


async def puts(store: S3Store, params: Command, run: int) -> None:
    """Put `total_bytes` in objects of `object_bytes`, so many in flight, each under a new key."""
    size = params["object_bytes"]
    body = b"".join(lines(1_000, size // 1_000 + 1))[:size]
    keys = (f"bare/{run}/{number}" for number in range(params["total_bytes"] // size))

    async def put_each(mine: Iterator[str]) -> None:
        for key in mine:
            await obstore.put_async(store, key, [memoryview(body)], mode="create", use_multipart=False)

    began_s, cpu_s = time.monotonic(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(params["in_flight"]):
            group.create_task(put_each(keys))
    seconds = time.monotonic() - began_s
    answer(seconds=seconds, cpu_s=time.process_time() - cpu_s, total_bytes=params["total_bytes"] // size * size)


async def main() -> None:
    params = options()
    store = S3Store(
        params["bucket"],
        config={
            "endpoint": params["endpoint"],
            "region": params["region"],
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
