"""The findings that hold in one write partition, kept in step with what is wrong now. Pure.

What is wrong is computed anew as sets of sequences; here it becomes findings that have a name and a beginning, that
grow, shrink and end. Each change of a finding is a change of its minute's counts, too: so counts and findings agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from memq.audit.account import apart, common
from memq.audit.finding import IN_OBJECT, Finding, Kind, finding_id
from memq.audit.live.event_minute import Dated
from memq.audit.minutes import MinuteRow
from memq.format.ranges import Range, RangeSet
from memq.format.report import ReportedDamage

FINDINGS_MAX = 10_000  # that hold in one write partition; more are not named until some have ended
COLUMNS = {Kind.LOST: "lost", Kind.DOUBLED: "doubled", Kind.CORRUPT: "corrupt", Kind.HOLE: "unknown"}


class OpenFindings:
    """The open findings of one write partition, in `findings` by id.

    `rows` receives each change.
    """

    def __init__(
        self, place: tuple[str, str, int], findings: dict[str, Finding], rows: Callable[[int], MinuteRow]
    ) -> None:
        self._topic, self._topic_id, self._partition = place
        self._findings = findings
        self._rows = rows
        self._by_key: dict[tuple[object, ...], dict[str, None]] = {}
        self._changed: dict[str, Finding] = {}
        for finding in findings.values():
            self._file(finding)

    def take_changed(self) -> list[Finding]:
        """Return the findings that are new, other or over since the last call."""
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
        """Make the findings of `wrong`, which has what they share, be those of all `pieces`.

        `dated` says which minutes new ones are of, `locate` in which pointer and object a sequence lies: -1 and "" for
        none that is known.
        """
        left = list(pieces)
        for id_ in list(self._by_key.get(_key_of(wrong), ())):
            finding = self._findings[id_]
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

    def ranges(self, wrong: Finding) -> RangeSet:
        """Return the sequences of the findings of `wrong`, which has what they share, that hold."""
        found = self._by_key.get(_key_of(wrong), ())
        return RangeSet(piece for id_ in found for piece in self._findings[id_].ranges)

    def damaged(self, damage: ReportedDamage, minute: int, now_ms: int) -> None:
        """Take a damaged block, which stays damaged; further reports of it change nothing."""
        id_ = finding_id(self._topic_id, self._partition, damage.object, damage.block, damage.producer, damage.first)
        if id_ in self._findings or len(self._findings) >= FINDINGS_MAX:
            return
        wrong = Finding(
            kind=Kind.CORRUPT,
            partition=self._partition,
            stage=IN_OBJECT,
            producer=damage.producer,
            records=damage.records,
            ranges=((damage.first, damage.next),) if damage.first < damage.next else (),
            cause=damage.cause,
            object=damage.object,
            block=damage.block,
            offset=damage.offset,
        )
        self._made(id_, wrong, minute, now_ms)
        self._rows(minute).side("").count("corrupt", damage.records)

    def told(self, wrong: Finding, minute: int, now_ms: int) -> None:
        """Take what a pointer says or is, and whose records nobody can name."""
        id_ = finding_id(self._topic_id, self._partition, wrong.kind.value, wrong.offset)
        if id_ not in self._findings and len(self._findings) < FINDINGS_MAX:
            self._made(id_, wrong, minute, now_ms)

    # ---- inside --------------------------------------------------------------------------------------

    def _of_minute(self, wrong: Finding, minute: int, now_ms: int) -> Finding | None:
        id_ = finding_id(self._topic_id, self._partition, *_key_of(wrong), minute)
        if id_ not in self._findings and len(self._findings) >= FINDINGS_MAX:
            return None
        return self._findings.get(id_) or self._made(id_, wrong, minute, now_ms)

    def _made(self, id_: str, wrong: Finding, minute: int, now_ms: int) -> Finding:
        place = {"topic": self._topic, "topic_id": self._topic_id, "partition": self._partition}
        finding = msgspec.structs.replace(wrong, id=id_, minute=minute, first_seen_ms=now_ms, **place)
        self._findings[id_] = self._changed[id_] = finding
        self._file(finding)
        return finding

    def _change(self, finding: Finding, ranges: tuple[Range, ...], now_ms: int) -> None:
        records = sum(next_ - first for first, next_ in ranges)
        if ranges == finding.ranges:
            return
        self._rows(finding.minute).side(finding.group).count(COLUMNS[finding.kind], records - finding.records)
        finding.records = records
        self._changed[finding.id] = finding
        if ranges:
            finding.ranges = ranges
        else:  # what it named is kept with it
            finding.resolved_ms = now_ms
            del self._findings[finding.id]
            self._by_key[_key_of(finding)].pop(finding.id)

    def _file(self, finding: Finding) -> None:
        self._by_key.setdefault(_key_of(finding), {})[finding.id] = None


def _key_of(finding: Finding) -> tuple[object, ...]:
    return (finding.kind.value, finding.stage, finding.group, finding.producer, finding.cause)
