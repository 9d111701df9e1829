"""Rules of listeners: what handlers are called with, what is stored for it, and what the group commits.

The rules share nothing with the product's listener. They know the log of the topic, and read the headers of retries and
dead letters by themselves. The value of a record decides what its handler answers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import memq
from memq.client.listener.open_records import NO_ANSWER
from memq.topic import Position, ReadPartition, Topic
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import LogEntry, RetryTopicRecord

RETRIES, LETTERS = ".retry", ".dead-letters"
DELAYS_S = (0.3, 1.5)
DEADLY = 63  # of 64 records: the first tries end their process
TRIES = len(DELAYS_S) + 1
ASKED_S = 0.8  # after which a handler asks to be called again
DEATHS_MAX = 24  # of processes by one record: the first ones may be counted for records before it


def is_retry_topic(name: str) -> bool:
    """Whether a topic belongs to a group of listeners."""
    return name.endswith((RETRIES, LETTERS))


def kind_of(value: bytes) -> str:
    """Return what the handler does with a record."""
    kinds = ("never", "once", "asks", "dead", "parked", "twice")
    if zlib.crc32(value) % 64 == DEADLY:
        return "deadly"
    number = zlib.crc32(value) % 16
    return kinds[number] if number < len(kinds) else "done"


@dataclass(slots=True)
class Handled:
    """One record of the topic, as its handlers and the two topics of its group show it."""

    failed: dict[int, int] = field(default_factory=dict)  # by attempt: the due time of the next one, Unix ms
    retries: dict[int, None] = field(default_factory=dict)  # attempts that the retry topic has
    done: bool = False
    letter: bool = False
    begins: int = 0  # calls of a handler
    deaths: int = 0  # of processes, by its handler
    unanswered: bool = False  # a later try knew of one without an answer

    @property
    def complete(self) -> bool:
        """Whether no handler needs to be called any more."""
        return self.done or self.letter


class RetryRules:
    """One group of listeners on one topic. A due time is compared with the clock of the process that handles it."""

    def __init__(
        self,
        topic: Topic,
        group: str,
        logs: Mapping[ReadPartition, ReadLog],
        fail: Callable[[str], None],
        *,
        ordered: bool,
        blocks: bool,
    ) -> None:
        self.topic, self.group = topic, group
        self._logs = logs
        self._fail = fail
        self.ordered, self.blocks = ordered, blocks
        self._records: dict[bytes, Handled] = {}
        self._retried: dict[ReadPartition, list[tuple[Position, bytes, int]]] = {}  # retries: position, value, attempt

    def _of(self, value: bytes) -> Handled:
        return self._records.setdefault(value, Handled())

    # ---- handlers -------------------------------------------------------------------------------

    def begin(self, message: memq.Message, wall_ms: int) -> None:
        """A handler is called, at this time of the clock of its process."""
        value, attempt = message.value or b"", message.attempt
        record, what = self._of(value), f"attempt {message.attempt} of record {(message.value or b'')[:40]!r}"
        if not any(value == each.value for each in self._log_of(message).stream):
            self._fail(f"{what} is of no record of the topic")
        record.begins += 1
        if attempt > TRIES and not self.blocks:
            self._fail(f"{what} comes after its last try")
        if message.error == NO_ANSWER:
            record.unanswered = True
        elif attempt > 1:
            if attempt - 1 not in record.failed:
                self._fail(f"{what} comes without a failed attempt before it")
                return
            if wall_ms < record.failed[attempt - 1]:
                self._fail(f"{what} comes {record.failed[attempt - 1] - wall_ms} ms before its due time")
            if message.error != cause_of(value):
                self._fail(f"{what} has the error {message.error!r}")
        if self.ordered and message.key is not None:
            self._check_order(message, what)

    def _log_of(self, message: memq.Message) -> ReadLog:
        partition = ReadPartition(self.topic.name, self.topic.id, message.position.read_partition)
        return self._logs.get(partition) or ReadLog()

    def _check_order(self, message: memq.Message, what: str) -> None:
        key = (message.key or b"").decode()
        log = self._log_of(message)
        for index, each in enumerate(log.stream):
            if each.value == message.value:
                return
            if key_of(each.value) == key and self._is_open(log, index):
                self._fail(f"{what} comes before record {each.value[:40]!r} of key {key} is complete")
                return

    def answer(self, message: memq.Message, wall_ms: int) -> object:
        """Return what the handler answers; an exception is to be raised. `wall_ms` as in `begin`."""
        value, attempt = message.value or b"", message.attempt
        record, kind = self._of(value), kind_of(value)
        if kind == "deadly" and not self.blocks:
            record.deaths += 1
            if record.deaths > DEATHS_MAX:
                self._fail(f"record {value[:40]!r} has ended {record.deaths} processes")
            raise ProcessEnd
        fails = {"once": 1, "asks": 1, "twice": 2, "never": TRIES + 1 if self.blocks else 99}.get(kind, 0)
        if attempt <= fails:
            delay_s = ASKED_S if kind == "asks" else DELAYS_S[min(attempt, len(DELAYS_S)) - 1]
            due_ms = wall_ms + round(delay_s * 1000)
            record.failed[attempt] = min(due_ms, record.failed.get(attempt, due_ms))
            if kind == "asks":
                return memq.Retry(after=ASKED_S, reason=cause_of(value))
            return HandlerError(cause_of(value).removeprefix("HandlerError: "))
        if kind in ("dead", "parked"):
            return memq.DeadLetter(cause_of(value)) if kind == "dead" else memq.Park(cause_of(value))
        record.done = True
        return None

    # ---- queue ----------------------------------------------------------------------------------

    def published(self, partition: ReadPartition, entry: LogEntry, records: Iterable[RetryTopicRecord]) -> None:
        """Records of a topic of the group are in the queue; late ones of an earlier group are not checked."""
        if partition.topic not in (self.group + RETRIES, self.group + LETTERS):
            return
        for index, value, headers in records:
            texts = {name: (content or b"").decode() for name, content in headers}
            record = self._of(value)
            if texts.get("memq-topic") != self.topic.name:
                self._fail(f"a record of {partition.topic} has the headers {texts}")
            elif partition.topic == self.group + RETRIES:
                attempt = int(texts["memq-attempt"])
                if attempt - 1 not in record.failed:
                    self._fail(
                        f"attempt {attempt} of record {value[:40]!r} is stored, and attempt {attempt - 1} did not fail"
                    )
                record.retries[attempt] = None
                at = Position(partition.partition, entry.offset, index)
                self._retried.setdefault(partition, []).append((at, value, attempt))
            else:
                self._check_letter(value, texts)
                record.letter = True

    def _check_letter(self, value: bytes, texts: Mapping[str, str]) -> None:
        kind, what = kind_of(value), f"the dead letter of record {value[:40]!r}"
        record = self._of(value)
        if texts["memq-cause"] == NO_ANSWER:
            if self.blocks or not record.begins:  # processes may end after the count, and before the call
                self._fail(f"{what} is of one that was tried {record.begins} times")
            elif (int(texts["memq-attempts"]), texts["memq-state"]) != (TRIES, "dead"):
                self._fail(f"{what} has {texts['memq-attempts']} attempts and state {texts['memq-state']}")
            return
        if kind not in ("never", "dead", "parked") or (kind == "never" and self.blocks):
            self._fail(f"{what} is of one that does not fail always")
        if texts["memq-cause"] != cause_of(value):
            self._fail(f"{what} has the cause {texts['memq-cause']!r}")
        attempts, state = TRIES if kind == "never" else 1, "parked" if kind == "parked" else "dead"
        if record.unanswered:
            stated = int(texts["memq-attempts"])
            attempts = max(attempts, stated if self.blocks else min(stated, TRIES))
        if (int(texts["memq-attempts"]), texts["memq-state"]) != (attempts, state):
            self._fail(f"{what} has {texts['memq-attempts']} attempts and state {texts['memq-state']}")

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """The group stored a position: all records before it are complete, or their retries are stored."""
        if partition.topic_id == self.topic.id:
            log = self._logs.get(partition) or ReadLog()
            for index, each in enumerate(log.stream):
                if (each.offset, each.record_index) >= (position.pointer_offset, position.record_index):
                    break
                if self._is_open(log, index) and not self._of(each.value).retries:
                    self._fail(f"{position} of {group} is stored, and record {each.value[:40]!r} before it is open")
        for at, value, attempt in self._retried.get(partition, ()):
            record = self._of(value)
            if at < position and not record.complete and not any(later > attempt for later in record.retries):
                self._fail(
                    f"{position} of {group} is stored, and attempt {attempt} of {value[:40]!r} before it is open"
                )

    @property
    def open_records(self) -> int:
        """How many records of the topic are open."""
        logs = [log for partition, log in self._logs.items() if partition.topic_id == self.topic.id]
        return sum(self._is_open(log, index) for log in logs for index in range(len(log.stream)))

    def _is_open(self, log: ReadLog, index: int) -> bool:
        """Whether a record is not complete. Listeners skip those that retention took; a stored retry stays."""
        record = self._of(log.stream[index].value)
        return not record.complete and (bool(record.retries) or not log.was_expired(index))


class ProcessEnd(BaseException):
    """The handler ends its process."""


class HandlerError(Exception):
    """The exception of a handler; its text is the whole cause."""


def cause_of(value: bytes) -> str:
    """Return the reason for which a record fails, as headers have it."""
    number = zlib.crc32(value)
    return f"no {number}" if kind_of(value) in ("asks", "dead", "parked") else f"HandlerError: no {number}"


def key_of(value: bytes) -> str:
    """Return the key of a record; its value begins with stream and key."""
    return value.split(b" ", 2)[1].decode()
