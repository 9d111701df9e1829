"""Producers and readers that load a cluster; each reader gets each record once, in its sender's order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Self

import memq
from memq.runtime.clock import SystemClock
from tests.processes import BrokerProcess

TOPIC = "clicks"
PARTITIONS = 6
RECORDS_S = 500
BLOCKS_MAX = 30_000  # a minute and more of them
HANG_S = 120.0  # an ack that does not come is a failure, not a build that never ends
# Settings with which batches stay open for long: acked blocks are in the spool, and in no object.
HOLDING: dict[str, int | bool | str] = {
    "ack1": "disk",
    "seal_when_idle": False,
    "batch_age_ms_max": 600_000,
    "stale_publish_ms": 1_000,
}
_CLOCK = SystemClock()
_numbers = itertools.count()


def addresses_of(brokers: Iterable[BrokerProcess]) -> str:
    """Return where clients begin."""
    return ",".join(broker.address for broker in brokers)


def create(brokers: Sequence[BrokerProcess], **settings: int) -> None:
    """Make the topic that senders send to."""
    with memq.Admin(addresses_of(brokers)) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS, settings=dict(settings))


class Sender:
    """A producer on a thread of its own: 500 numbered records a second, over all partitions, until it is asked to end.

    `number`: in its records, before theirs. For each partition: `acked_s`, the moments of its acks on the monotonic
    clock, and `acked`, how many records these were for.
    """

    def __init__(self, brokers: Sequence[BrokerProcess], acks: Literal["1", "all"] = "all") -> None:
        self.number = next(_numbers)
        self.sent = 0
        self.errors: list[BaseException] = []
        self.acked_s: list[list[float]] = [[] for _ in range(PARTITIONS)]
        self.acked = [0] * PARTITIONS
        self._addresses = addresses_of(brokers)
        self._acks = acks
        self._heard = threading.Condition()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sender")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End, and wait until everything is acked."""
        self._end.set()
        self._thread.join()

    def wait_for(self, blocks: int) -> None:
        """Wait until so many more blocks are acked."""
        wanted = self._blocks() + blocks
        self._wait(lambda: self._blocks() >= wanted, f"{blocks} more acks")

    def wait_for_all(self, blocks: int = 1) -> None:
        """Wait until so many more blocks of each partition are acked."""
        wanted = [len(times) + blocks for times in self.acked_s]
        self._wait(
            lambda: all(len(times) >= least for times, least in zip(self.acked_s, wanted, strict=True)),
            f"{blocks} more acks of each partition",
        )

    def wait_for_records(self, records: int, partitions: Sequence[int]) -> None:
        """Wait until so many more records in these partitions together are acked."""
        wanted = sum(self.acked[partition] for partition in partitions) + records
        self._wait(
            lambda: sum(self.acked[partition] for partition in partitions) >= wanted,
            f"{records} more records in {partitions}",
        )

    def wait_for_sent(self, records: int) -> None:
        """Wait until so many more records are handed to the producer."""
        wanted = self.sent + records
        with self._heard:
            assert self._heard.wait_for(lambda: self.sent >= wanted, HANG_S), f"not {records} records in {HANG_S:.0f} s"

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Look whether something holds, again after each ten acks."""
        blocks = 0
        while not holds():
            assert blocks < BLOCKS_MAX, f"it does not come to hold while {blocks} blocks are acked"
            self.wait_for(10)
            blocks += 10

    def go_on_for(self, seconds: float) -> None:
        """Wait for acks until so many seconds are over; none for long is a failure."""
        until_s = _CLOCK.monotonic() + seconds
        while _CLOCK.monotonic() < until_s:
            self.wait_for(10)

    def gap_s(self, partitions: Iterable[int], since_s: float) -> float:
        """Return the longest time without an ack in any of the partitions, from shortly before `since_s` on."""
        longest = 0.0
        for times in (self.acked_s[partition] for partition in partitions):
            start = next((at for at, time_s in enumerate(times) if time_s >= since_s), len(times))
            near = times[max(0, start - 1) :]
            longest = max([longest, *(after - before for before, after in itertools.pairwise(near))])
        return longest

    def _blocks(self) -> int:
        return sum(map(len, self.acked_s))

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        with self._heard:
            if not self._heard.wait_for(lambda: holds() or bool(self.errors), HANG_S):
                raise AssertionError(f"{what}: not within {HANG_S:.0f} s")
        assert not self.errors, f"{what}: {self.errors[:3]}"

    def _on_ack(self, outcome: memq.Ack | memq.MemqError) -> None:
        with self._heard:
            if isinstance(outcome, memq.MemqError):
                self.errors.append(outcome)
            else:
                self.acked_s[outcome.partition].append(_CLOCK.monotonic())
                self.acked[outcome.partition] += outcome.records
            self._heard.notify_all()

    def _run(self) -> None:
        try:
            with memq.Producer(self._addresses, acks=self._acks, linger_ms=5, on_ack=self._on_ack) as producer:
                began_s = _CLOCK.monotonic()
                while not self._end.wait(max(0.0, began_s + self.sent / RECORDS_S - _CLOCK.monotonic())):
                    producer.send(TOPIC, b"%d %d" % (self.number, self.sent), partition=self.sent % PARTITIONS)
                    with self._heard:
                        self.sent += 1
                        self._heard.notify_all()
        except BaseException as error:  # noqa: BLE001 - the test reads it
            with self._heard:
                self.errors.append(error)
                self._heard.notify_all()


class Tally:
    """What a reader got."""

    def __init__(self) -> None:
        self.records = 0  # without those that came again
        self._seen: set[tuple[int, int]] = set()
        self._got: dict[tuple[int, int], list[int]] = {}

    def add(self, batch: memq.Batch) -> None:
        """Note the records of a batch."""
        for record in batch:
            sender, number = map(int, (record.value or b"").split())
            self.records += (sender, number) not in self._seen
            self._seen.add((sender, number))
            self._got.setdefault((sender, batch.partition), []).append(number)

    def check_complete(self, sender: Sender) -> None:
        """It is every record of a sender; what was not committed when its group began again may be there again."""
        for partition in range(PARTITIONS):
            wanted = list(range(partition, sender.sent, PARTITIONS))
            found = self._got.get((sender.number, partition), [])
            assert sorted({*found}) == wanted, _difference(partition, found, wanted)

    def check(self, *senders: Sender) -> None:
        """It is each record of each sender once, in its order within each partition; and nothing else."""
        got = dict(self._got)
        for sender in senders:
            assert sender.errors == []
            for partition in range(PARTITIONS):
                wanted = list(range(partition, sender.sent, PARTITIONS))
                found = got.pop((sender.number, partition), [])
                assert found == wanted, _difference(partition, found, wanted)
        assert got == {}, f"records of nobody: {list(got)}"


def check_read(brokers: Sequence[BrokerProcess], *senders: Sender) -> None:
    """Read everything and check that it is what they sent, all of it."""
    tally = Tally()
    with memq.Consumer(addresses_of(brokers), [TOPIC], end="end") as consumer:
        for batch in consumer:
            tally.add(batch)
    tally.check(*senders)


class GroupReader:
    """A member of a group on a thread of its own, that reads and commits until it is asked to end."""

    def __init__(self, brokers: Sequence[BrokerProcess]) -> None:
        self.tally = Tally()
        self.errors: list[BaseException] = []
        self._addresses = addresses_of(brokers)
        self._changed = threading.Condition()
        self._end = False
        self._thread = threading.Thread(target=self._run, name="reader")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end = True
        self._thread.join()

    def wait_for(self, records: int) -> None:
        """Wait until it has read so many records in all."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.tally.records >= records or bool(self.errors), HANG_S)
        assert self.errors == []
        assert done, f"{self.tally.records} of {records} records within {HANG_S:.0f} s"

    def _run(self) -> None:
        try:
            with memq.Consumer(self._addresses, [TOPIC], group="report", start="beginning") as consumer:
                while not self._end:
                    batch = consumer.poll(timeout=0.5)
                    if batch is not None:
                        with self._changed:
                            self.tally.add(batch)
                            self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the test reads it
            with self._changed:
                self.errors.append(error)
                self._changed.notify_all()


def _difference(partition: int, found: list[int], wanted: list[int]) -> str:
    lost = sorted({*wanted} - {*found})
    twice = len(found) - len({*found})
    return (
        f"partition {partition}: {len(lost)} lost ({lost[:5]} …), {twice} twice, order kept: {found == sorted(found)}"
    )
