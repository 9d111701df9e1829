"""Answers of the shards of held records, computed from the state logs alone."""

from __future__ import annotations

from typing import Protocol

from memq.audit.released import ReleaseAnswer, ShardCounts
from memq.topic import Topic, shard_id
from tests.simulation.checked_cluster import CheckedCluster

BLOCK_RECORDS_MAX = 100  # of the blocks that processes of the simulation hold


class ShardAnswers(Protocol):
    """Answers for all shards of held records."""

    @property
    def lost_records(self) -> int:
        """How many held records, at most, owners could not read from the store."""
        ...

    async def ask(self, topic: Topic) -> ReleaseAnswer:
        """See `memq.audit.released.AskReleased`."""
        ...

    def of(self, topic: Topic) -> ReleaseAnswer:
        """Return the units of a topic."""
        ...


class NoShards:
    """The answers of a cluster without held records. See `ShardAnswers`."""

    lost_records = 0

    async def ask(self, topic: Topic) -> ReleaseAnswer:
        """See `ShardAnswers.ask`."""
        return ReleaseAnswer()

    def of(self, topic: Topic) -> ReleaseAnswer:
        """See `ShardAnswers.of`."""
        return ReleaseAnswer()


class FoldedShards:
    """The answers by the state logs of a cluster. See `ShardAnswers`."""

    def __init__(self, cluster: CheckedCluster) -> None:
        self._cluster = cluster

    @property
    def lost_records(self) -> int:
        """See `ShardAnswers.lost_records`."""
        return BLOCK_RECORDS_MAX * sum(each.lost_held_blocks for each in self._cluster.counters)

    async def ask(self, topic: Topic) -> ReleaseAnswer:
        """See `ShardAnswers.ask`."""
        return self.of(topic)

    def of(self, topic: Topic) -> ReleaseAnswer:
        """See `ShardAnswers.of`."""
        found: list[ShardCounts] = []
        for log, holds in self._cluster.cloud.state_logs.holds.items():
            shard = shard_id(log.topic_id, log.partition, holds.life)
            for target in {**holds.numbers, **holds.dropped}:
                if target.topic_id == topic.id:
                    count = holds.count_of(target)
                    released, done = (count.released, count.released_records), (count.settled, count.settled_records)
                    found.append(ShardCounts(target.partition, shard, *released, *done, count.dropped))
        return ReleaseAnswer(tuple(found))
