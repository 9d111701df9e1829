"""`kill -9` of a real `memq dev` at any moment: each record acked with ack=all exists, once and in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from pathlib import Path

import pytest

import memq
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.servers import DevServer, dev_server

TIMEOUT_S = 60.0


class Acked:
    """Counts acked records, and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.records = 0
        self.errors: list[object] = []
        self._changed = threading.Condition()

    def __call__(self, ack: object) -> None:
        with self._changed:
            if isinstance(ack, memq.Ack):
                self.records += ack.records
            else:
                self.errors.append(ack)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until `count` records are acked."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.records >= count or self.errors, TIMEOUT_S), "no acks"


def read_all(server: DevServer, topic: str) -> list[bytes]:
    """Read a topic from its beginning to its end."""
    with memq.Consumer(server.address, [topic], start="beginning", end="end") as consumer:
        return [value or b"" for batch in consumer for value in batch.values()]


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_nothing_acked_is_lost_or_doubled(seed: int, tmp_path: Path) -> None:
    draw, acked, sent = random.Random(seed), Acked(), 0
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address, on_ack=acked, linger_ms=1, block_bytes=4096) as producer:
            for _ in range(3):
                for _ in range(draw.randint(500, 4000)):
                    producer.send("clicks", b"%d" % sent)
                    sent += 1
                acked.wait_for(draw.randint(0, sent))
                server.kill()
                for _ in range(draw.randint(1, 200)):
                    producer.send("clicks", b"%d" % sent)
                    sent += 1
                server.start()
            producer.flush(timeout=TIMEOUT_S)
        assert acked.errors == []
        assert acked.records == sent
        assert read_all(server, "clicks") == [b"%d" % number for number in range(sent)]


def test_a_named_producer_that_starts_again_after_each_kill_has_each_record_once(tmp_path: Path) -> None:
    draw, total = random.Random(5), 6_000
    with dev_server(tmp_path / "data") as server:
        for life in range(4):
            acked = Acked()
            producer = memq.Producer(server.address, name="job", on_ack=acked, linger_ms=1, block_bytes=4096)
            stood = producer.resume_points("clicks")[0]
            end = total if life == 3 else min(total, stood + draw.randint(500, 1_500))
            for number in range(stood, end):
                producer.send("clicks", b"%d" % number, partition=0)
            if life == 3:
                producer.close(timeout=TIMEOUT_S)
                assert acked.errors == []
                break
            acked.wait_for(draw.randint(0, end - stood))
            server.kill()
            with contextlib.suppress(memq.errors.TimedOutError):
                producer.close(timeout=0)
            server.start()
        assert read_all(server, "clicks") == [b"%d" % number for number in range(total)]


def test_a_staged_batch_is_there_once_though_the_broker_is_killed_while_it_is_committed(tmp_path: Path) -> None:
    draw, batches, records = random.Random(6), 4, 300
    with dev_server(tmp_path / "data") as server:

        async def commit(batch: int, kill_after_s: float | None) -> None:
            store = FilesystemHandler(server.data / "objects", server.data / "tmp")
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(store.close)
                commits = await stack.enter_async_context(StagedCommits(server.address, "job"))
                topics = await commits.topics(["clicks"])
                objects = []
                for part in range(3):
                    writer = StagedWriter(commits.cluster, topics, store, "job", block_bytes=1_024)
                    for number in range(part * records // 3, (part + 1) * records // 3):
                        await writer.add("clicks", b"%d" % (batch * records + number))
                    objects += await writer.finish()
                work = asyncio.create_task(commits.commit(batch, objects, store, timeout_s=TIMEOUT_S))
                if kill_after_s is not None:
                    await asyncio.wait([work], timeout=kill_after_s)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                await work

        for batch in range(batches):
            asyncio.run(commit(batch, draw.uniform(0, 0.05)))
            asyncio.run(commit(draw.randint(0, batch), None))
        assert read_all(server, "clicks") == [b"%d" % number for number in range(batches * records)]


def test_starts_sweep_what_no_pointer_names_and_say_so(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data", "--sweep-confirm-ms", "1s") as server:
        with memq.Producer(server.address, audit=False) as producer:  # the kill may cut a report: here all is counted
            producer.send("clicks", b"kept").result(timeout=TIMEOUT_S)
        server.kill()
        (named,) = server.objects_of("clicks")
        unnamed = named.with_name(named.name[:-1] + "9")
        unnamed.write_bytes(b"stored, but its pointer was never published")
        torn = server.data / "tmp" / "77-0"
        torn.write_bytes(b"half a put")
        server.start()
        assert not torn.exists()
        assert unnamed.exists(), "one pass is one witness"
        assert "1 temporary files (10 bytes) and 0 unnamed objects (0 bytes)" in server.log.read_text()
        while unnamed.exists():  # a second later
            server.kill()
            server.start()
        assert named.exists()
        assert "0 temporary files (0 bytes) and 1 unnamed objects (43 bytes)" in server.log.read_text()
        assert read_all(server, "clicks") == [b"kept"]


def test_a_consumer_group_continues_where_it_committed(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address) as producer:
            for number in range(100):
                producer.send("clicks", b"%d" % number).result(timeout=TIMEOUT_S)
        seen: list[bytes] = []
        with memq.Consumer(server.address, ["clicks"], group="g", auto_commit=False) as consumer:
            while len(seen) < 40:
                batch = consumer.poll(timeout=TIMEOUT_S)
                assert batch is not None
                seen += [value or b"" for value in batch.values()]
                consumer.commit(batch)
        server.kill()
        server.start()
        with memq.Consumer(server.address, ["clicks"], group="g", end="end") as consumer:
            seen += [value or b"" for batch in consumer for value in batch.values()]
        assert seen == [b"%d" % number for number in range(100)]


def test_power_loss_leaves_no_half_object(tmp_path: Path) -> None:
    """Every object under its key is whole: what a kill cuts stays in the folder for temporary files."""
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address, codec="none", block_bytes=65536) as producer:
            for number in range(300):
                producer.send("clicks", os.urandom(10_000))  # noqa: TID251 - bytes that do not repeat
                if number == 200:
                    server.kill()
                    server.start()
            producer.flush(timeout=TIMEOUT_S)
        server.kill()
        from memq.format.object import open_object

        objects = [path for path in (server.data / "objects").rglob("*") if path.is_file()]
        assert objects
        for path in objects:
            open_object(path.read_bytes())
