"""Sends stamped records at a steady rate, or tails a topic and reads the stamps; with memq or confluent-kafka.

A record begins with the monotonic clock at its `send`, which all processes of the machine share. The reader compares it
with the clock when it has the record.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import memq
from benchmarks.children.commands import Command, answer, commands, options

STAMP = struct.Struct("<Q")  # ns; 0 for the first record, LAST for the last one
LAST = (1 << 64) - 1
TICK_S = 0.001
SAMPLES_MAX = 50_000
READY_S_MAX = 30.0
KAFKA_PRODUCER = {"acks": "all", "enable.idempotence": True, "queue.buffering.max.messages": 1_000_000, "log_level": 0}
KAFKA_CONSUMER = {"group.id": "tail", "enable.auto.commit": False, "auto.offset.reset": "earliest", "log_level": 0}


def paced(send: Callable[[bytes], object], serve: Callable[[], object], params: Command) -> None:
    """Send `rate` records a second for `seconds`, some in each tick; call `serve` after each tick."""
    rest, rate = b"v" * (params["size"] - STAMP.size), params["rate"]
    began_s, sent = time.monotonic(), 0
    while (passed_s := time.monotonic() - began_s) < params["seconds"]:
        due = int(passed_s * rate) + 1
        for _ in range(sent, due):
            send(STAMP.pack(time.monotonic_ns()) + rest)
        sent = max(sent, due)
        serve()
        time.sleep(max(0.0, TICK_S - (time.monotonic() - began_s) % TICK_S))
    send(STAMP.pack(LAST) + rest)


class Latencies:
    """Latencies in ns of about SAMPLES_MAX records, and how many came in all."""

    def __init__(self, params: Command) -> None:
        self.step = max(1, int(params["rate"] * params["seconds"]) // SAMPLES_MAX)
        self.after_s = time.monotonic() + params["warm_s"]
        self.found: list[int] = []
        self.records = 0
        self.ended = False

    def take(self, values: list[bytes]) -> None:
        """Take values that came at once."""
        now_ns = time.monotonic_ns()
        self.ended = STAMP.unpack_from(values[-1])[0] == LAST
        before, self.records = self.records, self.records + len(values)
        if now_ns < self.after_s * 1e9:
            return
        stamps = [STAMP.unpack_from(value)[0] for value in values[-before % self.step :: self.step]]
        self.found += [now_ns - stamp for stamp in stamps if 0 < stamp < LAST]


def send_memq(address: str, params: Command) -> None:
    """See `paced`."""
    topic = params["topic"]
    with memq.Producer(address, acks="all", codec="none", **params.get("settings", {})) as producer:
        producer.send(topic, STAMP.pack(0)).result(READY_S_MAX)
        answer(ready=True)
        next(commands())
        cpu_s = time.process_time()
        paced(lambda value: producer.send(topic, value), lambda: None, params)
        producer.flush(READY_S_MAX)
        answer(cpu_s=time.process_time() - cpu_s, records=producer.stats().records_acked)


def tail_memq(address: str, params: Command) -> None:
    """Read a topic to its last record."""
    with memq.Consumer(address, params["topic"], read=params.get("read", "auto")) as consumer:
        consumer.poll(READY_S_MAX)
        answer(ready=True)
        cpu_s, latencies = time.process_time(), Latencies(params)
        for batch in consumer:
            latencies.take([value or b"" for value in batch.values()])
            if latencies.ended:
                break
        cpu_s = time.process_time() - cpu_s
    answer(cpu_s=cpu_s, records=latencies.records, latencies_ns=latencies.found)


def send_kafka(address: str, params: Command) -> None:
    """See `paced`."""
    from confluent_kafka import Producer

    topic, failed, acked = params["topic"], list[object](), [0]

    def delivered(error: object, message: object) -> None:
        acked[0] += 1
        if error is not None:
            failed.append(error)

    settings = {**KAFKA_PRODUCER, **params.get("settings", {}), "bootstrap.servers": address}
    producer = Producer({**settings, "on_delivery": delivered})
    producer.produce(topic, STAMP.pack(0), partition=0)
    producer.flush(READY_S_MAX)
    answer(ready=True)
    next(commands())
    cpu_s = time.process_time()
    paced(lambda value: producer.produce(topic, value, partition=0), lambda: producer.poll(0), params)
    producer.flush(READY_S_MAX)
    assert not failed, f"{len(failed)} records failed: {failed[0]}"
    answer(cpu_s=time.process_time() - cpu_s, records=acked[0])


def tail_kafka(address: str, params: Command) -> None:
    """Read a topic to its last record, by `poll`: `consume` waits until its list is full."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer({**KAFKA_CONSUMER, "bootstrap.servers": address})
    consumer.assign([TopicPartition(params["topic"], 0, OFFSET_BEGINNING)])
    assert consumer.poll(READY_S_MAX) is not None, "Kafka's topic is empty"
    answer(ready=True)
    cpu_s, latencies = time.process_time(), Latencies(params)
    while not latencies.ended:
        message = consumer.poll(READY_S_MAX)
        assert message is not None, "Kafka brought nothing"
        if message.error() is None:
            latencies.take([message.value() or b""])
    cpu_s = time.process_time() - cpu_s
    consumer.close()
    answer(cpu_s=cpu_s, records=latencies.records, latencies_ns=latencies.found)


def create_kafka(address: str, params: Command) -> None:
    """Make a topic of one partition with Kafka's settings `config`."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    for made in admin.create_topics([NewTopic(params["topic"], 1, 1, config=params["config"])]).values():
        made.result(READY_S_MAX)
    answer(made=True)


WORK: dict[str, dict[str, Callable[[str, Any], None]]] = {
    "memq": {"send": send_memq, "tail": tail_memq},
    "kafka": {"send": send_kafka, "tail": tail_kafka, "create": create_kafka},
}


def main() -> None:
    found = options()
    answer(ready=True)
    for params in commands():
        WORK[found["side"]][params["command"]](found["address"], params)


if __name__ == "__main__":
    main()
