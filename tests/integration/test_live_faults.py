"""The live audit on real servers: it names each fault injected into a crashing cluster, and nothing else.

Two auditors watch, each with a state of its own: one works all the time, the other one is killed, started again, paused
and resumed. They say the same, of every record and of every minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

import memq
from memq.audit.live.view import AuditView
from memq.cli.cluster.embedded_services import database_at
from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.cursor_outcomes import ReadyRange
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.io_thread import io_thread
from memq.client.link_pool import LinkPool
from memq.client.observers.reporter import Reporter, reporting
from memq.client.producer.delivery import Delivery
from memq.format.ranges import RangeSet
from memq.format.report import AUDIT_TOPIC, Kind
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Topic
from memq_localstack.servers import S3Server, Server
from tests.auditors import AuditorProcess
from tests.integration.stored_faults import Batch, Named, StoredFaults, note, stored_faults_of
from tests.load import TOPIC, addresses_of
from tests.owners import owner_of, owners_of
from tests.postgres import postgres_url
from tests.processes import BrokerProcess, broker_processes
from tests.soak import SOAKING, repetitions, report

pytestmark = pytest.mark.soak
PARTITIONS = 2
ROUND_BURSTS, BURST_RECORDS = 6, 40  # of each producer; between two rounds something dies
RECORD_BYTES = 100  # so that a block has about ten
SOUND, FAULTY = "sound", "faulty"  # groups
PRETENDED = 5  # records of which a client reports an ack, and never sent them
TIMEOUT_S = 120.0
LOOKS_MAX = 400  # for what is to be said; each is a process, so this is minutes
AUDIT = 'audit = "on"\naudit_interval_ms = 200\naudit_partitions = 2\n'
SETTINGS = {"seal_when_idle": False, "batch_age_ms_max": 30}  # so that batches have several blocks
PointerPosition = tuple[int, int]  # read partition, pointer offset


@pytest.fixture
def cluster(tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server) -> Iterator[list[BrokerProcess]]:
    """Two brokers whose clients report, and a topic."""
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=2, top=AUDIT) as brokers:
        with memq.Admin(addresses_of(brokers)) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS, settings=dict(SETTINGS))
        yield brokers


class Load:
    """Two producers that send to all partitions, round by round; all is acked with `all`."""

    def __init__(self, brokers: Sequence[BrokerProcess], stack: ExitStack) -> None:
        self.sent = 0
        self._counts: dict[tuple[int, int], int] = {}  # by producer and partition
        self._sent: dict[int, Delivery] = {}  # the last one of each producer
        self.observers: list[Reporter] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("memq.client.producer.sender.reporting", self._reporting)
            self.producers = [
                stack.enter_context(memq.Producer(addresses_of(brokers), linger_ms=1, block_bytes=1024))
                for _ in range(2)
            ]

    def _reporting(self, kind: Kind, name: str) -> Callable[[Runtime, LinkPool, TaskOwner], Reporter]:
        def observe(runtime: Runtime, pool: LinkPool, tasks: TaskOwner) -> Reporter:
            self.observers.append(reporting(kind, name)(runtime, pool, tasks))
            return self.observers[-1]

        return observe

    def round(self) -> None:
        """Send some bursts, each of which is acked before the next one: so there are many batches."""
        for _ in range(ROUND_BURSTS):
            for number in range(BURST_RECORDS):
                for at, producer in enumerate(self.producers):
                    partition = number % PARTITIONS
                    value = (b"%d of %d" % (self.sent, at)).ljust(RECORD_BYTES)
                    self._sent[at] = producer.send(TOPIC, value, partition=partition)
                    self._counts[at, partition] = self._counts.get((at, partition), 0) + 1
                    self.sent += 1
            for producer in self.producers:
                producer.flush(timeout=TIMEOUT_S)

    def pretend(self, topic: Topic, named: Named) -> None:
        """Let a producer report an ack of records that it never sent."""
        first, producer_id = self._counts[0, 0] + 100, self._sent[0].result(TIMEOUT_S).producer_id

        async def pretend() -> None:
            tally, now_ms = self.observers[0].part(topic, 0), SystemClock().wall_ms()
            assert tally is not None
            tally.pass_stage("acked", producer_id, first, first + PRETENDED, now_ms, now_ms, 2)

        io_thread().run(pretend())
        note(named, ("lost", "queue", ""), 0, producer_id, first, first + PRETENDED)


class Reader:
    """A member of a group that reads to the end, passes over damage, and commits; a faulty one loses and repeats."""

    def __init__(
        self,
        brokers: Sequence[BrokerProcess],
        group: str,
        stack: ExitStack,
        lost: Sequence[PointerPosition] = (),
        twice: Sequence[PointerPosition] = (),
    ) -> None:
        self._lost = lost
        self._twice = twice
        self._again: list[tuple[Assigned, ReadyRange]] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("memq.client.consumer.core.FetchScheduler", self._scheduler)
            self._consumer = stack.enter_context(
                memq.Consumer(
                    *(addresses_of(brokers), [TOPIC]),
                    group=group,
                    end="end",
                    on_damaged="skip",
                    read="direct",
                    session_timeout_ms=60_000,
                )
            )

    def _scheduler(self, *arguments: Any) -> FetchScheduler:
        made: Any = FetchScheduler(*arguments)
        self._deliver: Callable[..., tuple[Assigned, ReadyRange] | None] = made.deliver
        made.deliver = self._faulty
        return cast(FetchScheduler, made)

    def read(self) -> None:
        """Read and commit; the consumer stays open, and says what it did when it is time."""
        for batch in self._consumer:
            batch.values()
        self._consumer.commit()

    def _faulty(self, *, whole: bool = False) -> tuple[Assigned, ReadyRange] | None:
        if self._again:
            return self._again.pop()
        found = self._deliver(whole=whole)
        while found is not None and _position_of(found) in self._lost:
            found = self._deliver(whole=whole)
        if found is not None and _position_of(found) in self._twice:
            self._again.append(found)
        return found


def _position_of(found: tuple[Assigned, ReadyRange]) -> PointerPosition:
    first = found[1].first
    return first.read_partition, first.pointer_offset


@contextmanager
def auditors(folder: Path, brokers: Sequence[BrokerProcess], seed: int) -> Iterator[list[AuditorProcess]]:
    """Run two auditors, each with a state of its own; some of `make soak` in PostgreSQL."""
    with ExitStack() as stack:
        first = f"sqlite:{folder / 'first.sqlite'}"
        if SOAKING and seed % 2:
            first = stack.enter_context(postgres_url())
        second = f"sqlite:{folder / 'second.sqlite'}"
        found = [
            AuditorProcess(folder, "first", addresses_of(brokers), first),
            AuditorProcess(folder, "second", addresses_of(brokers), second),
        ]
        for auditor in found:
            stack.callback(auditor.close)
        for auditor in found:
            auditor.launch()
        for auditor in found:
            auditor.wait_ready()
        yield found


def wait_for_the_audit(brokers: Sequence[BrokerProcess]) -> None:
    """Wait until the topic of reports is made."""
    with memq.Admin(addresses_of(brokers)) as admin:
        for _ in range(100_000):
            if any(topic.name == AUDIT_TOPIC for topic in admin.topics(internal=True)):
                return
    raise AssertionError("the cluster does not audit")


def kill_an_owner(brokers: list[BrokerProcess]) -> BrokerProcess:
    """Kill the owner of a partition."""
    owner, _ = owner_of(0, owners_of(brokers[0]), brokers)
    owner.kill()
    return owner


async def inject(
    folder: Path, kafka: Server, topic: Topic, draw: Random
) -> tuple[Named, list[PointerPosition], list[PointerPosition], int]:
    """Do faults at store and queue; return what must be named, and what a faulty reader passes over and repeats.

    And how many records there are more in the queue.
    """
    async with stored_faults_of(folder, kafka, topic, (SOUND, FAULTY), draw) as injected:
        batches = await injected.batches()
        partitions = draw.sample(range(PARTITIONS), draw.randint(1, PARTITIONS))
        for partition in partitions:
            await injected.overlap(partition)
        for do in (injected.lose, injected.cut, injected.flip, injected.copy):
            for _ in range(draw.randint(1, 2)):
                await do(batches.pop())
        lost = [_misread(injected, batches.pop(), "lost") for _ in range(draw.randint(1, 2))]
        twice = [_misread(injected, batches.pop(), "doubled") for _ in range(draw.randint(1, 2))]
        return injected.named, lost, twice, len(partitions)


def _misread(injected: StoredFaults, batch: Batch, kind: str) -> PointerPosition:
    for block in batch.blocks:
        place = (batch.pointer.partition, block.producer_id)
        note(injected.named, (kind, "consumer", FAULTY), *place, block.first_sequence, block.next_sequence)
    return batch.pointer.partition, batch.offset  # partitions are never split here


def named_by(auditor: AuditorProcess) -> Named:
    """Return the records that an auditor names."""
    found: Named = {}
    for each in auditor.findings():
        key = (each["kind"], each["stage"], each["group"], each["partition"], each["producer"])
        found.setdefault(key, RangeSet())
        for first, next_ in each["ranges"]:
            found[key].add(first, next_)
    return found


def wait_for_counts(auditor: AuditorProcess, wanted: dict[str, dict[str, int]]) -> None:
    """Wait until an auditor has heard of everything: its counts by group, "" for the queue."""
    known: dict[str, dict[str, int]] = {}
    for _ in range(LOOKS_MAX):
        sides = auditor.topic(TOPIC).get("sides", {})
        known = {side: {name: sides.get(side, {}).get(name, 0) for name in counts} for side, counts in wanted.items()}
        if known == wanted:
            return
    raise AssertionError(f"after {LOOKS_MAX} looks {auditor.state} knows {known}, not {wanted}: {auditor.findings()}")


def counts_of(sent: int, more: int, named: Named) -> dict[str, dict[str, int]]:
    """Return what an auditor counts that has heard of everything; there are `more` records in the queue than sent."""

    def count(kind: str, stage: str, group: str) -> int:
        return sum(ranges.total for key, ranges in named.items() if key[:3] == (kind, stage, group))

    lost = count("lost", "queue", "")  # named only behind the proof of an owner's end, some rounds later
    found = {"": {"sent": sent, "acked": sent + lost, "committed": sent + more, "lost": lost}}
    for group in (SOUND, FAULTY):
        gone = count("corrupt", "object", "") + count("lost", "consumer", group)
        found[group] = {"processed": sent + more - gone + count("doubled", "consumer", group)}
    return found


def words_of(auditor: AuditorProcess) -> dict[tuple[int, int, str], str]:
    """Return the verdict on each minute, partition and group."""

    async def ask() -> dict[tuple[int, int, str], str]:
        database = database_at(auditor.state)()
        try:
            minutes = [each async for each in AuditView(database).minutes(TOPIC, 0, 1 << 40)]
        finally:
            await database.close()
        return {(each.minute, each.partition, side): each.row.word(side) for each in minutes for side in each.row.sides}

    return asyncio.run(ask())


@pytest.mark.parametrize("seed", range(repetitions(1, 20)))
@pytest.mark.parametrize("faults", [True, False] if SOAKING else [True], ids=["faults", "sound"][: 1 + SOAKING])
def test_audit_names_only_the_injected_faults_of_a_crashing_cluster(
    faults: bool, seed: int, tmp_path: Path, cluster: list[BrokerProcess], kafka: Server
) -> None:
    draw, named = Random(f"{seed}/{faults}"), Named()
    lost: list[PointerPosition] = []
    twice: list[PointerPosition] = []
    more = 0
    wait_for_the_audit(cluster)
    with auditors(tmp_path, cluster, seed) as (shaken, steady), ExitStack() as stack:
        load = Load(cluster, stack)
        load.round()
        shaken.kill()
        victim = kill_an_owner(cluster)
        load.round()
        shaken.start()
        victim.start()
        load.round()
        shaken.pause()
        victim = kill_an_owner(cluster)
        load.round()
        with memq.Admin(addresses_of(cluster)) as admin:
            topic = admin.topic(TOPIC).topic
        if faults:
            named, lost, twice, more = asyncio.run(inject(tmp_path, kafka, topic, draw))
            load.pretend(topic, named)
        readers = {SOUND: Reader(cluster, SOUND, stack), FAULTY: Reader(cluster, FAULTY, stack, lost, twice)}
        for reader in readers.values():
            reader.read()
        victim.start()
        shaken.resume()
        wanted = counts_of(load.sent, more, named)
        for auditor in (shaken, steady):
            wait_for_counts(auditor, wanted)
            assert named_by(auditor) == named
        assert words_of(shaken) == words_of(steady)
    kinds = sorted({f"{kind} {stage}" for kind, stage, *_ in named})
    report(f"run {seed + 1}: {load.sent} records, two owners and an auditor killed, one paused; named: {kinds}")
