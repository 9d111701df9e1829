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
    "workers",
    "puts",
    "tls",
    "queues",
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
    """Measure the speed table, all rows or those that are NAMEd.

    Exit code 1 when a bound is missed or a row fails. The figures of complete rows are kept in both cases.
    """
    options, figures, began_s = Options(quick, say), list[Figure](), time.monotonic()
    where = machine()
    document: dict[str, object] = {"machine": where, "quick": quick}
    failed = dict[str, str]()
    if json_file is not None:
        _write(json_file, document)  # a path that can't be written is refused before an hour of work
    say(f"kernel: {where['kernel']}")
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what a row started ends
    try:
        for name in names or ROWS:
            say(f"{name} …")
            try:
                found = importlib.import_module(f"benchmarks.{name}").run(options)
            except Exception as error:  # noqa: BLE001  # a missing server or library: the other rows do not need it
                failed[name] = f"{type(error).__name__}: {error}"
                say(f"{name} failed: {failed[name]}")
                continue
            figures += found
            for figure in found:
                print(figure.line(), flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        if json_file is not None:
            document["seconds"] = round(time.monotonic() - began_s, 1)
            document |= {"figures": [figure.as_json() for figure in figures], "failed": failed}
            _write(json_file, document)
    sys.exit(bool(failed) or any(figure.holds is False for figure in figures))


def _write(path: Path, document: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error


if __name__ == "__main__":
    main()
