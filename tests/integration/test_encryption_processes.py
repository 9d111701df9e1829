"""Encrypted records on a broker's folder: compacted, verified, audited, and restored, without the keys."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import memq
from memq.encryption.keys import create_key_file
from memq.format.key import is_large_object
from memq.topic import Topic
from tests.compaction import compact_topic, folder_parts, make_old
from tests.servers import DevServer, dev_server

BATCHES, OLD = 12, 10
SETTINGS = {"stale_publish_ms": 1_000, "delivery_timeout_ms": 1_000, "dedup_window_ms": 43_000}
SECRET = b"a canary that no broker sees"


def memq_command(*arguments: str) -> str:
    """Run a command that has no keys, and return its output."""
    command = [sys.executable, "-m", "memq", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(broker: DevServer, keys: memq.Encryption) -> list[memq.Record]:
    with memq.Consumer(broker.address, "clicks", encryption=keys, end="end", audit=False) as consumer:
        return [record for batch in consumer for record in batch]


async def compact(broker: DevServer, topic: Topic) -> None:
    async with folder_parts(broker.data) as parts:
        done = await compact_topic(parts, topic)
        assert not [finding for each in done for finding in each.findings]


def test_compaction_verify_audit_and_restore_need_no_keys(tmp_path: Path) -> None:
    create_key_file(tmp_path / "keys.json", "one")
    keys = memq.Encryption(f"file:{tmp_path / 'keys.json'}", subjects=tmp_path / "subjects")
    data = tmp_path / "data"
    with dev_server(data) as broker:
        with memq.Admin(broker.address) as admin:
            topic = admin.create_topic("clicks", partitions=1, settings=SETTINGS)
        with memq.Producer(broker.address, encryption=keys) as producer:
            for number in range(BATCHES):
                subject = "ada" if number % 3 == 0 else None
                producer.send("clicks", SECRET + b"%d" % number, key=b"k", headers={"n": SECRET}, subject=subject)
                producer.flush(timeout=60)
        before = read(broker, keys)
        assert [record.value for record in before] == [SECRET + b"%d" % number for number in range(BATCHES)]
        make_old(data, "clicks", OLD)
        asyncio.run(compact(broker, topic))
        names = [path.relative_to(data / "objects").as_posix() for path in broker.objects_of("clicks")]
        assert any(map(is_large_object, names))
        assert read(broker, keys) == before
        assert "clean" in memq_command("audit", "clicks", "-b", broker.address)
        memq_command("verify", str(data))
        assert not any(SECRET in path.read_bytes() for path in data.rglob("*") if path.is_file())
        keys.subjects.forget("ada")
        after = read(broker, keys)
        assert [record.forgotten for record in after] == [number % 3 == 0 for number in range(BATCHES)]
        assert "clean" in memq_command("audit", "clicks", "-b", broker.address)
    for file in data.glob("queue.sqlite*"):
        file.unlink()
    memq_command("restore", "--data", str(data))
    with dev_server(data) as broker:
        assert [(record.value, record.headers) for record in read(broker, keys)] == [
            (record.value, record.headers) for record in after
        ]
