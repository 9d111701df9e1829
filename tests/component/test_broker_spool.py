"""The spool: an ack=1 on disk follows its fsync; blocks of an earlier run are delivered once, or reported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from awscrt.checksums import crc32c

from memq.broker.spool.files import ASIDE, SpoolFiles, inspect_spool, sizes_in
from memq.cli.cluster.doctor import _spool as spool_findings
from memq.errors import InvalidRequestError, InvalidSettingError
from memq.format.pointer import decode_pointer
from memq.format.spool import HEAD, decode_segment
from memq.notification import Publication
from memq.protocol.frames import AckLevel, Api
from memq.protocol.messages import Nack, Throttle, decode_message
from memq.settings import load_settings
from memq.topic import ReadPartition, TopicSettings
from tests.brokers import BareClient, block_of, until, write_frame
from tests.component.cluster_rig import rig
from tests.component.faulty_brokers import ON_DISK, GatedDisk, gate_of, left_behind, records, replayed, seize, taken


def test_an_ack_comes_after_the_fsync_and_what_waits_shares_the_next_one(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            disk = GatedDisk(tmp_path)
            one = await cluster.start("one", spool=disk)
            gate_of(cluster)
            topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ONE)
            disk.gate.clear()
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            await disk.called.wait()
            counters = one.services.counters
            for number in range(1, 20):
                client.write(write_frame(block_of(topic, number, [b"a"])))
                await until(lambda: counters.received_blocks > number)  # noqa: B023 - awaited here
            assert counters.acks == 0
            disk.gate.set()
            frames = [await client.frame(), await client.frame()]
            assert [(frame.api, frame.flags, frame.argument) for frame in frames] == [(Api.ACK, 1, 1), (Api.ACK, 1, 20)]
            assert (counters.spool_syncs, counters.spooled_blocks) == (2, 20)
            (name,) = sizes_in(tmp_path)
            assert len(decode_segment((tmp_path / name).read_bytes()).entries) == 20
            await client.close()

    asyncio.run(work())


def test_published_blocks_leave_the_spool(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            topic, client = await taken(one, blocks=5)
            await until(lambda: not sizes_in(tmp_path) and not len(one.services.spool.segments))
            assert sum(count for _, count in await records(cluster, topic)) == 10
            await client.close()

    asyncio.run(work())


def test_an_altered_topic_goes_to_disk_at_once_and_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            topic, client = await taken(one, settings=TopicSettings())
            for first, settings, spooled in ((2, ON_DISK, 1), (4, TopicSettings(), 1), (6, ON_DISK, 2)):
                await one.partitions.alter(one.partitions.topic("clicks"), settings)
                client.write(write_frame(block_of(topic, first, [b"a", b"b"])))
                while (await client.frame()).argument < first + 2:
                    pass
                assert one.services.counters.acks >= 1 + first // 2
                assert one.services.counters.spooled_blocks <= spooled
            await client.close()

    asyncio.run(work())


def test_a_disk_that_hangs_throttles_and_a_close_gives_all_memory_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            disk = GatedDisk(tmp_path)
            one = await cluster.start("one", spool=disk)
            topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ONE)
            disk.gate.clear()
            for number in range(30):  # 250 kB each, and an eighth of the 32 MiB may wait
                client.write(write_frame(block_of(topic, number, [bytes(250_000)])))
            frame = await client.frame()
            text = decode_message(frame.body, Throttle).text
            assert (frame.api, "wait for the disk" in text) == (Api.THROTTLE, True)
            await one.close()
            assert one.services.pool.leased_bytes == one.intake.slab.size
            await client.close()

    asyncio.run(work())


def test_a_topic_in_memory_writes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            _, client = await taken(one, settings=TopicSettings())
            assert one.services.counters.spool_syncs == 0
            await client.close()

    asyncio.run(work())


def test_a_failing_disk_refuses_acks_of_level_1_and_comes_back(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            disk = GatedDisk(tmp_path)
            one = await cluster.start("one", spool=disk)
            gate = gate_of(cluster)
            topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ONE)
            await client.open(topic, stream=2, producer=99, acks=AckLevel.ALL)
            disk.fails = True
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            frame = await client.frame()
            assert (frame.api, frame.argument) == (Api.THROTTLE, 0), "it is in the ring, and may be stored"
            while frame.api == Api.THROTTLE:  # until it meets the refusal, and not the next try of the disk
                await client.open(topic, acks=AckLevel.ONE)
                client.write(write_frame(block_of(topic, 0, [b"a"])))
                frame = await client.frame()
            refused = decode_message(frame.body, Nack)
            assert (frame.api, refused.code, refused.kind) == (Api.NACK, "spool-failed", "retryable")
            assert "the disk is full" in refused.text
            client.write(write_frame(block_of(topic, 0, [b"z"], producer=99), stream=2))
            gate.set()
            frame = await client.frame()
            assert (frame.api, frame.stream, frame.flags) == (Api.ACK, 2, AckLevel.ALL)
            disk.fails = False
            await until(lambda: one.services.spool.refusal is None)
            failed = list(disk.names)
            gate.clear()  # what is in the queue before its turn on the disk would not be written there
            await client.open(topic, acks=AckLevel.ONE)
            client.write(write_frame(block_of(topic, 0, [b"a"])) + write_frame(block_of(topic, 1, [b"b"])))
            while (await client.frame()).argument < 2:
                pass
            assert failed == list(disk.names)[:-1], "what lies in a segment that failed is unknown: it gets no more"
            gate.set()
            await one.drain()
            assert sum(count for _, count in await records(cluster, topic)) == 3
            await client.close()

    asyncio.run(work())


def test_spooled_block_stays_on_disk_until_its_pointer_is_in_the_queue(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            publish, called, gate = one.services.queue.publish, asyncio.Event(), asyncio.Event()

            async def slow(publication: Publication) -> int:
                if decode_pointer(publication.body).kind == "data":
                    called.set()
                    await gate.wait()
                return await publish(publication)

            one.services.queue.publish = slow  # type: ignore[method-assign]  # the store is quick, the queue is not
            _, client = await taken(one)
            await called.wait()
            (segment,) = one.services.spool.segments
            assert segment.tickets
            gate.set()
            await until(lambda: not segment.tickets)
            await client.close()

    asyncio.run(work())


def test_blocks_that_wait_behind_a_failed_write_are_held_back_too(tmp_path: Path) -> None:
    """Each stream hears from which block on it is not acked: one that hears nothing waits for its timeout."""

    async def work() -> None:
        async with rig() as cluster:
            disk = GatedDisk(tmp_path)
            one = await cluster.start("one", spool=disk)
            gate_of(cluster)
            topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic, acks=AckLevel.ONE)
            await client.open(topic, stream=2, producer=99, acks=AckLevel.ONE)
            disk.gate.clear()
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            await disk.called.wait()
            client.write(write_frame(block_of(topic, 0, [b"z"], producer=99), stream=2))
            await until(lambda: one.services.counters.received_blocks == 2)
            disk.fails = True
            disk.gate.set()
            frames = [await client.frame(), await client.frame()]
            assert [(frame.api, frame.stream, frame.argument) for frame in frames] == [
                (Api.THROTTLE, 1, 0),
                (Api.THROTTLE, 2, 0),
            ]
            assert one.services.counters.spool_refused_blocks == 2
            await client.close()

    asyncio.run(work())


def test_a_copy_that_was_acked_with_1_is_forwarded_though_its_first_one_was_to_be_acked_with_all(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            gate = gate_of(cluster)
            topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
            client = await BareClient.connect(one)
            block = write_frame(block_of(topic, 0, [b"a", b"b"]))
            await client.open(topic, acks=AckLevel.ALL)
            client.write(block)
            again = await BareClient.connect(one)
            await until(lambda: one.services.counters.sealed_batches > 0)
            await again.open(topic, acks=AckLevel.ONE)
            again.write(block)
            assert (await again.frame()).argument == 2
            two = await cluster.start("two")
            there = await seize(cluster, topic, two)
            gate.set()
            await one.drain()
            assert await records(cluster, topic) == [("two", 2)]
            for each in (client, again, there):
                await each.close()

    asyncio.run(work())


def test_a_full_spool_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            gate = gate_of(cluster)
            topic, client = await taken(one)
            one.services.spool.segments.bytes += 16 << 20
            client.write(write_frame(block_of(topic, 2, [b"a"])))
            frame = await client.frame()
            text = decode_message(frame.body, Nack).text
            assert (frame.api, "16777216 are allowed" in text) == (Api.NACK, True)
            gate.set()
            await client.close()

    asyncio.run(work())


def test_a_broker_without_a_spool_refuses_the_setting_and_the_blocks(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            with pytest.raises(InvalidSettingError, match="ack1 = disk needs a spool, and broker 'one' has none"):
                await one.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
            two = await cluster.start("two", spool=SpoolFiles(tmp_path))
            topic = await two.partitions.create("clicks", 1, ON_DISK, exist_ok=False)
            there = await seize(cluster, topic, one)
            await there.open(topic, acks=AckLevel.ONE)
            there.write(write_frame(block_of(topic, 0, [b"a"])))
            refused = decode_message((await there.frame()).body, Nack)
            assert refused.text == "broker 'one' has no spool for a topic with ack1 = disk"
            await there.close()

    asyncio.run(work())


# ---- replay --------------------------------------------------------------------------------------


def test_blocks_that_a_dead_broker_acked_are_delivered_after_its_start(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            found = await replayed(cluster, again, topic, tmp_path)
            assert sum(count for _, count in found) == 6
            assert again.services.counters.replayed_blocks == 3
            assert again.services.counters.forwarded_blocks == 3

    asyncio.run(work())


def test_spooled_blocks_that_the_queue_holds_are_not_forwarded_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            (name,) = sizes_in(tmp_path)
            body = (tmp_path / name).read_bytes()
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            before = await replayed(cluster, again, topic, tmp_path)
            await again.close()
            (tmp_path / name).write_bytes(body)  # as if it had died before the segment was removed
            third = await cluster.start("one", spool=SpoolFiles(tmp_path))
            assert await replayed(cluster, third, topic, tmp_path) == before
            assert third.services.counters.forwarded_blocks == 0

    asyncio.run(work())


def test_another_owner_gets_what_the_dead_one_acked(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            two = await cluster.start("two")
            there = await seize(cluster, topic, two)
            again = await cluster.start("three", spool=SpoolFiles(tmp_path))  # the folder, at a broker of another name
            assert await replayed(cluster, again, topic, tmp_path) == [("two", 6)]
            await there.close()

    asyncio.run(work())


def test_a_drain_waits_for_the_replay(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            await again.drain()
            assert sum(count for _, count in await records(cluster, topic)) == 6

    asyncio.run(work())


def test_a_segment_of_a_newer_version_is_kept_for_who_can_read_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            (name,) = sizes_in(tmp_path)
            body = (tmp_path / name).read_bytes()
            rest = b"\x63" + body[9 : HEAD.size]  # version 99
            (tmp_path / name).write_bytes(body[:4] + crc32c(rest).to_bytes(4, "little") + rest + body[HEAD.size :])
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            assert await replayed(cluster, again, topic, tmp_path) == []
            assert list(sizes_in(tmp_path / ASIDE)) == [name]
            assert again.services.counters.spool_damages == 1

    asyncio.run(work())


def test_damage_is_reported_and_kept_and_costs_only_what_it_hits(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            (name,) = sizes_in(tmp_path)
            body = bytearray((tmp_path / name).read_bytes())
            body[HEAD.size + 60] ^= 1
            (tmp_path / name).write_bytes(body)
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            found = await replayed(cluster, again, topic, tmp_path)
            assert sum(count for _, count in found) == 4
            assert again.services.counters.spool_damages == 1
            assert list(sizes_in(tmp_path / ASIDE)) == [name]
            text, hint = inspect_spool(tmp_path, 0, 0)
            assert "1 segments set aside" in text
            assert "spool.md" in hint

    asyncio.run(work())


def test_blocks_that_may_be_copies_are_set_aside_for_the_operator(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            topic = await left_behind(cluster, tmp_path)
            read = ReadPartition(topic.name, topic.id, 0)
            two = await cluster.start("two")
            await (await seize(cluster, topic, two)).close()
            await cluster.queue.trim(read, (await cluster.queue.span(read)).end)
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            assert await replayed(cluster, again, topic, tmp_path) == []
            assert again.services.counters.spool_undecided_blocks == 3
            assert len(sizes_in(tmp_path / ASIDE)) == 1

    asyncio.run(work())


# ---- the folder ----------------------------------------------------------------------------------


def test_doctor_looks_at_the_spool_of_a_broker_that_has_one(tmp_path: Path) -> None:
    assert list(spool_findings(load_settings({}, {}, folder=tmp_path))) == []
    (found,) = spool_findings(load_settings({"spool": str(tmp_path / "spool")}, {}, folder=tmp_path))
    assert (found.what, found.state, "0 segments with 0 bytes" in found.text) == ("spool", "ok", True)
    flags: dict[str, str | int] = {"spool": str(tmp_path / "spool"), "spool_bytes_max": 1 << 44}
    (found,) = spool_findings(load_settings(flags, {}, folder=tmp_path))
    assert (found.state, found.hint) == ("warning", f"spool_bytes_max is {1 << 44}: free some space, or lower it")


def test_a_folder_is_one_broker_s_alone_and_must_be_writable(tmp_path: Path) -> None:
    async def work() -> None:
        disk = SpoolFiles(tmp_path / "spool")
        with pytest.raises(InvalidRequestError, match=r"spool folder .* is in use by the process with pid"):
            SpoolFiles(tmp_path / "spool")
        await disk.close()
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(InvalidRequestError, match=r"spool folder .* can't be made"):
            SpoolFiles(tmp_path / "file" / "spool")

    asyncio.run(work())
