"""The part of `Admin` that begins, shows and removes pop groups."""

from __future__ import annotations

from dataclasses import dataclass

from memq.client.arguments import check_number
from memq.client.consumer.batch import TopicPartition, topic_partition_of
from memq.client.consumer.offset_resolver import Lag
from memq.client.consumer.settings import BEGINNING, Point, check_point, point_of
from memq.client.group_admin import AsyncGroupAdmin, GroupAdmin
from memq.client.log_answers import ask_logs
from memq.client.queue.items import checked_lease_ms
from memq.errors import InvalidRequestError, MemqError
from memq.limits import QUEUE_ATTEMPTS_MAX
from memq.protocol.admin_messages import AdminRequest
from memq.protocol.pop_messages import BeginPop, ListPops, RemovePop, WirePop, WirePopPosition
from memq.queues.pop.groups import check_queue, pop_queue, topic_of
from memq.topic import Committed, Position, ReadPartition, Topic, check_resource_name, read_partitions

POP_LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class PopProgress:
    """The position of a pop group in one partition, and its lag, or the error of its measurement."""

    topic_partition: TopicPartition
    position: Position
    measured: Lag | MemqError


@dataclass(frozen=True, slots=True)
class PopGroupDescription:
    """A pop group: its queue `topic@group`, its settings, and its progress.

    `items` counts records that were read and have not ended; dead ones do not count.
    """

    queue: str
    topic: str
    lease_s: float
    attempts_max: int
    items: int
    partitions: tuple[PopProgress, ...]

    @property
    def records(self) -> int | None:
        """The lag: `items`, and records that are not read yet; None if the log of a partition does not answer."""
        lags = [each.measured for each in self.partitions]
        return self.items + sum(lag.records for lag in lags if isinstance(lag, Lag)) if _known(lags) else None


def _known(lags: list[Lag | MemqError]) -> bool:
    return all(isinstance(lag, Lag) for lag in lags)


class AsyncPopAdmin(AsyncGroupAdmin):
    """Begins, shows and removes pop groups, in addition to consumer groups."""

    async def begin_pop(
        self, topic: str, group: str, *, start: Point = BEGINNING, lease: float = POP_LEASE_S, attempts_max: int = 0
    ) -> str:
        """Begin a pop group if it does not exist; return its queue. See `memq.Queue.begin_pop`."""
        ask = await self.pop_request(topic, group, start=start, lease=lease, attempts_max=attempts_max)
        await self._ask(AdminRequest(ask=ask))
        return ask.queue

    async def pop_request(self, topic: str, group: str, *, start: Point, lease: float, attempts_max: int) -> BeginPop:
        """Return the request that begins a pop group; positions are those of now. Raises: as `begin_pop`."""
        queue = check_queue(pop_queue(check_resource_name(topic), group))
        check_point(start, "start", (topic,))
        check_number("attempts_max", attempts_max, 0, QUEUE_ATTEMPTS_MAX, int)
        lease_ms = checked_lease_ms(lease)
        found = (await self.topic(topic)).topic
        positions: list[WirePopPosition] = []
        for log in read_partitions(found):
            point = point_of(start, topic_partition_of(log))
            position = await self._resolver.start_at(point, log, found.settings)
            marked = await self._resolver.marked(log, position)
            positions.append(WirePopPosition(log.partition, marked.pointer_offset, marked.record_index, marked.mark))
        return BeginPop(
            queue=queue, topic_id=found.id, lease_ms=lease_ms, attempts_max=attempts_max, positions=positions
        )

    async def pop_groups(self, *, proven: bool = True) -> list[PopGroupDescription]:
        """Return all pop groups with their lag, by the names of their queues. `proven` as in `groups`."""
        pops = (await self._ask(AdminRequest(ask=ListPops(proven=proven)))).about_queues.pops
        topics = {topic.id: topic for topic in await self.topics(internal=True)} if pops else {}
        return [await self._described_pop(each, topics.get(each.topic_id)) for each in pops]

    async def _described_pop(self, pop: WirePop, topic: Topic | None) -> PopGroupDescription:
        progress: tuple[PopProgress, ...] = ()
        if topic is not None:
            at = {
                ReadPartition(topic.name, topic.id, each.partition): Position(
                    each.partition, each.offset, each.index, each.mark
                )
                for each in pop.positions
            }
            of: Topic = topic

            async def lag(log: ReadPartition) -> Lag:
                totals = await self._totals_before(of, log, at[log])
                return await self._lag(of, log, Committed(at[log], totals))

            lags = await ask_logs(dict.fromkeys(at, topic), lag)
            progress = tuple(PopProgress(topic_partition_of(log), at[log], lags[log]) for log in at)
        terms = pop.lease_ms / 1_000, pop.attempts_max
        return PopGroupDescription(pop.queue, topic_of(pop.queue), *terms, pop.items, progress)

    async def delete_pop(self, queue: str) -> None:
        """Remove a pop group, `topic@group`, with its positions; its items end. Raises: NotFoundError."""
        if "@" not in check_queue(queue):
            raise InvalidRequestError(f"'{queue}' is no pop group", hint="name it topic@group")
        await self._ask(AdminRequest(ask=RemovePop(queue=queue)))


class PopAdmin(GroupAdmin):
    """The same for threads."""

    _core: AsyncPopAdmin

    def begin_pop(
        self, topic: str, group: str, *, start: Point = BEGINNING, lease: float = POP_LEASE_S, attempts_max: int = 0
    ) -> str:
        """Begin a pop group if it does not exist; return its queue. See `memq.Queue.begin_pop`."""
        work = self._core.begin_pop(topic, group, start=start, lease=lease, attempts_max=attempts_max)
        return self._background.run(work)

    def pop_groups(self, *, proven: bool = True) -> list[PopGroupDescription]:
        """Return all pop groups with their lag, by the names of their queues. `proven` as in `groups`."""
        return self._background.run(self._core.pop_groups(proven=proven))

    def delete_pop(self, queue: str) -> None:
        """Remove a pop group, `topic@group`, with its positions; its items end. Raises: NotFoundError."""
        self._background.run(self._core.delete_pop(queue))
