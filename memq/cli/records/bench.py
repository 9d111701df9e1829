"""`memq bench`: measures sending and reading records of one size, on a topic of its own."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

import click

from memq import kernel
from memq.cli.options import json_option, setting_options, settings_of
from memq.cli.output import count_text, print_json, print_message, print_pairs, size_text
from memq.client.admin import Admin
from memq.client.consumer.consumer import Consumer
from memq.client.producer.producer import Producer
from memq.errors import MemqError
from memq.limits import MIB, PARTITIONS_MAX
from memq.runtime.runtime import Runtime
from memq.settings import ClientSettings, Value

VALUES_BYTES = 4 * MIB  # a block of a producer has 512 KiB


@dataclass(frozen=True, slots=True)
class BenchRates:
    """Measurements: wall-clock seconds on this machine, records per second, bytes of values.

    `kernel` is the one of this client.
    """

    topic: str
    records: int
    record_bytes: int
    acks: str
    produce_seconds: float
    produce_records_per_second: int
    consume_seconds: float
    consume_records_per_second: int
    consumed: int
    kernel: str


@click.command()
@setting_options("brokers", "acks", "codec")
@click.option(
    "-n", "--records", default=200_000, type=click.IntRange(1, 100_000_000), help="Number of records (default 200000)."
)
@click.option("-s", "--size", default=1_000, type=click.IntRange(1, 1 << 20), help="Bytes of a value (default 1000).")
@click.option(
    "--partitions", default=1, type=click.IntRange(1, PARTITIONS_MAX), help="Partitions of the topic (default 1)."
)
@click.option("--keep", is_flag=True, help="Keep the topic.")
@json_option
def bench(
    records: int,
    size: int,
    partitions: int,
    keep: bool,
    as_json: bool,
    config: str | None,
    profile: str | None,
    **flags: Value | None,
) -> None:
    """Measure produce (until the last ack) and consume, on a new topic that is deleted afterwards.

    Values are random hex digits, which compress to half: real data do better or worse. Client and broker share the
    cores when they share the machine.
    """
    settings = settings_of(config, profile, **flags).client()
    runtime = Runtime()
    topic = f"bench-{runtime.random.getrandbits(32):08x}"
    values = _values(runtime, size)
    with Admin(settings.brokers) as admin:
        admin.create_topic(topic, partitions=partitions)
        try:
            print_message(f"memq: topic {topic}, {count_text(records, 'record')} of {size_text(size)}")
            print_message(f"memq: kernel of this client: {kernel.description()}")
            produced = _produce(runtime, settings, topic, values, records)
            consumed, seconds = _consume(runtime, settings, topic)
        except KeyboardInterrupt:
            print_message(f"interrupted: nothing was measured, topic {topic} is {'kept' if keep else 'deleted'}")
            raise
        finally:
            if not keep:
                _delete(admin, topic)
    rates = BenchRates(
        *(topic, records, size, settings.acks, round(produced, 3), round(records / produced)),
        *(round(seconds, 3), round(consumed / seconds), consumed, kernel.description()),
    )
    if as_json:
        print_json(asdict(rates))
    else:
        print_pairs(
            (
                ("produce", _rate(rates.produce_records_per_second, size)),
                ("consume", _rate(rates.consume_records_per_second, size)),
            )
        )


def _values(runtime: Runtime, size: int) -> list[bytes]:
    """Return different values, more than fit into a block: values that repeat within it compress too well."""
    count = -(-VALUES_BYTES // size)
    digits = random.Random(runtime.random.getrandbits(64)).randbytes(count * size // 2 + 1).hex().encode()
    return [digits[at * size : (at + 1) * size] for at in range(count)]


def _produce(runtime: Runtime, settings: ClientSettings, topic: str, values: list[bytes], records: int) -> float:
    """Send and wait for every ack; return the seconds."""
    started = runtime.clock.monotonic()
    with Producer(settings.brokers, acks=settings.acks, codec=settings.codec) as producer:
        for at in range(0, records, len(values)):
            producer.send_many(topic, values[: records - at])
        producer.flush()
    return max(runtime.clock.monotonic() - started, 1e-9)


def _consume(runtime: Runtime, settings: ClientSettings, topic: str) -> tuple[int, float]:
    """Read up to the end; return records and seconds."""
    started = runtime.clock.monotonic()
    with Consumer(settings.brokers, [topic], start="beginning", end="end") as consumer:
        found = sum(len(batch.values()) for batch in consumer)
    return found, max(runtime.clock.monotonic() - started, 1e-9)


def _delete(admin: Admin, topic: str) -> None:
    try:
        admin.delete_topic(topic)
    except MemqError as error:
        print_message(f"memq: topic {topic} was not deleted: {error}")


def _rate(records_per_second: int, size: int) -> str:
    return f"{records_per_second:,} records/s, {records_per_second * size / 1e6:,.1f} MB/s"
