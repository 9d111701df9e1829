"""Leased queues with `memq dev` on files and SQLite, compared with a `SKIP LOCKED` queue on PostgreSQL with fsync.

Items have 1 KB. Each side has a process of clients, with several calls at the same time, and each answer is durable.
The sides take turns: enqueue, then lease and ack. Then memq does all at the same time, and items one by one.
PostgreSQL comes from the package `pgserver`, which `make` installs; without it, the row has no peer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.child import Child, cpu_s
from benchmarks.dev import dev_broker
from benchmarks.postgres import postgres
from benchmarks.results import Figure, Options, median, percentile

NAME = "queues"
SIZE = 1_000
ENQUEUED, LEASED = (500, 4), (100, 16)  # items of one call, and calls at the same time
RATE = 1_000
RATE_MIN = 30_000.0
CPU_RATIO_MIN = 5.0
BOUNDS_MS = {"p50": (0.5, 15.0), "p99": (0.99, 60.0)}


@dataclass(slots=True)
class Side:
    """One side: a process of clients, and the CPU seconds of its server so far."""

    client: Child
    server_s: Callable[[], float]
    found: dict[str, list[float]] = field(default_factory=dict)

    def do(self, work: str, terms: dict[str, object], *, counts: bool) -> None:
        """Let the clients work; note rate, and CPU microseconds of an item, if the round counts."""
        began_s = self.server_s()
        done = self.client.ask(work, **terms)
        server_s, items = self.server_s() - began_s, done["items"]
        values = {"rate": items / done["seconds"], "client us": done["cpu_s"] / items * 1e6}
        for name, value in {**values, "server us": server_s / items * 1e6}.items():
            self.found.setdefault(f"{work} {name}", []).extend([value] if counts else [])

    def median(self, name: str) -> float:
        """Return the median of what was noted."""
        return median(self.found[name])

    def cpu_us(self, *names: str) -> float:
        """Return the CPU microseconds of an item, from its enqueue to its ack."""
        return sum(self.median(f"{work} {name} us") for work in ("fill", "drain") for name in names)


def run(options: Options) -> list[Figure]:
    """Measure rates and CPU of both sides, then the time from enqueue to dequeue."""
    items = 16_000 if options.quick else 96_000
    works: dict[str, dict[str, object]] = {}
    for work, (many, calls) in (("fill", ENQUEUED), ("drain", LEASED)):
        works[work] = {"queue": "flow", "size": SIZE, "many": many, "tasks": calls, "items": items}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memq-bench-")))
        dev = stack.enter_context(dev_broker(folder / "data"))
        client, other = (stack.enter_context(Child("queue_client", address=dev.address)) for _ in range(2))
        memq, peer = Side(client, lambda: cpu_s(dev.pid)), peer_in(folder / "postgres", stack, options)
        both: list[float] = []
        for number in range(options.rounds + 1):  # the first round warms up
            for side in (memq, peer) if peer is not None else (memq,):
                for work, terms in works.items():
                    side.do(work, terms, counts=number > 0)
            other.send_command("drain", **works["drain"])
            client.send_command("fill", **works["fill"])
            both.append(items / max(client.answer()["seconds"], other.answer()["seconds"]))
        figures = [*rates(memq, peer), Figure(NAME, "all three at the same time", median(both[1:]), "items/s")]
        figures += [*costs(memq, peer), *delays(client, other, options)]
    for figure in figures:
        options.say(figure.line())
    return figures


def peer_in(folder: Path, stack: ExitStack, options: Options) -> Side | None:
    """Start the peer and its clients; return None without the package."""
    try:
        server = stack.enter_context(postgres(folder))
    except ImportError as error:
        options.say(f"no peer: {error}; 'pip install pgserver' has PostgreSQL")
        return None
    client = stack.enter_context(Child("skip_locked_client", url=server.url, calls=LEASED[1]))
    return Side(client, server.cpu_s)


def rates(memq: Side, peer: Side | None) -> list[Figure]:
    """Return the rates of enqueue, and of lease and ack."""
    figures = []
    for work, case in (("fill", "enqueue"), ("drain", "lease and ack")):
        detail: dict[str, float | str] = {name: memq.median(f"{work} {name}") for name in ("server us", "client us")}
        if peer is not None:
            detail |= {f"peer {name}": peer.median(f"{work} {name}") for name in ("rate", "server us", "client us")}
        figures.append(Figure(NAME, case, memq.median(f"{work} rate"), "items/s", RATE_MIN, "higher", detail))
    return figures


def costs(memq: Side, peer: Side | None) -> list[Figure]:
    """Return the CPU of an item compared with the peer: of the servers, and with the clients."""
    if peer is None:
        return []
    figures = []
    for case, names in (("server CPU of an item", ("server",)), ("CPU with clients", ("server", "client"))):
        own_us, peer_us = memq.cpu_us(*names), peer.cpu_us(*names)
        bound = CPU_RATIO_MIN if len(names) == 1 else None
        detail: dict[str, float | str] = {"memq us": own_us, "peer us": peer_us}
        figures.append(Figure(NAME, case, peer_us / own_us, "x less", bound, "higher", detail))
    return figures


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
