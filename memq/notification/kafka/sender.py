"""Sends pointers to Kafka: one idempotent producer, one publish in flight per write partition."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from memq.errors import ClosedError, MemqError, QueueError, QueueRefusedError, TooLargeError
from memq.notification import Publication
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.librdkafka import end_threads, producer_of
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.process import keep_to_end
from memq.runtime.tasks import TaskOwner
from memq.runtime.threads import ThreadPool

POLL_S = 0.1
DISCARD_TRIES = 3
FAILURES_MAX = 16_000  # of one producer: each may take one of its 32,767 epochs, after which librdkafka begins at 0
_SMALL = "check max.message.bytes of the Kafka topic and message.max.bytes of Kafka's brokers"
Report = asyncio.Future[int | MemqError]
LaneKey = tuple[str, int, int]  # Kafka topic, partition, write partition


@dataclass(slots=True)
class PublishLane:
    """The publish in flight of one write partition.

    Kafka may refuse one record of a pipeline and accept the later ones. So the next record is passed to librdkafka only
    after the delivery report of the last one.
    `users`: calls that wait, for the lane or for a report.
    `gave_up`: the caller of the last record did not wait for its report. Such a record may have reached the log after
    the owner's last read.
    """

    free: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    gave_up: bool = False


class Sender:
    """Publishes pointers.

    A publish that was passed to librdkafka ends within `publish_timeout_ms`, also while Kafka is unreachable.
    """

    def __init__(self, settings: KafkaSettings, admin: KafkaAdmin, tasks: TaskOwner) -> None:
        self._settings = settings
        self._admin = admin
        self._errors = admin.errors
        self._tasks = tasks
        self._producer = producer_of(settings.producer(), self._errors.note)
        self._failures = 0  # of the present producer
        self._retired: deque[Producer] = deque()
        self._lanes: dict[LaneKey, PublishLane] = {}
        self._open: dict[Report, tuple[LaneKey, Producer]] = {}  # reports that have not come yet
        self._pool = ThreadPool("kafka-sender", 1)
        self._started = False
        self._stopping = False

    async def send(self, topic: str, publication: Publication) -> int:
        """Publish a pointer and return its offset. After a cancellation it may be in the log, or appear later.

        Raises: QueueRefusedError, QueueError, NotFoundError, DeniedError, TooLargeError, ClosedError.
        """
        self._check_open()
        if publication.time_ms <= 0:  # librdkafka replaces 0 by the current time
            raise QueueRefusedError(f"queue time {publication.time_ms} is too old")
        self._start()
        key = (topic, publication.partition.partition, publication.write_partition)
        lane = self._lanes.setdefault(key, PublishLane())
        lane.users += 1
        try:
            await lane.free.acquire()
            report = self._hand_over(topic, publication, key, lane)
            try:
                found = await asyncio.shield(report)
            except asyncio.CancelledError:
                if not (report.done() and isinstance(report.result(), QueueRefusedError)):
                    lane.gave_up = True
                raise
        finally:
            lane.users -= 1
            self._forget_unused(key, lane)
        if isinstance(found, MemqError):
            raise found
        return found

    async def refresh_metadata(self, topic: str) -> None:
        """Refresh the producer's metadata of a topic: its partition count may be old. Raises: QueueError."""
        doing = f"reading the metadata of Kafka topic '{topic}'"
        await self._admin.run(self._producer.list_topics, doing, topic, self._admin.timeout_s)

    def _hand_over(self, topic: str, publication: Publication, key: LaneKey, lane: PublishLane) -> Report:
        """Pass the pointer to librdkafka. The caller holds the lane, and the delivery report frees it."""
        report: Report = asyncio.get_running_loop().create_future()
        if lane.gave_up:
            lane.gave_up = False
            lane.free.release()
            raise QueueError(f"{_doing(key)}: an earlier try, which was given up, may have landed since")
        try:
            self._check_open()  # after a wait for the lane: the report would never come
            self._producer.produce(
                topic,
                value=publication.body,
                key=str(publication.write_partition).encode(),
                partition=publication.partition.partition,
                timestamp=publication.time_ms,
                on_delivery=partial(self._delivered, asyncio.get_running_loop(), report, key, self._producer),
            )
        except BaseException as error:
            lane.free.release()
            raise self._refusal(error, key) from error
        self._open[report] = key, self._producer
        report.add_done_callback(partial(self._ended, key, lane))
        return report

    def _ended(self, key: LaneKey, lane: PublishLane, report: Report) -> None:
        self._open.pop(report, None)
        if isinstance(report.result(), QueueRefusedError):
            lane.gave_up = False
        lane.free.release()
        self._forget_unused(key, lane)

    def _forget_unused(self, key: LaneKey, lane: PublishLane) -> None:
        if not (lane.users or lane.gave_up or lane.free.locked()):
            self._lanes.pop(key, None)

    def _refusal(self, error: BaseException, key: LaneKey) -> BaseException:
        """Return the error to raise when librdkafka did not accept a pointer."""
        if isinstance(error, BufferError):
            return QueueError(
                f"{len(self._producer)} pointers wait for Kafka already",
                hint="check Kafka; raise pending_bytes_max in [kafka]",
            )
        if not isinstance(error, KafkaException):
            return error
        self._renew_after(error.args[0], self._producer)
        return self._errors.failure(error, _doing(key))

    def _renew_after(self, error: KafkaError, producer: Producer) -> None:
        """Replace a producer after a fatal error, or after very many; several reports may have the same error.

        With a repeated epoch Kafka could take a pointer for one that it has, and answer the offset of that.
        """
        if producer is not self._producer:
            return
        self._failures += 1
        if error.fatal() or error.code() == KafkaError._FATAL or self._failures >= FAILURES_MAX:
            self._failures = 0
            self._retired.append(producer)
            self._producer = producer_of(self._settings.producer(), self._errors.note)

    def _check_open(self) -> None:
        if self._stopping:
            raise ClosedError("the queue is closed")

    # ---- reports -----------------------------------------------------------------------------

    def _delivered(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Report,
        key: LaneKey,
        producer: Producer,
        error: KafkaError | None,
        message: Message,
    ) -> None:
        """Take a delivery report, in the polling thread. A message that failed has no valid offset."""
        offset = None if error is not None else message.offset()
        loop.call_soon_threadsafe(self._settle, report, key, producer, error, offset)

    def _settle(
        self, report: Report, key: LaneKey, producer: Producer, error: KafkaError | None, offset: int | None
    ) -> None:
        if report.done():
            return  # it was abandoned, or the close was faster
        if error is not None:
            self._renew_after(error, producer)
            found = self._errors.failure(error, _doing(key))
            # memq has checked the size: Kafka has a lower limit, or reports this of a record that it has stored.
            report.set_result(QueueError(str(found), hint=_SMALL) if isinstance(found, TooLargeError) else found)
        elif offset is None or offset < 0:
            report.set_result(QueueError(f"{_doing(key)}: the report has no offset"))
        else:
            self._errors.clear()
            report.set_result(offset)

    def _abandon(self, producer: Producer) -> None:
        """Fail the publishes that a discarded producer did not report on: this frees their lanes."""
        for report, (_, used) in list(self._open.items()):
            if used is producer and not report.done():
                report.set_result(QueueError("Kafka's library was renewed, and gave no delivery report"))

    # ---- the thread --------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._tasks.start(self._run(), "kafka sender")

    async def _run(self) -> None:
        try:
            await self._pool.run(self._serve, asyncio.get_running_loop())
        finally:  # the thread has ended, died, or was left behind: no report comes any more
            self._stopping = True
            for report, (key, _) in list(self._open.items()):
                if not report.done():
                    report.set_result(QueueError(f"{_doing(key)}: the queue was closed before Kafka answered"))

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping:
            producer = self._producer
            try:
                producer.poll(POLL_S)
            except KafkaException as error:  # a fatal error, maybe raised before the reports that explain it
                loop.call_soon_threadsafe(self._renew_after, error.args[0], producer)
            while self._retired:
                retired = self._retired.popleft()
                _discard(retired)
                loop.call_soon_threadsafe(self._abandon, retired)
        _discard(self._producer)

    async def close(self) -> None:
        """End the thread; pointers that wait for Kafka fail, and their outcome is unknown."""
        self._stopping = True
        await end_threads(self._pool, lambda: _discard(self._producer))  # the thread of `_serve` may not have begun
        keep_to_end(self._producer)


def _discard(producer: Producer) -> None:
    """Fail the pointers that a producer still holds, and deliver their reports.

    A producer with a fatal error may raise it again: then flush once more.
    """
    producer.purge()
    for _ in range(DISCARD_TRIES):
        with suppress(KafkaException):
            producer.flush(1.0)
            return


def _doing(key: LaneKey) -> str:
    return f"publishing for partition {key[2]} to Kafka topic '{key[0]}'"
