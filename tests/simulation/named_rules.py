"""Rules of a producer name: records are dense from 0, each once, over all instances.

Records of a name tell their number and the instance that sent them, so a record of an instance that was fenced is known
for one, whatever bytes it has.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from memq.topic import ReadPartition
from tests.simulation.read_log import ReadLog

Logs = Mapping[ReadPartition, ReadLog]


def no_cuts() -> int:
    """Return how often a log was cut: never."""
    return 0


def no_holes(_name: str, _partition: int) -> Container[int]:
    """Return the numbers that may be missing in a partition: none."""
    return ()


class NamedRules:
    """Knows the names that write to one topic; `fail` gets each finding.

    `holes` are records in the lost end of a log. An owner that learns of the loss by its own pointer has put that
    pointer after the hole.
    """

    def __init__(
        self,
        logs: Logs,
        fail: Callable[[str], None],
        cuts: Callable[[], int] = no_cuts,
        holes: Callable[[str, int], Container[int]] = no_holes,
    ) -> None:
        self.cuts = cuts  # returns how often a log was cut
        self._holes = holes
        self._logs = logs
        self._fail = fail
        self._names: dict[str, None] = {}

    def began(self, name: str, points: Mapping[int, int], cuts: int = 0) -> None:
        """An instance of `name` was notified where it continues, by write partition.

        It began to ask after so many `cuts`. If a log was cut meanwhile, the answer may be of the time before.
        """
        self._names[name] = None
        if cuts != self.cuts():
            return
        for partition, sequence in points.items():
            held = self._held(name, partition)
            if sequence != held:
                self._fail(f"{name} goes on at {sequence} of partition {partition}, where {held} of its records are")

    def finish(self) -> None:
        """Check that the log holds the numbers of each name from 0 on, in order, none left out and none twice."""
        for name in self._names:
            partitions = {one.source[0] for log in self._logs.values() for one in log.stream}
            for partition in sorted(partitions):
                self._held(name, partition)

    def _held(self, name: str, partition: int) -> int:
        """Check that the numbers of a name grow by 1, apart from holes; return the number after the last one."""
        following, holes = 0, None
        for number in self._numbers(name, partition):
            if number != following:
                holes = self._holes(name, partition) if holes is None else holes
                if number < following or any(each not in holes for each in range(following, number)):
                    self._fail(f"record {following} of {name} in partition {partition} is number {number}")
            following = number + 1
        return following

    def _numbers(self, name: str, partition: int) -> Iterable[int]:
        start = f"{name} {partition} ".encode()
        for log in self._logs.values():
            for one in log.stream:
                if one.value.startswith(start):
                    yield int(one.value.split(b" ", 3)[2])
