"""A PostgreSQL server from the package `pgserver`, and its CPU."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import cpu_s

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running server."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes, also of those that have ended."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        ended_s = (int(fields[13]) + int(fields[14])) / TICKS  # cutime and cstime
        return cpu_s(self.pid) + ended_s + sum(cpu_s(int(child)) for child in children)


@contextmanager
def postgres(folder: Path) -> Iterator[Postgres]:
    """Start a server whose commits are durable; stop it at the end. Raises: ImportError without the package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants a folder of the user's session, which containers lack
        pgserver = importlib.import_module("pgserver")
        server = pgserver.get_server(folder, cleanup_mode="delete")
    try:
        pid = int((folder / "postmaster.pid").read_text().split()[0])
        for setting in ("fsync", "synchronous_commit"):
            found = server.psql(f"SHOW {setting}")
            assert " on" in found, f"{setting}: {found}"
        yield Postgres(server.get_uri(), pid)
    finally:
        server.cleanup()
