"""confluent-kafka's producer and consumer, with the commands of memq's."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.children.commands import Command, answer, commands, options
from benchmarks.children.memq_client import END, LATENCY_EVERY, PACE_S, START_MS
from benchmarks.children.samples import keys, lines

PRODUCER: dict[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    "linger.ms": 5,
    "queue.buffering.max.messages": 1_000_000,
    "log_level": 0,
}
CONSUMER: dict[str, Any] = {
    "group.id": "bench",
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "log_level": 0,
}
POLL_EVERY = 1_000  # callbacks of that many records are served at a time: polling after each costs 40 % more
CONSUME_RECORDS = 10_000
WAIT_S = 0.2  # `consume` waits so long for a list that does not get full


class Outcomes:
    """The delivery callback of all records: counts what was acked, and fails at the first error."""

    def __init__(self) -> None:
        self.acked = 0

    def __call__(self, error: object, message: object) -> None:
        if error is not None:
            raise RuntimeError(f"not delivered: {error}")
        self.acked += 1


def produce(address: str, params: Command) -> None:
    """Send records and learn what became of each, by one shared callback; `how` as in memq's client, or "blind"."""
    values, topic, how = lines(params["size"], params["records"]), params["topic"], params.get("how", "values")
    settings = {**PRODUCER, **params.get("settings", {}), "bootstrap.servers": address}
    settings["compression.type"] = params.get("codec", "zstd")
    if settings["compression.type"] == "zstd":
        settings["compression.level"] = 1
    outcomes, latencies = Outcomes(), list[float]()
    if how != "blind":
        settings["on_delivery"] = outcomes
    producer = Producer(settings)
    producer.produce(topic, b"first", partition=0)
    producer.flush(30)
    if params.get("waits"):
        answer(connected=True)
        next(commands())
    began_s, cpu_s = time.monotonic(), time.process_time()
    if how == "keyed":
        send_keyed(producer, topic, values)
    elif how == "sampled":
        send_sampled(producer, topic, values, latencies)
    elif how == "paced":
        send_paced(producer, topic, values, latencies)
    else:
        send_values(producer, topic, values, params.get("partitions", 1))
    producer.flush(60)
    cpu_s, ended_s = time.process_time() - cpu_s, time.monotonic()
    heard, sent = outcomes.acked + len(latencies), len(values) + 1 + (how == "sampled")
    assert how == "blind" or heard == sent, f"{heard} of {sent} records acked"
    answer(cpu_s=cpu_s, began_s=began_s, ended_s=ended_s, latencies_s=latencies)


def send_values(producer: Producer, topic: str, values: list[bytes], partitions: int) -> None:
    send = producer.produce
    for number, value in enumerate(values):
        try:
            send(topic, value, partition=number % partitions)
        except BufferError:
            wait_and_send(producer, topic, value, partition=number % partitions)
        if not number % POLL_EVERY:
            producer.poll(0)


def send_keyed(producer: Producer, topic: str, values: list[bytes]) -> None:
    send = producer.produce
    for number, value, key in zip(itertools.count(START_MS), values, keys(len(values)), strict=False):
        try:
            send(topic, value, key, partition=0, timestamp=number)
        except BufferError:
            wait_and_send(producer, topic, value, key=key, partition=0, timestamp=number)
        if not number % POLL_EVERY:
            producer.poll(0)


def send_sampled(producer: Producer, topic: str, values: list[bytes], latencies: list[float]) -> None:
    """Every `LATENCY_EVERY`th record says when it was acked; the last one tells the consumer to stop."""
    send = producer.produce
    for number, value in enumerate([*values, END]):
        sample: dict[str, Any] = {} if number % LATENCY_EVERY else {"on_delivery": _noting(latencies, time.monotonic())}
        try:
            send(topic, value, partition=0, **sample)
        except BufferError:
            wait_and_send(producer, topic, value, partition=0, **sample)
        if sample:
            producer.poll(0)


def send_paced(producer: Producer, topic: str, values: list[bytes], latencies: list[float]) -> None:
    """One record every millisecond, each with its latency: what an ack takes when nothing queues."""
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=_noting(latencies, time.monotonic()))
        until_s = time.monotonic() + PACE_S
        while (left_s := until_s - time.monotonic()) > 0:
            producer.poll(left_s)


def wait_and_send(producer: Producer, topic: str, value: bytes, **more: Any) -> None:
    """The queue is full: serve callbacks until it is not."""
    while True:
        producer.poll(0.01)
        try:
            producer.produce(topic, value, **more)
        except BufferError:
            continue
        return


def _noting(latencies: list[float], sent_s: float) -> Callable[[object, object], None]:
    def note(error: object, message: object) -> None:
        latencies.append(time.monotonic() - sent_s)
        if error is not None:
            raise RuntimeError(f"not delivered: {error}")

    return note


def consume(address: str, params: Command) -> None:
    """Read `records` values from the beginning, again and again when there are fewer, or up to the end marker."""
    consumer = Consumer({**CONSUMER, "bootstrap.servers": address})
    places = [
        TopicPartition(params["topic"], number, OFFSET_BEGINNING) for number in range(params.get("partitions", 1))
    ]
    consumer.assign(places)
    wanted, found, ended = params["records"], 0, False
    began_s, cpu_s = time.monotonic(), time.process_time()
    while found < wanted and not ended:
        values = [message.value() for message in consumer.consume(CONSUME_RECORDS, WAIT_S) if message.error() is None]
        found += len(values)
        ended = bool(values) and values[-1] == END
        if not values and params.get("again"):
            consumer.assign(places)
    cpu_s, ended_s = time.process_time() - cpu_s, time.monotonic()
    consumer.close()
    answer(cpu_s=cpu_s, began_s=began_s, ended_s=ended_s, records=found)


def create(address: str, params: Command) -> None:
    """Make a topic of one partition, and wait until it is there."""
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    for made in admin.create_topics([NewTopic(params["topic"], 1, 1)]).values():
        made.result(30)
    answer(made=True)


def delete(address: str, params: Command) -> None:
    """Delete a topic; Kafka removes its files a moment later."""
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    for deleted in admin.delete_topics([params["topic"]]).values():
        deleted.result(30)
    answer(deleted=True)


def main() -> None:
    address = options()["address"]
    work = {"produce": produce, "consume": consume, "create": create, "delete": delete}
    answer(ready=True)
    for params in commands():
        work[params["command"]](address, params)


if __name__ == "__main__":
    main()
