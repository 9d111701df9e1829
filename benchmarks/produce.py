"""Row 2: the client's CPU per record from `send` to ack=all, against confluent-kafka on librdkafka's mock cluster.

The values are the same, so is the codec (zstd 1, then none); broker and mock are other processes, whose CPU does not
count. Both sides learn the result of every record: memq by the delivery that `send` returns, the peer by
its delivery callback; the figures without that callback, and of both with key and timestamp, are in the details.
"""

from __future__ import annotations

from benchmarks.child import Child
from benchmarks.peers import Peers
from benchmarks.results import Figure, Options, median

NAME = "produce"
CASES = [(100, "zstd", 4.0), (1_000, "zstd", 2.0), (100, "none", 4.0), (1_000, "none", 2.0)]


def run(options: Options) -> list[Figure]:
    """Measure both sizes with both codecs."""
    figures = []
    with Peers() as peers:
        for size, codec, bound in CASES:
            records = (20_000_000 if options.quick else 60_000_000) // (size + 100)
            costs: dict[str, list[float]] = {}
            for number in range(options.rounds + 1):
                params = {"topic": f"produce-{size}-{codec}-{number}", "size": size, "records": records, "codec": codec}
                found = {
                    "memq": cost(peers.memq, params),
                    "kafka": cost(peers.kafka, params),
                    "send_many": cost(peers.memq, {**params, "how": "many"}),
                    "kafka blind": cost(peers.kafka, {**params, "how": "blind"}),
                    "keyed": cost(peers.memq, {**params, "how": "keyed"}),
                    "kafka keyed": cost(peers.kafka, {**params, "how": "keyed"}),
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


def cost(client: Child, params: dict[str, object]) -> float:
    """Return the client's CPU in ns per record."""
    found = client.ask("produce", partitions=1, **params)
    return float(found["cpu_s"]) / int(str(params["records"])) * 1e9
