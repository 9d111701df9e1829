"""A block is sent again after its log was cut: it is in the log once, and its sender gets an ack."""

from __future__ import annotations

import msgspec

from memq.client.consumer.consumer import AsyncConsumer
from memq.errors import ObjectExistsError
from memq.format.pointer import decode_pointer, encode_pointer
from memq.notification import Entry
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import Api
from memq.topic import Position, TopicSettings, read_partitions
from tests.brokers import block_of, run, running_broker, write_frame
from tests.component.test_block_identity import values_of
from tests.partition_owners import connected, processor_of


def test_a_block_whose_only_pointer_lets_readers_skip_it_is_taken_again() -> None:
    """An owner that has not learned of a cut may publish a batch without a block whose first copy the log lost."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            block = block_of(topic, 0, [b"a", b"b"])
            client.write(write_frame(block))
            assert (await client.frame()).api == Api.ACK
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            log = queue.logs[read_partitions(topic)[0]]
            last = log.entries.pop()
            pointer = msgspec.structs.replace(decode_pointer(last.body), skip=(0,))
            log.entries.append(Entry(last.offset, last.time_ms, encode_pointer(pointer)))
            assert await values_of(broker) == []
            processor_of(broker, topic).fence(ObjectExistsError("in a test"))
            while (await client.frame()).api != Api.REDIRECT:
                pass
            for stream in (2, 3):  # the second one is a copy
                frame = await client.send_again(topic, block, stream=stream)
                assert (frame.api, frame.argument) == (Api.ACK, 2)
            assert await values_of(broker) == [b"a", b"b"]
            after = Position(0, last.offset + 1, 0)  # the reader first reads the pointers of the window before it
            async with AsyncConsumer(broker.address, "clicks", start=after, end="end", audit=False) as consumer:
                assert [record.value async for batch in consumer for record in batch] == [b"a", b"b"]
            await client.close()

    run(work())
