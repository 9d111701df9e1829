"""The driver's report to the audit: its checkpoint at the start, and the progress since.

Spark asks what lies behind an offset once all before it is done and written down: so that is processed. The records
are reported by the tasks (`task_report`), the doubt about those that said nothing is the auditor's.
"""

from __future__ import annotations

from collections.abc import Mapping

from memq.client.link_pool import LinkPool
from memq.client.observers.report_carrier import ReportCarrier
from memq.client.observers.reporter import CLOSE_S_MAX, STEP_S_MAX, JobReporter
from memq.format.report import BeginReason
from memq.runtime.network import Runtime
from memq.spark.access import TopicPlace
from memq.spark.streaming.offsets import Places
from memq.topic import Position, ReadPartition


class StreamReport:
    """The driver's reports, on its event loop and connections."""

    def __init__(self, name: str, pool: LinkPool, topics: Mapping[str, TopicPlace], runtime: Runtime) -> None:
        self._topics = topics
        self._at: dict[ReadPartition, Position] = {}
        self._pool = pool
        self._reporter = JobReporter("spark-reader", name, runtime, pool, ReportCarrier)

    @property
    def interval_ms(self) -> int:
        """How often the cluster wants to hear of what is done; 0: not at all."""
        return self._pool.audit_ms

    async def stand(self, places: Places, reason: BeginReason) -> None:
        """Note the checkpoint's position `places`; a partition not known before begins there.

        How far it has come is reported at once: when all is read, Spark ends this process without a word.
        """
        came = False
        for partition, place in places.items():
            position, before = place.position(partition), self._at.get(partition)
            if position == before:
                continue
            self._at[partition] = position
            topic = self._topics[partition.topic]
            for writer in topic.partitions[partition]:
                tally = self._reporter.part(topic, writer)
                if tally is not None and before is not None and before < position:
                    tally.commit(str(position))
                    came = True
                elif tally is not None:
                    tally.begin(str(position), reason)
        if came:
            await self._reporter.tell(STEP_S_MAX)

    async def close(self) -> None:
        """Send the last report; connections stay."""
        await self._reporter.close(CLOSE_S_MAX)
