"""The cluster's rows: memq with pointers in Kafka and objects in files or S3, compared with the same Kafka, ack=all.

All sides send the same values with the same codec from one producer into one partition, and read them from the
beginning. They take turns, piece by piece; the first round warms up, of the others the medians count. A GB is 10^9
bytes of values. Kafka runs as its own start script runs it, and keeps its log as it does by default, without fsync;
memq's files are synced. The bytes that memq's broker stored in files are stored once more by the floor, which does
only what any broker must.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.child import Child
from benchmarks.floor import Floor
from benchmarks.results import Figure, Options, median, percentile
from benchmarks.servers import Broker, Process, RealServers, load
from memq.limits import MIB

NAME = "cluster"
CASES = [(1_000, "none"), (1_000, "zstd"), (100, "none"), (100, "zstd")]
STORES = ("files", "s3")
PIECE_BYTES = {1_000: 200_000_000, 100: 100_000_000}
RATE_BOUND, CPU_BOUND, MEMORY_BOUND = 3.0, 8.0, 4.0
PACED_RECORDS = 1_000


@dataclass(slots=True)
class Side:
    """One side: its clients, the process that takes blocks, and what else worked for it."""

    name: str
    writer: Child
    reader: Child
    broker: Process
    servers: dict[str, Process] = field(default_factory=dict)
    found: dict[str, list[float]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    memory_bytes: int = 0

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far of broker and servers."""
        return {"broker": self.broker.cpu_s(), **{name: server.cpu_s() for name, server in self.servers.items()}}

    def note(self, name: str, value: float) -> None:
        """Keep a measured value."""
        self.found.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """Return the median of what was kept under that name."""
        return median(self.found[name])

    def begin(self) -> None:
        """Forget what was measured before: another case begins."""
        self.found.clear()
        self.latencies.clear()


def run(options: Options) -> list[Figure]:
    """Measure all sizes and codecs, then latency at a low rate, then what memory it took."""
    figures = []
    with RealServers(*STORES) as servers:
        sides, floor = make_sides(servers), Floor(servers)
        for size, codec in CASES:
            measure(servers, sides, floor, size, codec, options)
            figures += case_figures(sides, f"{size} B, {codec}")
            for figure in figures[-6:]:
                options.say(figure.line())
        figures += [*latency_figures(sides, options), memory_figure(sides, servers)]
    for figure in figures[-3:]:
        options.say(figure.line())
    return figures


def make_sides(servers: RealServers) -> list[Side]:
    """Start the clients of the peer and of memq on each store."""
    others: dict[str, dict[str, Process]] = {"files": {"queue": servers.kafka}}
    others["s3"] = {"queue": servers.kafka, "store": servers.s3}
    sides = [make_side(servers, "kafka", "kafka_client", servers.kafka, {})]
    for store, broker in servers.brokers.items():
        sides.append(make_side(servers, store, "memq_client", broker, others[store]))
    return sides


def make_side(servers: RealServers, name: str, kind: str, broker: Process, others: dict[str, Process]) -> Side:
    """Start the clients of one side."""
    return Side(name, servers.client(kind, broker.address), servers.client(kind, broker.address), broker, others)


def measure(servers: RealServers, sides: list[Side], floor: Floor, size: int, codec: str, options: Options) -> None:
    """Let all sides write a piece and read it, in turn; several times over.

    Then Kafka and the files forget it: on a virtual machine the first touch of a page that the host has to give costs
    up to 3.7 CPU-s per GB, so all write into pages that were used before.
    """
    records = PIECE_BYTES[size] // size // (4 if options.quick else 1)
    for number in range(options.rounds + 1):
        for side in sides:
            topic = f"flow-{size}-{codec}-{number}"
            if side.name == "kafka":
                side.writer.ask("create", topic=topic)
            write(side, topic, size, codec, records)
            if side.name == "files":
                stored = side.found["stored bytes"][-1]
                side.note("produce floor", floor.write(int(stored)) * stored / (size * records / 1e9))
        for side in sides:
            read(side, f"flow-{size}-{codec}-{number}", size, records)
        sides[0].writer.ask("delete", topic=f"flow-{size}-{codec}-{number}")
        servers.drop_files(f"flow-{size}-{codec}-{number}")
        if not number:
            for side in sides:
                side.begin()


def write(side: Side, topic: str, size: int, codec: str, records: int) -> None:
    """Send a piece, and note rate, CPU, latency and puts."""
    side.writer.ask("produce", topic=topic, size=size, records=records, codec=codec, how="sampled", waits=True)
    gigabytes, puts, stored = size * records / 1e9, puts_of(side), stored_of(side)
    before = side.cpu_s()  # last, because each scrape costs the broker CPU
    wrote = side.writer.ask("go")
    note_cpu(side, "produce", before, wrote["cpu_s"], gigabytes)
    side.note("produce rate", records / (wrote["ended_s"] - wrote["began_s"]))
    side.note("puts per GiB", (puts_of(side) - puts) / gigabytes * 1.073741824)
    side.note("stored bytes", stored_of(side) - stored)
    side.latencies += wrote["latencies_s"]
    side.memory_bytes = max(side.memory_bytes, side.broker.memory_bytes())


def read(side: Side, topic: str, size: int, records: int) -> None:
    """Read a piece, and note rate and CPU."""
    before = side.cpu_s()
    found = side.reader.ask("consume", topic=topic, records=records)
    note_cpu(side, "consume", before, found["cpu_s"], size * found["records"] / 1e9)
    side.note("consume rate", found["records"] / (found["ended_s"] - found["began_s"]))
    side.memory_bytes = max(side.memory_bytes, side.broker.memory_bytes())


def note_cpu(side: Side, work: str, before: dict[str, float], client_s: float, gigabytes: float) -> None:
    """Note the CPU seconds per GB of each process."""
    side.note(f"{work} client", client_s / gigabytes)
    for name, after_s in side.cpu_s().items():
        side.note(f"{work} {name}", (after_s - before[name]) / gigabytes)


def puts_of(side: Side) -> float:
    """Return how many objects were put so far, every try counted; the peer puts none."""
    if not isinstance(side.broker, Broker):
        return 0.0
    return side.broker.counter(
        "memq_store_put_requests_total" if side.name == "s3" else "memq_broker_stored_objects_total"
    )


def stored_of(side: Side) -> float:
    """Return how many bytes were stored so far."""
    return side.broker.counter("memq_broker_stored_bytes_total") if isinstance(side.broker, Broker) else 0.0


# ---- figures -----------------------------------------------------------------------------------


def case_figures(sides: list[Side], case: str) -> list[Figure]:
    """Return the figures of one size and codec: rates and broker CPU with files against the peer, and those on S3."""
    kafka, files, s3 = sides
    figures = []
    for work in ("produce", "consume"):
        detail = {name: value for side in sides for name, value in details(side, work).items()}
        rate = files.median(f"{work} rate") / kafka.median(f"{work} rate")
        figures.append(Figure(NAME, f"{work} {case}", rate, "x more", RATE_BOUND, "higher", detail))
        cpu = kafka.median(f"{work} broker") / max(files.median(f"{work} broker"), 1e-9)
        figures.append(Figure(NAME, f"{work} {case}, broker CPU", cpu, "x less", CPU_BOUND, "higher"))
    rate = s3.median("produce rate") / kafka.median("produce rate")
    figures.append(Figure(NAME, f"produce {case}, on S3", rate, "x more"))
    floor, broker = files.median("produce floor"), files.median("produce broker")
    detail = {"floor CPU": floor, "Kafka's over the floor": kafka.median("produce broker") / max(floor, 1e-9)}
    return [*figures, Figure(NAME, f"produce {case}, over the floor", broker / max(floor, 1e-9), "x", detail=detail)]


def details(side: Side, work: str) -> dict[str, float | str]:
    """Return what one side's work cost, CPU in seconds per GB of values."""
    found: dict[str, float | str] = {f"{side.name} k/s": side.median(f"{work} rate") / 1e3}
    for name in ("client", "broker", *side.servers):
        found[f"{side.name} {name} CPU"] = side.median(f"{work} {name}")
    if work == "produce":
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            found[f"{side.name} ack {name} ms"] = percentile(side.latencies, share) * 1e3
        if isinstance(side.broker, Broker):
            found[f"{side.name} PUTs/GiB"] = side.median("puts per GiB")
    return found


def latency_figures(sides: list[Side], options: Options) -> list[Figure]:
    """Send 1,000 records of 1 KB a second, in turn: what an ack takes when nothing queues."""
    for side in sides:
        side.begin()
    for number in range(options.rounds + 1):
        for side in sides:
            topic = f"paced-{number}"
            if side.name == "kafka":
                side.writer.ask("create", topic=topic)
            wrote = side.writer.ask("produce", topic=topic, size=1_000, records=PACED_RECORDS, how="paced")
            side.latencies += wrote["latencies_s"] if number else []
    figures = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        ms = {f"{side.name} ms": percentile(side.latencies, share) * 1e3 for side in sides}
        figures.append(Figure(NAME, f"ack at 1,000/s of 1 KB, {name}", ms["files ms"], "ms", detail={**ms}))
    return figures


def memory_figure(sides: list[Side], servers: RealServers) -> Figure:
    """Compare the greatest memory of the brokers."""
    kafka, files, s3 = sides
    detail: dict[str, float | str] = {f"{side.name} MiB": side.memory_bytes / MIB for side in (kafka, files, s3)}
    detail |= {"S3 server": servers.s3_kind, "S3 server MiB": servers.s3.memory_bytes() / MIB, "load": load()}
    ratio = kafka.memory_bytes / files.memory_bytes
    return Figure(NAME, "broker memory", ratio, "x less", MEMORY_BOUND, "higher", detail)
