"""Random histories of one write partition: the live audit names exactly the injected faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from memq.audit.account import apart, common
from memq.format.ranges import RangeSet
from memq.format.report import ReportedDamage, ReportSpan
from tests.soak import repetitions
from tests.unit.audited import KEY
from tests.unit.live_audit_harness import MINUTE, LiveAuditHarness, span

GROUPS = ("g", "h")
Named = dict[tuple[str, str, str, int], RangeSet]  # kind, stage, group, producer


@dataclass
class Member:
    """One member of a group: what it still has to report."""

    client: int
    group: str
    begin: str
    read_to: int
    processed: list[ReportSpan] = field(default_factory=list)
    damages: list[ReportedDamage] = field(default_factory=list)
    seek: bool = False


class History:
    """Producers, queue and groups that do as they should, but for the faults that are drawn, which are written down."""

    def __init__(self, draw: random.Random, faults: bool) -> None:
        self.draw = draw
        self.faults = faults
        self.harness = LiveAuditHarness()
        self.injected: Named = {}
        self.nexts = {5: 0, 6: 0, 7: 0}
        self.acked: dict[int, list[ReportSpan]] = {producer: [] for producer in self.nexts}
        self.held: list[tuple[int, int, int]] = []  # blocks whose pointer is late
        self.log: list[list[tuple[int, int, int]]] = []
        self.members = {group: Member(200 + n, group, "0:0:0", 0) for n, group in enumerate(GROUPS)}
        self.clients = 300
        self.done: dict[tuple[str, int], RangeSet] = {}  # by group and producer
        self.done_to = dict.fromkeys(GROUPS, 0)

    def inject(self, kind: str, stage: str, group: str, run: tuple[int, int, int]) -> None:
        self.injected.setdefault((kind, stage, group, run[0]), RangeSet()).add(run[1], run[2])

    def fault(self, chance: float) -> bool:
        return self.faults and self.draw.random() < chance

    # ---- what happens --------------------------------------------------------------------------------

    def produce(self) -> None:
        """Send a batch of some producers; all is acked, and nearly all is published."""
        batch = []
        for producer in self.draw.sample(sorted(self.nexts), self.draw.randint(1, 3)):
            first = self.nexts[producer]
            self.nexts[producer] = next_ = first + self.draw.randint(1, 50)
            minute = MINUTE + self.harness.now_ms // 60_000 % 3
            run = (producer, first, next_)
            stages = [span(stage, (first, next_), producer=producer, minute=minute) for stage in ("sent", "acked")]
            self.acked[producer] += stages
            if self.fault(0.05):
                self.inject("lost", "queue", "", run)
            elif self.draw.random() < 0.05:
                self.held.append(run)
            elif first and self.fault(0.05) and self.lies(producer, first - 1):
                self.inject("doubled", "queue", "", (producer, first - 1, first))
                batch.append((producer, first - 1, next_))
            else:
                batch.append(run)
        self.publish(batch)

    def lies(self, producer: int, sequence: int) -> bool:
        """Whether a sequence lies in the queue."""
        return any(run[0] == producer and run[1] <= sequence < run[2] for runs in self.log for run in runs)

    def publish(self, batch: list[tuple[int, int, int]]) -> None:
        """Publish blocks, and sometimes a copy with them, which every reader drops."""
        known = [run for past in self.log[-5:] for run in past]
        copies = [self.draw.choice(known)] if known and self.draw.random() < 0.1 else []
        if batch or copies:
            self.harness.queue(*batch, *copies)
            self.log.append(batch)

    def land(self) -> None:
        """Publish what is late."""
        held, self.held = self.held, []
        self.publish(held)

    def consume(self, member: Member) -> None:
        """Process the next pointers."""
        for runs in self.log[member.read_to : member.read_to + self.draw.randint(1, 4)]:
            for run in runs:
                self.process(member, run)
            member.read_to += 1

    def process(self, member: Member, run: tuple[int, int, int]) -> None:
        """Process a block; sometimes it is passed over, damaged, or processed twice."""
        if member.read_to < self.done_to[member.group]:  # it went back
            member.processed.append(span("processed", run[1:], producer=run[0]))
            self.done.setdefault((member.group, run[0]), RangeSet()).add(*run[1:])
            return
        if self.fault(0.04):
            self.inject("lost", "consumer", member.group, run)
            return
        if self.fault(0.04):
            at = {"offset": member.read_to, "producer": run[0], "first": run[1], "next": run[2]}
            member.damages.append(ReportedDamage(object=f"{KEY}{run}", block=0, records=1, cause="checksum", **at))
            self.inject("corrupt", "object", "", run)
            return
        self.take(member, run)
        if self.fault(0.04):
            self.take(member, run)

    def take(self, member: Member, run: tuple[int, int, int]) -> None:
        """Process a block once."""
        done = self.done.setdefault((member.group, run[0]), RangeSet())
        for piece in common([run[1:]], done):
            self.inject("doubled", "consumer", member.group, (run[0], *piece))
        done.add(*run[1:])
        member.processed.append(span("processed", run[1:], producer=run[0]))

    def hand_over(self, group: str) -> None:
        """Let another client continue where the last one committed; in sound histories sometimes a little before."""
        member = self.members[group]
        self.report(member, last=True)
        self.done_to[group] = max(self.done_to[group], member.read_to)
        back = member.read_to if self.faults else max(member.read_to - self.draw.randint(0, 3), 0)
        self.clients += 1
        self.members[group] = Member(self.clients, group, f"0:{back}:0", back, seek=back < member.read_to)

    def report(self, member: Member, *, last: bool = False) -> None:
        begin, member.begin = member.begin, ""
        self.harness.read(
            *member.processed,
            begin=begin,
            reason="seek" if member.seek else "stored",
            committed=f"0:{member.read_to}:0" if member.read_to else "",
            damages=member.damages,
            client=member.client,
            group=member.group,
            last=last,
        )
        member.processed, member.damages = [], []

    def report_producers(self) -> None:
        for producer, spans in self.acked.items():
            self.harness.sent(*spans, client=100 + producer)
            spans.clear()

    def read_on(self, group: str) -> None:
        self.consume(self.members[group])

    def report_of(self, group: str) -> None:
        self.report(self.members[group])

    def step(self) -> None:
        actions: list[Callable[[], None]] = [self.produce, self.produce, self.produce, self.land, self.report_producers]
        for group in GROUPS:
            actions += [partial(self.read_on, group)] * 3
            actions += [partial(self.report_of, group)]
        self.draw.choice(actions)()
        if self.draw.random() < 0.05:
            self.hand_over(self.draw.choice(GROUPS))
        if self.draw.random() < 0.2:
            self.harness.settle(self.draw.randint(0, 5_000))

    def end(self) -> Named:
        self.land()
        self.report_producers()
        for member in self.members.values():
            while member.read_to < len(self.log):
                self.consume(member)
        for member in self.members.values():
            self.report(member, last=True)
        self.harness.settle(600_000)
        found: Named = {}
        for kind, stage, group, producer, ranges in self.harness.found():
            for piece in ranges:
                found.setdefault((kind, stage, group, producer), RangeSet()).add(*piece)
        return found

    def expected(self) -> Named:
        """Return what was injected; what was passed over or damaged, and processed after all, is not lost."""
        kept: Named = {}
        for (kind, stage, group, producer), ranges in self.injected.items():
            left = list(ranges)
            if (kind, stage) == ("lost", "consumer"):
                left = apart(left, self.done.get((group, producer), RangeSet()))
                left = apart(left, self.injected.get(("corrupt", "object", "", producer), RangeSet()))
            if left:
                kept[kind, stage, group, producer] = RangeSet(left)
        return kept


def run(seed: int, *, faults: bool) -> History:
    history = History(random.Random(seed), faults)
    for _ in range(300):
        history.step()
    return history


@pytest.mark.parametrize("seed", range(repetitions(4, 200)))
def test_audit_of_a_random_history_finds_only_the_injected_faults(seed: int) -> None:
    history = run(seed, faults=True)
    assert history.end() == history.expected() != {}


@pytest.mark.parametrize("seed", range(repetitions(4, 200)))
def test_nothing_is_found_in_a_sound_history(seed: int) -> None:
    history = run(seed, faults=False)
    assert history.end() == {}
    counts = dict.fromkeys(("sent", "acked", "committed"), 0)
    for row in history.harness.rows.values():
        for name in counts:
            counts[name] += row.side("")[name]
    assert set(counts.values()) == {sum(history.nexts.values())}
