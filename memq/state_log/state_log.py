"""The state log of one service partition on asyncio: the steps of its owner, and snapshots.

The owner (`owner.py`) decides; here are the calls of queue and store, time-outs, retries and the waiting callers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from memq.errors import (
    CorruptDataError,
    DeniedError,
    EpochFencedError,
    LogCutError,
    LogLostError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    QueueError,
    RetryableError,
    ThrottledError,
    TimedOutError,
)
from memq.format.key import state_snapshot_key
from memq.format.state_log.entry import (
    OpenedState,
    StateDecision,
    StateEntry,
    decode_state_entry,
    encode_state_entry,
)
from memq.format.state_log.snapshot import SavedState
from memq.limits import MIB
from memq.notification import FROM_THE_LOG, Entry, NotificationQueue, Publication
from memq.notification.log_reader import page_before, valid_span
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner, in_slices
from memq.state_log import Answer, Machines, StateMachine
from memq.state_log.opening import LogScan, check_opened
from memq.state_log.owner import (
    ProposalFate,
    PublishStep,
    ReadStep,
    Settled,
    SnapshotPace,
    StateOwner,
    TrimStep,
)
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import StorageHandler
from memq.topic import ReadPartition

READ_BYTES = 1 * MIB
SNAPSHOT_S = 60.0  # greatest age of a decision that no snapshot has
BACKOFF_S_MAX = 2.0
SCANS_MAX = 3  # of one opening without the state, while a newer owner may trim the log or replace its snapshot
# A queue that is starting or loses a certificate also answers "not found" or "denied".
OUTCOME_UNKNOWN = (RetryableError, EpochFencedError, TimeoutError, DeniedError, NotFoundError)


@dataclass(frozen=True, slots=True)
class StateLogSettings:
    """Settings of a state log; times in seconds.

    `answer_s`: time-out of one call of the queue. `snapshot_s`: greatest age of a decision that no snapshot has.
    `key_valid_s`: how long after its first put a snapshot may be named, half the safety age of the sweep.
    `waiting_bytes_max`: bytes of decisions that wait for an entry. `callers_max`: calls that wait.
    `drain_s`: how long `close` waits for answers.
    """

    cluster: str
    broker: str
    answer_s: float = 30.0
    snapshot_s: float = field(default_factory=lambda: SNAPSHOT_S)
    key_valid_s: float = 1_800.0
    waiting_bytes_max: int = 16 * MIB
    callers_max: int = 10_000
    drain_s: float = 10.0


class StateLog:
    """One epoch of a state log at this broker. A broker that opens the log again makes a new object.

    `lost` is called once when the epoch ends without `close`, with the cause: EpochFencedError after a higher epoch;
    LogCutError, LogLostError, CorruptDataError or UnsupportedFormatError when the log can't be read or continued.
    """

    def __init__(
        self,
        queue: NotificationQueue,
        store: StorageHandler,
        runtime: Runtime,
        events: EventLog,
        partition: ReadPartition,
        settings: StateLogSettings,
        machines: Machines,
        lost: Callable[[MemqError], None] = lambda error: None,
    ) -> None:
        self._queue = queue
        self._snapshots = SnapshotStore(store, events)
        self._runtime = runtime
        self._events = events
        self._partition = partition
        self._settings = settings
        self._machines = machines
        self._lost = lost
        self._tasks = TaskOwner(self._task_failed, events)
        self._owner: StateOwner | None = None
        self._closing = self._reported = False
        self._callers: dict[int, asyncio.Future[Answer]] = {}
        self._changed = asyncio.Event()  # a proposal, or a snapshot that may be named
        self._settled = asyncio.Event()  # outcomes, or the end
        self._damaged: Entry | None = None  # as the last read showed it
        self.highest_epoch = 0  # that this opening has met: the next one needs a higher one

    # ---- opening (S2) ------------------------------------------------------------------------

    async def open(self, epoch: int) -> None:
        """Open the log in an epoch that was never used before, from an assignment by compare-and-set.

        Reads that fail are repeated without limit: cancel the opening when the log is assigned to another broker.
        After an error, open another `StateLog` with an epoch above `epoch` and `highest_epoch`.
        Raises: EpochFencedError when a higher epoch is open; LogLostError when the state can't be known;
        UnsupportedFormatError when the log or its snapshot is of a newer version; RetryableError.
        """
        assert self._owner is None, "an object opens one epoch"
        opened = OpenedState(self._runtime.random.getrandbits(64), self._settings.broker)
        try:
            self._owner = owner = await self._load(StateEntry(epoch, 0, opened), opened.nonce)
        except EpochFencedError:
            with suppress(MemqError):
                await self._scan(0)  # for `highest_epoch`
            raise
        self._tasks.start(self._run(owner), f"state-log {self._partition.partition} {epoch}")
        self._tasks.start(self._keep_snapshots(owner), f"state-snapshots {self._partition.partition} {epoch}")

    async def _load(self, opened: StateEntry, nonce: int) -> StateOwner:
        """Publish `opened`, read to the end of the log, and return the owner.

        Meanwhile a newer owner may trim the log and replace its snapshot: then a higher epoch shows. A queue that lags
        may hide it. So before the next scan `opened` is published once more: this copy is void, and behind all of that.
        """
        tries, end = 0, await self._publish_opened(opened) + 1
        while True:
            scan = await self._scan(end)
            try:
                saved = await self._snapshots.get(scan.snapshot) if scan.snapshot is not None else None
                fold = await in_slices(scan.begin_fold(self._machines, saved))
            except (NotFoundError, LogLostError, CorruptDataError) as error:
                tries += 1
                if self.highest_epoch > opened.epoch:
                    text = f"{self._name()} has epoch {self.highest_epoch}, above {opened.epoch}"
                    raise EpochFencedError(text) from error
                if tries == SCANS_MAX:
                    raise LogLostError(f"{self._name()}: {error}") from error
                end = await self._publish_opened(opened) + 1
            except (RetryableError, DeniedError) as error:  # the store is asked again without limit
                await self._pause_after(error, 1)
            else:
                check_opened(fold, opened.epoch, nonce)
                return StateOwner(fold, SnapshotPace(self._settings.snapshot_s, scan.uncovered_bytes(), self._now()))

    async def _publish_opened(self, opened: StateEntry) -> int:
        """Return the offset of `opened`. Raises: TimedOutError; as `PointerWriter.publish`."""
        try:
            async with asyncio.timeout(self._settings.answer_s):
                return await self._publish(opened.epoch, encode_state_entry(opened))
        except TimeoutError as error:
            text = f"{self._name()}: no answer in {self._settings.answer_s:g} s to 'opened' of epoch {opened.epoch}"
            raise TimedOutError(text) from error

    async def _scan(self, known_end: int) -> LogScan:
        """Scan the log to its end, which is not before `known_end`; retry errors that pass without limit."""
        scan: LogScan | None = None
        tries = end = at = 0
        while True:
            try:
                async with asyncio.timeout(self._settings.answer_s):
                    if scan is None:
                        span = await valid_span(self._queue, self._partition)
                        scan, at, end = LogScan(span.begin), span.begin, max(span.end, known_end)
                    while at < end:
                        entries = await page_before(self._queue, self._partition, at, end, READ_BYTES)
                        for entry in entries:
                            self._add(scan, entry)
                        at = entries.next
                    if scan.end < end:
                        scan.pass_over(end)
            except OUTCOME_UNKNOWN as error:
                tries += 1
                await self._pause_after(error, tries)
            else:
                self.highest_epoch = max(self.highest_epoch, scan.highest_epoch)
                return scan

    def _add(self, scan: LogScan, entry: Entry) -> None:
        """Add an entry to a scan. A damaged one is a hole of the log, which a snapshot may cover."""
        try:
            scan.add(entry, self._decoded(entry))
        except CorruptDataError as error:
            self._events.error("state-entry-damaged", f"{self._name()} offset {entry.offset}: {error}", error)
            scan.pass_over(entry.offset + 1)

    def _decoded(self, entry: Entry) -> StateEntry:
        """Return the content of an entry. Damage counts only if two reads of the same bytes have it.

        Raises: QueueError for damage that is new; CorruptDataError, UnsupportedFormatError.
        """
        try:
            return decode_state_entry(entry.body)
        except CorruptDataError as error:
            if self._damaged == entry:
                raise
            self._damaged = entry
            raise QueueError(f"{self._name()} offset {entry.offset}: {error}") from error

    async def _pause_after(self, error: Exception, tries: int) -> None:
        """Report a failed call, and pause before the next try."""
        self._events.warning("state-log-retry", f"{self._name()}, try {tries}: {error}")
        await asyncio.sleep(backoff_s(self._runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX))

    # ---- callers -----------------------------------------------------------------------------

    async def propose(self, machine: str, body: bytes) -> Answer:
        """Put a decision into the log, and return the machine's answer when the decision counts.

        A caller that is cancelled does not know whether the decision counts.
        Raises: MovedError: the decision is not in the log and never will be, so the new owner may be asked.
        OutcomeUnknownError: it may be in the log. NotReadyError before the opening, and after the end.
        ThrottledError when too many decisions or callers wait; TooLargeError.
        """
        owner = self._live_owner()
        if machine not in owner.fold.machines:
            raise NotFoundError(f"{self._name()} has no machine '{machine[:60]}'")
        self._check_room(owner, len(body))
        return await self._wait(owner.propose(StateDecision(machine, body)))

    async def fresh(self) -> int:
        """Return the epoch when the machines have all that any owner answered before this call (S6).

        Read the machines at once, before the next await. Raises: as `propose`.
        """
        owner = self._live_owner()
        self._check_room(owner, 0)
        await self._wait(owner.propose(None))
        return owner.epoch

    def _check_room(self, owner: StateOwner, size: int) -> None:
        waiting = f"{len(self._callers)} callers wait with {owner.waiting_bytes} bytes"
        if len(self._callers) >= self._settings.callers_max:
            raise ThrottledError(f"{self._name()}: {waiting}, {self._settings.callers_max} callers are allowed")
        if owner.waiting_bytes + size > self._settings.waiting_bytes_max:
            raise ThrottledError(f"{self._name()}: {waiting}, {self._settings.waiting_bytes_max} bytes are allowed")

    async def _wait(self, ticket: int) -> Answer:
        caller: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._callers[ticket] = caller
        self._changed.set()
        return await caller

    def machine(self, name: str) -> StateMachine:
        """Return a machine with the state that counts; only decisions change it. Raises: as `propose`."""
        return self._live_owner().fold.machines[name]

    def counted(self) -> SavedState:
        """Return the state that counts, and the offset below which this owner has read. Raises: as `propose`."""
        return self._live_owner().fold.save()

    @property
    def proved_s(self) -> float:
        """The last moment (monotonic s) of which the owner knows that no higher epoch was open."""
        return self._owner.proved_s if self._owner is not None else -math.inf

    @property
    def is_owner(self) -> bool:
        """Whether the epoch is open, as far as this broker knows."""
        return self._owner is not None and not self._owner.has_ended()

    def _live_owner(self) -> StateOwner:
        owner = self._owner
        if owner is None or self._closing:
            raise NotReadyError(f"{self._name()} is not open")
        if owner.has_ended():
            raise MovedError(f"{self._name()}: epoch {owner.epoch} has ended: {owner.end_cause}")
        return owner

    # ---- the owner's steps -------------------------------------------------------------------

    async def _run(self, owner: StateOwner) -> None:
        tries = 0
        while not owner.has_ended():
            step = owner.next_step(self._now())
            if step is None:
                await self._idle(owner)
                continue
            try:
                async with asyncio.timeout(self._settings.answer_s):
                    await self._execute(owner, step)
            except OUTCOME_UNKNOWN as error:
                if isinstance(error, LogCutError):
                    owner.end(error)
                    continue
                owner.failed()
                tries += 1
                self._answer(owner.take_settled())
                await self._pause_after(error, tries)
            except MemqError as error:
                owner.end(error)
            else:
                tries = 0
            self._answer(owner.take_settled())
        self._ended(owner)

    def _ended(self, owner: StateOwner) -> None:
        """Answer the last callers, and report the end once."""
        self._answer(owner.take_settled())
        if not self._reported and not self._closing and owner.end_cause is not None:
            self._reported = True
            self._events.warning("state-log-ended", f"{self._name()}, epoch {owner.epoch}: {owner.end_cause}")
            self._lost(owner.end_cause)

    async def _idle(self, owner: StateOwner) -> None:
        """Wait for a proposal."""
        if not owner.has_ended():
            self._changed.clear()
            await self._changed.wait()

    async def _execute(self, owner: StateOwner, step: PublishStep | ReadStep) -> None:
        if isinstance(step, PublishStep):
            offset = await self._publish(owner.epoch, step.body)
            owner.published(offset, self._now())
            return
        await self._compare(owner, step)
        span = await valid_span(self._queue, self._partition)
        at, end = step.offset, max(step.end, span.end)
        while at < end and not owner.has_ended():
            entries = await page_before(self._queue, self._partition, at, end, READ_BYTES)
            for entry in entries:
                owner.meet(entry.offset, self._decoded(entry), self._now())
            at = entries.next
        owner.read(at)

    async def _compare(self, owner: StateOwner, step: ReadStep) -> None:
        """Compare the last known entry with the log. Raises: LogCutError after a cut."""
        known = owner.fold.last
        if known is None or not step.offset:
            return
        found = await self._queue.read(self._partition, step.offset - 1, FROM_THE_LOG)
        if found and found[0].offset == step.offset - 1 and self._decoded(found[0]) != known:
            raise LogCutError(f"{self._name()} has another entry than before at offset {step.offset - 1}")

    async def _publish(self, epoch: int, body: bytes) -> int:
        time_ms = self._runtime.clock.wall_ms()
        return await self._queue.publish(Publication(self._partition, self._partition.partition, epoch, time_ms, body))

    def _answer(self, settled: list[Settled]) -> None:
        """Pass outcomes to the callers that still wait."""
        for ticket, fate, answer in settled:
            caller = self._callers.pop(ticket, None)
            if caller is None or caller.done():
                continue
            if fate is ProposalFate.COUNTS:
                caller.set_result(answer)
            elif fate is ProposalFate.VOID:
                caller.set_exception(MovedError(f"{self._name()} has another owner: the decision does not count"))
            else:
                caller.set_exception(OutcomeUnknownError(f"{self._name()}: the decision may count, or not"))
        self._settled.set()

    # ---- snapshots (S7, S8) ------------------------------------------------------------------

    async def _keep_snapshots(self, owner: StateOwner) -> None:
        """Take snapshots when they are due, name them, then trim; retry without limit."""
        tries, last = 0, ("", 0.0)
        while True:
            for trim in owner.take_trims():
                await self._trim(trim)
            if owner.has_ended():
                return
            if not await self._wait_until_due(owner):
                continue
            key = self._key(owner.epoch, owner.fold.offset)
            if key != last[0]:
                last = (key, self._now())  # a key is used for `key_valid_s` from its first put (ADR 6)
            until_s = last[1] + self._settings.key_valid_s
            try:
                async with asyncio.timeout(until_s - self._now()):
                    snapshot = await self._snapshots.put(await in_slices(owner.save()), key)
            except (MemqError, TimeoutError) as error:
                tries += 1
                self._events.warning("state-snapshot-retry", f"{self._name()}, try {tries}: {error}")
                if not owner.has_ended() and self._now() >= until_s:
                    owner.propose(None)  # the next entry moves the offset: another key
                    self._changed.set()
                await asyncio.sleep(backoff_s(self._runtime.random, tries, base_s=0.5, most_s=30.0))
                continue
            tries = 0
            if not owner.has_ended():
                owner.name(snapshot, until_s)
                self._changed.set()

    async def _wait_until_due(self, owner: StateOwner) -> bool:
        """Whether a snapshot is due now; else wait for outcomes, or until one is due by age."""
        wait_s = math.inf if owner.naming else owner.pace.due_s(self._now()) - self._now()
        if wait_s <= 0:
            return True
        self._settled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                await self._settled.wait()
        return False

    async def _trim(self, trim: TrimStep) -> None:
        """Trim the log, then delete the replaced snapshot: no reader of the log needs it any more."""
        try:
            async with asyncio.timeout(self._settings.answer_s):
                await self._queue.trim(self._partition, trim.before)
                if trim.replaced is not None:
                    await self._snapshots.delete(trim.replaced)
        except (MemqError, TimeoutError) as error:  # the next snapshot trims more; the sweep deletes what is left
            self._events.warning("state-trim-failed", f"{self._name()} below {trim.before}: {error}")

    def _key(self, epoch: int, offset: int) -> str:
        where = self._partition
        return state_snapshot_key(self._settings.cluster, where.topic, where.topic_id, where.partition, epoch, offset)

    # ---- the end -----------------------------------------------------------------------------

    async def close(self) -> None:
        """Refuse new proposals, wait for the outcome of the others at most `drain_s`, then end.

        The epoch stays open in the log. The callers that still wait get OutcomeUnknownError or MovedError.
        """
        self._closing = True
        owner = self._owner
        if owner is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                while owner.busy:
                    self._settled.clear()
                    await self._settled.wait()
        await self._tasks.stop()
        owner.end(NotReadyError(f"{self._name()} was closed"))
        self._answer(owner.take_settled())

    def _task_failed(self, error: BaseException) -> None:
        """End the epoch after an error that no part expects."""
        assert self._owner is not None, "no task runs before the opening"
        self._events.error("state-log-failed", f"{self._name()}: {error!r}", error)
        self._owner.end(NotReadyError(f"{self._name()} failed: {error!r}"))
        self._ended(self._owner)

    def _now(self) -> float:
        return self._runtime.clock.monotonic()

    def _name(self) -> str:
        return f"state log {self._partition.partition} of topic '{self._partition.topic}'"
