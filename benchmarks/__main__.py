"""`python -m benchmarks [NAME…] [--quick] [--json FILE]`: progress on stderr, the table on stdout."""

from __future__ import annotations

import importlib
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

import click

from benchmarks.results import Figure, Options
from memq import kernel

ROWS = (
    "ingest",
    "own_part",
    "produce",
    "consume",
    "filters",
    "arrow",
    "end_to_end",
    "latency",
    "memory",
    "start",
    "audit",
    "dashboard",
    "cluster",
    "failover",
    "groups",
    "transactions",
    "puts",
    "spark",
)


def say(text: str) -> None:
    """Tell the person who waits."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """Describe where the figures come from."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "loadavg": os.getloadavg()[0],
        "kernel": kernel.description(),
    }


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(ROWS))
@click.option("--quick", is_flag=True, help="A minute instead of ten: fewer rounds over less data.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
def main(names: tuple[str, ...], quick: bool, json_file: Path | None) -> None:
    """Measure the speed table, all rows or those that are NAMEd. Exit code 1 when a bound is missed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what a row started ends with it
    options, figures, began_s = Options(quick, say), list[Figure](), time.monotonic()
    where = machine()
    say(f"kernel: {where['kernel']}")
    for name in names or ROWS:
        say(f"{name} …")
        figures += importlib.import_module(f"benchmarks.{name}").run(options)
    for figure in figures:
        print(figure.line())
    if json_file is not None:
        document = {
            "machine": where,
            "quick": quick,
            "seconds": round(time.monotonic() - began_s, 1),
            "figures": [figure.as_json() for figure in figures],
        }
        json_file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(any(figure.holds is False for figure in figures))


if __name__ == "__main__":
    main()
