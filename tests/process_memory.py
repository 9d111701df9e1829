"""The memory of a process, as Linux reports it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process now."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """Return the most resident bytes that a process ever had: no moment is missed, as samples miss it."""
    return _status(pid, "VmHWM")


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {name} of process {pid}")
