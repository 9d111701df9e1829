"""Row 8: from `memq dev` to the first consumed record, by the README's commands; `memq --help` against Python."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.dev import MEMQ, dev_broker
from benchmarks.results import Figure, Options, median

NAME = "start"
FIRST_RECORD_S_MAX = 3.0
HELP_RATIO_MAX = 4.0
DEADLINE_S = 60.0


def run(options: Options) -> list[Figure]:
    """Measure both."""
    seconds = [first_record() for _ in range(options.rounds)]
    first = Figure(NAME, "memq dev to first consumed record", median(seconds), "s", FIRST_RECORD_S_MAX)
    options.say(first.line())
    helps, bare = [], []
    for _ in range(4 * options.rounds):
        helps.append(cpu_s([*MEMQ, "--help"]))
        bare.append(cpu_s([sys.executable, "-c", "pass"]))
    detail: dict[str, float | str] = {"help CPU ms": median(helps) * 1e3, "bare CPU ms": median(bare) * 1e3}
    ratio = Figure(NAME, "memq --help", median(helps) / median(bare), "x", HELP_RATIO_MAX, detail=detail)
    options.say(ratio.line())
    return [first, ratio]


def first_record() -> float:
    """Return the seconds of three commands: dev, produce, consume."""
    with tempfile.TemporaryDirectory(prefix="memq-bench-") as folder:
        began_s = time.monotonic()
        with dev_broker(Path(folder) / "data") as dev:
            subprocess.run(
                [*MEMQ, "produce", "start", "-b", dev.address], input=b"hello\n", check=True, timeout=DEADLINE_S
            )
            found = subprocess.run(
                [*MEMQ, "consume", "start", "-b", dev.address, "-o", "beginning", "-c", "1"],
                check=True,
                capture_output=True,
                timeout=DEADLINE_S,
            )
            elapsed_s = time.monotonic() - began_s
    if found.stdout != b"hello\n":
        raise RuntimeError(f"consumed {found.stdout!r}")
    return elapsed_s


def cpu_s(command: list[str]) -> float:
    """Return the CPU seconds of a command: steadier than the clock on a busy machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
