"""Transactions with `memq dev` on a real disk, compared with the same records sent with acks=all.

Both sides send 1,000 records to eight partitions and take turns. The time begins after the last record is added.
The plain side waits for all acks, the other for its commit, which returns at the decision. Objects and pointers are
counted when all records are in their logs.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import memq
from benchmarks.dev import dev_broker
from benchmarks.results import Figure, Options, percentile

NAME = "transactions"
PARTITIONS, RECORDS = 8, 1_000
VALUE = b"v" * 100
GAP_S = 0.05
WAIT_S = 30.0
EXTRA_MS_MAX = 20.0
EXTRA_PUTS_MAX = 2.0
TOPIC = "transactions"


@dataclass(slots=True)
class Side:
    """The cost of one side: the time of each round, its objects by their first folder, and its entries."""

    waits_s: list[float] = field(default_factory=list)
    objects: Counter[str] = field(default_factory=Counter)
    pointers: int = 0
    entries: int = 0

    @property
    def puts(self) -> float:
        """Return the objects of records in each round; snapshots of state logs come by time."""
        return (self.objects.total() - self.objects["state"]) / len(self.waits_s)


class Cluster:
    """The objects and entries that a running `memq dev` has stored and published so far."""

    def __init__(self, folder: Path, admin: memq.Admin) -> None:
        self._objects = folder / "objects"
        self._admin = admin

    def measure(self, side: Side, work: Callable[[], float]) -> None:
        """Add the costs of `work`, which returns the seconds that count, to a side."""
        objects, ends = self._stored(), self._ends()
        side.waits_s.append(work())
        until_s = time.monotonic() + WAIT_S
        while (after := self._ends())[TOPIC] < ends[TOPIC] + PARTITIONS and time.monotonic() < until_s:
            time.sleep(GAP_S)
        time.sleep(GAP_S)  # more than one pointer for a partition would come now
        stored, after = self._stored(), self._ends()
        side.objects += stored - objects
        side.pointers += after[TOPIC] - ends[TOPIC]
        side.entries += sum(after.values()) - sum(ends.values()) - (after[TOPIC] - ends[TOPIC])

    def _stored(self) -> Counter[str]:
        """Count the objects below each folder of the cluster: topics, shared, held, state."""
        files = (path for path in self._objects.rglob("*") if path.is_file())
        return Counter(path.relative_to(self._objects).parts[1] for path in files)

    def _ends(self) -> Counter[str]:
        """Return the number of entries in the logs of each topic."""
        topics = self._admin.topics(internal=True)
        answers = self._admin.ends(topics)
        return Counter({name: sum(found.values()) for name, found in answers.items()})


def run(options: Options) -> list[Figure]:
    """Measure both in turn."""
    plain, transacted = Side(), Side()
    with (
        tempfile.TemporaryDirectory(prefix="memq-bench-") as folder,
        dev_broker(Path(folder) / "data") as dev,
        memq.Admin(dev.address) as admin,
        memq.Producer(dev.address, acks="all") as producer,
        memq.Producer(dev.address, transactional_id="bench") as other,
    ):
        admin.create_topic(TOPIC, partitions=PARTITIONS)
        send_plain(producer)
        send_transaction(other)  # the first ones warm up
        cluster = Cluster(Path(folder) / "data", admin)
        for _ in range(50 if options.quick else 300):
            cluster.measure(plain, lambda: send_plain(producer))
            cluster.measure(transacted, lambda: send_transaction(other))
    figures = [delay(plain, transacted, share) for share in (0.5, 0.99)] + costs(plain, transacted)
    for figure in figures:
        options.say(figure.line())
    return figures


def send_plain(producer: memq.Producer) -> float:
    """Send all records; return the seconds from the last one to the last ack."""
    for number in range(RECORDS):
        producer.send(TOPIC, VALUE, partition=number % PARTITIONS)
    began_s = time.perf_counter()
    producer.flush(WAIT_S)
    return time.perf_counter() - began_s


def send_transaction(producer: memq.Producer) -> float:
    """Send all records in a transaction; return the seconds of its commit."""
    with producer.transaction() as transaction:
        for number in range(RECORDS):
            transaction.send(TOPIC, VALUE, partition=number % PARTITIONS)
        began_s = time.perf_counter()
    return time.perf_counter() - began_s


def delay(plain: Side, transacted: Side, share: float) -> Figure:
    """Return how much longer a commit takes than the acks."""
    commit_ms, acks_ms = (percentile(side.waits_s, share) * 1e3 for side in (transacted, plain))
    bound = EXTRA_MS_MAX if share > 0.5 else None
    detail: dict[str, float | str] = {"commit ms": commit_ms, "acks ms": acks_ms, "rounds": len(plain.waits_s)}
    return Figure(NAME, f"commit over ack=all, p{share * 100:g}", commit_ms - acks_ms, "ms", bound, detail=detail)


def costs(plain: Side, transacted: Side) -> list[Figure]:
    """Return the PUTs that a transaction adds, and the pointers and entries that it has."""
    rounds = len(plain.waits_s)
    detail: dict[str, float | str] = {"plain": plain.puts, "transaction": transacted.puts}
    detail |= {name: count / rounds for name, count in sorted(transacted.objects.items())}
    entries: dict[str, float | str] = {"plain": plain.pointers / rounds}
    entries["state log entries"] = transacted.entries / rounds
    return [
        Figure(NAME, "PUTs more than ack=all", transacted.puts - plain.puts, "PUTs", EXTRA_PUTS_MAX, detail=detail),
        Figure(NAME, "pointers", transacted.pointers / rounds, "pointers", PARTITIONS, detail=entries),
    ]
