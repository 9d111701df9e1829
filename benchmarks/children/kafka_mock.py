"""librdkafka's mock cluster of one broker, in a process of its own."""

from __future__ import annotations

from confluent_kafka import Producer

from benchmarks.children.commands import answer, commands


def main() -> None:
    producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = producer.list_topics(timeout=10).brokers.values()
    answer(address=",".join(f"{broker.host}:{broker.port}" for broker in brokers))
    for _ in commands():
        pass


if __name__ == "__main__":
    main()
