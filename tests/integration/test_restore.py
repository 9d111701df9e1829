"""`memq restore`: a lost queue is rebuilt from the objects, and every record is readable as before."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import memq
from memq.format.state_log.entry import StateDecisions, StateSnapshot, decode_state_entry
from memq.notification import Entry
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.topic import STATE_TOPIC
from tests.servers import DevServer

TOPIC = "clicks"
VALUES = [f"value {number}".encode() for number in range(3_000)]
_QUICK = """
import sys
from memq.state_log import state_log
state_log.SNAPSHOT_S = 1.0
from memq.cli import main
sys.exit(main())
"""


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


class QuickServer(DevServer):
    """A server with a snapshot of each state log soon after its first decision."""

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return ["-c", _QUICK, *super().command()[2:]]

    def wait_for_snapshots(self) -> None:
        """Wait until snapshots have all decisions of all state logs."""
        pause = threading.Event()
        while not asyncio.run(self._is_saved()):
            pause.wait(0.2)

    async def _is_saved(self) -> bool:
        queue = SqliteQueue(self.data / "queue.sqlite", SystemClock())
        try:
            logs = await queue.partitions(STATE_TOPIC)
            return all([is_saved(await queue.read(log, (await queue.span(log)).begin, 1 << 30)) for log in logs])
        finally:
            await queue.close()


def is_saved(entries: Sequence[Entry]) -> bool:
    """Whether the last snapshot that a state log names has all of its decisions."""
    contents = [(entry.offset, decode_state_entry(entry.body).content) for entry in entries]
    decided = max((at for at, each in contents if isinstance(each, StateDecisions) and each.decisions), default=-1)
    return decided < max((each.offset for _, each in contents if isinstance(each, StateSnapshot)), default=0)


def hold_and_commit(address: str) -> None:
    """Let a group read a half, and delay a record for each partition."""
    with memq.Consumer(address, [TOPIC], group="g", auto_commit=False) as consumer:
        found = 0
        while found < len(VALUES) // 2:
            batch = consumer.poll(30)
            assert batch is not None
            consumer.commit(batch)
            found += len(batch)
    with memq.Producer(address) as producer:
        for partition in (0, 1):
            producer.send(TOPIC, b"later", partition=partition, deliver_after=3_600).result(30)


def check_held_and_committed(address: str) -> None:
    """The group goes on where it was, and the records are held."""
    with memq.Admin(address) as admin:
        assert sum(each.records for each in admin.delayed(TOPIC).values()) == 2
        lags = [part.lag.records for part in admin.group("g").partitions]
    assert 0 < sum(lags) <= len(VALUES) // 2
    with memq.Consumer(address, [TOPIC], group="g", end="end") as consumer:
        assert sum(len(batch) for batch in consumer) == sum(lags)


def test_a_lost_queue_is_restored_and_continues(tmp_path: Path) -> None:
    server = QuickServer(tmp_path / "data")
    server.start()
    fill(server.address)
    hold_and_commit(server.address)
    server.wait_for_snapshots()
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
        check_held_and_committed(server.address)
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
