"""A log is cut under an owner that holds blocks acked with 1: each of them is in the log once afterwards."""

from __future__ import annotations

import pytest

from memq.format.pointer import decode_pointer
from memq.limits import MIB
from memq.protocol.frames import AckLevel, Api
from memq.topic import read_partitions
from tests.brokers import PRODUCER, block_of, write_frame
from tests.component.served_brokers import Served, open_of, served
from tests.skipping_loop import skip


@pytest.mark.parametrize("later", [0, 5], ids=["an idle log", "a log that grows over the known end"])
def test_a_block_by_which_an_owner_learned_of_a_cut_is_held_until_the_log_shows_it(later: int) -> None:
    """Its pointer is below all that the lost epoch has read. The drain of a broker waits for such blocks."""

    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        (read,) = read_partitions(topic)
        await at.answered(client, Api.OPEN, open_of(topic, acks=AckLevel.ONE), stream=9)
        for sequence in (0, 1):
            client.say(write_frame(block_of(topic, sequence, [b"v"], producer=PRODUCER), stream=9))
            await skip(1)
        del at.cluster.queue.logs[read].entries[-1:]
        client.say(write_frame(block_of(topic, 2, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK, Api.ACK, Api.ACK, Api.REDIRECT]
        assert len(at.broker.partitions.forwarder) == 1
        await at.answered(client, Api.OPEN, open_of(topic, sequence=3), stream=10)
        for sequence in range(3, 3 + later):
            client.say(write_frame(block_of(topic, sequence, [b"v"], producer=PRODUCER), stream=10))
            await skip(1)
        await skip(topic.settings.stale_publish_ms / 1_000 + 2)
        assert len(at.broker.partitions.forwarder) == 0
        await skip(2 * topic.settings.dedup_window_ms / 1_000)
        log = [decode_pointer(entry.body) for entry in await at.cluster.queue.read(read, 0, MIB)]
        named = [first for pointer in log for producer in pointer.producers for first, _ in producer.ranges]
        assert named == [0, 2, *range(3, 3 + later)]
        counters = at.broker.services.counters
        assert (counters.given_up_blocks, counters.forwarded_blocks) == (0, 0)

    served(work)
