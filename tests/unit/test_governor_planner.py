"""Plans of many partitions run on a thread, those of few on the event loop."""

from __future__ import annotations

import asyncio
import threading

from memq.governor.balance import balanced
from memq.governor.governor import AT_ONCE_PARTITIONS_MAX, Planner, view_of
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.planning import AssignmentPlan, ClusterView
from tests.unit.governor_views import broker, topic


async def cluster_of(partitions: int) -> ClusterView:
    """A cluster with a broker and a topic that nobody has."""
    door = MemoryCoordinator(MemoryCluster())
    await door.create_topic(topic("clicks", 1, partitions))
    await door.register(broker("one"))
    return await view_of(door, 0)


def test_the_loop_continues_while_many_partitions_are_planned() -> None:
    went_on = threading.Event()

    def waiting(view: ClusterView) -> AssignmentPlan:
        assert went_on.wait(60), "the loop had no turn"
        return balanced(view)

    async def work() -> None:
        planner, view = Planner(waiting), await cluster_of(AT_ONCE_PARTITIONS_MAX + 1)
        asyncio.get_running_loop().call_soon(went_on.set)
        assert len((await planner.plan(view)).changes) == AT_ONCE_PARTITIONS_MAX + 1
        assert await planner.reshapes(view) == []
        await planner.close()

    asyncio.run(work())


def test_few_partitions_are_planned_without_a_thread() -> None:
    planned_in: list[int] = []

    def noting(view: ClusterView) -> AssignmentPlan:
        planned_in.append(threading.get_ident())
        return balanced(view)

    async def work() -> None:
        planner = Planner(noting)
        assert len((await planner.plan(await cluster_of(3))).changes) == 3
        await planner.close()

    asyncio.run(work())
    assert planned_in == [threading.get_ident()]
