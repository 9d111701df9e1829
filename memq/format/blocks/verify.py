"""Whether a block's header matches its records: unnecessary for readers, needed by an audit."""

from __future__ import annotations

from memq.errors import CorruptDataError
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import DELTA_SATURATED, BlockHeader, tag_bit
from memq.limits import SLOTS
from memq.topic import slot_of_key


def verify_block(reader: BlockReader) -> None:
    """Read every column, and hold times, slots and tag bits against the header's.

    A header that is too narrow makes readers skip records that they should see.
    Raises: CorruptDataError, UnsupportedFormatError.
    """
    header = reader.header
    times: list[int] = []
    keys: list[bytes | None] = []
    tags: dict[str | None, None] = {}
    for _, key, _, time, tag in reader.records():
        times.append(time)
        keys.append(key)
        tags[tag] = None
    _verify_times(header, min(times), max(times))
    _verify_slots(header, keys)
    for tag in tags:
        if tag is not None and not header.tag_bits & tag_bit(tag):
            raise CorruptDataError(f"{header.describe()}: tag {tag[:60]!a} is not in tag bits {header.tag_bits:#x}")


def _verify_times(header: BlockHeader, least: int, greatest: int) -> None:
    saturated = header.max_delta_ms == DELTA_SATURATED and greatest - least >= DELTA_SATURATED
    if least != header.base_ms or not (saturated or greatest - least == header.max_delta_ms):
        raise CorruptDataError(
            f"{header.describe()}: timestamps are {least} to {greatest}, "
            f"the header says {header.base_ms} + {header.max_delta_ms}"
        )


def _verify_slots(header: BlockHeader, keys: list[bytes | None]) -> None:
    slots = [(0, SLOTS - 1) if key is None else (slot_of_key(key),) for key in keys]
    least, greatest = min(slot[0] for slot in slots), max(slot[-1] for slot in slots)
    if least < header.slot_first or greatest > header.slot_last:
        raise CorruptDataError(
            f"{header.describe()}: keys have slots {least} to {greatest}, "
            f"the header says {header.slot_first} to {header.slot_last}"
        )
