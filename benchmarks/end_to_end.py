"""Row 5: producer, broker and consumer as three processes, 1 KB, ack=all, against confluent-kafka on its mock cluster.

The clock runs from the first `send` until the consumer has read the last record. The peer uses one partition as
well. Its mock forgets what is older than 5 MiB: of plain records its consumer, falling behind, gets only a share, which
is in the details and counts in the peer's favour, since what it does not get costs it nothing. memq's store keeps the
last 128 MiB. The details have the CPU of all three processes for each record sent, too: it says more than the rate when
other work shares the cores.
"""

from __future__ import annotations

from benchmarks.child import Child
from benchmarks.peers import Peers
from benchmarks.results import Figure, Options, median, percentile

NAME = "end_to_end"
SIZE = 1_000
BOUND = 3.0
EAGER = {"fetch.wait.max.ms": 10, "fetch.error.backoff.ms": 10}  # the mock lets a fetch wait to its end: 0.5 s
RECORDS = {"zstd": 25_000, "none": 60_000}  # compressed, all of them are within what the mock keeps


def run(options: Options) -> list[Figure]:
    """Measure both in turn, with both codecs."""
    figures = []
    with Peers() as peers:
        for codec in ("zstd", "none"):
            figures.append(measure(peers, codec, options))
            options.say(figures[-1].line())
    return figures


def measure(peers: Peers, codec: str, options: Options) -> Figure:
    """Return the figure of one codec."""
    records = RECORDS[codec]
    rates: dict[str, list[float]] = {"memq": [], "kafka": []}
    latencies: dict[str, list[float]] = {"memq": [], "kafka": []}
    costs: dict[str, list[float]] = {"memq": [], "kafka": []}
    received: list[float] = []
    for number in range(4 * options.rounds + 1):
        sides = {
            "memq": (peers.memq, peers.broker, peers.memq_reader),
            "kafka": (peers.kafka, peers.mock, peers.kafka_reader),
        }
        for name, (writer, broker, reader) in sides.items():
            broker_s = broker.cpu_s()
            cpu_s, rate, seconds, share = flow(writer, reader, f"flow-{codec}-{number}", records, codec)
            if number:  # the first round warms up
                rates[name].append(rate)
                costs[name].append((cpu_s + broker.cpu_s() - broker_s) / records)
                latencies[name] += seconds
                received += [share] if name == "kafka" else []
    ours, theirs = median(rates["memq"]), median(rates["kafka"])
    detail: dict[str, float | str] = {"memq k/s": ours / 1e3, "memq MB/s": ours * SIZE / 1e6, "kafka k/s": theirs / 1e3}
    for name, found in latencies.items():
        detail[f"{name} ack p50 ms"] = percentile(found, 0.5) * 1e3
        detail[f"{name} ack p99 ms"] = percentile(found, 0.99) * 1e3
        detail[f"{name} CPU ns"] = median(costs[name]) * 1e9
    detail["kafka received"] = median(received)
    return Figure(NAME, f"1 KB, ack=all, {codec}", ours / theirs, "x more", BOUND, "higher", detail)


def flow(writer: Child, reader: Child, topic: str, records: int, codec: str) -> tuple[float, float, list[float], float]:
    """Return the clients' CPU seconds, records per second, ack latencies in seconds, and the share received."""
    writer.ask("produce", topic=topic, size=SIZE, records=1, partitions=1)  # the topic is there
    eager: dict[str, object] = {"wait_s": 0.01, "settings": EAGER}  # settings of the peer's consumer
    reader.ask("consume", topic=topic, records=1 << 60, partitions=1, connected=True, **eager)
    wrote = writer.ask("produce", topic=topic, size=SIZE, records=records, partitions=1, how="sampled", codec=codec)
    read = reader.answer()
    rate = records / (read["ended_s"] - wrote["began_s"])
    return wrote["cpu_s"] + read["cpu_s"], rate, wrote["latencies_s"], read["records"] / records
