"""A broker with very many idle partitions: no thread and little memory for each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memq
from memq.limits import MIB
from memq.runtime.clock import SystemClock
from memq_localstack.servers import S3Server, Server
from tests.integration.kafka import running_kafka
from tests.process_memory import peak_bytes
from tests.processes import BrokerProcess, settings_text
from tests.servers import dev_server
from tests.soak import repetitions, report

pytestmark = [pytest.mark.soak, pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")]

HANG_S = repetitions(few=180, many=1_800)
TOPICS = repetitions(few=4, many=100)
PARTITIONS = repetitions(few=50, many=100)
AT_ONCE = 100
SESSION_MS = 10_000  # the usual one: a broker that loses its session opens all partitions again
CLOCK = SystemClock()
BYTES_MAX = repetitions(few=512, many=2_048) * MIB
THREADS_MORE_MAX = 10  # pools of a fixed size start their threads when they are first needed


def test_a_broker_bears_many_partitions_with_little_traffic(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data", "--log-level", "warning") as server:
        asyncio.run(_use(server.address, server.process.pid))
        server.signal()
        assert server.wait() == 0


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Server]:
    """A Kafka that is not taken for dead when it is busy: all its partitions would begin new epochs, for minutes."""
    with running_kafka(tmp_path / "kafka", **{"broker.session.timeout.ms": "60000"}) as server:
        yield server


def test_so_does_one_whose_pointers_are_in_kafka(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    config = tmp_path / "memq.toml"
    config.write_text(settings_text(tmp_path, zookeeper, kafka, reads_s3, {}, session_timeout_ms=SESSION_MS))
    broker = BrokerProcess(config, "b1")
    try:
        broker.start()
        asyncio.run(_use(broker.address, broker.process.pid))
        broker.signal()
        broker.process.wait(HANG_S)
        assert broker.wait() == 0
    finally:
        report(broker.log.read_text()[-5_000:])
        broker.close()


async def _use(address: str, pid: int) -> None:
    names = [f"small-{number}" for number in range(TOPICS)]
    async with asyncio.timeout(HANG_S):
        async with memq.aio.Admin(address) as admin:
            for name in names:
                await admin.create_topic(name, partitions=PARTITIONS, settings={"shared_objects": True})
        async with memq.aio.Producer(address, linger_ms=0) as producer:
            places = [(name, partition) for partition in range(PARTITIONS) for name in names]
            await _send_each(producer, places[:AT_ONCE])
            threads = _threads(pid)
            opening_s, _ = await _send_each(producer, places[AT_ONCE:])
            sending_s, waits_s = await _send_each(producer, places)
    p99_ms = sorted(waits_s)[len(waits_s) * 99 // 100] * 1_000
    report(
        f"{len(places)} partitions: {opening_s:.1f} s to open, {len(places) / sending_s:.0f} records/s with ack p99 "
        f"{p99_ms:.0f} ms, {_threads(pid)} threads ({threads} at first), {peak_bytes(pid) / MIB:.0f} MiB"
    )
    assert _threads(pid) <= threads + THREADS_MORE_MAX
    assert peak_bytes(pid) <= BYTES_MAX


async def _send_each(producer: memq.aio.Producer, places: list[tuple[str, int]]) -> tuple[float, list[float]]:
    """Send a record to each place, a number of them at once; return how long all took, and how long each."""
    waits_s: list[float] = []

    async def send(name: str, partition: int) -> None:
        began_s = CLOCK.monotonic()
        await (await producer.send(name, b"a record that came alone", partition=partition))
        waits_s.append(CLOCK.monotonic() - began_s)

    began_s = CLOCK.monotonic()
    for start in range(0, len(places), AT_ONCE):
        await asyncio.gather(*(send(*place) for place in places[start : start + AT_ONCE]))
    return CLOCK.monotonic() - began_s, waits_s


def _threads(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
