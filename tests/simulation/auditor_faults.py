"""Faults injected into a healed world with a running auditor: it names each, and withdraws false losses.

Records are acked that are in no pointer; their pointer comes after the auditor has named them; a batch is published
once more when its readers have forgotten it. Pointers go into the log directly: no owner would publish them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from memq.audit.finding import IN_QUEUE, Kind
from memq.client.link_pool import bootstrap_addresses
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.fields import check_fields
from memq.client.producer.settings import ProducerSettings
from memq.errors import MemqError
from memq.format.pointer import Pointer, ProducerRanges, encode_pointer
from memq.format.ranges import RangeSet
from memq.format.report import AUDIT_TOPIC, Report, ReportPart, ReportSpan, encode_report, home_of
from memq.notification import Entry
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import AckLevel
from memq.runtime.runtime import Runtime
from memq.topic import Topic
from tests.simulation.auditor_rules import AuditorRules
from tests.simulation.live_faults import ALL, STRANGER, LiveFaults
from tests.simulation.live_replay import History, Named
from tests.simulation.live_rules import both
from tests.simulation.reader import LogEntry

STATION = "stranger"  # the process that reports
HOMES = 2
LOST = 3  # records
MINUTE_MS = 60_000
SENDS_S = 0.5


class AuditorFaults:
    """Does faults to the `queue`. `until` runs the world until something holds, and says whether it does."""

    def __init__(
        self,
        topic: Topic,
        queue: MemoryQueue,
        history: History,
        objects: Mapping[str, bytes],
        rules: AuditorRules,
        until: Callable[[Callable[[], bool]], bool],
        fail: Callable[[str], None],
    ) -> None:
        self._topic = topic
        self._queue = queue
        self._rules = rules
        self._until = until
        self._fail = fail
        self._objects = objects
        self.done: dict[str, int] = {}  # by name
        self._history = [each for each in history if not isinstance(each, LogEntry) or self._is_whole(each)]
        self.batches = [each for each in self._history if isinstance(each, LogEntry) and each.blocks]

    def _is_whole(self, entry: LogEntry) -> bool:
        return all(location.key in self._objects for location in entry.pointer.locations)

    def check_loss(self, report: Callable[[Report, int], None], now_ms: int) -> None:
        """Lose acked records, and find them again. `report` sends a report to a home."""
        before, last = self._rules.named(), max(self.batches, key=lambda entry: (entry.pointer.partition, entry.offset))
        partition, lost = last.pointer.partition, RangeSet([(0, LOST)])
        report(self._acked(partition, now_ms), home_of(self._topic.id, partition, HOMES))
        self._hold("acked and in no pointer", {**before, (Kind.LOST, IN_QUEUE, "", partition, STRANGER): lost})
        self._publish(_pointer_of(last.pointer, lost), now_ms)
        self._hold("its pointer after all", before)

    def check_doubling(self, draw: random.Random) -> None:
        """Publish a batch once more, where there is one without copies."""
        before = self._rules.named()
        again = LiveFaults(self._topic, self._history, self._objects, draw).batch_again_too_late()
        if again is not None:
            entry = again.history[-1]
            assert isinstance(entry, LogEntry)
            self._publish(entry.pointer, entry.time_ms)
            doubled = {key: both(before, again.named, key) for key in again.named}
            self._hold("a batch again too late", {**before, **doubled})

    def _hold(self, name: str, wanted: Named) -> None:
        """Wait until the auditor names what it must, and nothing else."""
        self.done[f"auditor: {name}"] = 1
        if not self._until(lambda: self._rules.named() == wanted):
            self._fail(f"after '{name}' the auditor names {self._rules.named()}, not {wanted}")

    def _acked(self, partition: int, now_ms: int) -> Report:
        """Return the only report of a client, whose records are nowhere."""
        span = ReportSpan(stage="acked", producer=STRANGER, minute=now_ms // MINUTE_MS, ranges=((0, LOST),), level=ALL)
        part = ReportPart(topic=self._topic.name, topic_id=self._topic.id, partition=partition, spans=(span,))
        return Report(
            client=STRANGER,
            kind="producer",
            number=0,
            since_ms=now_ms,
            until_ms=now_ms,
            next_ms=now_ms,
            last=True,
            parts=(part,),
        )

    def _publish(self, pointer: Pointer, time_ms: int) -> None:
        log = self._queue.log(self._topic.read_partition_of(pointer.partition))
        log.entries.append(Entry(log.entries[-1].offset + 1, time_ms, encode_pointer(pointer)))


def _pointer_of(pointer: Pointer, ranges: RangeSet) -> Pointer:
    """Return the pointer of a next batch, of the stranger's records."""
    return msgspec.structs.replace(
        pointer,
        batch_sequence=pointer.batch_sequence + 1,
        producers=(ProducerRanges(STRANGER, tuple(ranges)),),
        producers_complete=True,
        records=ranges.total,
        totals=pointer.totals.plus(pointer.records, pointer.stored_bytes),
        skip=(),
        adopted=(),
        named=(),
    )


async def send_report(runtime: Runtime, brokers: str, report: Report, home: int) -> None:
    """Send a report until it is acked."""

    def wake() -> None:
        asyncio.get_running_loop().call_soon(core.drain)

    settings, addresses = ProducerSettings(acks=AckLevel.ALL), bootstrap_addresses(brokers)
    core = ProducerCore(settings, runtime, addresses, AsyncDelivery, wake, lambda: None, internal=True)
    fields = check_fields(encode_report(report), None, None, None, None)
    try:
        while True:
            try:
                delivery = core.buffer.put(await core.route(AUDIT_TOPIC), fields, home)
                await cast(AsyncDelivery, delivery)
            except MemqError:
                await asyncio.sleep(SENDS_S)
            else:
                return
    finally:
        await core.close()
