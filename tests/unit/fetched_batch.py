"""One stored batch with its pointer, and a reader that answers as a test says."""

from __future__ import annotations

from memq.errors import CorruptDataError, NotFoundError
from memq.format.blocks.header import Buffer, parse_header
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Pointer, decode_pointer
from tests.unit.queue_model import TOPIC_ID, Block, Log

BLOCKS = [Block(1, 0, 2), Block(2, 0, 3), Block(1, 2, 4)]


def batch(blocks: list[Block]) -> tuple[Pointer, bytes, list[BlockEntry]]:
    log = Log()
    log.batch(*blocks)
    entries, at = [], 0
    for block in blocks:
        header = parse_header(block.data())
        entries.append(BlockEntry.from_header(header, at))
        at += header.length
    return decode_pointer(log.entries[0].body), log.bodies[0], entries


POINTER, BODY, ENTRIES = batch(BLOCKS)


def stored_object() -> bytes:
    """Return the batch as the one batch of an object."""
    meta = ObjectMeta(cluster="test", broker="b", topics=(ObjectTopic("clicks", TOPIC_ID),), created_ms=1)
    entry = BatchEntry(0, len(BODY), 1, 0, POINTER.records, 0, len(ENTRIES), 0, 1)
    return BODY + encode_index(meta, [entry], ENTRIES, len(BODY))


class Shelf:
    """A store with one object, which counts its reads and may fail."""

    def __init__(self, body: bytes | None, failure: Exception | None = None) -> None:
        self.body = body
        self.failure = failure
        self.reads = 0

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        if self.body is None:
            raise NotFoundError(f"no object '{key}'")
        if offset + length > len(self.body):
            raise CorruptDataError(f"object '{key}' is shorter")
        return self.body[offset : offset + length]
