"""Starts a memq broker as a process of its own, on the settings of a stack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from memq_localstack.launch import Launch
from memq_localstack.ports import HOST

PORTS = 1
DRAIN_TIMEOUT_S = 60.0  # it stores and acks what it holds; a store that is slow makes that long


def launch(config: Path, name: str, ports: list[int], arguments: Sequence[str]) -> Launch:
    """Say how to start the broker of that name; `arguments` go to `memq broker` as they are."""
    (port,) = ports
    command = [sys.executable, "-m", "memq", "broker", "--config", str(config), "--broker-id", name]
    command += ["--spool", str(config.parent / name / "spool")]
    return Launch(
        kind=name,
        command=(*command, "--host", HOST, "--port", str(port), "--http-port", "-1", *arguments),
        address=f"{HOST}:{port}",
        ports=(port,),
        ready=("memq ready: ",),
        stop_timeout_s=DRAIN_TIMEOUT_S,
    )
