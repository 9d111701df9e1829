"""memq's producer and consumer in a process of their own; each command returns its CPU and times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import memq
from benchmarks.children.commands import Command, answer, commands, options
from benchmarks.children.samples import keys, lines

LATENCY_EVERY = 500
MANY_RECORDS = 5_000
PACE_S = 0.001
START_MS = 1_700_000_000_000
END = b"the end"
Deliveries = dict[int, memq.Delivery]


def produce(address: str, params: Command) -> None:
    """Send records and wait for all acks. `how` is one of `WAYS`; with `waits` it goes on at the next command."""
    values, topic = lines(params["size"], params["records"]), params["topic"]
    latencies: list[float] = []
    with memq.Producer(address, acks="all", codec=params.get("codec", "zstd")) as producer:
        producer.send(topic, b"first").result(30)  # connected, and the topic is there
        if params.get("waits"):
            answer(connected=True)
            next(commands())
        began_s, cpu_s = time.monotonic(), time.process_time()
        WAYS[params.get("how", "values")](producer, topic, values, latencies)
        producer.flush(60)
        cpu_s, ended_s = time.process_time() - cpu_s, time.monotonic()
        acked = producer.stats().records_acked
    assert acked == len(values) + 1 + (params.get("how") == "sampled"), f"{acked} records acked"
    answer(cpu_s=cpu_s, began_s=began_s, ended_s=ended_s, latencies_s=latencies)


def send_values(producer: memq.Producer, topic: str, values: Sequence[bytes], latencies: list[float]) -> None:
    send = producer.send
    for value in values:
        send(topic, value)


def send_keyed(producer: memq.Producer, topic: str, values: Sequence[bytes], latencies: list[float]) -> None:
    send = producer.send
    for number, value, key in zip(itertools.count(START_MS), values, keys(len(values)), strict=False):
        send(topic, value, key=key, timestamp_ms=number)


def send_many(producer: memq.Producer, topic: str, values: Sequence[bytes], latencies: list[float]) -> None:
    for at in range(0, len(values), MANY_RECORDS):
        producer.send_many(topic, values[at : at + MANY_RECORDS])


def send_sampled(producer: memq.Producer, topic: str, values: Sequence[bytes], latencies: list[float]) -> None:
    """Every `LATENCY_EVERY`th record says when it was acked; the last one tells the consumer to stop."""
    send = producer.send
    for number, value in enumerate(values):
        delivery = send(topic, value)
        if not number % LATENCY_EVERY:
            delivery.add_done_callback(_noting(latencies, time.monotonic()))
    send(topic, END)


def send_paced(producer: memq.Producer, topic: str, values: Sequence[bytes], latencies: list[float]) -> None:
    """One record every millisecond, each with its latency: what an ack takes when nothing queues."""
    for value in values:
        producer.send(topic, value).add_done_callback(_noting(latencies, time.monotonic()))
        time.sleep(PACE_S)


def _noting(latencies: list[float], sent_s: float) -> Callable[[memq.Delivery], None]:
    return lambda delivery: latencies.append(time.monotonic() - sent_s)


WAYS: dict[str, Callable[[memq.Producer, str, Sequence[bytes], list[float]], None]] = {
    "values": send_values,
    "keyed": send_keyed,
    "many": send_many,
    "sampled": send_sampled,
    "paced": send_paced,
}


def consume(address: str, params: Command) -> None:
    """Read `records` records of a topic from its beginning, or up to the end marker, as values or as records."""
    wanted, found, tail = params["records"], 0, b""
    as_records = params.get("how") == "records"
    with memq.Consumer(address, params["topic"], read=params.get("read", "auto")) as consumer:
        began_s, cpu_s = time.monotonic(), time.process_time()
        for batch in consumer:
            if as_records:
                for record in batch:
                    tail = record.value or b""
                    found += 1
            else:
                values = batch.values()
                found, tail = found + len(values), values[-1] or b""
            if found >= wanted or tail == END:
                break
        cpu_s, ended_s = time.process_time() - cpu_s, time.monotonic()
    answer(cpu_s=cpu_s, began_s=began_s, ended_s=ended_s, records=found)


def arrow(address: str, params: Command) -> None:
    """Fetch batches, and then turn them into Arrow tables, which alone is measured; several times over."""
    batches, records = [], 0
    with memq.Consumer(address, params["topic"]) as consumer:
        for batch in consumer:
            batches.append(batch)
            records += len(batch)
            if records >= params["records"]:
                break
    batches[0].arrow()  # imports pyarrow
    costs = []
    for _ in range(params["rounds"]):
        cpu_s = time.process_time()
        rows = sum(batch.arrow().num_rows for batch in batches)
        costs.append(time.process_time() - cpu_s)
        assert rows == records
    answer(costs_s=costs, records=records)


def main() -> None:
    address = options()["address"]
    work = {"produce": produce, "consume": consume, "arrow": arrow}
    answer(ready=True)
    for params in commands():
        work[params["command"]](address, params)


if __name__ == "__main__":
    main()
