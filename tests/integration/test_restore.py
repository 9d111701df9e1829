"""`memq restore`: a lost queue is rebuilt from the objects, and every record is readable as before."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import memq
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from tests.servers import DevServer

TOPIC = "clicks"
VALUES = [f"value {number}".encode() for number in range(3_000)]


def restore(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memq", "restore", "--data", str(data), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def fill(address: str) -> None:
    """Three rounds, so that there are several batches; two partitions."""
    with memq.Admin(address) as admin:
        admin.create_topic(TOPIC, partitions=2)
    for start in range(0, len(VALUES), 1_000):
        with memq.Producer(address) as producer:
            for number in range(start, start + 1_000):
                producer.send(TOPIC, VALUES[number], partition=number % 2)
            producer.flush(timeout=30)


def read(address: str) -> list[tuple[int, bytes | None]]:
    with memq.Consumer(address, [TOPIC], end="end") as consumer:
        return [(batch.partition, value) for batch in consumer for value in batch.values()]


def expected() -> dict[int, list[bytes]]:
    return {partition: VALUES[partition::2] for partition in (0, 1)}


def by_partition(found: list[tuple[int, bytes | None]]) -> dict[int, list[bytes | None]]:
    return {partition: [value for at, value in found if at == partition] for partition in (0, 1)}


def remove_queue(data: Path) -> None:
    for file in data.glob("queue.sqlite*"):
        file.unlink()


def intact(report: str) -> int:
    return next(int(each["intact"]) for each in json.loads(report) if each["topic"] == TOPIC)


async def lose_log(data: Path) -> None:
    """Empty partition 0, as if it had been made again."""
    queue = SqliteQueue(data / "queue.sqlite", SystemClock())
    try:
        first = next(each for each in await queue.partitions(TOPIC) if each.partition == 0)
        await queue.drop([first])
        await queue.create([first], 30_000)
    finally:
        await queue.close()


def test_one_lost_log_is_restored_into_the_queue_that_is_there(tmp_path: Path) -> None:
    """As the event log-lost says; the command refused a folder that has its queue."""
    server = DevServer(tmp_path / "data")
    server.start()
    fill(server.address)
    with memq.Consumer(server.address, [TOPIC], group="g", end="end") as consumer:
        assert len([value for batch in consumer for value in batch.values()]) == len(VALUES)
        consumer.commit()
    assert server.stop() == 0
    asyncio.run(lose_log(server.data))
    found = restore(server.data, "--json")
    assert found.returncode == 0, found.stderr
    assert intact(found.stdout) == 1
    server.start()
    try:
        assert by_partition(read(server.address)) == expected()
        with memq.Consumer(server.address, [TOPIC], group="g", end="end") as consumer:
            assert {batch.partition for batch in consumer} <= {0}, "the group has its position in partition 1"
    finally:
        assert server.stop() == 0
    remove_queue(server.data)
    (server.data / "queue.sqlite").write_bytes(b"no database" * 1_000)
    assert "move it away first" in restore(server.data).stderr


def test_a_lost_queue_is_restored_and_continues(tmp_path: Path) -> None:
    server = DevServer(tmp_path / "data")
    server.start()
    fill(server.address)
    assert server.stop() == 0
    whole = restore(server.data, "--json")
    assert whole.returncode == 0, whole.stderr
    assert intact(whole.stdout) == 2, "a queue that is there keeps what it has"
    remove_queue(server.data)
    dry = restore(server.data, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert not (server.data / "queue.sqlite").exists()
    found = restore(server.data, "--json")
    assert found.returncode == 0, found.stderr
    assert found.stdout == dry.stdout
    report = next(each for each in json.loads(found.stdout) if each["topic"] == TOPIC)
    assert (report["records"], report["copies"], report["findings"]) == (3_000, 0, [])
    assert report["pointers"] == report["objects"] >= 6

    server.start()
    try:
        assert by_partition(read(server.address)) == expected()
        with memq.Producer(server.address) as producer:
            producer.send(TOPIC, b"after", partition=0).result(timeout=30)
        assert (0, b"after") in read(server.address)
        command = [sys.executable, "-m", "memq", "audit", TOPIC, "-b", server.address]
        audited = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert audited.returncode == 0, audited.stdout
    finally:
        server.kill()


def test_a_damaged_object_is_named_and_the_rest_restored(tmp_path: Path) -> None:
    server = DevServer(tmp_path / "data")
    server.start()
    fill(server.address)
    assert server.stop() == 0
    remove_queue(server.data)
    first, second = server.objects_of(TOPIC)[:2]
    first.write_bytes(first.read_bytes()[:-1])  # cut: its trailer is gone
    body = bytearray(second.read_bytes())
    body[100] ^= 1  # within its first block
    second.write_bytes(body)
    found = restore(server.data)
    assert found.returncode == 1
    assert first.name in found.stderr
    assert f"{second.name}: 1 of " in found.stderr
    assert (server.data / "queue.sqlite").exists()


def test_a_start_without_the_queue_says_what_to_do(tmp_path: Path) -> None:
    server = DevServer(tmp_path / "data")
    server.start()
    fill(server.address)
    assert server.stop() == 0
    remove_queue(server.data)
    started = subprocess.run(
        [sys.executable, *server.command()], capture_output=True, text=True, timeout=60, check=False
    )
    assert started.returncode == 1
    assert "memq restore" in started.stderr
