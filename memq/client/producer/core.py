"""The shared core of producers, sync and asyncio: the senders of all partitions on one loop.

`InstanceFencing` lets an instance of a named producer begin in each partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from memq.client.broker_router import BrokerRouter
from memq.client.link_pool import LinkPool, Session
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import OwnerRequests
from memq.client.producer.delayed import DelayedRecord, DelayedRecords, ack_of
from memq.client.producer.delivery import Ack, AsyncDelivery, Delivery
from memq.client.producer.open_block import PartitionBuffer, PendingBlock, Route
from memq.client.producer.partition_sender import CLOSE_TIMEOUT_S, PartitionSender, ProducerObserver, SenderParts
from memq.client.producer.send_buffer import SendBuffer
from memq.client.producer.settings import ProducerSettings
from memq.client.transactions.check_back import TransactionChecks
from memq.client.transactions.core import TransactionalCore
from memq.client.transactions.staging import PartStager
from memq.errors import (
    ClosedError,
    InvalidRequestError,
    MemqError,
    NotReadyError,
    OutcomeUnknownError,
    ProducerFencedError,
    ProtocolError,
    TimedOutError,
    UnreachableError,
)
from memq.format.held_sequences import delayed_sequence, held_minute
from memq.format.report import HeldStage
from memq.protocol.admin_messages import BeginProducer
from memq.protocol.frames import Api
from memq.protocol.link import broker_name
from memq.protocol.messages import Metadata, MetadataRequest
from memq.runtime.logs import EventLog
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.runtime.waits import time_before
from memq.topic import Position, Topic, check_resource_name, producer_id_of, secret_producer_id

METADATA_AGE_S_MAX = 60.0  # within this time, records go to the new partitions of a widened topic
_SETTLE_S = 0.5
Observe = Callable[[Runtime, LinkPool, TaskOwner], ProducerObserver]  # returns the observer of a producer
ACKS_LATE_AFTER_S = 3.0
WAITS_HINT = "repair what the broker waits for: it tries again without end"
FAILURES_MAX = 1_000  # failures that are kept for `raise_unseen`
BEGINNINGS_AT_ONCE_MAX = 32


class InstanceFencing:
    """Asks the owners of partitions to let one instance of a producer begin."""

    def __init__(self, owners: OwnerRequests, producer_id: int) -> None:
        self._owners = owners
        self._producer = f"{producer_id:016x}"
        self._turn = asyncio.Semaphore(BEGINNINGS_AT_ONCE_MAX)

    async def begin(self, topic: Topic, partitions: Sequence[int], settings: ProducerSettings) -> list[tuple[int, int]]:
        """Begin in each partition; return its epoch there, and the sequence after the last that is committed.

        Raises: TimedOutError after the delivery timeout; ProducerFencedError, NotFoundError, TooLargeError.
        """
        if not partitions:
            return []
        try:
            async with asyncio.timeout(settings.delivery_timeout_s), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._begin(topic, partition)) for partition in partitions]
        except TimeoutError as error:
            raise TimedOutError(
                f"producer '{settings.name}' did not begin in topic '{topic.name}' in {settings.delivery_timeout_s:g} s"
            ) from error
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise (_with_name(first, settings.name) if isinstance(first, MemqError) else first) from None
        return [task.result() for task in tasks]

    async def _begin(self, topic: Topic, partition: int) -> tuple[int, int]:
        ask = BeginProducer(topic=topic.name, topic_id=topic.id, partition=partition, producer=self._producer)
        async with self._turn:
            answer = await self._owners.ask(topic, partition, ask)
        if answer.instance is None:
            raise ProtocolError("the broker's answer has no start of the named producer")
        return answer.instance.epoch, answer.instance.next_sequence


@dataclass(slots=True)
class ProducerStats:
    """A producer's counters.

    `bytes_acked` counts bytes of sealed blocks; `pending_bytes_max` bounds `pending_bytes`.
    """

    records_acked: int = 0
    records_failed: int = 0
    blocks_acked: int = 0
    blocks_failed: int = 0
    block_writes: int = 0
    bytes_acked: int = 0
    pending_records: int = 0
    pending_bytes: int = 0


def _with_name(error: MemqError, name: str) -> MemqError:
    """Return the error; one that fences a producer gets its name, since brokers know only the id."""
    if not name or not isinstance(error, ProducerFencedError):
        return error
    text = str(error.args[0]).replace(f"named producer {producer_id_of(name):016x}", f"producer '{name}'")
    named = ProducerFencedError(text, hint=error.hint)
    named.__cause__ = error.__cause__
    return named


def _ended_error(name: str, error: MemqError) -> ClosedError:
    ended = ClosedError(
        f"producer '{name}' ended with a block that failed: {error}",
        hint="create it again: resume_points() returns where to continue; send the failed records again from there",
    )
    ended.__cause__ = error
    return ended


class ProducerCore:
    """One producer on its event loop. All methods but the buffer's are called on that loop."""

    def __init__(
        self,
        settings: ProducerSettings,
        runtime: Runtime,
        bootstrap: Sequence[Address],
        make_delivery: Callable[[], Delivery | AsyncDelivery],
        wake: Callable[[], None],
        room_made: Callable[[], None],
        producer_id: int = 0,
        *,
        observe: Observe | None = None,
        pool: LinkPool | None = None,
        events: EventLog | None = None,
        internal: bool = False,
    ) -> None:
        """A new producer draws a secret. Its id follows from the secret, or from its name.

        With `producer_id`, the producer continues as the earlier producer with this id. `observe` returns its observer.
        With `pool`, it uses the connections of another client, and does not close them. `internal` allows memq's own
        topics.
        """
        secret = "" if producer_id or settings.name else f"{runtime.random.getrandbits(128):032x}"
        self.producer_id = producer_id or producer_id_of(settings.name) or secret_producer_id(secret)
        self.buffer = SendBuffer(settings, runtime, self.producer_id, make_delivery, wake, room_made)
        self.buffer.why_late = self._why_late
        self._settings = settings
        self._internal = internal
        self._runtime = runtime
        self._lent = pool is not None
        self._pool = pool or LinkPool(
            runtime, bootstrap, client_id=settings.client_id, zone=settings.zone, owner="producer"
        )
        self._metadata = ClusterMetadata(runtime, self._pool, self._topic_refreshed)
        self.events = events or EventLog(runtime.clock)
        self._delayed = self.events.outage("client.waits", "client.answered")
        self._tasks = TaskOwner(self._broke, self.events)
        self._observer = observe(runtime, self._pool, self._tasks) if observe is not None else None
        self._senders: dict[PartitionBuffer, PartitionSender] = {}
        self._stats = ProducerStats()
        self._failures: list[tuple[Delivery | AsyncDelivery, MemqError]] = []
        self._watch: asyncio.TimerHandle | None = None
        self._ended: MemqError | None = None
        self._callback_raised = False
        self._asked_s: dict[str, float] = {}
        self._fencing = InstanceFencing(
            OwnerRequests(runtime, self._pool, self._metadata, settings.open_timeout_s), self.producer_id
        )
        self._routed = set[str]()  # topics that this producer has had a route to
        self._beginning = asyncio.Lock()  # an instance begins once in a partition: twice, it would fence itself
        router = BrokerRouter(self._pool)
        self.checks = TransactionChecks(settings, runtime, router, self._tasks, self.events)
        self.transactions = TransactionalCore(settings, runtime, router, self.checks.start)
        self.transactions.note_held = self._note_held
        self._stager = self.transactions.stager = PartStager(self._metadata, runtime)
        parts = (settings, runtime, self.buffer, router, self._metadata, self._tasks, make_delivery, wake)
        self.delayed = DelayedRecords(*parts, self._settled_delayed, self._note_held)
        self._parts = SenderParts(
            producer_id=self.producer_id,
            secret=secret,
            settings=settings,
            runtime=runtime,
            buffer=self.buffer,
            pool=self._pool,
            metadata=self._metadata,
            tasks=self._tasks,
            events=self.events,
            settled=self._settled,
            broke=self._broke,
            observer=self._observer,
        )

    # ---- called by the shells ------------------------------------------------------------------

    async def route(self, topic: str) -> Route:
        """Return the route of a topic; request its metadata if they are unknown.

        The cluster may create a missing topic for the first record. It does not create the topic again later, because a
        deleted topic would return with other settings.

        Raises: NotFoundError, InvalidNameError, UnreachableError, TimedOutError, ClosedError.
        """
        if not self._pool.reached:
            await self._pool.reach(min(self._settings.connect_timeout_s, self._settings.metadata_timeout_s))
        check_resource_name(topic, internal=self._internal)
        create = topic not in self._routed
        found = await self._metadata.topic(topic, create=create, timeout_s=self._settings.metadata_timeout_s)
        self._routed.add(topic)
        if self._settings.name:
            await self._begin(found.topic)
        known = self.buffer.route(topic)
        return known if known is not None else self.buffer.add_route(found.topic)

    async def _begin(self, topic: Topic) -> None:
        """Begin this instance of a named producer in those partitions of a topic where it has not begun."""
        starts = self.buffer.starts
        async with self._beginning:
            new = [part.partition for part in topic.taking if (topic.id, part.partition) not in starts]
            for partition, start in zip(new, await self._fencing.begin(topic, new, self._settings), strict=True):
                starts[topic.id, partition] = start

    def drain(self) -> None:
        """Take the blocks and delayed records that callers have added since the last wake."""
        self.delayed.drain()
        for partition in self.buffer.take_dirty():
            sender = self._senders.get(partition)
            if sender is None:
                sender = self._senders[partition] = PartitionSender(self._parts, partition)
                if self._ended is not None:
                    sender.abandon(self._ended)
            sender.take_sealed()
            self._refresh_when_old(partition.topic.name)
        if self._watch is None and self._ended is None:
            self._watch = asyncio.get_running_loop().call_later(self._owed_s / 2, self._check_late_acks)

    async def flush(self, timeout_s: float | None) -> None:
        """Send all pending blocks and wait until each is acked or has failed.

        Raises: TimedOutError with the number of records that are still pending; nothing is dropped.
        """
        pending = dict(enumerate(self._seal_all()))
        settled = asyncio.get_running_loop().create_future()

        def done(number: int) -> None:
            del left[number]
            if not left and not settled.done():
                settled.set_result(None)

        left = {number: records for number, (_, records) in pending.items()}
        for number, (delivery, _) in pending.items():
            delivery.when_done(partial(done, number))
        if not left:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await settled
        except TimeoutError as error:
            if not left:
                return
            records = sum(left.values())
            why = self._why_late()
            raise TimedOutError(
                f"{records} record{'s are' if records != 1 else ' is'} still pending after {timeout_s:g} s"
                + (f": {why}" if why else ""),
                hint="they remain in flight; flush again, or check the broker",
            ) from error

    async def close(self, timeout_s: float | None = None) -> None:
        """Refuse new records, flush and report the streams' ends for at most `timeout_s`, close everything.

        With None, it flushes for the delivery timeout and 0.5 s more, so that each block gets its own error. Then it
        reports ends for 2 s. It is no error if a partition without an owner gets no report.

        Raises: TimedOutError with the number of records that were given up.
        """
        self.buffer.refuse(ClosedError("the producer is closed"))
        began_s = self._runtime.clock.monotonic()
        try:
            await self.flush(self._settings.delivery_timeout_s + _SETTLE_S if timeout_s is None else timeout_s)
            took_s = self._runtime.clock.monotonic() - began_s
            await self._report_ends(CLOSE_TIMEOUT_S if timeout_s is None else max(0.0, timeout_s - took_s))
        except TimedOutError as error:
            raise TimedOutError(str(error), hint="their deliveries say which may have been stored") from error
        finally:
            await self._stop(timeout_s)

    async def write_and_close(self, timeout_s: float) -> None:
        """Write all blocks within `timeout_s` and close, without waiting for acks."""
        await self.write(timeout_s)
        await self._stop()

    async def write(self, timeout_s: float) -> None:
        """Seal the open blocks and write all blocks to the sockets, as many as `timeout_s` allows."""
        self._seal_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for sender in list(self._senders.values()):
                    await sender.written.wait()

    def stats(self) -> ProducerStats:
        """Return a copy of the counters."""
        pending = sum(records for sender in self._senders.values() for _, records in sender.pending())
        pending += len(self.delayed.unsettled())
        self._stats.pending_records = pending + sum(records for _, records in self.buffer.unsettled())
        self._stats.pending_bytes = self.buffer.pending_bytes
        return ProducerStats(**{name: getattr(self._stats, name) for name in ProducerStats.__slots__})

    def raise_unseen(self) -> None:
        """Raise the first error of a failed block whose delivery was not read."""
        for delivery, error in self._failures:
            if not delivery.observed:
                raise error

    # ---- inside ----------------------------------------------------------------------------------

    def _seal_all(self) -> list[tuple[Delivery | AsyncDelivery, int]]:
        """Seal all open blocks; return each block that is not settled, with its number of records."""
        found = self.buffer.unsettled()
        for partition in self.buffer.buffers():
            self.buffer.seal_open(partition)
        found += [(block.delivery, records) for sender in self._senders.values() for block, records in sender.pending()]
        found += [(delivery, 1) for delivery in self.delayed.unsettled()]
        self.drain()
        return found

    def _settled(self, block: PendingBlock, error: MemqError | None) -> None:
        """Pass the outcome of a block to its delivery, to `on_ack` and to the counters."""
        self.buffer.release(block)
        records = block.next - block.first
        stats = self._stats
        stats.block_writes += block.writes
        outcome: Ack | MemqError
        if error is None:
            stats.records_acked += records
            stats.blocks_acked += 1
            stats.bytes_acked += len(block.data)
            buffer = block.buffer
            level = self._settings.acks
            position, acked = None, block.position
            if acked is not None:
                read = buffer.topic.read_partition_of(buffer.partition).partition
                index = acked.record_index + block.first - acked.first
                position = Position(read, acked.pointer_offset, index)
            outcome = Ack(buffer.topic.name, buffer.partition, self.producer_id, block.first, records, level, position)
        else:
            error = _with_name(error, self._settings.name)
            stats.records_failed += records
            stats.blocks_failed += 1
            outcome = error
            count = "1 record" if records == 1 else f"{records} records"
            self.events.error("producer.block-failed", f"{count} failed: {error.code}: {error}")
            self._end_named(error)
        self._report(block.delivery, outcome)
        block.data = b""

    def _settled_delayed(self, record: DelayedRecord, error: MemqError | None) -> None:
        """Do the same for a delayed record; it is acked when it is held."""
        stats = self._stats
        if error is None:
            stats.records_acked, stats.blocks_acked = stats.records_acked + 1, stats.blocks_acked + 1
            stats.bytes_acked += len(record.data)
        else:
            stats.records_failed, stats.blocks_failed = stats.records_failed + 1, stats.blocks_failed + 1
            self.events.error("producer.block-failed", f"1 delayed record failed: {error.code}: {error}")
        if error is None or isinstance(error, OutcomeUnknownError):
            stage: HeldStage = "held" if error is None else "unsure"
            self._note_held(record.topic, record.partition, stage, held_minute(delayed_sequence(record.due_ms)), 1)
        self._report(record.delivery, ack_of(record) if error is None else error)

    def _note_held(self, topic: Topic, partition: int, stage: HeldStage, minute: int, records: int) -> None:
        """Report delayed records, or records of a transaction, to the audit."""
        part = self._observer.part(topic, partition) if self._observer is not None else None
        if part is not None:
            part.hold(stage, minute, records)

    def _report(self, delivery: Delivery | AsyncDelivery, outcome: Ack | MemqError) -> None:
        for callback in delivery.settle(outcome):
            self._call(callback)
        if self._settings.on_ack is not None:
            on_ack = self._settings.on_ack
            self._call(lambda: on_ack(outcome))
        elif isinstance(outcome, MemqError) and not delivery.observed and len(self._failures) < FAILURES_MAX:
            self._failures.append((delivery, outcome))

    def _end_named(self, error: MemqError) -> None:
        """End a named producer after its first failure: no later record may be stored without the failed one."""
        if not self._settings.name or self._ended is not None:
            return
        ended = error if isinstance(error, ProducerFencedError) else _ended_error(self._settings.name, error)
        self.buffer.refuse(ended)
        self._ended = ended
        asyncio.get_running_loop().call_soon(self._abandon, ended)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001  # an error of the caller's code must not stop the producer
            self.events.error("producer.callback-raised", f"a callback raised {error!r}", error)
            if not self._callback_raised:  # the loop's handler writes to stderr, if the log is not shown
                self._callback_raised = True
                text = "a callback of a memq producer raised; further errors of callbacks are only in the log of 'memq'"
                asyncio.get_running_loop().call_exception_handler({"message": text, "exception": error})

    def _topic_refreshed(self, topic: Topic) -> None:
        """Use the new map of a topic that was altered or created again."""
        self._asked_s[topic.name] = self._runtime.clock.monotonic()
        try:
            known = self.buffer.route(topic.name)
        except MemqError:
            return  # closed
        if known is not None and known.topic != topic:
            if self._settings.name:
                self._tasks.start(self._follow(topic), f"begin in {topic.name}")
            else:
                self.buffer.add_route(topic)

    async def _follow(self, topic: Topic) -> None:
        """Begin in the new partitions of a topic, then use its new map."""
        try:
            await self._begin(topic)
            known = self.buffer.route(topic.name)
        except MemqError as error:
            self.events.warning("producer.begin-failed", f"topic '{topic.name}': {error}")
            return
        if known is not None:  # else the next record requests the metadata, which never return to an older version
            self.buffer.add_route(topic)

    def _refresh_when_old(self, topic: str) -> None:
        """Refresh the metadata of a topic after METADATA_AGE_S_MAX, to learn of new partitions."""
        now_s = self._runtime.clock.monotonic()
        if self._ended is None and now_s - self._asked_s.setdefault(topic, now_s) > METADATA_AGE_S_MAX:
            self._asked_s[topic] = now_s
            self._tasks.start(self.refresh(topic), f"metadata of {topic}")

    async def refresh(self, topic: str) -> None:
        """Refresh the metadata of a topic, and use its new partitions. A failure is only logged."""
        try:
            await self._metadata.refresh(topic)
        except MemqError as error:
            self.events.info("producer.metadata-failed", f"metadata of topic '{topic}' not refreshed: {error}")

    # ---- late acks --------------------------------------------------------------------------

    def _check_late_acks(self) -> None:
        """Send a request to each broker with late acks: its link may be broken, or the broker may wait itself."""
        self._watch = None
        now_s, owed_s = self._runtime.clock.monotonic(), self._owed_s
        late: dict[Session, dict[PartitionSender, float]] = {}  # with the time since when acks are owed
        for sender in self._senders.values():
            since_s, session = sender.owed_since_s, sender.session
            if since_s is not None and session is not None and now_s - since_s >= owed_s:
                late.setdefault(session, {})[sender] = since_s
        if not late:
            self._delayed.passed()
        for session, senders in late.items():
            if not session.asked and now_s - session.answered_s >= owed_s:
                self._tasks.start(self._ask_for_cause(session, senders), "sign of life")
        if any(sender.window.live for sender in self._senders.values()):
            self._watch = asyncio.get_running_loop().call_later(owed_s / 2, self._check_late_acks)

    def _why_late(self) -> str:
        """Return the known cause of late acks, "" without one."""
        known = (sender.window.why for sender in list(self._senders.values()) if sender.window.live)
        return next((str(why) for why in known if why is not None), self._pool.waits.describe())

    @property
    def _owed_s(self) -> float:
        """Time in s after which a broker that owes acks is asked for the cause."""
        return min(ACKS_LATE_AFTER_S, self._settings.silence_s_max)

    async def _ask_for_cause(self, session: Session, senders: Mapping[PartitionSender, float]) -> None:
        """Request METADATA of a broker that owes acks: the answer names what the broker waits for."""
        since_s = min(senders.values())
        link, now_s, name = session.link, self._runtime.clock.monotonic(), broker_name(session.link.address)
        silent_s = 2 * self._settings.silence_s_max
        heard_s = max(since_s, link.heard_s)
        session.asked = True
        try:
            with self._pool.waits.on(name, "acks", heard_s):
                wait_s = max(heard_s + silent_s - now_s, self._settings.silence_s_max)
                answer = await link.request(Api.METADATA, MetadataRequest(topics=[]), Metadata, timeout_s=wait_s)
        except TimedOutError:
            if link.heard_s <= heard_s:
                silent = f"{name} is silent since {time_before(self._runtime.clock, heard_s)}"
                link.abort(UnreachableError(f"{silent}, and was given up"))
        except MemqError:
            pass  # an error is an answer, too; a lost connection is reported by the senders
        else:
            if answer.waits:
                owed = f"{name} owes acks since {time_before(self._runtime.clock, since_s)}"
                error = NotReadyError(f"{owed}: {answer.waits}", hint=WAITS_HINT)
                self._delayed.failed(str(error))
                for sender in senders:
                    sender.delayed(error)
        finally:
            session.asked, session.answered_s = False, self._runtime.clock.monotonic()

    # ---- the end ---------------------------------------------------------------------------------------

    async def _report_ends(self, timeout_s: float) -> None:
        """Send CLOSE on every stream within `timeout_s`, so that the audit can prove the last records."""
        senders = list(self._senders.values())
        for sender in senders:
            sender.finish()
        try:
            async with asyncio.timeout(timeout_s):
                for sender in senders:
                    await sender.closed.wait()
        except TimeoutError:
            self.events.info("producer.close-failed", f"the end of a stream is not reported in {timeout_s:g} s")

    async def _stop(self, report_s_max: float | None = None) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._abandon(ClosedError("the producer was closed before the block was acked"))
        if self._observer is not None:
            await self._observer.close(report_s_max)
        await self.checks.close()
        await self._tasks.stop()
        await self._stager.close()
        await self._metadata.close()
        if not self._lent:
            await self._pool.close()

    def _abandon(self, error: MemqError) -> None:
        self._ended = error
        for sender in list(self._senders.values()):
            sender.abandon(error)
        for partition in self.buffer.buffers():
            self.buffer.seal_open(partition)
        self.delayed.abandon(error)
        self.drain()

    def _broke(self, cause: BaseException) -> None:
        """Fail the whole producer with the cause of a dead task."""
        error = InvalidRequestError(f"the producer broke: {cause!r}", hint="this is an error in memq: report it")
        error.__cause__ = cause
        self.events.error("producer.broke", str(error), cause)
        self.buffer.refuse(error)
        self._abandon(error)
