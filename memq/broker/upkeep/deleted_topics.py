"""The positions of groups in deleted topics: the owner of a service partition removes them.

A topic is gone when the coordinator proves its deletion twice, FORGET_S apart: a wrong answer alone takes no position.
An owner that dies before leaves the work to the next one, and a repeated removal changes nothing.
"""

from __future__ import annotations

import asyncio

from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.errors import MemqError
from memq.groups.coordinator import GroupCoordinator

FORGET_S = 30.0


class DeletedTopics:
    """Removes deleted topics from the groups of one service partition, while its log is open here."""

    def __init__(self, services: Services, partitions: Partitions, groups: GroupCoordinator) -> None:
        self._services = services
        self._partitions = partitions
        self._groups = groups
        self._proven: dict[str, None] = {}  # ids of topics whose deletion the last round has proven

    async def run(self) -> None:
        """Search until cancelled."""
        while True:
            await asyncio.sleep(FORGET_S)
            try:
                await self.search()
            except MemqError as error:  # the next round tries again, here or at the next owner
                self._services.events.warning("housekeeping-failed", f"positions in deleted topics: {error}")

    async def search(self) -> None:
        """Run one round. Raises: UnreachableError; as `GroupCoordinator.forget`."""
        known = {topic.id for topic in self._partitions.topics()}
        named = {topic: logs for topic, logs in self._groups.named_topics().items() if topic[1] not in known}
        before, self._proven = self._proven, {}
        for (name, topic_id), logs in named.items():
            if not await self._services.coordinator.deleted(topic_id):
                continue
            self._proven[topic_id] = None
            if topic_id in before:
                await self._groups.forget(sorted(logs))
                text = f"topic '{name}' with id {topic_id} was deleted: {len(logs)} read partitions"
                self._services.events.info("positions-forgotten", text)
