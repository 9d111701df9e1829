"""Row 5: from `send` to the record in the hands of a tailing consumer, against a real Kafka; 100 B, ack=all.

Producer, broker and consumer are three processes: `memq dev` on a folder, and Kafka with confluent-kafka. Both are
durable: a record is on disk before its ack. memq syncs each object and each pointer. Kafka syncs its log after each
message (`flush.messages=1`); its default, without a sync, is measured in the same rounds, as "unsynced".
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child import Child, cpu_s
from benchmarks.dev import dev_broker
from benchmarks.results import Figure, Options, median, percentile
from benchmarks.servers import KAFKA_JAVA, load
from memq_localstack.servers import start_kafka

NAME = "end_to_end"
SIZE = 100
RATES = (1_000, 20_000, 100_000)
BOUNDS = {"p50": (0.5, 1.3), "p99": (0.99, 1.0)}
SECONDS = 8.0
WARM_S = 2.0


@dataclass(slots=True)
class Side:
    """One side: its clients, its broker, its settings of a topic, and what was measured at one rate."""

    name: str
    writer: Child
    reader: Child
    broker_pid: int
    config: dict[str, str] | None = None
    found: dict[str, list[float]] = field(default_factory=dict)

    def note(self, values: dict[str, float]) -> None:
        """Keep measured values."""
        for name, value in values.items():
            self.found.setdefault(name, []).append(value)


def run(options: Options) -> list[Figure]:
    """Measure all rates; the sides take turns, and the first round does not count."""
    figures = []
    with ExitStack() as stack:
        sides = make_sides(stack)
        for rate in RATES:
            for side in sides:
                side.found.clear()
            for number in range(options.rounds + 1):
                for side in sides:
                    values = one_pass(side, f"tail-{rate}-{number}-{side.name}", rate, options)
                    if number:
                        side.note(values)
            figures += figures_of(sides, rate)
            for figure in figures[-len(BOUNDS) :]:
                options.say(figure.line())
    return figures


def make_sides(stack: ExitStack) -> list[Side]:
    """Start both brokers and the clients."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memq-bench-", ignore_cleanup_errors=True)))
    dev = stack.enter_context(dev_broker(folder / "data"))
    kafka = stack.enter_context(start_kafka(folder / "kafka", java_options=KAFKA_JAVA))

    def child(side: str, address: str) -> Child:
        return stack.enter_context(Child("tail", side=side, address=address))

    ours = child("memq", dev.address), child("memq", dev.address)
    theirs = child("kafka", kafka.address), child("kafka", kafka.address)
    return [
        Side("memq", *ours, dev.pid),
        Side("kafka", *theirs, kafka.pid, {"flush.messages": "1"}),
        Side("unsynced", *theirs, kafka.pid, {}),
    ]


def one_pass(side: Side, topic: str, rate: int, options: Options) -> dict[str, float]:
    """Return percentiles in ms, and the CPU in µs per record of client and broker processes."""
    params: dict[str, Any] = {"topic": topic, "rate": rate, "size": SIZE, "warm_s": WARM_S}
    params["seconds"] = SECONDS / 2 if options.quick else SECONDS
    if side.config is not None:
        side.writer.ask("create", topic=topic, config=side.config)
    side.writer.ask("send", **params)
    side.reader.ask("tail", **params)
    broker_s = cpu_s(side.broker_pid)
    sent = side.writer.ask("go")
    got = side.reader.answer()
    broker_s = cpu_s(side.broker_pid) - broker_s
    if got["records"] + 1 != sent["records"]:
        raise RuntimeError(f"{side.name}: {got['records'] + 1} of {sent['records']} records came")
    ms = [value / 1e6 for value in got["latencies_ns"]]
    cpus = {"writer": sent["cpu_s"], "reader": got["cpu_s"], "broker": broker_s}
    found = {f"{name} µs": seconds / got["records"] * 1e6 for name, seconds in cpus.items()}
    return found | {name: percentile(ms, share) for name, (share, _) in BOUNDS.items()}


def figures_of(sides: list[Side], rate: int) -> list[Figure]:
    """Return the ratios of one rate: memq's percentiles over those of the synced Kafka."""
    figures = []
    for name, (_, bound) in BOUNDS.items():
        ms = {side.name: median(side.found[name]) for side in sides}
        detail: dict[str, float | str] = {f"{side} ms": value for side, value in ms.items()}
        detail |= {"over unsynced": ms["memq"] / ms["unsynced"], "load": load()}
        if name == "p50":
            for side in sides[:2]:
                detail |= {
                    f"{side.name} {part}": median(values) for part, values in side.found.items() if part[-1] == "s"
                }
        figures.append(Figure(NAME, f"{rate:,}/s, {name}", ms["memq"] / ms["kafka"], "x", bound, detail=detail))
    return figures
