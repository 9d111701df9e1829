"""Leased queues with `memq dev` on files and SQLite: enqueue, then lease and ack, then all at the same time.

Items have 1 KB. A client process has several calls at the same time. Each answer is durable.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.child import Child, cpu_s
from benchmarks.dev import dev_broker
from benchmarks.results import Figure, Options, median, percentile

NAME = "queues"
SIZE = 1_000
ENQUEUED, LEASED = (500, 4), (100, 16)  # items of one call, and calls at the same time
RATE = 1_000
RATE_MIN = 30_000.0
BOUNDS_MS = {"p50": (0.5, 15.0), "p99": (0.99, 60.0)}


def run(options: Options) -> list[Figure]:
    """Measure rates, then the time from enqueue to dequeue."""
    items = 16_000 if options.quick else 96_000
    found: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="memq-bench-") as folder,
        dev_broker(Path(folder) / "data") as dev,
        Child("queue_client", address=dev.address) as client,
        Child("queue_client", address=dev.address) as other,
    ):
        for number in range(options.rounds + 1):
            for name, value in measure(client, other, dev.pid, items).items():
                found.setdefault(name, []).extend([value] if number else [])  # the first round warms up
        figures = rates(found) + delays(client, other, options)
    for figure in figures:
        options.say(figure.line())
    return figures


def measure(client: Child, other: Child, broker: int, items: int) -> dict[str, float]:
    """Return rates, and CPU microseconds of an item, of one round."""
    works: dict[str, dict[str, object]] = {}
    for work, (many, tasks) in (("fill", ENQUEUED), ("drain", LEASED)):
        works[work] = {"queue": "flow", "size": SIZE, "many": many, "tasks": tasks, "items": items}
    found: dict[str, float] = {}
    for work, terms in works.items():
        began_s = cpu_s(broker)
        done = client.ask(work, **terms)
        found[f"{work} rate"] = items / done["seconds"]
        found[f"{work} client us"] = done["cpu_s"] / items * 1e6
        found[f"{work} broker us"] = (cpu_s(broker) - began_s) / items * 1e6
    other.send_command("drain", **works["drain"])
    client.send_command("fill", **works["fill"])
    found["both rate"] = items / max(client.answer()["seconds"], other.answer()["seconds"])
    return found


def rates(found: dict[str, list[float]]) -> list[Figure]:
    """Return the rates of enqueue, of lease and ack, and of all together."""
    figures = []
    for work, case in (("fill", "enqueue"), ("drain", "lease and ack")):
        costs = (f"{work} {side} us" for side in ("broker", "client"))
        detail: dict[str, float | str] = {name: median(found[name]) for name in costs}
        rate = median(found[f"{work} rate"])
        figures.append(Figure(NAME, f"{case}, 1 KB", rate, "items/s", RATE_MIN, "higher", detail))
    return [*figures, Figure(NAME, "all three at the same time", median(found["both rate"]), "items/s")]


def delays(client: Child, other: Child, options: Options) -> list[Figure]:
    """Return the time from enqueue to dequeue at a low rate, with single calls."""
    items = RATE * (5 if options.quick else 20)
    terms = {"queue": "paced", "size": SIZE, "many": 100, "tasks": 2, "items": items}
    other.send_command("follow", **terms)
    late_s = client.ask("pace", rate=RATE, **terms)["late_s"]
    delays_s = other.answer()["delays_s"]
    detail: dict[str, float | str] = {"late s": late_s}
    figures = []
    for name, (share, bound) in BOUNDS_MS.items():
        delay_ms = percentile(delays_s, share) * 1e3
        figures.append(Figure(NAME, f"to dequeue at {RATE}/s, {name}", delay_ms, "ms", bound, detail=detail))
    return figures
