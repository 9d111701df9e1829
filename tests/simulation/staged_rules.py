"""The rule of a staged commit: after it returns, exactly the first manifest of the batch is readable."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memq.format.staged_manifest import Manifest
from memq.protocol.admin_messages import PublishStaged
from memq.topic import writer_id
from tests.simulation.checker import Checker


class StagedRules:
    """Knows what was staged, by object, and what was committed, by writer and batch."""

    def __init__(self, checker: Checker, fail: Callable[[str], None]) -> None:
        self._checker = checker
        self._fail = fail
        self._numbers: dict[str, int] = {}
        self._objects: dict[str, list[bytes]] = {}
        self._offered: set[tuple[str, int]] = set()
        self._committed: dict[tuple[str, int], Manifest] = {}
        self._given_up: set[tuple[str, int]] = set()

    def known(self, name: str) -> int:
        """Return how many batches of a writer are known to be there, or given up."""
        return sum(1 for writer, _ in {*self._committed, *self._given_up} if writer == name)

    def given_up(self, name: str, batch: int) -> None:
        """A commit ended, because the owner may have forgotten the batch."""
        self._given_up.add((name, batch))

    def made(self, name: str, batch: int, partition: int, filling: bytes) -> bytes:
        """Return a record that nobody made before."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        value = f"{name} {batch} {partition} {number} ".encode() + filling
        self._checker.sent(name, partition, number, value, staged=True)
        return value

    def staged(self, key: str, values: list[bytes]) -> None:
        """An object holds these records."""
        self._objects[key] = values

    def offered(self, name: str, batch: int, keys: Iterable[str]) -> None:
        """A batch is about to be committed: the first objects decide what it is, where the store does not fail."""
        if (name, batch) in self._offered:
            return
        self._offered.add((name, batch))
        records = [self._checker.records[value] for key in keys for value in self._objects[key]]
        partitions = frozenset(record.stream[1] for record in records)
        for record in records:
            record.batch = partitions

    def acked_by_owner(self, ask: PublishStaged, published: int, epoch: int) -> None:
        """The owner of an epoch answers that so many pieces of a batch are in the queue.

        A running owner may put its last pointer, which has the writer's progress, after lost pieces. Later owners
        learn only that progress.
        """
        progress = self._progress(ask)
        for number, piece in enumerate(ask.pieces[: max(0, published - ask.first)], ask.first + 1):
            for value in self._objects[piece.key]:
                if self._checker.records[value].stream[1] == ask.partition:
                    self._checker.records[value].staged_ack_leaves(epoch, named=(ask.batch_id, number) <= progress)

    def _progress(self, ask: PublishStaged) -> tuple[int, int]:
        """Return the writer's last batch and the number of its last piece by the pointers in the queue."""
        found = (-1, 0)
        for log in self._checker.logs.values():
            for pointer in (entry.pointer for entry in log.entries if entry.pointer.partition == ask.partition):
                for named in pointer.named if pointer.topic_id == ask.topic_id else ():
                    if named.producer == writer_id(ask.writer):
                        found = max(found, (int(named.batch_id), named.last_sequence))
        return found

    def committed(self, name: str, batch: int, manifest: Manifest) -> None:
        """A commit has returned: all records of the manifest are readable, whichever process wrote it.

        An id below the writer's last one counts as committed, also that of a batch that was refused and given up.
        """
        if (name, batch) in self._given_up:
            return
        known = self._committed.setdefault((name, batch), manifest)
        if known != manifest:
            self._fail(f"batch {batch} of {name} is another one than before")
        if known is manifest:
            for staged in manifest.objects:
                for value in self._objects[staged.key]:
                    self._checker.ack(value)

    def finish(self) -> None:
        """Check that of each committed batch nothing is there but what its manifest names."""
        right = {
            value
            for manifest in self._committed.values()
            for each in manifest.objects
            for value in self._objects[each.key]
        }
        names = {name.encode(): None for name, _ in self._committed}
        for log in self._checker.logs.values():
            for one in log.stream:
                name, batch, *_ = one.value.split(b" ", 3)
                if name in names and (name.decode(), int(batch)) in self._committed and one.value not in right:
                    self._fail(f"record {one.value[:40]!r} is there, and its batch was committed without it")
