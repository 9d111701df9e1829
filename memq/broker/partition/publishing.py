"""Publishing one pointer: with a fresh proof, in order, and only after a read to the queue's end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from memq.broker.partition.ownership import Ownership, Phase, changed_entry
from memq.broker.partition.pointer_resolver import PointerResolver
from memq.broker.partition.recent_pointer_cache import RecentPointer
from memq.broker.services import Services
from memq.errors import DeniedError, EpochFencedError, LogCutError, NotFoundError, RetryableError
from memq.format.pointer import Pointer, encode_pointer
from memq.notification import Entry, Publication
from memq.runtime.clock import backoff_s
from memq.topic import ReadPartition

BACKOFF_S_MAX = 2.0
PASSING: tuple[type[Exception], ...] = (RetryableError, TimeoutError)
# A queue that is starting or loses a certificate also answers "not found" or "denied". Only the coordinator decides
# that a topic is deleted; the broker then closes the partition.
OUTCOME_UNKNOWN: tuple[type[Exception], ...] = (*PASSING, DeniedError, NotFoundError)


def reused_offset(offset: int, read_to: int) -> LogCutError:
    """Return the error for a pointer at an offset below `read_to`, where the log had other entries."""
    return LogCutError(f"the queue put a pointer at offset {offset}, below {read_to}: its log was cut, or replaced")


class Publisher:
    """Reads and publishes for one epoch of one partition. The caller runs one publish at a time.

    The publisher retries after errors that pass. With `patient`, it also retries after "denied" and "not found".
    """

    def __init__(self, services: Services, own: Ownership, partition: ReadPartition, *, patient: bool) -> None:
        self.own = own
        self.partition = partition
        self.pointer_offset: int | None = None  # of the pointer; None if another copy may lie before it
        self._passing = OUTCOME_UNKNOWN if patient else PASSING
        self._refused: tuple[type[Exception], ...] = (EpochFencedError, *self._passing)
        self._services = services
        self._log = PointerResolver(services, partition, self._name())

    async def publish(
        self,
        build: Callable[[], Pointer],
        batch_sequence: int | None,
        until_s: float = math.inf,
        compare: Callable[[], Awaitable[None]] | None = None,
    ) -> bool:
        """Publish the pointer that `build` makes; retry until the queue holds it, at most until `until_s`.

        Each try builds the pointer again. When the proof is old or the last try failed, the publisher reads the queue
        before the next try. A pointer that the queue refused may still be in it; `batch_sequence` identifies it.
        Returns True when the queue holds the pointer, even if it also shows a higher epoch. Returns False when the
        pointer was not known to be in the queue at `until_s` (monotonic s); nothing is handed over after that. Each try
        awaits `compare` first. It looks up the facts that `build` needs, and raises RetryableError if it can't.
        Raises: EpochFencedError, LogCutError.
        """
        own, counters = self.own, self._services.counters
        tries, started = 0, self._now()
        while True:
            if own.unread or own.needs_proof(self._now()):
                await self.read_to_end()
            if batch_sequence is not None and batch_sequence in own.landed:
                own.take_landed(batch_sequence)
                return True
            if compare is not None:
                await self._compare(compare, until_s)
                if (own.unread or own.needs_proof(self._now())) and self._now() <= until_s:
                    continue  # read and compare pointers that landed meanwhile
            pointer, time_ms, handed_over_s, read_to = build(), own.queue_time_ms(), self._now(), own.read_to
            if handed_over_s > until_s:
                own.unread = own.unread or tries > 0  # a try may still land: read before the next publish
                return False
            repeated = own.handed_over == batch_sequence
            if batch_sequence is not None:
                own.handed_over_s, own.handed_over = handed_over_s, batch_sequence
            body = encode_pointer(pointer)
            try:
                offset = await self._hand_over(body, time_ms)
            except self._refused as error:
                own.unread, tries = True, tries + 1
                await self._rest_after(error, tries)
                continue
            if offset < read_to:  # a batch may have left out copies of blocks that the log has lost: no ack
                lost = reused_offset(offset, read_to)
                self._lose_log(lost)
                raise lost
            if own.follows(offset):
                own.prove(handed_over_s)
            first = own.follows(offset) or (not repeated and own.is_alone(handed_over_s))
            self.pointer_offset = offset if first else None
            own.published_s = handed_over_s
            own.published(offset, pointer, time_ms)
            location = pointer.locations[0] if pointer.locations else None
            recent = RecentPointer(Entry(offset, time_ms, body), location, pointer.tag_bits)
            self._services.recent_pointers.add(self.partition, recent)
            counters.published_pointers += 1
            counters.publish_seconds.observe(self._now() - started)
            return True

    async def _compare(self, compare: Callable[[], Awaitable[None]], until_s: float) -> None:
        """Await `compare`; retry after errors that pass, until `until_s` (monotonic s). Raises: LogCutError."""
        tries = 0
        while True:
            try:
                await compare()
            except LogCutError as error:
                self._lose_log(error)
                raise
            except self._passing as error:
                tries += 1
                self._services.events.warning("compare-retry", f"{self._name()}, try {tries}: {error}")
                if self._now() > until_s:
                    return
                await asyncio.sleep(self._backoff_s(tries))
            else:
                return

    async def _hand_over(self, body: bytes, time_ms: int) -> int:
        publication = Publication(self.partition, self.own.partition, self.own.epoch, time_ms, body)
        with self._services.waits.on("the queue", self._name()):
            async with asyncio.timeout(self.own.stale_publish_s):
                return await self._services.queue.publish(publication)

    async def read_to_end(self, end: int = 0) -> None:
        """Read the queue to its end and apply its entries; a proof, dated when the last read was handed over.

        The publisher accepts no end before `end` or before an own pointer, because the queue has shown these offsets.
        Raises: EpochFencedError when the queue shows a higher epoch; LogCutError, which ends the epoch, too. Errors
        that pass are retried without limit.
        """
        tries = 0
        while True:
            handed_over_s = self._now()
            try:
                async with asyncio.timeout(self.own.stale_publish_s):
                    entries = await self._log.read(self.own.read_to, max(end, self.own.known_end()))
                    if await self._log.has_changed(self.own.read_to - 1, self.own.last_mark):
                        raise changed_entry(self.own.read_to - 1)
                    for entry in entries:
                        await self._meet(entry)
            except LogCutError as error:
                self._lose_log(error)
                raise
            except self._passing as error:
                tries += 1
                await self._rest_after(error, tries)
                continue
            if self.own.phase is Phase.FENCED:
                raise EpochFencedError(f"{self._name()}: epoch {self.own.epoch} met {self.own.highest_epoch}")
            if not entries:
                self.own.prove(handed_over_s)
                self.own.unread = False
                return

    def _lose_log(self, error: LogCutError) -> None:
        """End the epoch: what this owner knows of the log is void."""
        self.own.log_was_cut = True
        if self.own.phase is Phase.OWNING:
            self._services.events.error("log-lost", f"{self._name()}: {error}; {error.hint}")
            self.own.become(Phase.FENCED)

    async def _rest_after(self, error: Exception, tries: int) -> None:
        """Report a failed try to publish, or to read before it, and pause before the next one."""
        self._services.counters.publish_retries += 1
        if isinstance(error, EpochFencedError):
            self._services.events.warning("epoch-refused", f"{self._name()}: {error}")
        else:
            self._services.events.warning("queue-retry", f"{self._name()}, try {tries}: {error}")
        await asyncio.sleep(self._backoff_s(tries))

    async def _meet(self, entry: Entry) -> None:
        if entry.offset < self.own.read_to:
            return
        pointer = await self._log.pointer(entry)
        if pointer is None:
            self.own.read_to, self.own.last_mark = entry.offset + 1, 0
            return
        if self.own.stated and pointer.kind == "data" and pointer.epoch < self.own.epoch:
            self._services.counters.late_pointers += 1
        self.own.meet(entry.offset, entry.time_ms, pointer)

    def _backoff_s(self, tries: int) -> float:
        return backoff_s(self._services.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX)

    def _now(self) -> float:
        return self._services.runtime.clock.monotonic()

    def _name(self) -> str:
        return f"topic '{self.partition.topic}' partition {self.own.partition}"
