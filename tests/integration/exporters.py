"""Commands that export metrics, as Prometheus reads them."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT_S = 60.0


@contextmanager
def exporter(*command: str) -> Iterator[str]:
    """Run a command that serves metrics until the end of the test; yields the address."""
    command = (sys.executable, "-m", "memq", *command, "--serve", "127.0.0.1:0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("memq ready: "), line
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def scraped(address: str) -> dict[str, float]:
    """Return each line of the metrics."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
