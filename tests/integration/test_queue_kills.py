"""Queues and pop groups on real Kafka, ZooKeeper and S3, while their owner and a worker are killed."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from confluent_kafka.admin import AdminClient

import memq
from memq.errors import RetryableError
from memq.queues.decisions import ItemOutcome
from memq.runtime.clock import SystemClock
from memq.topic import STATE_TOPIC
from memq_localstack import guard
from memq_localstack.processes import identity_of
from memq_localstack.servers import S3Server, Server
from tests.load import addresses_of
from tests.memq_process import run_command
from tests.processes import SESSION_TIMEOUT_MS, BrokerProcess, SavingBrokerProcess, broker_processes
from tests.soak import SOAKING

QUEUE, TOPIC, GROUP = "jobs", "clicks", "billing"
ACKED, PREFETCHED, WAITING = 1_000, 500, 200
LEASE_S = 6.0
TAKEOVER_S = SESSION_TIMEOUT_MS / 1_000 + 10.0  # of a busy machine
HANG_S = 120.0
RECORDS, MORE = 5_000 if SOAKING else 1_000, 100
CALL_ITEMS = 50
CLOCK = SystemClock()
# Leases records of a group, acks each, and notes both in its journal; its answer to a lost lease is a note, too.
WORKER = """
import sys, memq
from memq.queues.decisions import ItemOutcome
addresses, queue, journal, count = sys.argv[1:]
with memq.Queue(addresses) as jobs, open(journal, "w", buffering=1) as journal:
    while True:
        for item in jobs.dequeue({queue: int(count)}, wait=5):
            journal.write(f"begun {item.payload.decode()}\\n")
            (outcome,) = jobs.ack_many([item])
            journal.write(f"{'acked' if outcome is ItemOutcome.ACKED else 'lost'} {item.payload.decode()}\\n")
"""


def owner_of(name: str, brokers: list[BrokerProcess]) -> tuple[BrokerProcess, BrokerProcess]:
    """Return the owner of a queue's state log, and the other broker."""
    with memq.Admin(addresses_of(brokers)) as admin:
        owners = admin.topic(STATE_TOPIC).owners
    found = owners[zlib.crc32(name.encode()) % len(owners)].broker
    first, second = brokers
    return (first, second) if first.name == found else (second, first)


def until(holds: Callable[[], bool], what: str) -> None:
    """Ask again and again; errors of brokers that are being killed do not count."""
    until_s = CLOCK.monotonic() + HANG_S
    while CLOCK.monotonic() < until_s:
        try:
            if holds():
                return
        except RetryableError:
            continue
    raise AssertionError(f"{what}: not within {HANG_S:.0f} s")


def test_an_owner_that_is_killed_loses_no_ack_and_no_lease(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    """1,000 items are acked, and 500 are with a worker, which acks half of them after the kill."""
    with (
        broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=2) as brokers,
        memq.Queue(addresses_of(brokers)) as holder,
    ):
        count = ACKED + PREFETCHED + WAITING
        ids = set(holder.enqueue_many(QUEUE, [b"%d" % number for number in range(count)], lease=LEASE_S))
        first = [item for _ in range(ACKED // 500) for item in holder.dequeue({QUEUE: 500}, wait=5)]
        assert set(holder.ack_many(first)) == {ItemOutcome.ACKED}
        held = holder.dequeue({QUEUE: PREFETCHED}, wait=5)
        assert (len(first), len(held)) == (ACKED, PREFETCHED)
        killed, other = owner_of(QUEUE, brokers)
        killed_s = CLOCK.monotonic()
        killed.kill()
        outcomes = holder.ack_many(held[::2])
        late = {item.id for item, outcome in zip(held[::2], outcomes, strict=True) if outcome is ItemOutcome.ACKED}
        assert late, "the next owner knows the leases of the killed one"
        acked = {item.id for item in first} | late
        came: dict[str, float] = {}
        with memq.Queue(other.address) as worker:
            while len(came) < len(ids - acked):
                assert CLOCK.monotonic() < killed_s + TAKEOVER_S + 2 * LEASE_S, f"{len(came)} items came"
                items = worker.dequeue({QUEUE: 500}, wait=1)
                came |= {item.id: CLOCK.monotonic() for item in items}
                assert set(worker.ack_many(items)) <= {ItemOutcome.ACKED}
        assert set(came) == ids - acked, "no acked item comes again, and each other one comes"
        early = [item.id for item in held if item.id in came and came[item.id] < item.until_s]
        assert early == [], "no item is held by two workers"


class WorkerProcess:
    """A process that leases and acks records of the group."""

    def __init__(self, folder: Path, name: str, addresses: str) -> None:
        self._journal = folder / name
        line = [sys.executable, "-c", WORKER, addresses, f"{TOPIC}@{GROUP}", str(self._journal), str(CALL_ITEMS)]
        self.process = subprocess.Popen(line)
        guard.watch(identity_of(self.process.pid))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)

    def noted(self, word: str) -> list[int]:
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(f"{word} ") and line.count(" ") == 1]


def fill(addresses: str, numbers: Iterable[int]) -> None:
    with memq.Producer(addresses) as producer:
        for number in numbers:
            producer.send(TOPIC, b"%d" % number)
        producer.flush(timeout=HANG_S)


def lag(addresses: str) -> int | None:
    with memq.Admin(addresses) as admin:
        (found,) = admin.pop_groups()
    return found.records


def lose_pointers(kafka: Server, prefix: str) -> None:
    """Delete all that Kafka holds of the cluster."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    mine = [name for name in admin.list_topics(timeout=30).topics if name.startswith(prefix)]
    for answer in admin.delete_topics(mine).values():
        answer.result()
    while not admin.list_topics(timeout=30).topics.keys().isdisjoint(mine):
        pass


def test_a_pop_group_acks_each_record_once_over_kills_and_is_restored(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=2, kind=SavingBrokerProcess) as brokers:
        addresses = addresses_of(brokers)
        with memq.Admin(addresses) as admin:
            admin.create_topic(TOPIC, partitions=2, settings={"retention_ms": 3_600_000})
        with memq.Queue(addresses) as queue:
            assert queue.begin_pop(TOPIC, GROUP, lease=3.0) == f"{TOPIC}@{GROUP}"
        fill(addresses, range(RECORDS))
        assert lag(addresses) == RECORDS
        workers = [WorkerProcess(tmp_path, f"w{number}", addresses) for number in range(3)]
        try:
            until(lambda: sum(len(worker.noted("acked")) for worker in workers) > RECORDS // 8, "acks")
            workers[0].kill()
            killed, _ = owner_of(f"{TOPIC}@{GROUP}", brokers)
            killed.kill()
            until(lambda: lag(addresses_of(b for b in brokers if b is not killed)) == 0, "the end of the lag")
            killed.start()
        finally:
            for worker in workers:
                worker.kill()
        begun = Counter(number for worker in workers for number in worker.noted("begun"))
        acked = Counter(number for worker in workers for number in worker.noted("acked"))
        assert set(begun) == set(range(RECORDS))
        assert set(acked.values()) == {1}, "no record is acked twice"
        open_ = set(workers[0].noted("begun")) - set(workers[0].noted("acked"))
        assert set(begun) - set(acked) <= open_, "only acks of the killed worker have no answer"
        twice = {number for number, times in begun.items() if times > 1}
        assert twice <= open_, "only what the killed worker had begun is begun again"
        if SOAKING:
            restored(tmp_path, kafka, brokers)


def restored(folder: Path, kafka: Server, brokers: list[BrokerProcess]) -> None:
    """Lose all that Kafka has, restore it, and read what was not acked; acks after a snapshot may be lost."""
    fill(addresses_of(brokers), range(RECORDS, RECORDS + MORE))
    for broker in brokers:
        assert broker.stop() == 0, broker.log.read_text()
    lose_pointers(kafka, f"{folder.name}.")
    done = run_command("restore", "--config", str(folder / "memq.toml"))
    assert done.returncode == 0, done.stderr
    brokers[0].start()
    came: Counter[int] = Counter()
    with memq.Queue(brokers[0].address) as queue:
        until_s = CLOCK.monotonic() + HANG_S
        new = set(range(RECORDS, RECORDS + MORE))
        while not set(came) >= new or lag(brokers[0].address) != 0:
            assert CLOCK.monotonic() < until_s, f"{len(new - set(came))} records did not come"
            items = queue.dequeue({f"{TOPIC}@{GROUP}": 500}, wait=1)
            came.update(int(item.payload) for item in items)
            queue.ack_many(items)
    assert set(came.values()) == {1}
