"""A log of one partition with real objects: batches of one record each, whose pointers land one by one."""

from __future__ import annotations

from functools import partial

from memq.broker.restore.rebuild import BatchLocation, Rebuilder, find_batch
from memq.format.key import object_key
from memq.topic import ReadPartition
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import object_bytes, read_entry
from tests.simulation.restore_rules import STORE
from tests.unit.sealed_batches import TOPIC, batch, block, joined

BATCHES = 3
PARTITION = ReadPartition(TOPIC.name, TOPIC.id, 0)


class StoredLog:
    """A store with one object for each batch, and the log that names them: a cluster changes both at any moment."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.log = ReadLog()
        for number in range(BATCHES):
            self.land(number)

    def land(self, number: int, *, first: int | None = None, producer: int = 1) -> None:
        """Store one more batch of one record, and let its pointer land. `first` is its sequence, else `number`."""
        key = object_key("c-1", TOPIC.name, TOPIC.id, 0, 4, number, 1)
        self.objects[key] = joined(
            (batch(number), [block(number if first is None else first, [b"%d" % number], producer)])
        )
        found = find_batch(BatchLocation(key, 0, 4, number), self.objects[key], TOPIC)
        pointer = Rebuilder(TOPIC, "c-1", STORE).pointer(found)
        assert pointer is not None
        entry = read_entry(number, 0, pointer, partial(object_bytes, self.objects))
        self.log.entries.append(entry)
        self.log.stream += self.log.reader.take(entry)

    def store(self, number: int, *blocks: bytes) -> None:
        """Store one more batch without a pointer."""
        key = object_key("c-1", TOPIC.name, TOPIC.id, 0, 4, number, 1)
        self.objects[key] = joined((batch(number), list(blocks)))

    def lose(self, number: int) -> None:
        """Take the object of a batch from the store, though the log names it."""
        del self.objects[self.log.entries[number].pointer.locations[0].key]

    def expire(self, number: int) -> None:
        """Let retention take the pointers up to a batch, then the object of this batch."""
        self.log.leave_queue(number + 1)
        self.objects.pop(self.log.entries[number].pointer.locations[0].key, None)
