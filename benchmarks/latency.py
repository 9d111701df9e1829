"""Row 6: ack=all at low load with `memq dev` on a real disk, over a bare put of the same bytes by the same handler."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from awscrt.checksums import crc32c

import memq
from benchmarks.dev import dev_broker
from benchmarks.results import Figure, Options, percentile
from memq.storage_handlers.filesystem import FilesystemHandler

NAME = "latency"
VALUE = b"v" * 1_000
GAP_S = 0.01
BOUNDS_MS = {"p50": (0.5, 5.0), "p99": (0.99, 15.0)}


def run(options: Options) -> list[Figure]:
    """Alternate a send with its ack and a put of as many bytes as its object has."""
    count = 200 if options.quick else 1_000
    acks: list[float] = []
    puts: list[float] = []
    with tempfile.TemporaryDirectory(prefix="memq-bench-") as folder, asyncio.Runner() as runner:
        objects, tmp = Path(folder) / "bare" / "objects", Path(folder) / "bare" / "tmp"
        for made in (objects, tmp):
            made.mkdir(parents=True)
        store = FilesystemHandler(objects, tmp)
        with dev_broker(Path(folder) / "data") as dev, memq.Producer(dev.address, acks="all") as producer:
            producer.send("latency", VALUE).result(30)
            stored = (Path(folder) / "data" / "objects").glob("*/topics/latency/**/*")
            body = next(path for path in stored if path.is_file()).read_bytes()
            for number in range(count):
                began_s = time.perf_counter()
                producer.send("latency", VALUE).result(30)
                acks.append(time.perf_counter() - began_s)
                puts.append(runner.run(bare_put(store, f"bare/{number % 16:02x}/{number}", body)))
                time.sleep(GAP_S)
        runner.run(store.close())
    figures = []
    for name, (share, bound) in BOUNDS_MS.items():
        ack_ms, put_ms = percentile(acks, share) * 1e3, percentile(puts, share) * 1e3
        detail: dict[str, float | str] = {"ack ms": ack_ms, "put ms": put_ms, "object bytes": len(body)}
        figures.append(Figure(NAME, f"ack=all over a put, {name}", ack_ms - put_ms, "ms", bound, detail=detail))
        options.say(figures[-1].line())
    return figures


async def bare_put(store: FilesystemHandler, key: str, body: bytes) -> float:
    """Return the seconds of one put."""
    began_s = time.perf_counter()
    await store.put(key, [body], crc32c(body))
    return time.perf_counter() - began_s
