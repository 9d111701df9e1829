"""A real broker process whose store hangs on demand: files, but each put waits while the gate is shut.

`python -m tests.stalling FOLDER MEMORY_BYTES_MAX` says `memq ready: HOST:PORT`; every line on stdin shuts or opens the
gate, the end of stdin ends it; it says `starved` whenever the memory budget has stopped all producers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvloop

from memq.broker.broker import Broker
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers import Buffer
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.process_memory import peak_bytes, resident_bytes


class GatedFiles(FilesystemHandler):
    """Files, with a gate before each put."""

    def __init__(self, folder: Path) -> None:
        (folder / "objects").mkdir(parents=True)
        (folder / "tmp").mkdir()
        super().__init__(folder / "objects", folder / "tmp")
        self.gate = asyncio.Event()
        self.gate.set()

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        await self.gate.wait()
        await super().put(key, buffers, checksum)


async def serve(folder: Path, memory_bytes_max: int) -> None:
    """Run until stdin ends."""
    runtime, store = Runtime(), GatedFiles(folder)
    settings = dataclasses.replace(BrokerSettings(), port=0, memory_bytes_max=memory_bytes_max)
    queue, coordinator = MemoryQueue(runtime.clock), MemoryCoordinator(MemoryCluster())
    broker = Broker(settings, runtime, {"main": store}, queue, coordinator)
    hurry, ended = broker.intake.starving, asyncio.Event()

    def starving() -> None:
        print("starved", flush=True)
        hurry()

    def report() -> None:
        commands = os.read(0, 1024)
        for command in commands.splitlines():
            (store.gate.clear if command == b"shut" else store.gate.set)()
        if not commands:
            ended.set()

    broker.intake.starving = starving
    await broker.start()
    asyncio.get_running_loop().add_reader(0, report)
    print(f"memq ready: {broker.address}", flush=True)
    await ended.wait()
    store.gate.set()
    await broker.close()
    await store.close()


class StallingBroker:
    """The process, as a test sees it."""

    def __init__(self, folder: Path, memory_bytes_max: int) -> None:
        command = [sys.executable, "-m", "tests.stalling", str(folder), str(memory_bytes_max)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.wait_for("memq ready: ")

    def wait_for(self, start: str) -> str:
        """Wait for a line that starts so, and return its rest."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line.removeprefix(start).strip()
        raise AssertionError(f"the broker ended without saying '{start}'")

    def tell(self, command: str) -> None:
        """Shut or open the gate."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def resident_bytes(self) -> int:
        """What the process has in memory now."""
        return resident_bytes(self._process.pid)

    def peak_bytes(self) -> int:
        """What it had in memory at most, ever."""
        return peak_bytes(self._process.pid)

    def close(self) -> int:
        """End it and return the exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(60)
        self._process.stdout.close()
        return code


@contextmanager
def stalling_broker(folder: Path, memory_bytes_max: int) -> Iterator[StallingBroker]:
    """Run the process for a test; it must end well."""
    broker = StallingBroker(folder, memory_bytes_max)
    try:
        yield broker
    finally:
        code = broker.close()
    assert code == 0


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
