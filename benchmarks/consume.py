"""Row 3: the client's CPU per record as values, compared with confluent-kafka on librdkafka's mock cluster.

The mock keeps about 5 MiB of a partition, so the peer reads four partitions again and again until it has as many
records; memq reads them once. The store is the filesystem, as with `memq dev`: memq reads objects directly.
"""

from __future__ import annotations

from benchmarks.child import Child
from benchmarks.peers import Peers
from benchmarks.results import Figure, Options, median

NAME = "consume"
CASES = [(100, "zstd", 4.0), (1_000, "zstd", 2.0), (100, "none", 4.0), (1_000, "none", 2.0)]
MOCK_PARTITIONS = 4
MOCK_PARTITION_BYTES = 4_000_000


def run(options: Options) -> list[Figure]:
    """Measure both sizes with both codecs."""
    figures = []
    with Peers(store="files") as peers:
        for size, codec, bound in CASES:
            records = (30_000_000 if options.quick else 120_000_000) // (size + 100)
            topic = f"consume-{size}-{codec}"
            kept = min(records, MOCK_PARTITIONS * MOCK_PARTITION_BYTES // (size + 50))
            peers.memq.ask("produce", topic=topic, size=size, records=records, codec=codec)
            peers.kafka.ask("produce", topic=topic, size=size, records=kept, codec=codec, partitions=MOCK_PARTITIONS)
            costs: dict[str, list[float]] = {}
            for number in range(options.rounds + 1):
                found = {
                    "memq": cost(peers.memq_reader, topic, records, read="direct"),
                    "kafka": cost(peers.kafka_reader, topic, records, partitions=MOCK_PARTITIONS, again=True),
                    "by READ": cost(peers.memq_reader, topic, records, read="broker"),
                    "as records": cost(peers.memq_reader, topic, records, read="direct", how="records"),
                }
                for name, value in found.items():
                    if number:  # the first round warms up
                        costs.setdefault(name, []).append(value)
            ns = {f"{name} ns": median(values) for name, values in costs.items()}
            figures.append(
                Figure(NAME, f"{size} B, {codec}", ns["kafka ns"] / ns["memq ns"], "x less", bound, "higher", {**ns})
            )
            options.say(figures[-1].line())
    return figures


def cost(client: Child, topic: str, records: int, **more: object) -> float:
    """Return the client's CPU in ns per record."""
    found = client.ask("consume", topic=topic, records=records, **more)
    return float(found["cpu_s"]) / int(found["records"]) * 1e9
