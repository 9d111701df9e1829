"""The main job on real input: send the flight records through a broker, read them back, compare every byte, audit.

Run it with `make demo`. It starts `memq dev` on a fresh folder, sends 336,776 records as JSON lines with ack=all,
reads them back with a consumer group, compares them one by one with what was sent, and asks the auditor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flights import RECORDS, flights
from folders import claim, clear

import memq

TOPIC = "flights"
PARTITIONS = 4
SHOWN_EVERY_S = 0.2
Lines = dict[bytes, list[bytes]]  # carrier -> its flights, in order


def main() -> int:
    """Run the demo; the exit code is 0 when every byte came back and the audit is clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("memq-demo"), help="data folder, emptied first")
    parser.add_argument("--records", type=int, default=RECORDS, help="send only so many")
    options = parser.parse_args()
    with claim(options.data):
        return run(options.data, options.records)


def run(data: Path, records: int) -> int:
    """Run it in a folder, and return the exit code."""
    clear(data)
    print("reading the flight records …", flush=True)
    lines = [item for item, _ in zip(flights(), range(records), strict=False)]
    size = sum(len(line) for _, line in lines)
    print(f"{len(lines):,} flights, {size / 1e6:.1f} MB as JSON lines", flush=True)
    with broker(data) as address:
        print(f"memq dev runs at {address} on {data}/", flush=True)
        send(address, lines, size)
        same = compare(lines, receive(address, len(lines), size))
        audit = subprocess.run([sys.executable, "-m", "memq", "audit", TOPIC, "-b", address], check=False)
        show_objects(data, size)
    return 0 if same and audit.returncode == 0 else 1


@contextmanager
def broker(data: Path, *options: str) -> Iterator[str]:
    """Run `memq dev` on a free port; yield its address; end it with a drain."""
    command = [sys.executable, "-m", "memq", "dev", "--data", str(data), "--port", "0", "--http-port", "-1"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "stdout is a pipe"
        ready = process.stdout.readline()
        if not ready.startswith("memq ready: "):
            raise SystemExit("memq: error: the broker did not start; what it said is above")
        try:
            yield ready.removeprefix("memq ready: ").strip()
        finally:
            process.terminate()


def send(address: str, lines: list[tuple[bytes, bytes]], size: int) -> None:
    """Send every line with its carrier as key, and wait until all are stored and published."""
    with memq.Admin(address) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS)
    started, shown = time.perf_counter(), 0.0
    with memq.Producer(address, acks="all") as producer:
        for number, (carrier, line) in enumerate(lines):
            producer.send(TOPIC, line, key=carrier)
            if number % 4096 == 0 and time.perf_counter() - shown > SHOWN_EVERY_S:
                shown = progress("sent", number, len(lines))
        producer.flush(timeout=120)
    finish("sent, all acked with ack=all", len(lines), size, time.perf_counter() - started)


def receive(address: str, count: int, size: int) -> Lines:
    """Read the topic with a consumer group from the beginning to its end, and commit."""
    received: Lines = {}
    number, shown, started = 0, 0.0, time.perf_counter()
    with memq.Consumer(address, [TOPIC], group="demo", start="beginning", end="end") as consumer:
        for batch in consumer:
            for record in batch:
                received.setdefault(record.key or b"", []).append(record.value or b"")
                number += 1
            if time.perf_counter() - shown > SHOWN_EVERY_S:
                shown = progress("received", number, count)
    finish("received, keys and values as records", number, size, time.perf_counter() - started)
    return received


def compare(lines: list[tuple[bytes, bytes]], received: Lines) -> bool:
    """Compare every byte, and the order of each key."""
    sent: Lines = {}
    for carrier, line in lines:
        sent.setdefault(carrier, []).append(line)
    if sent == received:
        print(f"compared: all {len(lines):,} records are equal, byte for byte and in order of their keys")
        return True
    for carrier in sorted(sent.keys() | received.keys()):
        if sent.get(carrier) != received.get(carrier):
            counts = len(sent.get(carrier, [])), len(received.get(carrier, []))
            print(f"compared: DIFFERENT for key {carrier!r}: {counts[0]} sent, {counts[1]} received")
    return False


def show_objects(data: Path, size: int) -> None:
    """Say where the objects lie, and how to look into one."""
    objects = sorted(path for path in (data / "objects").glob(f"*/topics/{TOPIC}/**/*") if path.is_file())
    stored = sum(path.stat().st_size for path in objects)
    print(f"objects: {len(objects)} files, {stored / 1e6:.1f} MB ({size / max(stored, 1):.1f}:1) under {data}/objects/")
    print(f"look into one:  {os.path.relpath(sys.executable)} -m memq inspect {objects[0]}")


def progress(what: str, number: int, count: int) -> float:
    """Draw progress on a terminal; return the time."""
    if sys.stderr.isatty():
        print(f"\r{what} {number:,} of {count:,}", end="\r", file=sys.stderr, flush=True)
    return time.perf_counter()


def finish(what: str, count: int, size: int, seconds: float) -> None:
    """Print a rate."""
    rates = f"{count / seconds:,.0f} records/s, {size / seconds / 1e6:,.0f} MB/s"
    print(f"{what}: {count:,} records in {seconds:.2f} s ({rates})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
