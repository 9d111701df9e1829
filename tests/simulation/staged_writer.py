"""A process that stages records and commits them in batches, again after every end."""

from __future__ import annotations

import asyncio
import random

from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.errors import InvalidRequestError, MemqError, TooOldError
from memq.format.staged_manifest import StagedObject
from memq.runtime.runtime import Runtime
from memq.simulation.world.node import SimNode
from memq.storage_handlers import StorageHandler
from tests.simulation.plan import Plan
from tests.simulation.reduced_constants import PARTS
from tests.simulation.staged_rules import StagedRules

OBJECTS_MAX = 3  # that a batch is made of
COMMIT_S = 20.0
RETRY_S = 0.5
RESTS_MAX = 1
REST_RATE, AGAIN_RATE = 0.1, 0.3
ATOMIC_RATE = 0.5  # of the batches, where parts of transactions are staged


class StagedLife:
    """One life of the process. `batches` is how many there are to be, over all lives."""

    def __init__(
        self,
        plan: Plan,
        node: SimNode,
        runtime: Runtime,
        brokers: list[str],
        store: StorageHandler,
        rules: StagedRules,
    ) -> None:
        self._atomic_rate = ATOMIC_RATE if PARTS in plan.constants else 0.0
        self._plan = plan
        self._node = node
        self._runtime = runtime
        self._brokers = brokers
        self._store = store
        self._rules = rules
        self._rests = 0

    async def run(self, batches: int) -> None:
        """Commit up to batch `batches`, beginning with the last one that is known to be there: it may be once more."""
        draw, name = self._node.random, self._node.name
        async with StagedCommits(self._brokers, name, runtime=self._runtime) as commits:
            batch = max(0, self._rules.known(name) - 1)
            while batch < batches:
                if not await self._committed(commits, batch):
                    await asyncio.sleep(RETRY_S)
                    continue
                if self._rests < RESTS_MAX and draw.random() < REST_RATE:
                    self._rests += 1
                    await asyncio.sleep(self._plan.named_rest_s_max)
                    continue  # the same batch again
                if draw.random() < AGAIN_RATE:
                    await self._committed(commits, draw.randrange(batch + 1))
                await asyncio.sleep(draw.uniform(0, self._plan.pace_s_max))
                batch += 1

    async def _committed(self, commits: StagedCommits, batch: int) -> bool:
        """Stage a batch and commit it; False when that did not come to an end.

        A batch that may have been forgotten is not published: the writer gives it up.
        """
        try:
            await commits.topics([self._plan.shape.topic])
            objects = [await self._stage(commits, batch) for _ in range(self._node.random.randint(1, OBJECTS_MAX))]
            self._rules.offered(self._node.name, batch, [staged.key for staged in objects])
            atomic = random.Random(f"{self._node.name}/{batch}").random() < self._atomic_rate
            try:
                manifest = await commits.commit(batch, objects, self._store, atomic=atomic, timeout_s=COMMIT_S)
            except InvalidRequestError:  # an earlier try, with other rows, has decided what the batch is
                manifest = await commits.commit(batch, (), self._store, timeout_s=COMMIT_S)
        except TooOldError:
            self._rules.given_up(self._node.name, batch)
            return True
        except MemqError:
            return False
        self._rules.committed(self._node.name, batch, manifest)
        return True

    async def _stage(self, commits: StagedCommits, batch: int) -> StagedObject:
        draw = self._node.random
        name = self._plan.shape.topic
        topic = (await commits.topics([name]))[name]
        writer = StagedWriter(
            commits.cluster, {name: topic}, self._store, self._node.name, block_bytes=1_000, runtime=self._runtime
        )
        values: list[bytes] = []
        for _ in range(draw.randint(1, 2 * self._plan.block_records_max)):
            partition = draw.randrange(self._plan.shape.partitions)
            values.append(self._rules.made(self._node.name, batch, partition, draw.randbytes(draw.choice((0, 300)))))
            await writer.add(name, values[-1], partition=partition)
        (staged,) = await writer.finish()
        self._rules.staged(staged.key, values)
        return staged
