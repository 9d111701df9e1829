"""Passes published data to the checker of its topic: one for the lasting topic, one for the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memq.format.report import AUDIT_TOPIC
from memq.groups import Membership
from memq.notification import Publication
from memq.simulation.ports.cloud import Observer
from memq.simulation.world.node import SimNode
from memq.topic import NAMESPACE_END, Position, ReadPartition
from tests.simulation.checker import Checker

LISTENERS = "listeners"  # begins the names of groups that have rules of their own
Places = list[tuple[ReadPartition, Position]]


class Observers(Observer):
    """See `cloud.Observer`. `exists` says whether a topic of this id is there; its log may not be dropped then."""

    def __init__(
        self,
        topic_id: str,
        lasting: Checker,
        transient: Checker,
        exists: Callable[[str], bool],
        fail: Callable[[str], None],
    ) -> None:
        self._topic_id = topic_id
        self._lasting = lasting
        self._transient = transient
        self._exists = exists
        self._fail = fail
        self._left = False
        self.on_listeners: Callable[[str, ReadPartition, Position], None] = lambda group, partition, position: None
        self._dropped: dict[ReadPartition, None] = {}  # a late `create` may bring such a log back, empty, for a while

    def leave(self) -> None:
        """Check nothing any more: from now on the run itself does faults to logs and objects."""
        self._left = True

    def _of(self, partition: ReadPartition) -> Checker:
        lasts = partition.topic_id == self._topic_id or partition.topic == AUDIT_TOPIC
        return self._lasting if lasts else self._transient

    def _split(self, positions: Places) -> list[tuple[Checker, Places]]:
        both = (self._lasting, self._transient)
        return [(each, [one for one in positions if self._of(one[0]) is each]) for each in both]

    def stored(self, key: str) -> None:
        """See `cloud.Observer`."""
        if not self._left:
            self._lasting.stored(key)

    def deleted(self, key: str) -> None:
        """See `cloud.Observer`."""
        if not self._left:
            self._lasting.deleted(key)
            self._transient.deleted(key)

    def published(
        self, publication: Publication, offset: int, node: SimNode, read_to: int, handed_over_s: float
    ) -> None:
        """See `cloud.Observer`."""
        if publication.partition in self._dropped or self._left:
            return
        self._of(publication.partition).published(publication, offset, node, read_to, handed_over_s)

    def trimmed(self, partition: ReadPartition, before: int) -> None:
        """See `cloud.Observer`."""
        if not self._left:
            self._of(partition).trimmed(partition, before)

    def cut(self, partition: ReadPartition, end: int) -> None:
        """See `cloud.Observer`."""
        if partition not in self._dropped and not self._left:
            self._of(partition).cut(partition, end)

    def dropped(self, partitions: Sequence[ReadPartition]) -> None:
        """See `cloud.Observer`: a log goes with its topic, and never before."""
        for partition in partitions:
            if self._exists(partition.topic_id):
                self._fail(f"the log of {partition} is dropped, and its topic exists")
            self._of(partition).dropped(partition)
            self._dropped[partition] = None

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """See `cloud.Observer`."""
        checker = self._of(partition)
        if checker.retention is not None:
            checker.retention.commit(group, partition, position.pointer_offset)
        if _is_of_listeners(group):
            self.on_listeners(group, partition, position)
            return
        checker.committed(group, partition, position)

    def granted(self, group: str, member: str, membership: Membership, *, joined: bool) -> None:
        """See `cloud.Observer`."""
        self._lasting.commits.granted(group, member, membership, joined=joined)
        self._transient.commits.granted(group, member, membership, joined=joined)

    def asked(self, group: str, member: str, generation: int, number: int, positions: Places) -> None:
        """See `cloud.Observer`."""
        for checker, places in self._split(positions):
            checker.commits.asked(group, member, generation, number, places)

    def stored_by(self, group: str, member: str, generation: int, number: int, positions: Places) -> None:
        """See `cloud.Observer`."""
        for checker, places in self._split(positions):
            checker.commits.stored(group, member, generation, number, places)

    def fetched(self, group: str, partition: ReadPartition, position: Position | None) -> None:
        """See `cloud.Observer`."""
        if _is_of_listeners(group):
            return
        self._of(partition).fetched(group, partition, position)


def _is_of_listeners(group: str) -> bool:
    return group.rpartition(NAMESPACE_END)[2].startswith(LISTENERS)
