"""Truncation, seals, idle topics, retention for groups and broadcast on S3, Kafka and ZooKeeper, over kills."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import memq
from memq.errors import OutcomeUnknownError, RetryableError, TimedOutError, TopicSealedError
from memq.runtime.clock import SystemClock
from memq.topic import Position
from memq_localstack.servers import S3Server, Server
from tests.integration.retained_batches import BEHIND_MS, QUICK, SLOW
from tests.load import HANG_S, addresses_of
from tests.processes import BrokerProcess, broker_processes
from tests.soak import repetitions

BATCHES = 8
CUTS = (2, 4, 6)  # batches that the truncations remove, one after another
KILLS_AFTER_S = (0.0, 0.25, 0.05)  # between the answer to a truncation, and the end of the owner
IDLE = {"stale_publish_ms": 1_000, "delivery_timeout_ms": 10_000, "dedup_window_ms": 52_000, "expire_idle_ms": 52_000}
YEAR_MS = 366 * 86_400_000
PARTITIONS = 4
Acks = Literal["1", "all"]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Ask again and again; errors of brokers that are being killed don't count."""
    clock = SystemClock()
    until_s = clock.monotonic() + HANG_S
    while clock.monotonic() < until_s:
        with suppress(RetryableError, TimedOutError):
            if holds():
                return
    raise AssertionError(f"{what}: not within {HANG_S:.0f} s")


def owner_of(topic: str, partition: int, brokers: list[BrokerProcess]) -> BrokerProcess:
    """Return the broker that has a partition of a topic."""
    with memq.Admin(addresses_of(brokers)) as admin:
        names = {each.partition: each.broker for each in admin.topic(topic).owners}
    return next(broker for broker in brokers if broker.name == names[partition])


def values(brokers: list[BrokerProcess], topic: str, **options: Any) -> list[int]:
    """Return the numbers in a topic, in their order."""
    with memq.Consumer(addresses_of(brokers), topic, end="end", **options) as consumer:
        return [int(value or b"") for batch in consumer for value in batch.values()]


class Writer:
    """Sends numbered records with one level of acks, over all partitions."""

    def __init__(self, brokers: list[BrokerProcess], topic: str, acks: Acks) -> None:
        self.sent: list[memq.Delivery] = []
        self._arguments = (addresses_of(brokers), topic, acks)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer with acks={acks}")

    def _run(self) -> None:
        addresses, topic, acks = self._arguments
        # the end of the producer raises an error of a record that was refused: `outcomes` asks each
        with suppress(memq.MemqError), memq.Producer(addresses, acks=acks, linger_ms=5) as producer:
            for number in itertools.count():
                if self._end.wait(0.003):
                    return
                self.sent.append(producer.send(topic, b"%d" % number, key=acks, partition=number % PARTITIONS))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def outcomes(self) -> tuple[set[int], set[int]]:
        """Return the numbers that were acked, and those that were refused; the others may be either."""
        acked, refused = set[int](), set[int]()
        for number, delivery in enumerate(self.sent):
            try:
                delivery.result(HANG_S)
            except TopicSealedError:
                refused.add(number)
            except OutcomeUnknownError:
                pass
            else:
                acked.add(number)
        return acked, refused


@contextmanager
def aged(folder: Path, zookeeper: Server, kafka: Server, s3: S3Server) -> Iterator[list[BrokerProcess]]:
    """Run two brokers with two topics whose batches are 50 minutes old."""
    with broker_processes(folder, zookeeper, kafka, s3, count=0):
        config = folder / "memq.toml"
        config.write_text('retention_interval_ms = "200ms"\n' + config.read_text())
        brokers = [BrokerProcess(config, f"b{number}", behind_ms=BEHIND_MS) for number in (1, 2)]
        try:
            for broker in brokers:
                broker.start()
            with memq.Admin(brokers[0].address) as admin, memq.Producer(brokers[0].address, codec="none") as producer:
                for topic in ("cut", "kept"):
                    admin.create_topic(topic, settings=SLOW)
                    for number in range(BATCHES):
                        producer.send(topic, b"%d" % number).result(HANG_S)
            for broker in brokers:
                assert broker.stop() == 0, broker.log.read_text()
                broker.behind_ms = 0
            for broker in brokers:
                broker.start()
            yield brokers
        finally:
            for broker in brokers:
                broker.close()


def test_owners_that_are_killed_keep_what_was_said_of_the_history_of_topics(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with aged(tmp_path, zookeeper, kafka, reads_s3) as brokers, memq.Admin(addresses_of(brokers)) as admin:
        make_topics(brokers, admin)
        read_a_part(brokers)
        assert admin.groups() == ["slow"]
        cut = truncate_and_kill(brokers, admin)
        assert values(brokers, "cut", broadcast="wall", on_expired="skip") == list(range(cut, BATCHES))
        wait_for_the_group_and_kill(brokers, admin)
        seal_and_kill(brokers, admin)
        wait_until(lambda: "idle" not in {topic.name for topic in admin.topics()}, "the idle topic is deleted")
        assert {topic.name for topic in admin.topics()} == {"cut", "kept", "clicks"}
        expired = "topic-expired: topic 'idle'"
        wait_until(lambda: any(expired in broker.log.read_text() for broker in brokers), "a line of the log")


def make_topics(brokers: list[BrokerProcess], admin: memq.Admin) -> None:
    admin.create_topic("idle", settings=IDLE)
    with memq.Producer(addresses_of(brokers)) as producer:
        producer.send("idle", b"0").result(HANG_S)
    groups: dict[str, int | bool | str] = {"retention_groups": "slow", "retention_groups_ms_max": YEAR_MS}
    admin.alter_topic("kept", settings={**QUICK, **groups, "retention_ms": QUICK["dedup_window_ms"]})
    admin.alter_topic("cut", settings={**QUICK, "retention_ms": 0})


def read_a_part(brokers: list[BrokerProcess]) -> None:
    """Let a group read half of a topic, and a broadcast consumer the first batch of another one."""
    with memq.Consumer(addresses_of(brokers), "kept", group="slow", auto_commit=False) as consumer:
        for _ in range(BATCHES // 2):
            batch = consumer.poll(HANG_S)
            assert batch is not None
            consumer.commit(batch)
    with memq.Consumer(addresses_of(brokers), "cut", broadcast="wall", auto_commit=False) as consumer:
        batch = consumer.poll(HANG_S)
        assert batch is not None
        consumer.commit(batch)


def truncate_and_kill(brokers: list[BrokerProcess], admin: memq.Admin) -> int:
    """Truncate a topic further and further, and kill its owner soon after each order; return the batches that went."""
    pause, batches = threading.Event(), 0
    remaining = partial(values, brokers, "cut", on_expired="skip")  # a truncation may take records meanwhile
    for batches, after_s in list(zip(CUTS, KILLS_AFTER_S, strict=True))[: repetitions(few=2, many=3)]:
        with memq.Consumer(addresses_of(brokers), "cut", end="end") as consumer:
            places = {int(record.value or b""): record.position for batch in consumer for record in batch}
        place = Position(places[batches].read_partition, places[batches].pointer_offset)
        owner = owner_of("cut", 0, brokers)
        (goes,) = admin.truncate_topic("cut", place)
        assert goes.records > 0
        pause.wait(after_s)
        owner.kill()
        owner.start()
        wait_until(lambda: min(remaining()) >= batches, "the truncation")  # noqa: B023
        assert values(brokers, "cut") == list(range(batches, BATCHES)), "an order takes nothing behind it"
        assert admin.topic("cut").topic.truncations[0].before == place.pointer_offset
    return batches


def wait_for_the_group_and_kill(brokers: list[BrokerProcess], admin: memq.Admin) -> None:
    """Let retention take what the group has committed; then the group reads the rest, from another owner."""
    left = list(range(BATCHES // 2, BATCHES))
    remaining = partial(values, brokers, "kept", on_expired="skip")  # retention may take records meanwhile
    wait_until(lambda: remaining() == left, "retention waits for a group")
    owner = owner_of("kept", 0, brokers)
    owner.kill()
    assert values(brokers, "kept", group="slow") == left
    owner.start()
    (progress,) = admin.group("slow").partitions
    assert progress.lag.records == 0


def seal_and_kill(brokers: list[BrokerProcess], admin: memq.Admin) -> None:
    """Seal a topic while records are sent, and kill an owner: no acked record is behind the end."""
    admin.create_topic("clicks", partitions=PARTITIONS, settings={"stale_publish_ms": 1_000, "ack1": "disk"})
    with Writer(brokers, "clicks", "all") as careful, Writer(brokers, "clicks", "1") as quick:
        wait_until(lambda: min(len(careful.sent), len(quick.sent)) > 300, "records")
        victim = owner_of("clicks", 0, brokers)
        sealing = threading.Thread(target=admin.seal_topic, args=("clicks",), name="seal")
        sealing.start()
        wait_until(lambda: bool(admin.topic("clicks").topic.sealed_ms), "the seal")
        victim.kill()
        sealing.join()
    assert admin.topic("clicks").topic.ended
    found = read_to_the_end(brokers)
    acked, refused = careful.outcomes()
    assert acked
    assert refused
    assert acked - found["all"] == set(), "acked, and behind the end"
    assert refused & found["all"] == set(), "refused, and in the log"

    victim.start()
    acked, _ = quick.outcomes()
    wait_until(lambda: acked <= read_to_the_end(brokers)["1"], "what was acked on a disk")
    assert read_to_the_end(brokers)["all"] == found["all"]


def read_to_the_end(brokers: list[BrokerProcess]) -> dict[str, set[int]]:
    """Read a sealed topic without an `end`; each record is there once, and in order."""
    found: dict[str, list[int]] = {"all": [], "1": []}
    with memq.Consumer(addresses_of(brokers), "clicks") as consumer:
        for batch in consumer:
            for record in batch:
                found[(record.key or b"").decode()].append(int(record.value or b""))
    for numbers in found.values():
        assert len({*numbers}) == len(numbers), "a record came twice"
    return {acks: {*numbers} for acks, numbers in found.items()}
