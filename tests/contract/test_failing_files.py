"""The spool on a failing disk: acked blocks survive a loss of power, whatever fsync returned."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from memq.broker.spool import writer
from memq.broker.spool.files import SpoolFiles, sizes_in
from memq.errors import SpoolError
from memq.format.spool import decode_segment
from memq.protocol.frames import AckLevel, Api, Frame
from memq.protocol.messages import Nack, Throttle, decode_message
from memq.storage_handlers import Buffer
from memq.storage_handlers.files import sync_folder
from memq.topic import Topic
from tests.brokers import BareClient, block_of, write_frame
from tests.component.cluster_rig import Rig, rig
from tests.component.faulty_brokers import ON_DISK, gate_of, pointers
from tests.failing_files import FailingFiles

BLOCKS = 12


class HopefulSpool(SpoolFiles):
    """Calls fsync once more when it fails, and believes the second answer: what memq must not do."""

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """See `SpoolDisk.append`."""
        try:
            await super().append(name, buffers)
        except SpoolError:
            if self._open is None:
                raise
            try:
                os.fsync(self._open[1])
                sync_folder(self._folder)
            except OSError as error:
                raise SpoolError("the second answer is no better") from error


async def send_all(
    client: BareClient,
    topic: Topic,
    *,
    blocks: int = BLOCKS,
    size: int = 1,
    refused: Callable[[Frame], None] = lambda frame: None,
) -> None:
    """Send blocks of one record, each again until it is acked with 1."""
    await client.open(topic, acks=AckLevel.ONE)
    for number in range(blocks):
        block = write_frame(block_of(topic, number, [bytes(size)]))
        client.write(block)
        while True:
            frame = await client.frame()
            if frame.api == Api.ACK and frame.argument > number:
                break
            if frame.api in (Api.THROTTLE, Api.NACK):
                refused(frame)
                await client.open(topic, acks=AckLevel.ONE, sequence=number)
                client.write(block)


async def spooled(cluster: Rig, disk: SpoolFiles) -> Topic:
    """Have a broker whose store hangs ack blocks from its spool, and end it."""
    one = await cluster.start("one", spool=disk)
    put = cluster.store.put
    gate_of(cluster)
    topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=True)
    client = await BareClient.connect(one)
    await send_all(client, topic)
    await client.close()
    await one.close()
    cluster.store.put = put  # type: ignore[method-assign]  # it answers again
    return topic


def survivors(folder: Path) -> set[int]:
    """Return the sequences of all blocks that a spool holds."""
    contents = [decode_segment((folder / name).read_bytes()) for name in sizes_in(folder)]
    return {entry.header.first_sequence for content in contents for entry in content.entries}


@pytest.mark.parametrize("seed", range(8))
def test_blocks_that_a_spool_acked_survive_failed_fsyncs_and_a_loss_of_power(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_S_BASE", 0.001)
    monkeypatch.setattr(writer, "RETRY_S_MAX", 0.002)
    (tmp_path / "disk").mkdir()
    disk = FailingFiles(tmp_path / "disk", random.Random(seed))

    async def work() -> None:
        async with rig() as cluster:
            with disk.installed():
                files = SpoolFiles(tmp_path / "disk" / "spool")
                disk.fail_share = 0.3
                topic = await spooled(cluster, files)
            disk.lose_power(tmp_path / "after")
            assert survivors(tmp_path / "after" / "spool") == set(range(BLOCKS))
            again = await cluster.start("one", spool=SpoolFiles(tmp_path / "after" / "spool"))
            await again.replay.wait()
            assert sum(each.records for each in await pointers(cluster, topic)) == BLOCKS

    asyncio.run(work())
    assert disk.failed > 0


def test_a_spool_that_believes_a_second_fsync_is_found_out(tmp_path: Path) -> None:
    missing = []

    async def work(seed: int) -> None:
        folder = tmp_path / str(seed)
        folder.mkdir()
        disk = FailingFiles(folder, random.Random(seed))
        async with rig() as cluster:
            with disk.installed():
                files = HopefulSpool(folder / "spool")
                disk.fail_share = 0.2
                await spooled(cluster, files)
            disk.lose_power(tmp_path / f"{seed}-after")
            missing.append(BLOCKS - len(survivors(tmp_path / f"{seed}-after" / "spool")))

    for seed in range(3):
        asyncio.run(work(seed))
    assert sum(missing) > 0


def test_a_spool_that_turns_read_only_refuses_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = FailingFiles(tmp_path / "disk", random.Random(1))

    async def work() -> None:
        files = SpoolFiles(tmp_path / "disk" / "spool")
        await files.append("0-1.spool", [b"one"])
        disk.read_only = True
        for name in ("0-1.spool", "0-2.spool"):
            with pytest.raises(SpoolError):
                await files.append(name, [b"two"])
        assert await files.read("0-1.spool") in (b"one", b"onetwo")
        disk.read_only = False
        await files.append("0-3.spool", [b"three"])
        await files.close()

    with disk.installed():
        asyncio.run(work())
    disk.lose_power(tmp_path / "after")
    assert (tmp_path / "after" / "spool" / "0-1.spool").read_bytes() == b"one"
    assert (tmp_path / "after" / "spool" / "0-3.spool").read_bytes() == b"three"


def test_a_segment_is_set_aside_by_a_second_try(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = FailingFiles(tmp_path / "disk", random.Random(1))

    async def work() -> None:
        files = SpoolFiles(tmp_path / "disk" / "spool")
        await files.append("0-1.spool", [b"one"])
        disk.fail_share = 1.0
        with pytest.raises(SpoolError):
            await files.set_aside("0-1.spool")
        disk.fail_share = 0.0
        assert await files.set_aside("0-1.spool") == str(tmp_path / "disk" / "spool" / "aside" / "0-1.spool")
        with pytest.raises(SpoolError):
            await files.set_aside("0-2.spool")
        await files.close()

    with disk.installed():
        asyncio.run(work())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("a small file system needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_spool_on_a_full_disk_refuses_and_continues_when_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_S_BASE", 0.001)
    monkeypatch.setattr(writer, "RETRY_S_MAX", 0.002)
    refusals: list[str] = []

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(small_disk / "spool"))
            gate = gate_of(cluster)
            topic = await one.partitions.create("clicks", 1, ON_DISK, exist_ok=True)
            client = await BareClient.connect(one)

            def refused(frame: Frame) -> None:
                throttled = frame.api == Api.THROTTLE
                refusals.append(
                    decode_message(frame.body, Throttle).text if throttled else decode_message(frame.body, Nack).text
                )
                gate.set()  # what is published leaves room

            await send_all(client, topic, blocks=60, size=8_000, refused=refused)
            await one.drain()
            assert sum(each.records for each in await pointers(cluster, topic)) == 60
            assert sizes_in(small_disk / "spool") == {}
            await client.close()

    asyncio.run(work())
    assert any("No space left on device" in text for text in refusals)
