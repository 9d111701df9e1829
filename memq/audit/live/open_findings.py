"""The findings that hold in one write partition, kept in step with what is wrong now. Pure.

What is wrong is computed anew as sets of sequences; here it becomes findings that have a name and a beginning, that
grow, shrink and end. Each change of a finding is a change of its minute's counts, too: so counts and findings agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from memq.audit.account import apart, common
from memq.audit.live.event_minute import Dated
from memq.audit.live.finding import LiveFinding, finding_id
from memq.audit.minutes import MinuteRow
from memq.audit.verdict import Kind
from memq.format.ranges import Range, RangeSet
from memq.format.report import ReportedDamage

FINDINGS_MAX = 10_000  # that hold in one write partition; more are not named until some have ended
COLUMNS = {Kind.LOST: "lost", Kind.DOUBLED: "doubled", Kind.CORRUPT: "corrupt", Kind.HOLE: "unknown"}


@dataclass(frozen=True, slots=True)
class Wrong:
    """The attributes that all findings of one producer and kind share."""

    kind: Kind
    stage: str
    producer: int
    cause: str
    group: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """The key that distinguishes it."""
        return (self.kind.title, self.stage, self.group, self.producer, self.cause)


class OpenFindings:
    """The open findings of one write partition, in `findings` by id.

    `rows` receives each change.
    """

    def __init__(
        self, place: tuple[str, str, int], findings: dict[str, LiveFinding], rows: Callable[[int], MinuteRow]
    ) -> None:
        self._topic, self._topic_id, self._partition = place
        self._findings = findings
        self._rows = rows
        self._by_key: dict[tuple[object, ...], dict[str, None]] = {}
        self._changed: dict[str, LiveFinding] = {}
        for finding in findings.values():
            self._file(finding)

    def take_changed(self) -> list[LiveFinding]:
        """Return the findings that are new, other or over since the last call."""
        changed = [msgspec.structs.replace(finding) for finding in self._changed.values()]
        self._changed.clear()
        return changed

    def hold(
        self,
        wrong: Wrong,
        pieces: Iterable[Range],
        dated: Callable[[Sequence[Range]], list[Dated]],
        locate: Callable[[int], tuple[int, str]],
        now_ms: int,
    ) -> None:
        """Make the findings of `wrong` be those of all `pieces`.

        `dated` says which minutes new ones are of, `locate` in which pointer and object a sequence lies: -1 and "" for
        none that is known.
        """
        left = list(pieces)
        for id_ in list(self._by_key.get(wrong.key, ())):
            finding = self._findings[id_]
            kept = tuple(common(finding.ranges, RangeSet(left)))
            left = apart(left, RangeSet(kept))
            self._change(finding, wrong.kind, kept, now_ms)
        for minute, first, next_ in dated(left):
            finding_or_none = self._of_minute(wrong, minute, now_ms)
            if finding_or_none is not None:
                if finding_or_none.offset < 0:
                    finding_or_none.offset, finding_or_none.object = locate(first)
                ranges = tuple(RangeSet([*finding_or_none.ranges, (first, next_)]))
                self._change(finding_or_none, wrong.kind, ranges, now_ms)

    def damaged(self, damage: ReportedDamage, minute: int, now_ms: int) -> None:
        """Take a damaged block, which stays damaged; further reports of it change nothing."""
        id_ = finding_id(self._topic_id, self._partition, damage.object, damage.block, damage.producer, damage.first)
        if id_ in self._findings or len(self._findings) >= FINDINGS_MAX:
            return
        finding = self._made(id_, Wrong(Kind.CORRUPT, "object", damage.producer, damage.cause), minute, now_ms)
        finding.object, finding.block, finding.offset = damage.object, damage.block, damage.offset
        finding.records = damage.records
        finding.ranges = ((damage.first, damage.next),) if damage.first < damage.next else ()
        self._rows(minute).side("").count("corrupt", damage.records)

    def told(self, wrong: Wrong, offset: int, records: int, minute: int, now_ms: int) -> None:
        """Take what a pointer says or is, and whose records nobody can name."""
        id_ = finding_id(self._topic_id, self._partition, wrong.kind.title, offset)
        if id_ not in self._findings and len(self._findings) < FINDINGS_MAX:
            finding = self._made(id_, wrong, minute, now_ms)
            finding.offset, finding.records = offset, records

    # ---- inside --------------------------------------------------------------------------------------

    def _of_minute(self, wrong: Wrong, minute: int, now_ms: int) -> LiveFinding | None:
        id_ = finding_id(self._topic_id, self._partition, *wrong.key, minute)
        if id_ not in self._findings and len(self._findings) >= FINDINGS_MAX:
            return None
        return self._findings.get(id_) or self._made(id_, wrong, minute, now_ms)

    def _made(self, id_: str, wrong: Wrong, minute: int, now_ms: int) -> LiveFinding:
        finding = self._findings[id_] = self._changed[id_] = LiveFinding(
            id=id_,
            kind=wrong.kind.title,
            stage=wrong.stage,
            topic=self._topic,
            topic_id=self._topic_id,
            partition=self._partition,
            minute=minute,
            producer=wrong.producer,
            group=wrong.group,
            cause=wrong.cause,
            first_seen_ms=now_ms,
        )
        self._file(finding)
        return finding

    def _change(self, finding: LiveFinding, kind: Kind, ranges: tuple[Range, ...], now_ms: int) -> None:
        records = sum(next_ - first for first, next_ in ranges)
        if ranges == finding.ranges:
            return
        self._rows(finding.minute).side(finding.group).count(COLUMNS[kind], records - finding.records)
        finding.records = records
        self._changed[finding.id] = finding
        if ranges:
            finding.ranges = ranges
        else:  # what it named is kept with it
            finding.resolved_ms = now_ms
            del self._findings[finding.id]
            self._by_key[_key_of(finding)].pop(finding.id)

    def _file(self, finding: LiveFinding) -> None:
        self._by_key.setdefault(_key_of(finding), {})[finding.id] = None


def _key_of(finding: LiveFinding) -> tuple[object, ...]:
    return (finding.kind, finding.stage, finding.group, finding.producer, finding.cause)
