"""The rules of pop groups: the register of queue items, for the records of a topic (Q1 to Q5).

A record comes with the position that it has in the log, and no record that the log lacks comes. Each record ends by an
ack, or because retention took its pointer. A copy of a block is no second item: the register knows records by value.
Rows of tasks that run again are known by their positions, since several blocks may have them.
"""

from __future__ import annotations

from collections.abc import Callable

from memq.client.queue.items import QueueItem
from memq.queues.decisions import ItemState
from memq.queues.machine import QueueMachine
from memq.simulation.ports.groups import StateLogs
from memq.topic import ReadPartition, Topic
from tests.simulation.checker import Checker
from tests.simulation.queue_rules import QueueKind, QueueRules, Register
from tests.simulation.read_log import ReadLog


class PopRules(QueueRules):
    """`checker` has the logs. Records before `ends`, by log, are to end; without it, all are."""

    def __init__(
        self,
        topic: Topic,
        queue: str,
        kind: QueueKind,
        checker: Checker,
        states: StateLogs,
        fail: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        super().__init__(queue, kind, states, fail, now)
        self.topic = topic
        self.ends: dict[ReadPartition, int] | None = None
        self._checker, self._logs = checker, checker.logs

    def given(self, worker: object, item: QueueItem, left_s: float) -> None:
        """See `QueueRules.given`; the record must lie at its position."""
        at = item.position
        log = None if at is None else self._logs.get(ReadPartition(self.topic.name, self.topic.id, at.read_partition))
        if at is None or log is None or log.source_of(at.pointer_offset, at.record_index, item.payload) is None:
            self._fail(f"record {item.id} of '{self.queue}' comes from {at}, where the log has another one")
            return
        self.registers.setdefault(self.key_of(item), Register())
        super().given(worker, item, left_s)

    def key_of(self, item: QueueItem) -> bytes:
        """See `QueueRules.key_of`."""
        at = item.position
        assert at is not None, "see `given`"
        return self._key(item.payload, at.pointer_offset, at.record_index)

    def _key(self, value: bytes, offset: int, index: int) -> bytes:
        repeats = self._checker.records[value].repeats
        return f"{offset}:{index} ".encode() + value if repeats else value

    def _is_home(self, machine: QueueMachine) -> bool:
        """Whether a shard has the group: groups of other shards may have blocks of the same ids."""
        return self.queue in machine.pops.groups

    def stop(self) -> None:
        """Let the group end with the records that are in the logs now."""
        self.ends = {partition: len(log.stream) for partition, log in self._own_logs()}

    def open(self) -> list[object]:
        """Return the records in the logs that have no end: an ack, or one because retention took them."""
        return [
            log.stream[index].value
            for partition, log in self._own_logs()
            for index in range(len(log.stream) if self.ends is None else self.ends.get(partition, 0))
            if self._is_open(log, index)
        ]

    def _is_open(self, log: ReadLog, index: int) -> bool:
        record = log.stream[index]
        register = self.registers.get(self._key(record.value, record.offset, record.record_index))
        state = None if register is None else self._state_of(register)
        if state is ItemState.EXPIRED and not log.was_expired(index):
            self._fail(f"a record of '{self.queue}' at offset {record.offset} has expired in the log")
        is_over = register is not None and (register.acked or state is ItemState.ACKED)
        return not is_over and not (log.was_expired(index) and state in (None, ItemState.EXPIRED))

    def _own_logs(self) -> list[tuple[ReadPartition, ReadLog]]:
        return [(each, log) for each, log in self._logs.items() if each.topic_id == self.topic.id]
