"""The floor of the cluster's row: how much of a broker's CPU is the machine's, for the bytes that it took."""

from __future__ import annotations

from pathlib import Path

from benchmarks.child import Child
from benchmarks.servers import RealServers
from memq.limits import KIB

BLOCK_BYTES = 512 * KIB  # what a producer seals


class Floor:
    """A process that receives, checks and writes, and the one that sends to it, which is not measured."""

    def __init__(self, servers: RealServers) -> None:
        self._folder: Path = servers.folder / "floor"
        self._folder.mkdir()
        self._receiver: Child = servers.child("floor", folder=str(self._folder))
        self._sender: Child = servers.child("sender")

    def write(self, total_bytes: int) -> float:
        """Let it store about so many bytes, then forget them; return the CPU seconds that each byte took."""
        params = self._sender.ask(
            "prepare",
            address=self._receiver.ready["address"],
            topic="",
            block_bytes=BLOCK_BYTES,
            connections=1,
            total_bytes=max(total_bytes, 2 * BLOCK_BYTES),
            acked=False,
        )
        before_s = self._receiver.cpu_s()
        self._sender.ask("run")
        used_s = self._receiver.cpu_s() - before_s
        for path in self._folder.iterdir():
            path.unlink()
        return used_s / float(params["total_bytes"])
