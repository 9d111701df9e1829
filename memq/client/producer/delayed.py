"""Delayed records: each is a block of its own, which a broker holds until it is due.

So each can be cancelled alone. A block has a producer id of its own, and its sequence says when it is due: a request
that is repeated holds the block once. Records that are sent together go into one request for each partition.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from memq.client.broker_router import BrokerRouter
from memq.client.metadata import ClusterMetadata
from memq.client.producer.delivery import Ack, AsyncDelivery, Delivery
from memq.client.producer.fields import RecordFields, check_size, encrypted_fields
from memq.client.producer.open_block import Route
from memq.client.producer.send_buffer import BLOCK_COST_BYTES, SendBuffer
from memq.client.producer.settings import ProducerSettings
from memq.errors import (
    InvalidRequestError,
    MemqError,
    OutcomeUnknownError,
    RetryableError,
    TimedOutError,
    TooLargeError,
    TooOldError,
    UnreachableError,
)
from memq.format.blocks.builder import BlockBuilder
from memq.format.held_sequences import delayed_sequence, held_minute, is_held
from memq.format.report import HeldStage
from memq.limits import DELAY_MS_MAX, HOLD_BYTES_MAX, HOLDS_PER_REQUEST_MAX, PRODUCER_ID_END, SLOTS
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import AckLevel, Api
from memq.protocol.hold_messages import CancelHolds, HoldRecords, WireHold, WireHoldId
from memq.runtime.clock import backoff_s
from memq.runtime.network import format_address
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Topic

DeliverAt = float | datetime | None
DeliverAfter = float | timedelta | None
Time = TypeVar("Time")
MakeDelivery = Callable[[], Delivery | AsyncDelivery]
REQUEST_BYTES_MAX = 600 * 1024  # of the blocks in one request, which has them as text
REQUESTS_AT_ONCE = 8
SECONDS_MIN, SECONDS_END = 1_000_000_000, 100_000_000_000  # of 2001 and 5138 as seconds; of 1970 and 1973 as ms
RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0
CANCELLED_MAX = 65_536  # that are known, so that a repeated cancel is reported once
NoteHeld = Callable[[Topic, int, HeldStage, int, int], None]  # partition, stage, Unix minute, records
_ZERO = datetime(1970, 1, 1, tzinfo=UTC)


class CancelOutcome(StrEnum):
    """The end of a delayed record after `cancel`.

    CANCELLED: no reader will ever get it. DELIVERED: it was due before. UNKNOWN: the cluster does not know it, because
    it was never held, or its end was long ago.
    """

    CANCELLED = "cancelled"
    DELIVERED = "delivered"
    UNKNOWN = "unknown"


_OUTCOMES = {"dropped": CancelOutcome.CANCELLED, "released": CancelOutcome.DELIVERED, "unknown": CancelOutcome.UNKNOWN}


def due_ms_of(deliver_at: DeliverAt, deliver_after: DeliverAfter, now_ms: int) -> int:
    """Return when a record is due (Unix ms); a time that is over is due at once.

    Raises: TypeError; InvalidRequestError for both, a negative delay, one over 366 days, or a time without time zone.
    """
    if deliver_at is not None and deliver_after is not None:
        raise InvalidRequestError("deliver_at and deliver_after exclude each other", hint="give one of them")
    if deliver_after is not None:
        delay_s = deliver_after.total_seconds() if isinstance(deliver_after, timedelta) else deliver_after
        _check_number("deliver_after", delay_s, "seconds or timedelta")
        if delay_s < 0:
            raise InvalidRequestError(f"deliver_after = {delay_s:g} s is negative", hint="give 0 or more seconds")
        due_ms = now_ms + math.ceil(delay_s * 1_000)
    elif isinstance(deliver_at, datetime):
        if deliver_at.tzinfo is None:
            raise InvalidRequestError("deliver_at has no time zone", hint="for example datetime.now(UTC) + delay")
        due_ms = math.ceil((deliver_at - _ZERO) / timedelta(milliseconds=1))
    else:
        _check_number("deliver_at", deliver_at, "Unix ms or datetime")
        assert deliver_at is not None, "checked"
        due_ms = math.ceil(deliver_at)
        if SECONDS_MIN <= due_ms < SECONDS_END:
            text = f"deliver_at = {due_ms} ms is a time before 1974"
            raise InvalidRequestError(text, hint="give Unix milliseconds, not seconds, or a datetime")
    if due_ms - now_ms > DELAY_MS_MAX:
        days, most = (due_ms - now_ms) / 86_400_000, DELAY_MS_MAX // 86_400_000
        text = f"a delay of {days:.1f} days is over the limit of {most} days"
        raise InvalidRequestError(text, hint=f"let the record come within {most} days, and delay it again then")
    return max(due_ms, 1)


def due_times_of(
    deliver_at: DeliverAt | Sequence[DeliverAt],
    deliver_after: DeliverAfter | Sequence[DeliverAfter],
    count: int,
    now_ms: int,
) -> list[int]:
    """Return when each of `count` records is due, as `due_ms_of`: by one time for all, or by one for each.

    Raises: as `due_ms_of`; InvalidRequestError for a column of another length.
    """
    ats, afters = _column("deliver_at", deliver_at, count), _column("deliver_after", deliver_after, count)
    return [due_ms_of(at, after, now_ms) for at, after in zip(ats, afters, strict=True)]


def _column(what: str, given: Time | Sequence[Time], count: int) -> Sequence[Time]:
    if not isinstance(given, Sequence):
        return [given] * count
    if isinstance(given, str | bytes | bytearray | memoryview):
        raise TypeError(f"{what} must be a time or a sequence of times, not {type(given).__name__}")
    if len(given) != count:
        raise InvalidRequestError(f"{len(given)} times in {what} for {count} values", hint="give one for each, or one")
    return given


def _check_number(what: str, value: object, kinds: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be {kinds}, not {type(value).__name__}")
    if not math.isfinite(value):
        raise InvalidRequestError(f"{what} = {value} is no time", hint="give a finite number")


@dataclass(slots=True, eq=False)
class DelayedRecord:
    """A sealed record on its way to its broker."""

    topic: Topic
    partition: int
    producer_id: int
    data: bytes
    due_ms: int
    delivery: Delivery | AsyncDelivery
    sent_s: float  # when it was given to the producer
    deadline_s: float
    sent: bool = False
    unsure: bool = False  # a try without an answer may have held it


class DelayedRecords:
    """The delayed records of one producer.

    `add` may be called on any thread, all else on the producer's loop.
    `settled` gets each record with its error, None if it is held. `note` reports a cancelled one to the audit.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        runtime: Runtime,
        buffer: SendBuffer,
        router: BrokerRouter,
        metadata: ClusterMetadata,
        tasks: TaskOwner,
        make_delivery: MakeDelivery,
        wake: Callable[[], None],
        settled: Callable[[DelayedRecord, MemqError | None], None],
        note: NoteHeld = lambda *noted: None,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._buffer = buffer
        self._router = router
        self._metadata = metadata
        self._tasks = tasks
        self._make_delivery = make_delivery
        self._wake = wake
        self._settled = settled
        self._note = note
        self._cancelled: dict[int, None] = {}  # producer ids of cancelled records that were reported
        self._lock = threading.Lock()
        self._added: list[DelayedRecord] = []
        self._waiting: dict[DelayedRecord, None] = {}  # for a request
        self._live: dict[DelayedRecord, None] = {}  # not settled
        self._requests = 0

    # ---- called by the shells ------------------------------------------------------------------

    def add(self, route: Route, fields: RecordFields, partition: int | None, due_ms: int) -> Delivery | AsyncDelivery:
        """Seal a record that is due at `due_ms`.

        Raises: TooLargeError, InvalidRequestError; BufferFullError when there is no room now.
        """
        if self._settings.name:
            raise InvalidRequestError(
                f"producer '{self._settings.name}' has a name: it can't delay records",
                hint="a name resumes by the number of its records; use another producer without a name",
            )
        fields = encrypted_fields(fields, self._settings.encryption, route.topic)
        check_size(fields.size, route.topic)
        if partition is not None:
            index = route.map.index_of(partition)
        elif fields.key is not None:
            index = route.map.index_of_key(fields.key)
        else:
            index = self._runtime.random.randrange(len(route.buffers))
        target = route.buffers[index]
        builder, now_s = BlockBuilder(), self._runtime.clock.monotonic()
        builder.append(*fields)
        producer_id = self._runtime.random.randrange(1, PRODUCER_ID_END)
        sealed = builder.seal(
            producer_id=producer_id,
            first_sequence=delayed_sequence(due_ms),
            scope=target.scope,
            now_ms=self._runtime.clock.wall_ms(),
            codec=self._settings.codec,
            slot_range=target.slots if partition is None else (0, SLOTS - 1),
        )
        if self._settings.encryption is not None:
            sealed = self._settings.encryption.seal_block(sealed, route.topic.id, target.partition)
        data = bytes(sealed.data)
        if len(data) > HOLD_BYTES_MAX:
            raise TooLargeError(f"delayed record of {len(data)} bytes, {HOLD_BYTES_MAX} are allowed")
        self._buffer.claim(len(data) + BLOCK_COST_BYTES)
        deadline_s = now_s + route.delivery_timeout_s
        made = DelayedRecord(
            route.topic, target.partition, producer_id, data, due_ms, self._make_delivery(), now_s, deadline_s
        )
        with self._lock:
            self._added.append(made)
        self._wake()
        return made.delivery

    def drain(self) -> None:
        """Take the records that callers have added, and send them."""
        with self._lock:
            added, self._added = self._added, []
        self._waiting.update(dict.fromkeys(added))
        self._live.update(dict.fromkeys(added))
        while self._waiting and self._requests < REQUESTS_AT_ONCE and not self._tasks.stopped:
            records = self._next_request()
            self._requests += 1
            self._tasks.start(self._send(records), f"delay {len(records)} records")

    def unsettled(self) -> list[Delivery | AsyncDelivery]:
        """Return the delivery of each record that is neither held nor given up."""
        with self._lock:
            return [record.delivery for record in (*self._live, *self._added)]

    def abandon(self, error: MemqError) -> None:
        """Settle all remaining records with `error`, or as unknown."""
        self.drain()
        for record in list(self._live):
            unknown = OutcomeUnknownError(f"the producer gave up a delayed record that it had sent: {error}")
            self._settle(record, unknown if record.sent else error)

    async def cancel(self, ack: Ack) -> CancelOutcome:
        """Cancel a held record; see `memq.Producer.cancel`."""
        if ack.position is not None:
            raise InvalidRequestError(
                f"the record at {ack.position} of topic '{ack.topic}' was not delayed: it can't be cancelled",
                hint="cancel deliveries of send(…, deliver_after=…) or deliver_at=… only",
            )
        found = await self._metadata.topic(ack.topic, timeout_s=self._settings.metadata_timeout_s)
        hold = WireHoldId(producer=f"{ack.producer_id:016x}", first=ack.first_sequence)
        ask = CancelHolds(topic=ack.topic, topic_id=found.topic.id, partition=ack.partition, holds=[hold])
        until_s, tries = self._now_s() + self._settings.delivery_timeout_s, 0
        while True:
            try:
                answer = await self._router(
                    Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=self._settings.open_timeout_s
                )
            except RetryableError as error:
                tries += 1
                if self._now_s() > until_s:
                    raise OutcomeUnknownError(f"no broker said what became of the record: {error}") from error
                await self._pause(error, tries)
            else:
                outcome = _OUTCOMES[answer.holds[0]]
                if outcome is CancelOutcome.CANCELLED:
                    self._note_cancelled(found.topic, ack)
                return outcome

    # ---- inside ----------------------------------------------------------------------------------

    def _note_cancelled(self, topic: Topic, ack: Ack) -> None:
        """Report a cancelled record to the audit, once."""
        if is_held(ack.first_sequence) and ack.producer_id not in self._cancelled:
            self._cancelled[ack.producer_id] = None
            if len(self._cancelled) > CANCELLED_MAX:
                del self._cancelled[next(iter(self._cancelled))]
            self._note(topic, ack.partition, "cancelled", held_minute(ack.first_sequence), ack.records)

    def _next_request(self) -> list[DelayedRecord]:
        """Take the records of one partition that fit into a request."""
        first = next(iter(self._waiting))
        place, size, chosen = (first.topic.id, first.partition), 0, list[DelayedRecord]()
        for record in self._waiting:
            if (record.topic.id, record.partition) != place:
                continue
            size += len(record.data)
            if chosen and (size > REQUEST_BYTES_MAX or len(chosen) == HOLDS_PER_REQUEST_MAX):
                break
            chosen.append(record)
        for record in chosen:
            del self._waiting[record]
        return chosen

    async def _send(self, records: Sequence[DelayedRecord]) -> None:
        """Send records until they are held, refused, or too old."""
        tries = 0
        try:
            while records := [record for record in records if record in self._live]:
                try:
                    await self._ask(records)
                except RetryableError as error:
                    tries += 1
                    self._give_up_old(records, error)
                    await self._pause(error, tries)
                except MemqError as error:
                    await self._refused(records, error)
                    return
                else:
                    for record in records:
                        self._settle(record, None)
        finally:
            self._requests -= 1
            self.drain()

    async def _ask(self, records: Sequence[DelayedRecord]) -> None:
        topic, partition = records[0].topic, records[0].partition
        link = await self._router.link()
        for record in records:
            record.sent = True
        ask = HoldRecords(
            topic=topic.name,
            topic_id=topic.id,
            partition=partition,
            sent_ms=link.clock_ms(min(record.sent_s for record in records)),
            holds=[WireHold(block=record.data, due_ms=record.due_ms) for record in records],
        )
        try:
            await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=self._settings.open_timeout_s)
        except RetryableError as error:
            for record in records:
                record.unsure = True
            if isinstance(error, TimedOutError) or not link.open:
                self._router.give_up(link, error)
            raise
        except TooOldError as error:
            if any(self._now_s() > record.deadline_s for record in records):
                raise
            # The answer to the handshake was late, so the clock of this connection is, too.
            slow = UnreachableError(f"the handshake with {format_address(link.address)} was too slow: {error}")
            link.abort(slow)
            raise slow from error

    async def _refused(self, records: Sequence[DelayedRecord], error: MemqError) -> None:
        """Settle a refused record; of several, each is sent alone, because the error may be of one.

        A refusal says nothing about an earlier try: the topic may have been sealed after that one was held.
        """
        if len(records) == 1:
            self._settle_refused(records[0], error)
            return
        for record in records:
            try:
                await self._ask([record])
            except RetryableError:
                self._waiting[record] = None
            except MemqError as refusal:
                self._settle_refused(record, refusal)
            else:
                self._settle(record, None)

    def _settle_refused(self, record: DelayedRecord, error: MemqError) -> None:
        if not record.unsure:
            self._settle(record, error)
            return
        doubt = OutcomeUnknownError(f"a delayed record was sent again, and refused: {error}")
        doubt.__cause__ = error
        self._settle(record, doubt)

    def _give_up_old(self, records: Sequence[DelayedRecord], error: MemqError) -> None:
        for record in records:
            if self._now_s() > record.deadline_s:
                text = f"the record was not held within {self._settings.delivery_timeout_s:g} s: {error}"
                self._settle(record, OutcomeUnknownError(text) if record.sent else TimedOutError(text))

    def _settle(self, record: DelayedRecord, error: MemqError | None) -> None:
        if self._live.pop(record, record) is not None:
            return
        self._waiting.pop(record, None)
        self._buffer.give_back(len(record.data) + BLOCK_COST_BYTES)
        self._settled(record, error)

    async def _pause(self, error: MemqError, tries: int) -> None:
        delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
        await asyncio.sleep(error.retry_after_ms / 1_000 + delay_s)

    def _now_s(self) -> float:
        return self._runtime.clock.monotonic()


def ack_of(record: DelayedRecord) -> Ack:
    """Return the ack of a record that is held: it has no position before it is due."""
    first = delayed_sequence(record.due_ms)
    return Ack(record.topic.name, record.partition, record.producer_id, first, 1, AckLevel.ALL)
