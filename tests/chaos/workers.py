"""Client processes of a chaos run: `python -m tests.chaos.workers KIND …`; SIGTERM ends one in order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import memq
from memq.client.arguments import runtime_of
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptDataError,
    DeniedError,
    FencedError,
    MemqError,
    NotFoundError,
    OutcomeUnknownError,
    RetryableError,
)
from memq.runtime.clock import SystemClock
from memq.storage_handlers.s3 import open_store
from tests.chaos.journal import Journal, value_of

CLOCK = SystemClock()
END_S = 240.0  # what a client has to come to its end in a healed world
DELIVERY_MS = 30_000
CHURN_RECORDS = 200
CHURNED_MAX = 100_000  # topics of one life of the worker
BURSTS = (1, 5, 50, 500)  # how many records a producer sends at once, drawn for each burst
# Errors after which a user tries again. A store that denies or misses its objects for seconds ends a call by
# DeniedError, NotFoundError or CorruptDataError: that is no loss, as long as nothing is passed over.
PASSING = (RetryableError, OutcomeUnknownError, DeniedError, NotFoundError, CorruptDataError)


def now_ms() -> int:
    """Return the monotonic time in ms, the same for all processes of a machine."""
    return int(CLOCK.monotonic() * 1000)


class Worker:
    """What all kinds share: options, journal, and the wish to end."""

    def __init__(self, options: argparse.Namespace, ending: threading.Event) -> None:
        self.options = options
        self.brokers: str = options.brokers
        self.name: str = options.name
        self.topic: str = options.topic
        self.partitions: int = options.partitions
        self.size: int = options.size
        self.journal = Journal(Path(options.journal))
        self.ending = ending

    def until_ready(self, work: Callable[[], memq.Producer]) -> memq.Producer:
        """Try again while the cluster does not answer."""
        while True:
            try:
                return work()
            except RetryableError:
                if self.ending.wait(0.2):
                    raise

    def settle(self, outcome: memq.Ack | MemqError) -> None:
        """Note what became of a block."""
        if isinstance(outcome, memq.Ack):
            producer = f"{outcome.producer_id:016x}"
            place = outcome.topic, outcome.partition, producer
            self.journal.write("A", *place, outcome.first_sequence, outcome.records, now_ms())
        else:
            self.journal.write("U", self.topic, -1, outcome.code)
            if not isinstance(outcome, OutcomeUnknownError | RetryableError | FencedError | ClosedError):
                self.journal.write("X", f"a block of {self.name} failed: {outcome!r}")


def produce(worker: Worker) -> None:
    """Produce; a named producer that ended with a block of unknown outcome begins again where its name ends."""
    while True:
        try:
            return produce_once(worker)
        except ClosedError as error:
            worker.journal.write("R", error.code)
            if not worker.options.named:
                raise
            if worker.ending.is_set():
                return None


def produce_once(worker: Worker) -> None:
    """Send numbered records to all partitions in turn, in bursts at a steady mean rate, and note each ack."""
    options = worker.options
    name = worker.name if options.named else None
    acks: Literal["1", "all"] = options.acks

    def begin() -> memq.Producer:
        return memq.Producer(
            worker.brokers, acks=acks, name=name, codec=options.codec, linger_ms=5, delivery_timeout_ms=DELIVERY_MS,
            on_ack=worker.settle,
        )  # fmt: skip

    producer = worker.until_ready(begin)
    counts = [0] * worker.partitions
    if name:
        points = resume_points_of(worker, producer)
        counts = [points.get(partition, 0) for partition in range(worker.partitions)]
        for partition, count in enumerate(counts):
            worker.journal.write("F", worker.topic, partition, count)
    begun_s, sent = CLOCK.monotonic(), 0
    draw = random.Random(f"{worker.name}/{options.life}")
    while not worker.ending.wait(max(0.0, begun_s + sent / options.rate - CLOCK.monotonic())):
        for _ in range(draw.choice(BURSTS)):
            partition = sent % worker.partitions
            value = value_of(worker.name, counts[partition], worker.size)
            sent += 1
            with contextlib.suppress(RetryableError):
                producer.send(worker.topic, value, partition=partition)
                counts[partition] += 1
    for partition, count in enumerate(counts):
        worker.journal.write("S", worker.topic, partition, count)
    producer.flush(timeout=END_S)
    producer.close(timeout=END_S)


def resume_points_of(worker: Worker, producer: memq.Producer) -> dict[int, int]:
    """Return the record count of the name in each partition, asked until the owners answer."""
    while True:
        try:
            return producer.resume_points(worker.topic)
        except (RetryableError, FencedError):
            if worker.ending.wait(0.2):
                return {}  # nothing is sent any more


def consume(worker: Worker) -> None:
    """Read as a member of a group, note each batch before its commit, and each commit after it returned."""
    while not worker.ending.is_set():
        try:
            consume_once(worker)
        except PASSING as error:
            worker.journal.write("R", error.code)
            worker.ending.wait(0.5)


def consume_once(worker: Worker) -> None:
    """Read until an error or the end."""
    with memq.Consumer(
        worker.brokers, worker.topic.split(","), group=worker.options.group, start="beginning", auto_commit=False,
    ) as consumer:  # fmt: skip
        while not worker.ending.is_set():
            batch = consumer.poll(timeout=0.5)
            if batch is None:
                continue
            place = batch.topic, batch.first.read_partition
            worker.journal.write("D", *place, batch.first, batch.next, *ranges_of(batch))
            if batch.damaged:
                worker.journal.write("X", f"{worker.name} got a damaged block in {place}: {batch.damaged}")
            begun_ms = now_ms()
            try:
                consumer.commit(batch)
            except FencedError:
                continue
            worker.journal.write("C", *place, batch.next, begun_ms, now_ms())


def read(worker: Worker) -> None:
    """Read all topics once from their beginning to their end, without a group; from the beginning after an error."""
    again(worker, partial(read_once, worker))


def read_once(worker: Worker) -> None:
    """Read until an error or the end."""
    worker.journal.write("N")
    with memq.Consumer(worker.brokers, worker.topic.split(","), start="beginning", end="end") as consumer:
        for batch in consumer:
            place = batch.topic, batch.first.read_partition
            worker.journal.write("D", *place, batch.first, batch.next, *ranges_of(batch))


def ranges_of(batch: memq.Batch) -> list[str]:
    """Return the records of a batch as ranges `worker:first-last`, in their order."""
    found: list[tuple[str, int, int]] = []
    for value in batch.values():
        worker, number = (value or b"? -1").split(b" ", 2)[:2]
        name, count = worker.decode(), int(number)
        if found and found[-1][0] == name and found[-1][2] == count - 1:
            found[-1] = (name, found[-1][1], count)
        else:
            found.append((name, count, count))
    return [f"{name}:{first}-{last}" for name, first, last in found]


def churn(worker: Worker) -> None:
    """Make a topic, write, read everything back and delete it, over and over, under two names."""
    for number in itertools.count(worker.options.life * CHURNED_MAX):
        try:
            if not churn_once(worker, f"{worker.topic}-{number % 2}", number * CHURN_RECORDS):
                return
        except (RetryableError, OutcomeUnknownError) as error:
            worker.journal.write("R", error.code)  # this topic stays until its name has its turn again


def churn_once(worker: Worker, topic: str, first: int) -> bool:
    """Take one topic through its life, with records numbered from `first`; False when the worker shall end."""
    outcomes: list[object] = []
    with memq.Admin(worker.brokers) as admin:

        def make() -> None:
            try:
                admin.create_topic(topic, partitions=2)
            except AlreadyExistsError:  # left by an earlier try, which may have written to it
                with contextlib.suppress(NotFoundError):
                    admin.delete_topic(topic)
                admin.create_topic(topic, partitions=2)

        if not again(worker, make, again_after=AlreadyExistsError):
            return False
        with memq.Producer(worker.brokers, on_ack=outcomes.append) as producer:
            for count in range(first, first + CHURN_RECORDS):
                value = value_of(worker.name, count, worker.size)
                producer.send(topic, value, partition=count % 2)
            producer.flush(timeout=END_S)
        if all(isinstance(outcome, memq.Ack) for outcome in outcomes):
            if not read_back(worker, topic, first):
                return False
            worker.journal.write("A", topic, 0, "0" * 16, 0, CHURN_RECORDS, now_ms())
        return again(worker, lambda: admin.delete_topic(topic), NotFoundError)


def read_back(worker: Worker, topic: str, first: int) -> bool:
    """Read a topic from its beginning to its end; what is not as it was sent is noted. False when it shall end."""

    def numbers_read() -> tuple[list[int], str]:
        """Return the numbers of all records, and where the consumer ended."""
        with memq.Consumer(worker.brokers, [topic], start="beginning", end="end") as consumer:
            found = sorted(int(value.split(b" ")[1]) for batch in consumer for value in batch.values() if value)
            return found, f"positions {[str(each) for each in consumer.position().values()]}, {consumer.stats()}"

    def read() -> None:
        try:
            found, ended = numbers_read()
            sent = range(first, first + CHURN_RECORDS)
            if found != list(sent):
                lost = sorted({*sent} - {*found})
                twice, ended_then = numbers_read()
                text = f"{topic}: {len(found)} records read, lost {lost[:10]}; {ended}"
                worker.journal.write("X", f"{text}; then {len(twice)} records read; {ended_then}")
        except NotFoundError as error:
            worker.journal.write("X", f"{topic} exists: {error}")
            raise

    return again(worker, read)


def again(
    worker: Worker, work: Callable[[], object], *fine: type[MemqError], again_after: type[MemqError] = RetryableError
) -> bool:
    """Do something until it works, or fails in a `fine` way; False when the worker shall end first."""
    while True:
        try:
            work()
        except fine:
            return True
        except (*PASSING, again_after) as error:
            worker.journal.write("R", error.code)
            if worker.ending.wait(0.3):
                return False
        else:
            return not worker.ending.is_set()


def stage(worker: Worker) -> None:
    """Commit staged batches one after another, each twice; a batch whose commit failed is committed again."""
    asyncio.run(stage_all(worker))


async def stage_all(worker: Worker) -> None:
    """Go through the batches; the journal says which ones were committed by lives before this one."""
    done = worker.options.life  # the first batch of this life: lives have a thousand numbers each
    for batch in itertools.count(done * 1_000):
        objects = None
        while not worker.ending.is_set():
            try:
                async with StagedCommits(worker.brokers.split(","), worker.name) as commits:
                    topics = await commits.topics([worker.topic])
                    store = open_store(commits.store.url, runtime_of(None), {})
                    try:
                        if objects is None:
                            writer = StagedWriter(commits.cluster, topics, store, worker.name, block_bytes=4_096)
                            for number in range(CHURN_RECORDS):
                                value = value_of(worker.name, batch * CHURN_RECORDS + number, worker.size)
                                await writer.add(worker.topic, value)
                            objects = await writer.finish()
                        await commits.commit(batch, objects, store, timeout_s=DELIVERY_MS / 1000)
                        await commits.commit(batch, objects, store, timeout_s=DELIVERY_MS / 1000)
                    finally:
                        await store.close()
                worker.journal.write("A", worker.topic, -1, "staged", batch * CHURN_RECORDS, CHURN_RECORDS, now_ms())
                break
            except PASSING as error:
                worker.journal.write("R", error.code)
                await asyncio.to_thread(worker.ending.wait, 0.3)
        else:
            return


KINDS: dict[str, Callable[[Worker], None]] = {
    "produce": produce,
    "consume": consume,
    "read": read,
    "churn": churn,
    "stage": stage,
}


def run_worker(kinds: Mapping[str, Callable[[Worker], None]]) -> int:
    """Run one worker until SIGTERM; what it meets that must not happen is raised and noted."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.workers", description=__doc__)
    parser.add_argument("kind", choices=list(kinds))
    for name in ("name", "brokers", "topic", "journal"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--acks", default="all", choices=["1", "all"])
    parser.add_argument("--codec", default="zstd")
    parser.add_argument("--group", default="")
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--rate", type=float, default=100.0, help="records/s")
    parser.add_argument("--size", type=int, default=100, help="bytes of a value")
    parser.add_argument("--life", type=int, default=0, help="how often this worker was started before")
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    worker = Worker(parser.parse_args(), ending)  # its journal says that SIGTERM is heard
    try:
        kinds[worker.options.kind](worker)
    except BaseException as error:
        worker.journal.write("X", f"{worker.name} died of {error!r}".replace("\n", " "))
        raise
    else:
        worker.journal.write("E")
    finally:
        worker.journal.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_worker(KINDS))
