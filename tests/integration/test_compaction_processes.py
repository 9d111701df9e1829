"""Small objects become large ones under readers, groups and a broker: none notices it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memq
from memq.compaction.compaction import manifest_of
from memq.format.key import is_large_object
from memq.format.pointer import decode_pointer
from memq.topic import Topic, read_partitions
from tests.compaction import Seen, all_records, compact_topic, folder_parts, make_old, seen_by
from tests.servers import DevServer, dev_server

SETTINGS = {"stale_publish_ms": 1_000, "delivery_timeout_ms": 1_000, "dedup_window_ms": 43_000}
BATCHES, OLD = 30, 24
NOISE = random.Random(11)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[DevServer]:
    with dev_server(tmp_path / "data") as server:
        yield server


def make_topic(broker: DevServer, topic: str) -> Topic:
    with memq.Admin(broker.address) as admin:
        return admin.create_topic(topic, partitions=1, settings=SETTINGS)


def produce(broker: DevServer, topic: str, batches: int, first: int = 0) -> None:
    """Send records of all kinds, an object for each batch."""
    for codec in ("zstd", "none"):
        with memq.Producer(broker.address, codec=codec) as producer:
            for number in range(first, first + batches // 2):
                value = None if number % 7 == 0 else b"%d " % number + NOISE.randbytes(700)
                producer.send(topic, value, key=b"%d" % (number % 3), headers=[("n", b"%d" % number)], tag=codec)
                producer.send(topic, b"", timestamp_ms=number)
                producer.flush(timeout=60)


def objects_of(broker: DevServer) -> set[str]:
    root = broker.data / "objects"
    return {path.relative_to(root).as_posix() for path in root.glob("*/topics/**/*") if path.is_file()}


async def compact_old(broker: DevServer, topic: Topic) -> tuple[int, int]:
    """Compact what is old, and return how many large objects that made, and where the queue begins now."""
    async with folder_parts(broker.data) as parts:
        done = await compact_topic(parts, topic)
        assert not [finding for each in done for finding in each.findings]
        (partition,) = read_partitions(topic)
        manifest = await manifest_of(parts.files, partition)
        span = await parts.queue.span(partition)
        assert span.begin == manifest.next > manifest.begin
        return len(done), span.begin


def delete_originals(broker: DevServer) -> int:
    """Delete what a sweep deletes once it may: what lies in large objects, where it was before."""
    root = broker.data / "objects"
    keys = [key for key in objects_of(broker) if "/cold/" not in key]

    async def named() -> set[str]:
        async with folder_parts(broker.data) as parts:
            return {
                key
                for topic in ("clicks",)
                for partition in await parts.queue.partitions(topic)  # type: ignore[attr-defined]
                for entry in await parts.queue.read(partition, 0, 1 << 30)
                for key in keys
                if key.encode() in entry.body
            }

    gone = set(keys) - asyncio.run(named())
    for key in gone:
        (root / key).unlink()
    return len(gone)


def test_readers_groups_and_places_are_the_same_across_the_seam(broker: DevServer) -> None:
    topic = make_topic(broker, "clicks")
    produce(broker, "clicks", BATCHES)
    make_old(broker.data, "clicks", OLD)
    before = all_records(broker.address, "clicks")
    assert len(before) == 2 * BATCHES
    stands = [before[at].position for at in (4, 2 * OLD - 8, 2 * BATCHES - 6)]
    for number, position in enumerate(stands):
        read_as_group(broker, f"group-{number}", until=position)
    lags, verdict = lags_of(broker, stands), audited(broker)

    count, begin = asyncio.run(compact_old(broker, topic))
    assert count > 1
    assert begin > OLD // 2
    assert len([key for key in objects_of(broker) if is_large_object(key)]) == count
    assert all_records(broker.address, "clicks") == before
    assert delete_originals(broker) >= OLD // 2
    assert all_records(broker.address, "clicks") == before
    assert all_records(broker.address, "clicks", read="broker") == before
    for position in stands:
        after = [seen for seen in before if seen.position >= position]
        assert all_records(broker.address, "clicks", position) == after
    for number, position in enumerate(stands):
        assert read_as_group(broker, f"group-{number}") == [seen for seen in before if seen.position >= position]
    assert lags_of(broker, stands) == lags
    assert audited(broker) == verdict


def test_a_pop_group_finds_its_records_where_compaction_moved_them(broker: DevServer) -> None:
    """One group has read the records before, and does not find its payloads in memory; another one begins after."""
    topic = make_topic(broker, "clicks")
    produce(broker, "clicks", BATCHES)
    make_old(broker.data, "clicks", OLD)
    expected = sorted((str(each.position), each.value or b"") for each in all_records(broker.address, "clicks"))
    with memq.Queue(broker.address) as queue:
        queue.begin_pop("clicks", "before", lease=5)
        first = queue.dequeue("clicks@before", wait=20)
        queue.ack_many(first)
    broker.stop()
    broker.start()
    count, _ = asyncio.run(compact_old(broker, topic))
    assert count > 1
    assert delete_originals(broker) >= OLD // 2
    with memq.Queue(broker.address) as queue:
        queue.begin_pop("clicks", "after", lease=5)
        for name, found in (("clicks@before", first), ("clicks@after", [])):
            while len(found) < len(expected):
                items = queue.dequeue({name: 20}, wait=20)
                assert items, f"{len(found)} of {len(expected)} came"
                queue.ack_many(items)
                found += items
            assert sorted((str(each.position), each.payload) for each in found) == expected


def read_as_group(broker: DevServer, group: str, until: memq.Position | None = None) -> list[Seen]:
    """Continue as a group up to a position, or the end, and commit that."""
    found: list[Seen] = []
    with memq.Consumer(broker.address, ["clicks"], group=group, start="beginning", end=until or "end") as consumer:
        found += seen_by(consumer)
        consumer.commit()
    return found


def audited(broker: DevServer) -> tuple[object, ...]:
    """Return what the audit says, with the bounds of what it rests on."""
    command = [sys.executable, "-m", "memq", "audit", "clicks", "-b", broker.address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    coverage = report["coverage"]
    return report["verdict"], report["findings"], report["producers"], coverage["partitions"], coverage["records"]


def lags_of(broker: DevServer, positions: list[memq.Position]) -> list[tuple[int, int]]:
    found = []
    for position in positions:
        with memq.Consumer(broker.address, ["clicks"], start=position) as consumer:
            assert consumer.poll(timeout=60) is not None
            consumer.seek("clicks", 0, position)
            (lag,) = consumer.lag().values()
            found.append((lag.records, lag.bytes))
    return found


def test_a_consumer_that_knew_the_old_places_continues(broker: DevServer) -> None:
    topic = make_topic(broker, "clicks")
    produce(broker, "clicks", BATCHES)
    make_old(broker.data, "clicks", OLD)
    before = all_records(broker.address, "clicks")
    with memq.Consumer(broker.address, ["clicks"], start="beginning", end="end", prefetch_bytes_max=4096) as consumer:
        first = consumer.poll(timeout=60)
        assert first is not None
        consumer.pause("clicks", 0)  # it knows all pointers by now, and holds no batch
        asyncio.run(compact_old(broker, topic))
        assert delete_originals(broker) >= OLD // 2
        consumer.resume("clicks", 0)
        found = seen_by(consumer)
    assert [seen.position for seen in found] == [seen.position for seen in before if seen.position >= first.next]


def compacted(broker: DevServer, *options: str) -> tuple[int, dict[str, int], str]:
    """Run `memq compact`; return its exit code, its counts, and its messages."""
    command = [sys.executable, "-m", "memq", "compact", "clicks", "-b", broker.address, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


async def object_at(broker: DevServer, topic: Topic, offset: int) -> str:
    """Return the key of the first object that is named at an offset or later."""
    async with folder_parts(broker.data) as parts:
        entries = await parts.queue.read(read_partitions(topic)[0], offset, 1 << 20)
        return next(pointer.locations[0].key for entry in entries if (pointer := decode_pointer(entry.body)).locations)


def test_the_compact_command_copies_old_batches_once_and_names_a_damaged_one(broker: DevServer) -> None:
    topic = make_topic(broker, "clicks")
    produce(broker, "clicks", BATCHES)
    make_old(broker.data, "clicks", OLD)
    before = all_records(broker.address, "clicks")
    assert compacted(broker) == (0, {"objects": 0, "pointers": 0, "bytes": 0, "damaged": 0}, "")  # a rest waits
    damaged = asyncio.run(object_at(broker, topic, OLD // 2))
    path = broker.data / "objects" / damaged
    sound = path.read_bytes()
    path.write_bytes(sound[:50] + bytes([sound[50] ^ 1]) + sound[51:])
    code, counts, messages = compacted(broker, "--rest", "--object-bytes", "8KiB")
    path.write_bytes(sound)

    assert (code, counts["damaged"]) == (1, 1)
    assert damaged in messages
    assert counts["objects"] == len([key for key in objects_of(broker) if is_large_object(key)]) > 1
    assert OLD // 2 < counts["pointers"] <= OLD + 2
    assert compacted(broker, "--rest")[:2] == (0, {"objects": 0, "pointers": 0, "bytes": 0, "damaged": 0})
    assert delete_originals(broker) >= OLD // 2
    assert all_records(broker.address, "clicks") == before
