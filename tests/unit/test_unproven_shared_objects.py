"""Objects with batches of several partitions or topics: each batch is compared with the log of its own partition."""

from __future__ import annotations

import pytest

from memq.broker.sweep.sweep import UNNAMED, UNPROVEN, Sweep
from memq.format.blocks.header import parse_header
from memq.format.key import shared_object_key
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, Pointer, ProducerRanges, encode_pointer
from memq.notification import Publication
from memq.topic import Topic, read_partitions
from tests.brokers import block_of, run
from tests.unit.bare_cluster import CLUSTER, SHARING, Cluster, topic_of

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
PRODUCER = 7


class SharedObject(Cluster):
    """Two write partitions, each with a log that shows batch 0 of epoch 1, and an object with a later batch of both."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.notes: list[str] = []
        first = topic_of("clicks", 2, SHARING)
        self.places = [(first, 0), (first, 1) if second == "partition" else (topic_of("views", 1, SHARING), 0)]

    async def begin(self) -> None:
        for topic in dict.fromkeys(topic for topic, _ in self.places):
            await self.topic(topic)
        for place in self.places:
            await self.publish(place, kind="opened", epoch=1)
            await self.data(place, 1, 0, (0, 10))

    async def publish(self, place: tuple[Topic, int], **fields: object) -> None:
        topic, partition = place
        given = {"cluster": CLUSTER, "topic": topic.name, "topic_id": topic.id, "partition": partition, **fields}
        pointer = Pointer(**given)  # type: ignore[arg-type]
        log = read_partitions(topic)[partition]
        body = encode_pointer(pointer)
        await self.queue.publish(Publication(log, partition, pointer.epoch, self.clock.wall_ms(), body))

    async def data(self, place: tuple[Topic, int], epoch: int, number: int, sequences: tuple[int, int]) -> None:
        await self.publish(
            place,
            kind="data",
            epoch=epoch,
            batch_sequence=number,
            locations=(Location(store="main", key="k", offset=0, length=1),),
            records=1,
            stored_bytes=1,
            producers=(ProducerRanges(PRODUCER, (sequences,)),),
        )

    async def shared(self, *batches: tuple[tuple[Topic, int], int, tuple[int, int]]) -> str:
        """Store an object with these batches of epoch 1: place, number, sequences."""
        body, blocks, entries = b"", list[BlockEntry](), list[BatchEntry]()
        topics = list(dict.fromkeys(topic for topic, _ in self.places))
        for (topic, partition), number, (first, next_) in batches:
            block = block_of(topic, first, [b"x"] * (next_ - first), producer=PRODUCER, partition=partition)
            entry = (len(body), len(block), 1_000, number, next_ - first, len(blocks), 1, partition, 1)
            entries.append(BatchEntry(*entry, topics.index(topic)))
            blocks.append(BlockEntry.from_header(parse_header(block), len(body)))
            body += block
        names = tuple(ObjectTopic(topic.name, topic.id) for topic in topics)
        meta = ObjectMeta(cluster=CLUSTER, broker="b", topics=names, created_ms=1)
        return await self.put(
            shared_object_key(CLUSTER, "b", 1, 0, 1_000), body + encode_index(meta, entries, blocks, len(body))
        )

    async def swept(self) -> list[str]:
        """Return the reasons of the second of two passes, a day apart."""
        found: list[str] = []
        for _ in range(2):
            self.clock.advance(DAY_MS)
            sweep = Sweep(CLUSTER, self.store, self.queue, self.topics, self.clock, self.notes.append, DAY_MS)
            found = [each.why async for each in sweep.run(HOUR_MS, HOUR_MS)]
        return found


@pytest.mark.parametrize("second", ["partition", "topic"])
@pytest.mark.parametrize("lacks", [None, 0, 1])
def test_an_object_is_kept_if_the_log_of_one_of_its_batches_has_not_its_records(second: str, lacks: int | None) -> None:
    async def trial() -> None:
        cluster = SharedObject(second)
        await cluster.begin()
        sequences = [(10, 20), (30, 40)]
        batches = [(place, 1, each) for place, each in zip(cluster.places, sequences, strict=True)]
        key = await cluster.shared(*batches)
        for number, (place, each) in enumerate(zip(cluster.places, sequences, strict=True)):
            if number != lacks:
                await cluster.publish(place, kind="opened", epoch=2)
                await cluster.data(place, 2, 0, each)
        assert await cluster.swept() == [UNNAMED if lacks is None else UNPROVEN]
        assert (key in cluster.store.objects, cluster.notes) == (lacks is not None, [])

    run(trial())


def test_an_object_stays_if_a_log_may_have_named_its_last_batch() -> None:
    """The records of its first batch were sent again. The log of its last one has lost a pointer before the end."""

    async def trial() -> None:
        cluster = SharedObject("topic")
        await cluster.begin()
        one, two = cluster.places
        key = await cluster.shared((one, 1, (10, 20)), (two, 1, (10, 20)))
        await cluster.data(one, 2, 0, (10, 20))
        await cluster.data(two, 1, 2, (20, 30))
        assert await cluster.swept() == []
        assert key in cluster.store.objects
        assert "topic 'views' partition 0: the queue has lost what may have named 1 objects" in cluster.notes[0]

    run(trial())
