"""Two groups of up to six members that come and go over twelve read partitions, on real queues, under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from memq.aio import Admin, Consumer, Producer
from memq.client.consumer.batch import TopicPartition
from memq.errors import FencedError, RetryableError
from memq_localstack.servers import Server
from tests.integration.queued_broker import QUEUES, queued_broker
from tests.soak import repetitions

TOPIC = "clicks"
PARTITIONS = 12
AHEAD = 20 * PARTITIONS  # a commit is a request for each batch: groups would take long to catch up
HANG_S = 240
# Who is there, after each change; a group comes back to this as often as the soak wants.
CHANGES = ("abc", "abcdef", "bdf", "bdfga")


class Group:
    """Members with what they hold, what was committed, and how often a partition went to another member."""

    def __init__(self, address: str, name: str) -> None:
        self.committed: list[int] = []
        self.moved = 0
        self.least = 0
        self.changed = asyncio.Event()
        self._address = address
        self._name = name
        self._members: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._held: dict[str, set[TopicPartition]] = {}
        self._last: dict[TopicPartition, str] = {}

    async def change(self, members: str) -> None:
        """Have just these members, and wait until the partitions are shared out evenly."""
        before = {name: len(held) for name, held in self._held.items()}
        leaving = [self._members.pop(name) for name in sorted(set(self._members) - set(members))]
        for _, leave in leaving:
            leave.set()
        await asyncio.gather(*(task for task, _ in leaving))
        for name in sorted(set(members) - set(self._members)):
            leave = asyncio.Event()
            self._held[name] = set()
            self._members[name] = asyncio.create_task(self._live(name, leave)), leave
        await self.until(self._is_even)
        if before:
            # A partition must move when who held it is gone, or to give who came a fair share of what there is.
            gone = sum(count for name, count in before.items() if name not in members)
            given = sum(len(self._held[name]) for name in members if name not in before)
            self.least += max(gone, given)
        else:
            self.moved = 0  # the first time everything goes to somebody

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        while not holds():
            self.changed.clear()
            await self.changed.wait()

    async def until_committed(self, count: int) -> None:
        """Wait until so many records are committed."""
        await self.until(lambda: len(self.committed) >= count)

    async def _live(self, name: str, leave: asyncio.Event) -> None:
        def assigned(places: list[TopicPartition]) -> None:
            self._held[name] |= set(places)
            for place in places:
                self.moved += self._last.get(place) != name
                self._last[place] = name
            self.changed.set()

        def revoked(places: list[TopicPartition]) -> None:
            self._held[name] -= set(places)
            self.changed.set()

        async with Consumer(
            self._address,
            [TOPIC],
            group=self._name,
            auto_commit=False,
            on_assigned=assigned,
            on_revoked=revoked,
            on_lost=revoked,
        ) as consumer:
            while not leave.is_set():
                batch = await consumer.poll(0.1)
                if batch is not None:
                    values = [int(value) for value in batch.values() if value is not None]
                    if await _commit(consumer, batch):
                        self.committed += values
                        self.changed.set()
        self._held.pop(name)

    def _is_even(self) -> bool:
        shares = [len(self._held[name]) for name in self._members]
        once = set().union(*(self._held[name] for name in self._members))
        return sum(shares) == len(once) == PARTITIONS and max(shares) - min(shares) <= 1

    async def end(self) -> None:
        """Have all members leave."""
        for task, leave in self._members.values():
            leave.set()
            await task


async def _commit(consumer: Consumer, batch: object) -> bool:
    """Commit a batch; False when its partition went to another member, which reads it again."""
    while True:
        try:
            await consumer.commit(batch)  # type: ignore[arg-type]
        except FencedError:
            return False
        except RetryableError:
            continue  # the group is being balanced
        else:
            return True


async def produce(address: str, groups: list[Group], stop: asyncio.Event) -> int:
    """Send numbered records over all partitions, not far ahead of the groups, until asked to stop; return how many."""
    number = 0
    async with Producer(address) as producer:
        while not stop.is_set():
            deliveries = [await producer.send(TOPIC, b"%d" % (number + at), partition=at) for at in range(PARTITIONS)]
            number += PARTITIONS
            for delivery in deliveries:
                await delivery
            for group in groups:
                await group.until_committed(number - AHEAD)
    return number


@pytest.mark.soak
@QUEUES
def test_members_come_and_go_and_each_record_is_committed_once(kind: str, tmp_path: Path, kafka: Server) -> None:
    rounds = repetitions(few=1, many=20)

    async def work() -> None:
        async with queued_broker(kind, tmp_path, kafka) as broker, Admin(broker.address) as admin:
            await admin.create_topic(TOPIC, partitions=PARTITIONS)
            groups = [Group(broker.address, "one"), Group(broker.address, "two")]
            stop = asyncio.Event()
            sending = asyncio.create_task(produce(broker.address, groups, stop))
            for _ in range(rounds):
                for members in CHANGES:
                    await asyncio.gather(*(group.change(members) for group in groups))
            stop.set()
            sent = await sending
            for group in groups:
                await group.until_committed(sent)
                assert Counter(group.committed) == Counter(range(sent))
                assert group.least > 0
                assert group.moved <= 1.2 * group.least, f"{group.moved} moved, {group.least} had to"
                await group.end()

    async def bounded() -> None:
        async with asyncio.timeout(HANG_S * rounds):
            await work()

    asyncio.run(bounded())
