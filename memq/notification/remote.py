"""The queue `remote`: clients without access to the queue use it through a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from memq.errors import MemqError, QueueError
from memq.limits import POLL_BYTES_MAX
from memq.notification import Entries, Entry, Span, checked_span
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, TrimCompacted
from memq.protocol.frames import Api
from memq.protocol.messages import (
    PartitionEntries,
    PartitionRef,
    PollAnswer,
    PollEntries,
    PollFrom,
    PollRequest,
    PollSpans,
    PollTime,
    error_of,
)
from memq.topic import ReadPartition

Answer = TypeVar("Answer", bound=msgspec.Struct)
ANSWER_S = 30.0  # time-out of an answer, in addition to the requested wait


class Ask(Protocol):
    """Sends a request to any broker that answers, and returns the answer.

    Raises: the error in the answer; UnreachableError, TimedOutError.
    """

    async def __call__(self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        """Send `message`, and decode the answer as `answer`."""
        ...


class AskWithBlocks(Protocol):
    """As `Ask`, for answers that blocks may follow."""

    async def __call__(
        self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float
    ) -> tuple[Answer, memoryview]:
        """Send `message`; return the answer, and the bytes after it."""
        ...


class Polled(msgspec.Struct, frozen=True):
    """The content of one partition from the requested offset on, with its span at that moment.

    With an `error`, span and entries are empty, and the content is unknown. `blocks` has the bytes of some entries'
    batches, by offset, as the broker sent them: nothing is checked. `ended`: the broker knows that the topic has ended.
    """

    partition: ReadPartition
    span: Span
    entries: Entries
    error: MemqError | None = None
    blocks: Mapping[int, memoryview] = {}
    ended: bool = False

    @classmethod
    def failed(cls, partition: ReadPartition, offset: int, error: MemqError) -> Polled:
        """Return the answer for a partition whose log fails, from the requested offset."""
        return cls(partition, Span(0, 0), Entries((), offset), error)


class RemoteQueue:
    """Reads pointers through a broker: `PointerReader`."""

    def __init__(self, ask: Ask, ask_with_blocks: AskWithBlocks | None = None) -> None:
        """Without `ask_with_blocks`, `poll` brings pointers only."""
        self._ask = ask
        self._ask_with_blocks = ask_with_blocks

    # ---- pointers ----------------------------------------------------------------------------

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = POLL_BYTES_MAX,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        """Return entries of several partitions, each from its offset on.

        Wait up to `wait_ms` if there are none. A failure of one log is in the `error` of its answer. A broker may add
        up to `blocks_bytes_max` bytes of blocks, of batches with any of the `tag_bits`; 0 for all batches.
        """
        partitions = [PollFrom(partition=ref_of(part), offset=offset) for part, offset in offsets.items()]
        wanted = PollEntries(partitions=partitions, wait_ms=wait_ms, bytes_max=bytes_max)
        if self._ask_with_blocks is None or blocks_bytes_max <= 0:
            answer, blocks = await self._poll(wanted, wait_ms), memoryview(b"")
        else:
            wanted.blocks_bytes_max, wanted.tag_bits = blocks_bytes_max, f"{tag_bits:016x}"
            request, timeout_s = PollRequest(ask=wanted), ANSWER_S + wait_ms / 1000
            answer, blocks = await self._ask_with_blocks(Api.POLL, request, PollAnswer, timeout_s=timeout_s)
        found: list[Polled] = []
        for part in answer.partitions:
            polled, blocks = _polled_of(part, offsets, blocks)
            found.append(polled)
        return found

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        polled = await self.poll({partition: offset}, 0, min(bytes_max, POLL_BYTES_MAX))
        if [each.partition for each in polled] != [partition]:
            raise QueueError(f"a broker left partition {partition.partition} of '{partition.topic}' out of its answer")
        if polled[0].error is not None:
            raise polled[0].error
        return polled[0].entries

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        found = (await self.spans([partition]))[partition]
        if isinstance(found, MemqError):
            raise found
        return found

    async def owner_span(self, partition: ReadPartition, writer: int) -> Span:
        """Return the span from the owner of write partition `writer`; the request must go to that broker.

        Raises: MovedError, NotReadyError when the connected broker is not the owner; as `span`.
        """
        answer = await self._poll(PollSpans(partitions=[ref_of(partition)], writer=writer))
        parts = [part for part in answer.partitions if partition_of(part.partition) == partition]
        found = _span_of(partition, parts[0] if parts else None)
        if isinstance(found, MemqError):
            raise found
        return found

    async def spans(self, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Span | MemqError]:
        """Return the span of each partition, or its error. Raises: the first error when all logs fail."""
        answer = await self._poll(PollSpans(partitions=[ref_of(partition) for partition in partitions]))
        answered = {partition_of(part.partition): part for part in answer.partitions}
        return {partition: _span_of(partition, answered.get(partition)) for partition in partitions}

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        offset = (await self._poll(PollTime(partition=ref_of(partition), time_ms=time_ms))).offset
        if offset < 0:
            raise QueueError(f"a broker answered offset {offset} for time {time_ms}, which is no offset")
        return offset

    async def trim_compacted(self, topic: str, topic_id: str) -> int:
        """Remove pointers that manifests contain from the queue; return the brokers' `sweep_age_ms`."""
        return (await self._admin(AdminRequest(ask=TrimCompacted(topic=topic, topic_id=topic_id)))).sweep_age_ms

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        for polled in await self.poll(ends, int(timeout_s * 1000), 1):
            if polled.error is not None:
                raise polled.error

    async def _poll(self, ask: PollEntries | PollTime | PollSpans, wait_ms: int = 0) -> PollAnswer:
        return await self._ask(Api.POLL, PollRequest(ask=ask), PollAnswer, timeout_s=ANSWER_S + wait_ms / 1000)

    async def _admin(self, request: AdminRequest) -> AdminAnswer:
        return await self._ask(Api.ADMIN, request, AdminAnswer, timeout_s=ANSWER_S)


# ---- between the wire and the port --------------------------------------------------------------


def _span_of(partition: ReadPartition, part: PartitionEntries | None) -> Span | MemqError:
    if part is None:
        return QueueError(f"a broker left partition {partition.partition} of '{partition.topic}' out of its answer")
    if part.error is not None:
        return error_of(part.error)
    try:
        return checked_span(partition, part.begin, part.end)
    except QueueError as error:
        return error


def ref_of(partition: ReadPartition) -> PartitionRef:
    """Return a read partition as a field of a message."""
    return PartitionRef(topic=partition.topic, topic_id=partition.topic_id, partition=partition.partition)


def partition_of(ref: PartitionRef) -> ReadPartition:
    """Return the read partition in a message."""
    return ReadPartition(ref.topic, ref.topic_id, ref.partition)


def _polled_of(
    part: PartitionEntries, asked: Mapping[ReadPartition, int], blocks: memoryview
) -> tuple[Polled, memoryview]:
    """Return a broker's answer for one partition, and the blocks that belong to others.

    A broker before 0.6 sends no `next`: then reading continues after its last entry.
    """
    partition = partition_of(part.partition)
    if part.error is not None:
        return Polled.failed(partition, asked.get(partition, 0), error_of(part.error)), blocks
    entries = [
        Entry(wire.offset, wire.time_ms, bytes(wire.pointer) if wire.damaged is None else wire.damaged)
        for wire in part.entries
    ]
    found: dict[int, memoryview] = {}
    for wire in part.entries:
        if wire.blocks_bytes > 0:
            found[wire.offset], blocks = blocks[: wire.blocks_bytes], blocks[wire.blocks_bytes :]
    shown = entries[-1].offset + 1 if entries else asked.get(partition, 0)
    span = checked_span(partition, part.begin, part.end)
    return Polled(partition, span, Entries(entries, max(part.next, shown)), blocks=found, ended=part.ended), blocks
