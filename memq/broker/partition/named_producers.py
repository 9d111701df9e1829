"""One write partition's memory of named producers beyond its dedup window. Pure.

Theory. A named producer's sequences are dense from 0: its owner opens no stream for it beyond what the queue holds. So
one number, the sequence after its last, says which of them are committed, for as long as the name is remembered. Each
pointer of its batches says that number again, and the `opened` of an epoch, which is published again now and then, says
it of all names: an opening reads from the last of these on, and knows what its predecessors knew. Of a writer that
stages, it is two numbers: its last batch, and how many pieces of that are there.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from memq.format.pointer import NamedProducer


class NamedProducers:
    """The names of one write partition, by producer id.

    No more than NAMED_PRODUCERS_MAX, its owner sees to that.
    """

    def __init__(self) -> None:
        self._known: dict[int, NamedProducer] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, producer_id: int) -> NamedProducer | None:
        """Return what is remembered of a name, None when it is not known."""
        return self._known.get(producer_id)

    def entries(self) -> tuple[NamedProducer, ...]:
        """Return what is remembered of all names."""
        return tuple(self._known.values())

    def learn(self, entry: NamedProducer, time_ms: int) -> None:
        """Take the statement of a pointer of queue time `time_ms`, in any order: older ones change nothing."""
        known = self._known.get(entry.producer, entry)
        seen_ms = max(entry.last_seen_ms or time_ms, known.last_seen_ms)
        if entry.batch_id:
            newest = max(known, entry, key=lambda each: (batch_of(each), each.last_sequence))
            self._known[entry.producer] = msgspec.structs.replace(newest, last_seen_ms=seen_ms)
            return
        self._known[entry.producer] = msgspec.structs.replace(
            entry,
            epoch=max(entry.epoch, known.epoch),
            last_sequence=max(entry.last_sequence, known.last_sequence),
            last_seen_ms=seen_ms,
        )

    def forget(self, before_ms: int, busy: Container[int] = ()) -> None:
        """Forget names silent since before `before_ms` (queue time), except the `busy` ones."""
        for number, entry in list(self._known.items()):
            if entry.last_seen_ms < before_ms and number not in busy:
                del self._known[number]


def batch_of(entry: NamedProducer) -> int:
    """Return the last batch of a writer that stages, -1 for other producers."""
    return int(entry.batch_id) if entry.batch_id.isdecimal() and entry.batch_id.isascii() else -1
