"""The contract of the spool's disk, over files and the simulation's disk, and errors of a failing disk."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memq.broker.spool import SpoolDisk
from memq.broker.spool.files import ASIDE, MemorySpool, SpoolFiles, _spool_error
from memq.errors import ClosedError, SpoolError
from memq.simulation.ports.disk import SICKNESSES, DiskFaults, HostDisk, SimDisk

ONE, TWO = "0000000000000001-aaaaaaaa.spool", "0000000000000002-bbbbbbbb.spool"
Opened = Callable[[], SpoolDisk]


def files(folder: Path) -> Opened:
    return lambda: SpoolFiles(folder)


def simulated(_folder: Path) -> Opened:
    host = HostDisk()
    return lambda: SimDisk(host, DiskFaults(0.0, 0.0), random.Random(1), float)


def in_memory(_folder: Path) -> Opened:
    disk = MemorySpool()
    return lambda: disk


def run(opened: Opened, work: Callable[[SpoolDisk], Coroutine[Any, Any, None]]) -> None:
    """Do something with the disk, as one process would."""

    async def main() -> None:
        disk = opened()
        try:
            await work(disk)
        finally:
            await disk.close()

    asyncio.run(main())


@pytest.mark.parametrize("make", [files, in_memory, simulated])
def test_appended_segments_are_read_by_the_next_process(make: Callable[[Path], Opened], tmp_path: Path) -> None:
    opened = make(tmp_path)

    async def first(disk: SpoolDisk) -> None:
        assert await disk.sizes() == {}
        await disk.append(TWO, [b"head", memoryview(b"two")])
        await disk.append(ONE, [b"one"])
        await disk.append(ONE, [bytearray(b" more"), b""])

    async def second(disk: SpoolDisk) -> None:
        assert list((await disk.sizes()).items()) == [(ONE, 8), (TWO, 7)], "oldest first"
        assert await disk.read(ONE) == b"one more"
        assert await disk.read(TWO) == b"headtwo"

    run(opened, first)
    run(opened, second)


@pytest.mark.parametrize("make", [files, in_memory, simulated])
def test_removed_and_set_aside_segments_are_not_listed(make: Callable[[Path], Opened], tmp_path: Path) -> None:
    async def work(disk: SpoolDisk) -> None:
        await disk.append(ONE, [b"one"])
        await disk.append(TWO, [b"two"])
        assert TWO in await disk.set_aside(TWO)
        assert await disk.sizes() == {ONE: 3}
        await disk.remove(ONE)
        await disk.remove(ONE)
        assert await disk.sizes() == {}

    opened = make(tmp_path)
    run(opened, work)
    if make is files:
        assert (tmp_path / ASIDE / TWO).read_bytes() == b"two"


def test_a_process_that_dies_while_it_writes_leaves_what_was_synced_and_any_part_of_the_rest() -> None:
    for seed in range(200):
        draw, host = random.Random(seed), HostDisk()
        opened = partial(SimDisk, host, DiskFaults(0.0, 0.0), draw, float)
        run(opened, lambda disk: disk.append(ONE, [b"synced"]))
        host.files[ONE].data += b"not synced"
        host.lose_power(draw)
        found = bytes(host.files[ONE].data)
        assert found.startswith(b"synced")
        assert b"not synced".startswith(found[6:].rstrip(b"\0"))


def test_a_removed_segment_may_be_back_whole_until_the_folder_is_synced() -> None:
    back = 0
    for seed in range(100):
        draw, host = random.Random(seed), HostDisk()
        opened = partial(SimDisk, host, DiskFaults(0.0, 0.0), draw, float)

        async def work(disk: SpoolDisk) -> None:
            await disk.append(ONE, [b"one"])
            await disk.remove(ONE)
            await disk.append(TWO, [b"two"])  # a new name: the folder is synced
            await disk.remove(TWO)

        run(opened, work)
        host.lose_power(draw)
        assert ONE not in host.files
        back += TWO in host.files
        assert TWO not in host.files or host.files[TWO].data == b"two"
    assert 10 < back < 60


@pytest.mark.parametrize("kind", SICKNESSES)
def test_a_sick_disk_fails_until_it_is_well_and_keeps_what_it_had(kind: str) -> None:
    host, now_s = HostDisk(), [0.0]
    opened = partial(SimDisk, host, DiskFaults(0.0, 0.0), random.Random(1), lambda: now_s[0])

    async def work(disk: SpoolDisk) -> None:
        await disk.append(ONE, [b"one"])
        host.fail_until(kind, 60.0)
        for now_s[0] in (0.0, 59.0):
            with pytest.raises(SpoolError):
                await disk.append(ONE, [b"more"])
        assert (await disk.read(ONE)).startswith(b"one")
        assert host.files[ONE].synced == 3
        now_s[0] = 60.0
        await disk.append(TWO, [b"two"])
        assert host.files[TWO].synced == 3

    run(opened, work)


def test_files_say_what_to_do(tmp_path: Path) -> None:
    async def work(disk: SpoolDisk) -> None:
        (tmp_path / "spool" / ONE).mkdir()
        with pytest.raises(SpoolError, match=rf"can't be written: '{ONE}': File exists") as caught:
            await disk.append(ONE, [b"x"])
        assert "check the broker's disk" in caught.value.hint
        await disk.append(TWO, [b"x"])
        with pytest.raises(SpoolError, match="can't be read"):
            await disk.read("gone.spool")
        await disk.close()
        with pytest.raises(ClosedError):
            await disk.append(TWO, [b"x"])

    run(files(tmp_path / "spool"), work)
    full = _spool_error(tmp_path, "be written", OSError(errno.ENOSPC, "No space left on device"))
    assert "free space" in full.hint
