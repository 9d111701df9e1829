"""Rules of a producer name: records are dense from 0, each once, over all instances.

Records of a name tell their number and the instance that sent them, so a record of an instance that was fenced is known
for one, whatever bytes it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from memq.topic import ReadPartition
from tests.simulation.read_log import ReadLog

Logs = Mapping[ReadPartition, ReadLog]


class NamedRules:
    """Knows the names that write to one topic; `fail` gets each finding."""

    def __init__(self, logs: Logs, fail: Callable[[str], None]) -> None:
        self._logs = logs
        self._fail = fail
        self._names: dict[str, None] = {}

    def began(self, name: str, stood: Mapping[int, int]) -> None:
        """An instance of `name` was notified where it continues, by write partition."""
        self._names[name] = None
        for partition, sequence in stood.items():
            held = len(list(self._numbers(name, partition)))
            if sequence != held:
                self._fail(f"{name} goes on at {sequence} of partition {partition}, where {held} of its records are")

    def finish(self) -> None:
        """Check that the log holds the numbers of each name from 0 on, in order, none left out and none twice."""
        for name in self._names:
            partitions = {one.source[0] for log in self._logs.values() for one in log.stream}
            for partition in sorted(partitions):
                found = list(self._numbers(name, partition))
                if found != list(range(len(found))):
                    wrong = next(at for at, number in enumerate(found) if at != number)
                    self._fail(f"record {wrong} of {name} in partition {partition} is number {found[wrong]}")

    def _numbers(self, name: str, partition: int) -> Iterable[int]:
        start = f"{name} {partition} ".encode()
        for log in self._logs.values():
            for one in log.stream:
                if one.value.startswith(start):
                    yield int(one.value.split(b" ", 3)[2])
