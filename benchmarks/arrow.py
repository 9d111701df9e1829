"""Row 4: cost of `batch.arrow()` per record of 100 bytes, on batches that a consumer has fetched."""

from __future__ import annotations

from benchmarks.child import Child
from benchmarks.results import Figure, Options, median

NAME = "arrow"
NS_MAX = 13.0


def run(options: Options) -> list[Figure]:
    """Measure it on plain blocks; what decompression adds is in the details."""
    records = 200_000 if options.quick else 1_000_000
    ns: dict[str, float] = {}
    with (
        Child("broker", store="memory") as broker,
        Child("memq_client", address=broker.ready["address"]) as client,
    ):
        for codec in ("none", "zstd"):
            client.ask("produce", topic=f"arrow-{codec}", size=100, records=records, codec=codec)
            found = client.ask("arrow", topic=f"arrow-{codec}", records=records, rounds=4 * options.rounds)
            ns[codec] = median(found["costs_s"]) / found["records"] * 1e9
    figure = Figure(NAME, "100 B, plain", ns["none"], "ns", NS_MAX, detail={"with zstd ns": ns["zstd"]})
    options.say(figure.line())
    return [figure]
