"""Items of a block with a right checksum over broken columns stop no worker: they are dead, with an event."""

from __future__ import annotations

from typing import Any

from awscrt.checksums import crc32c

from memq.format.blocks.builder import BlockBuilder
from memq.limits import BLOCK_HEADER_BYTES
from memq.protocol.admin_messages import AdminRequest
from memq.protocol.frames import Api, encode_with_blocks
from memq.protocol.messages import encode_message
from memq.protocol.queue_messages import EnqueueItems, WireQueueBlock
from memq.queues.decisions import queue_scope
from tests.brokers import BareClient, block_of, run, write_frame
from tests.component.queue_rig import payloads, queueing
from tests.component.test_pop_groups import QUEUE, drained, popping


def poisoned(block: bytes) -> bytes:
    """Return a block with a right checksum, whose first value is longer than the block."""
    broken = bytearray(block)
    broken[BLOCK_HEADER_BYTES + 2] ^= 0x40
    broken[4:8] = crc32c(bytes(broken[8:])).to_bytes(4, "little")
    return bytes(broken)


def test_a_worker_of_a_pop_group_passes_over_a_poisoned_block() -> None:
    async def work() -> None:
        async with popping(1, 1) as (_, (broker,), queue, admin):
            topic = (await admin.topic("orders")).topic
            client = await BareClient.connect(broker)
            await client.open(topic)
            sound, bad = block_of(topic, 0, [b"a"]), poisoned(block_of(topic, 1, [b"b", b"c"]))
            for block in (sound, bad, block_of(topic, 3, [b"d"])):
                client.write(write_frame(block))
                assert (await client.frame()).api == Api.ACK
            await queue.begin_pop("orders", "billing")
            assert payloads(await drained(queue, 2)) == [b"a", b"d"]
            assert len(await queue.dead(QUEUE)) == 2
            await client.close()

    run(work())


def test_a_worker_of_a_queue_passes_over_a_poisoned_block() -> None:
    async def work() -> None:
        async with queueing(1) as (_, (broker,), queue):
            builder = BlockBuilder()
            builder.append(b"bad")
            sealed = builder.seal(producer_id=77, first_sequence=0, scope=queue_scope("jobs"), now_ms=1, codec="none")
            block = poisoned(bytes(sealed.data))
            terms: dict[str, Any] = {"priority": 5, "after_ms": 0, "life_ms": 0, "lease_ms": 30_000, "attempts_max": 0}
            ask = EnqueueItems(queue="jobs", blocks=[WireQueueBlock(length=len(block), **terms)])
            head = encode_with_blocks(Api.ADMIN, 3, encode_message(AdminRequest(ask=ask)), len(block))
            client = await BareClient.connect(broker)
            client.write(head + block)
            assert (await client.frame()).api == Api.ADMIN
            await queue.enqueue("jobs", b"good")
            assert payloads(await queue.dequeue({"jobs": 2}, wait=10)) == [b"good"]
            await client.close()

    run(work())
