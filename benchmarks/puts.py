"""Total cost of a broker on S3 and Kafka, compared with a bare loop of obstore PUTs to the same server.

The sender of the ingest row sends pre-built blocks, so that broker and S3 server limit, not a producer. The bare loop
writes as many bytes in objects of the size that the broker made, as many in flight. They take turns.
"""

from __future__ import annotations

from benchmarks.child import Child
from benchmarks.results import Figure, Options, median
from benchmarks.servers import Broker, RealServers, load
from memq.limits import KIB, MIB
from memq.topic import TopicSettings

NAME = "puts"
BLOCK_BYTES = 512 * KIB  # what a producer seals
TOTAL_BYTES = 512 * MIB
RATE_BOUND, CPU_BOUND = 0.8, 0.6
IN_FLIGHT = TopicSettings().uploads_in_flight_max


def run(options: Options) -> list[Figure]:
    """Measure both in turn."""
    total = TOTAL_BYTES // (4 if options.quick else 1)
    found: dict[str, list[float]] = {}
    with RealServers("s3") as servers:
        broker, sender = servers.brokers["s3"], servers.child("sender")
        bare = servers.child("puts", **servers.s3_address)
        for number in range(options.rounds + 1):
            values = broker_costs(servers, broker, sender, total)
            values |= bare_costs(servers, bare, total, int(values["object bytes"]))
            for name, value in values.items():
                if number:  # the first round warms up
                    found.setdefault(name, []).append(value)
        detail: dict[str, float | str] = {name: median(values) for name, values in found.items()}
        detail |= {"S3 server": servers.s3_kind, "load": load()}
    rate = median(found["broker MB/s"]) / median(found["bare MB/s"])
    figures = [
        Figure(NAME, "rate over a bare loop of puts", rate, "x", RATE_BOUND, "higher", detail),
        Figure(NAME, "broker in all", median(found["broker CPU-s/GB"]), "CPU-s/GB", CPU_BOUND),
    ]
    for figure in figures:
        options.say(figure.line())
    return figures


def broker_costs(servers: RealServers, broker: Broker, sender: Child, total: int) -> dict[str, float]:
    """Send pre-built blocks until all are acked."""
    params = sender.ask(
        "prepare",
        address=broker.address,
        topic="puts",
        block_bytes=BLOCK_BYTES,
        connections=1,
        total_bytes=total,
        acked=True,
    )
    processes = {"broker": broker, "queue": servers.kafka, "store": servers.s3}
    puts, stored = counts(broker)  # a scrape costs CPU: before the clock starts
    before = {name: process.cpu_s() for name, process in processes.items()}
    seconds = sender.ask("run")["seconds"]
    gigabytes = params["total_bytes"] / 1e9
    found = {f"{name} CPU-s/GB": (each.cpu_s() - before[name]) / gigabytes for name, each in processes.items()}
    puts_after, stored_after = counts(broker)
    return {
        **found,
        "broker MB/s": gigabytes * 1e3 / seconds,
        "PUTs/GiB": (puts_after - puts) / params["total_bytes"] * (1 << 30),
        "object bytes": (stored_after - stored) / (puts_after - puts),
    }


def bare_costs(servers: RealServers, bare: Child, total: int, object_bytes: int) -> dict[str, float]:
    """Put as many bytes without a broker."""
    store_s = servers.s3.cpu_s()
    done = bare.ask("puts", total_bytes=total, object_bytes=object_bytes, in_flight=IN_FLIGHT)
    gigabytes = done["total_bytes"] / 1e9
    return {
        "bare MB/s": gigabytes * 1e3 / done["seconds"],
        "bare CPU-s/GB": done["cpu_s"] / gigabytes,
        "bare store CPU-s/GB": (servers.s3.cpu_s() - store_s) / gigabytes,
    }


def counts(broker: Broker) -> tuple[float, float]:
    """Return how many puts were sent, every try counted, and how many bytes were stored."""
    return broker.counter("memq_store_put_requests_total"), broker.counter("memq_broker_stored_bytes_total")
