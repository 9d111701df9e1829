"""The live audit against the truth: no wrong finding in a sound run, and one for each injected fault.

It plays what landed as it is, then with each of some faults of `live_faults.py`. It says the same though it dies and
continues with what is stored, or is away for ten minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from memq.audit.account import apart
from memq.audit.checks.object_reads import named
from memq.audit.finding import IN_OBJECT, IN_QUEUE, Kind
from memq.format.object import open_object
from memq.format.ranges import RangeSet
from memq.format.report import Report, ReportedDamage
from memq.topic import Topic
from tests.simulation.live_faults import InjectedFault
from tests.simulation.live_replay import AuditResult, History, LivePlay, Named
from tests.simulation.reader import LogEntry, Source, delivered_twice
from tests.simulation.shard_answers import ShardAnswers
from tests.simulation.unit_faults import ALL_FAULTS, UnitFaults

FAULT_RATE = 0.5  # of the faults are done in one run: all of them took a tenth of all runs' time
AGREE_RATE = 0.25  # how often a fault is played by auditors that die and are away, too


class LiveRules:
    """`history` is what landed, without copies of reports; `fail` gets what the audit says wrongly.

    `injected` counts the faults that were done, by stage and name. `shards` are those of held
    records.
    """

    def __init__(
        self,
        topic: Topic,
        history: History,
        objects: Mapping[str, bytes],
        fail: Callable[[str], None],
        shards: ShardAnswers,
    ) -> None:
        self._released, self._lost_records = shards.of(topic), shards.lost_records
        self.injected: dict[str, int] = {}
        self.sound = AuditResult()  # what it says of the history as it is
        self._there: dict[Source, RangeSet] = {}
        self._topic = topic
        self._objects = objects
        self._fail = fail
        entries = [each for each in history if isinstance(each, LogEntry)]
        self._twice = delivered_twice(entries)
        self._partitions = list(dict.fromkeys(entry.pointer.partition for entry in entries))
        self._pointers = {(entry.pointer.partition, entry.offset): entry.pointer for entry in entries}
        self._refused: dict[Source, RangeSet] = {}  # what readers report as damaged, and could not name
        self._history: History = [
            (each[0], self._with_named_damages(each[1])) if isinstance(each, tuple) else each for each in history
        ]

    def check(self, draw: random.Random) -> None:
        """Play the history as it is, by auditors that die and are away, and once with each of some faults."""
        faults = UnitFaults(self._topic, self._history, self._objects, draw)
        self._there = faults.there
        self.sound = sound = self._play(self._history, draw)
        self.check_sound(sound.named)
        self.check_held(sound.held)
        self._agree("nothing", self._history, sound, draw)
        for stage, known in ALL_FAULTS.items():
            for inject in known:
                injected = inject(faults) if draw.random() < FAULT_RATE else None
                if injected is not None:
                    name = f"{stage} {inject.__name__}"
                    self.injected[name] = self.injected.get(name, 0) + 1
                    self._hold(name, injected, sound, draw)

    def check_sound(self, said: Named) -> None:
        """Check what an audit names in the run as it was."""
        for (kind, stage, group, *source), ranges in said.items():
            there = self._there.get((source[0], source[1]), RangeSet())
            if (kind, stage) == (Kind.CORRUPT, IN_OBJECT) and not apart(
                ranges, self._refused.get((source[0], source[1]), RangeSet())
            ):
                continue  # a store that lied once, as "not found": the reader got none of this, and says so
            if kind is Kind.DOUBLED and not apart(ranges, self._twice.get((source[0], source[1]), RangeSet())):
                continue  # other records under the same sequences: readers deliver both
            if (kind, stage) != (Kind.LOST, IN_QUEUE) or apart(ranges, there) != list(ranges):
                self._fail(f"the live audit of a sound run says {kind.value} in {stage} {group} of {source}: {ranges}")

    def check_held(self, said: Mapping[tuple[Kind, str], int]) -> None:
        """Check what an audit says of held records in the run as it was."""
        for (kind, id_), records in said.items():
            if kind is not Kind.LOST or records > self._lost_records:
                self._fail(f"the live audit of a sound run says {kind.value} of {records} held records: finding {id_}")

    def _with_named_damages(self, report: Report) -> Report:
        """Return a report as the partition's machine hears it: the auditor names damages by pointer and index first.

        One that is left without a name has no minute but that of the auditor's clock, which differs for one that was
        away; it is left so only where the pointer is gone, which no history has.
        """
        parts = tuple(
            replace(part, damages=tuple(new for old in part.damages for new in self._named(part.partition, old)))
            for part in report.parts
        )
        return replace(report, parts=parts)

    def _named(self, partition: int, damage: ReportedDamage) -> list[ReportedDamage]:
        pointer = self._pointers.get((partition, damage.offset))
        if pointer is None or not pointer.locations:
            return [damage]
        location = pointer.locations[0]
        known = self._objects.get(location.key)
        entries = () if known is None else open_object(known).blocks_in(location.offset, location.length)
        found = named(damage, pointer, entries)
        for each in found if found != [damage] else ():
            self._refused.setdefault((partition, each.producer), RangeSet()).add(each.first, each.next)
        for own in pointer.producers if known is None else ():  # compacted since then: the auditor could still name it
            for first, next_ in own.ranges:
                self._refused.setdefault((partition, own.producer), RangeSet()).add(first, next_)
        return found

    def _hold(self, name: str, injected: InjectedFault, sound: AuditResult, draw: random.Random) -> None:
        """Check what is said of a history with a fault, and that two more auditors say the same."""
        said = self._play(injected.history, draw)
        for key in sorted({**said.named, **injected.named, **sound.named}, key=repr):  # kinds have no order
            wanted = both(sound.named, injected.named, key)
            found = said.named.get(key, RangeSet())
            if apart(found, wanted) or (apart(wanted, found) and not injected.silent):
                self._fail(f"after '{name}' the live audit says {found} of {key}, not {wanted}")
        if said.held_lost() != sound.held_lost() + injected.held:
            self._fail(f"after '{name}' the live audit calls {said.held_lost()} held records lost, not {injected.held}")
        count, records = injected.counted
        if count and said.count(count) != sound.count(count) + records:
            self._fail(f"after '{name}' {said.count(count)} are {count}, not {sound.count(count)} and {records}")
        if injected.unreadable >= 0 and injected.unreadable not in said.unreadable:
            self._fail(f"after '{name}' the live audit says nothing of pointer {injected.unreadable}")
        if draw.random() < AGREE_RATE:
            self._agree(name, injected.history, said, draw)

    def _agree(self, name: str, history: History, said: AuditResult, draw: random.Random) -> None:
        """Let one auditor play that dies again and again, and one that comes ten minutes late: both say the same."""
        others = {
            "that died": self._play(history, draw, dies=True),
            "that was away": self._play(history, draw, away_from=draw.randrange(len(history) + 1)),
        }
        for who, other in others.items():
            if other.held != said.held:
                self._fail(f"after '{name}' an auditor {who} says {other.held} of held records, the other {said.held}")
            if other.named != said.named or other.unreadable.keys() != said.unreadable.keys():
                self._fail(f"after '{name}' an auditor {who} names {other.named}, the other one {said.named}")
            for key in sorted({**dict.fromkeys(said.sides()), **dict.fromkeys(other.sides())}):
                if said.word(*key) != other.word(*key):
                    self._fail(
                        f"after '{name}' an auditor {who} says '{other.word(*key)}' of {key}, not '{said.word(*key)}'"
                    )

    def _play(
        self, history: History, draw: random.Random, *, dies: bool = False, away_from: int | None = None
    ) -> AuditResult:
        parts = (self._topic, self._partitions, draw, self._fail, self._released)
        return LivePlay(*parts, dies=dies).play(history, away_from)


def both(one: Named, other: Named, key: tuple[Kind, str, str, int, int]) -> RangeSet:
    """Return what is named under a key by either."""
    return RangeSet([*one.get(key, RangeSet()), *other.get(key, RangeSet())])
