"""The open findings of one write partition, updated with each new judgement. Pure.

Each judgement computes sets of wrong sequences. This file turns them into findings with an id and a beginning, which
grow, shrink and end. A change of a finding also changes the counts of its minute, so counts and findings agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from memq.audit.account import apart, common
from memq.audit.finding import IN_OBJECT, IN_QUEUE, Finding, Kind, finding_id
from memq.audit.live.event_minute import Dated
from memq.audit.minutes import MinuteRow
from memq.format.ranges import Range, RangeSet
from memq.format.report import ReportedDamage

FINDINGS_MAX = 10_000  # that hold in one write partition; more are not named until some have ended
COLUMNS = {
    Kind.LOST: "lost",
    Kind.DOUBLED: "doubled",
    Kind.EARLY: "doubled",  # readers get it, and should not yet
    Kind.UNRELEASED: "doubled",
    Kind.CORRUPT: "corrupt",
    Kind.HOLE: "unknown",
}


class OpenFindings:
    """The open findings of one write partition, in `findings` by id.

    `rows` receives each change.
    """

    def __init__(
        self, partition: tuple[str, str, int], findings: dict[str, Finding], rows: Callable[[int], MinuteRow]
    ) -> None:
        self._topic, self._topic_id, self._partition = partition
        self._findings = findings
        self._rows = rows
        self._by_key: dict[tuple[object, ...], dict[str, None]] = {}
        self._by_producer: Counter[int] = Counter()
        self._changed: dict[str, Finding] = {}
        for finding in findings.values():
            self._file(finding)

    def take_changed(self) -> list[Finding]:
        """Return the findings that began, changed or ended since the last call."""
        changed = [msgspec.structs.replace(finding) for finding in self._changed.values()]
        self._changed.clear()
        return changed

    def hold(
        self,
        wrong: Finding,
        pieces: Iterable[Range],
        dated: Callable[[Sequence[Range]], list[Dated]],
        locate: Callable[[int], tuple[int, str]],
        now_ms: int,
    ) -> None:
        """Replace the findings of one kind by those of `pieces`; `wrong` has the fields that they share.

        `dated` returns the minutes of new findings. `locate` returns the pointer offset and object of a sequence, -1
        and "" if they are unknown.
        """
        left = list(pieces)
        for finding in self._alike(wrong):
            kept = tuple(common(finding.ranges, RangeSet(left)))
            left = apart(left, RangeSet(kept))
            self._change(finding, kept, now_ms)
        for minute, first, next_ in dated(left):
            finding_or_none = self._of_minute(wrong, minute, now_ms)
            if finding_or_none is not None:
                if finding_or_none.offset < 0:
                    finding_or_none.offset, finding_or_none.object = locate(first)
                ranges = tuple(RangeSet([*finding_or_none.ranges, (first, next_)]))
                self._change(finding_or_none, ranges, now_ms)

    def any_of(self, producer: int) -> bool:
        """Return whether a finding about a producer is open."""
        return producer in self._by_producer

    def ranges(self, wrong: Finding) -> RangeSet:
        """Return the sequences of the open findings with the fields of `wrong`."""
        return RangeSet(piece for finding in self._alike(wrong) for piece in finding.ranges)

    def damaged(self, damage: ReportedDamage, minute: int, now_ms: int) -> None:
        """Take a damaged block. Its finding stays open; only records that no finding has yet are counted.

        A damage without sequences, because its index did not answer, ends once other damages name as many records.
        """
        wrong = Finding(
            kind=Kind.CORRUPT,
            partition=self._partition,
            stage=IN_OBJECT,
            producer=damage.producer,
            cause=damage.cause,
            object=damage.object,
            block=damage.block,
            offset=damage.offset,
        )
        id_ = finding_id(self._topic_id, self._partition, damage.object, damage.block, damage.producer, damage.first)
        if id_ not in self._findings and len(self._findings) >= FINDINGS_MAX:
            return
        new, records = self._new_of(damage, wrong)
        if records <= 0:
            return
        finding = self._findings.get(id_) or self._made(id_, wrong, minute, now_ms)
        self._recount(finding, finding.records + records)
        finding.ranges = tuple(RangeSet([*finding.ranges, *new]))
        for other in self._alike(wrong):
            if not other.ranges and self._named_from(other) >= other.records:
                self._end(other, now_ms)

    def add_unnamed(self, wrong: Finding, minute: int, now_ms: int) -> None:
        """Add a finding about a pointer, whose records can't be named."""
        id_ = finding_id(self._topic_id, self._partition, wrong.kind.value, wrong.offset)
        if id_ not in self._findings and len(self._findings) < FINDINGS_MAX:
            self._made(id_, wrong, minute, now_ms)

    def note(self, kind: Kind, cause: str, minute: int, records: int, offset: int, now_ms: int) -> None:
        """Set the records of a finding that does not name their sequences; 0 ends it."""
        wrong = Finding(kind=kind, partition=self._partition, stage=IN_QUEUE, cause=cause, offset=offset)
        id_ = finding_id(self._topic_id, self._partition, *_key_of(wrong), wrong.offset, minute)
        finding = self._findings.get(id_)
        if finding is None and records and len(self._findings) < FINDINGS_MAX:
            finding = self._made(id_, wrong, minute, now_ms)
        if finding is not None and finding.records != records:
            self._recount(finding, records)
        if finding is not None and not records:
            self._end(finding, now_ms)

    # ---- inside --------------------------------------------------------------------------------------

    def _alike(self, wrong: Finding) -> list[Finding]:
        """Return the findings that share their fields with `wrong`; damages share the batch."""
        return [self._findings[id_] for id_ in self._by_key.get(_key_of(wrong), ())]

    def _new_of(self, damage: ReportedDamage, wrong: Finding) -> tuple[list[Range], int]:
        """Return the ranges of a damage that no finding has, and the number of their records."""
        if damage.first < damage.next:
            known = [each.ranges for each in self._alike(wrong) if each.producer == damage.producer]
            new = apart([(damage.first, damage.next)], *map(RangeSet, known))
            return new, sum(next_ - first for first, next_ in new)
        same = [each.records for each in self._alike(wrong) if not each.ranges and each.block == damage.block]
        return [], 0 if self._named_from(wrong) >= damage.records else damage.records - sum(same)

    def _named_from(self, damage: Finding) -> int:
        """Return how many damaged records of a batch are named, from the block of a damage on."""
        return sum(each.records for each in self._alike(damage) if each.ranges and each.block >= damage.block)

    def _of_minute(self, wrong: Finding, minute: int, now_ms: int) -> Finding | None:
        id_ = finding_id(self._topic_id, self._partition, *_key_of(wrong), minute)
        if id_ not in self._findings and len(self._findings) >= FINDINGS_MAX:
            return None
        return self._findings.get(id_) or self._made(id_, wrong, minute, now_ms)

    def _made(self, id_: str, wrong: Finding, minute: int, now_ms: int) -> Finding:
        partition = {"topic": self._topic, "topic_id": self._topic_id, "partition": self._partition}
        finding = msgspec.structs.replace(wrong, id=id_, minute=minute, first_seen_ms=now_ms, **partition)
        self._findings[id_] = self._changed[id_] = finding
        self._file(finding)
        return finding

    def _change(self, finding: Finding, ranges: tuple[Range, ...], now_ms: int) -> None:
        records = sum(next_ - first for first, next_ in ranges)
        if ranges == finding.ranges:
            return
        if ranges:
            self._recount(finding, records)
            finding.ranges = ranges
        else:
            self._end(finding, now_ms)

    def _recount(self, finding: Finding, records: int) -> None:
        self._rows(finding.minute).side(finding.group).count(COLUMNS[finding.kind], records - finding.records)
        finding.records = records
        self._changed[finding.id] = finding

    def _end(self, finding: Finding, now_ms: int) -> None:
        """End a finding, and subtract its records; it keeps its ranges."""
        self._recount(finding, 0)
        finding.resolved_ms = now_ms
        del self._findings[finding.id]
        self._by_key[_key_of(finding)].pop(finding.id)
        self._by_producer[finding.producer] -= 1
        if not self._by_producer[finding.producer]:
            del self._by_producer[finding.producer]

    def _file(self, finding: Finding) -> None:
        self._by_key.setdefault(_key_of(finding), {})[finding.id] = None
        self._by_producer[finding.producer] += 1


def _key_of(finding: Finding) -> tuple[object, ...]:
    if finding.stage == IN_OBJECT:
        return (finding.kind.value, finding.object, finding.offset)
    return (finding.kind.value, finding.stage, finding.group, finding.producer, finding.cause)
