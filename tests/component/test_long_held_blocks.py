"""Blocks acked with 1 that wait in a ring for longer than the dedup window, while the store fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memq.errors import StoreError
from memq.format.pointer import decode_pointer
from memq.limits import MIB
from memq.protocol.frames import AckLevel, Api
from memq.topic import ReadPartition, read_partitions
from tests.brokers import PRODUCER, block_of, write_frame
from tests.component.served_brokers import Calls, Served, open_of, served
from tests.partition_owners import control, processor_of
from tests.skipping_loop import skip


@pytest.mark.parametrize(("fenced", "false_seeks"), [(False, 0), (True, 0), (True, 1)])
@pytest.mark.parametrize("windows", [0.5, 2.0])
def test_a_block_in_a_ring_is_known_by_a_copy_that_landed_after_it_was_taken(
    windows: float, *, fenced: bool, false_seeks: int
) -> None:
    """The copy is a late pointer. Readers and the next owner have forgotten it by the time the store answers.

    One answer to the search for the first offset of that time says that nothing is so young.
    """

    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        (read,) = read_partitions(topic)
        log, block = at.cluster.queue.logs[read], block_of(topic, 0, [b"v"], producer=PRODUCER)
        await at.answered(client, Api.OPEN, open_of(topic, acks=AckLevel.ONE), stream=9)
        client.say(write_frame(block, stream=9))
        await skip(1)
        late = log.entries.pop()  # it lands below
        processor = processor_of(at.broker, topic)
        await at.cluster.queue.publish(control(topic, "opened", 7))
        await processor.republish_opened()
        await skip(1)
        assert processor.owned().epoch > 7
        client.heard()
        await at.answered(client, Api.OPEN, open_of(topic, acks=AckLevel.ONE), stream=10)
        puts = Calls(at.cluster.store, "put")
        puts.fails["put"] = [StoreError("it is down")] * 10_000
        client.say(write_frame(block, stream=10))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK]
        late_ms = at.broker.services.runtime.clock.wall_ms()
        log.entries.append(replace(late, offset=log.end, time_ms=late_ms))
        for _ in range(10):
            await processor.republish_opened()
            await skip(windows * topic.settings.dedup_window_ms / 10_000)
        left, seek = [0] * false_seeks, at.cluster.queue.seek_time

        async def late_seek(partition: ReadPartition, time_ms: int) -> int:
            if left and time_ms < late_ms - topic.settings.dedup_window_ms:
                return left.pop() or log.end
            return await seek(partition, time_ms)

        at.cluster.queue.seek_time = late_seek  # type: ignore[method-assign]
        if fenced:
            now_ms = at.broker.services.runtime.clock.wall_ms()
            await at.cluster.queue.publish(replace(control(topic, "opened", 90), time_ms=now_ms))
        puts.fails["put"] = []
        await processor.republish_opened()
        await skip(topic.settings.stale_publish_ms / 1_000 + 10)
        assert len(at.broker.partitions.forwarder) == 0
        pointers = [decode_pointer(entry.body) for entry in await at.cluster.queue.read(read, 0, MIB)]
        batches = [(pointer.epoch, pointer.skip) for pointer in pointers if pointer.kind == "data"]
        assert left == []
        assert batches == ([(1, ())] if fenced else [(1, ()), (8, (0,))])

    served(work)
