"""Measures the broker's own part of a block, without sockets: accept frames that lie in slabs, then make the object.

A batch has 8 MiB, and eight of them take turns, so that the bytes have left the CPU caches as in a broker.
"""

from __future__ import annotations

import gc
import struct
import time
from typing import Any, cast

from awscrt.checksums import crc32c

from benchmarks.children.commands import Command, answer, commands
from memq.broker.ingest.intake import sound_run
from memq.broker.ingest.slabs import Slab, SlabPool
from memq.broker.partition.append import ProducerState
from memq.broker.partition.batch import Origin, data_pointer, own_object, seal_batch
from memq.broker.partition.ring import Ring, RingLimits, RingStream
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import CHECKED_FROM
from memq.limits import BLOCK_HEADER_BYTES, FRAME_PREFIX_BYTES, MIB
from memq.protocol.frames import WRITE_PREFIX, AckLevel, Api
from memq.runtime.process import keep_freed_blocks
from memq.topic import Topic, Totals, equal_slots

BATCH_BYTES = 8 * MIB
BATCHES = 8
RECORD_BYTES = 100
PRODUCER, SCOPE = 7, 5
TOPIC = Topic(name="bench", id="0" * 31 + "1", created_ms=1, partitions=equal_slots(1))
ORIGIN = Origin("memq", "one", "main", TOPIC, 0, 1)
Batch = list[tuple[Slab, int]]  # slabs, and where their frames end


class Home:
    """The partition, as a scan sees it."""

    scope = SCOPE


def frames(block_bytes: int) -> Batch:
    """Return the frames of one batch, in slabs as the intake fills them."""
    builder, values = BlockBuilder(), max(1, (block_bytes - BLOCK_HEADER_BYTES) // (RECORD_BYTES + 4))
    for number in range(values):
        builder.append(b"%0100d" % number)
    block = bytearray(builder.seal(producer_id=PRODUCER, first_sequence=0, scope=SCOPE, now_ms=0, codec="none").data)
    need, pool = FRAME_PREFIX_BYTES + len(block), SlabPool(1 << 40)
    prefix = WRITE_PREFIX.pack(len(block), Api.WRITE, 0, 1, 0)
    batch: Batch = []
    for number in range(BATCH_BYTES // len(block)):
        if not batch or batch[-1][1] + need > batch[-1][0].size:
            slab = pool.lease(need)
            assert slab is not None, "the pool has no bound"
            batch.append((slab, 0))
        slab, at = batch[-1]
        struct.pack_into("<Q", block, 40, number * values)
        struct.pack_into("<I", block, 4, crc32c(memoryview(block)[CHECKED_FROM:]))
        slab.view[at : at + need] = prefix + block
        batch[-1] = (slab, at + need)
    return batch


def take(batch: Batch) -> Ring:
    """Accept the blocks of a batch."""
    ring = Ring(RingLimits(8, 1 << 40, 65_536, 1.0, True, 4))
    nobody = cast(Any, Home)
    stream = RingStream(1, nobody, nobody, ProducerState(PRODUCER), AckLevel.ALL, 0)
    for slab, end in batch:
        run = sound_run(stream, slab, 0, end, oldest_ms=-1.0, blocks_max=65_536, bytes_max=1 << 40)
        ring.extend(stream, run, 0.0)
        stream.expected = run.next
    return ring


def measure(batch: Batch) -> Command:
    """Return the CPU seconds of both steps, and the size of the batch."""
    began_s = time.thread_time()
    ring = take(batch)
    taken_s = time.thread_time()
    slot = ring.open
    assert slot is not None, "no block was sound"
    slot.sealed_ms = 5
    sealed = seal_batch(slot, ORIGIN)
    own_object(sealed)
    data_pointer(slot, sealed, ORIGIN, Totals(), (), (), 9)
    blocks, size = sealed.entry.blocks, slot.bytes
    slot.drop_blocks()
    del ring, slot, sealed
    return {"take_s": taken_s - began_s, "seal_s": time.thread_time() - taken_s, "blocks": blocks, "bytes": size}


def main() -> None:
    batches: list[Batch] = []
    keep_freed_blocks()  # as a broker does
    answer(ready=True)
    for command in commands():
        if "block_bytes" in command:
            batches.clear()
            batches += [frames(command["block_bytes"]) for _ in range(BATCHES)]
        gc.collect()
        gc.disable()
        found = [measure(batch) for batch in batches]
        gc.enable()
        answer(**{name: sum(each[name] for each in found) for name in found[0]})


if __name__ == "__main__":
    main()
