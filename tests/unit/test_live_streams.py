"""Spark streams in the live audit: checkpoints against fetches of tasks, with restarts, gaps and faults."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from memq.audit.live.streams import TASKS_MAX, WAIT_MS
from memq.format.ranges import RangeSet
from memq.format.report import Begin, ReportedDamage, ReportPart, ReportSpan
from tests.soak import repetitions
from tests.unit.audited import KEY, TOPIC
from tests.unit.live_audit_harness import PRODUCER, LiveAuditHarness, span

STREAM = "spark"
LOST = ("lost", "consumer", STREAM, PRODUCER)
HOLE = ("unproven hole", "consumer", STREAM, PRODUCER)


class StreamHarness(LiveAuditHarness):
    """A harness at which a stream reports: its drivers, and tasks that are a client each."""

    def __init__(self, batches: int = 0) -> None:
        super().__init__()
        self.tasks = 1_000
        for number in range(batches):
            self.queue((PRODUCER, number * 10, number * 10 + 10))

    def task(self, read: tuple[str, str] | None, *spans: ReportSpan, **fields: object) -> int:
        """Report as a task that read from a place to another, and return its client."""
        self.tasks += 1
        self.report(self.tasks, "spark-task", STREAM, made(*spans, read=read), {"last": True, **fields})
        return self.tasks

    def driver(self, begin: str = "", reason: str = "stored", committed: str = "", client: int = 300) -> None:
        """Report as a driver."""
        begins = [Begin(at=begin, reason=reason)] if begin else []  # type: ignore[arg-type]
        self.report(client, "spark-reader", STREAM, made(begins=tuple(begins), committed=committed), {})

    def processed(self) -> int:
        return sum(row.side(STREAM)["processed"] for row in self.rows.values())


def made(*spans: ReportSpan, **fields: object) -> ReportPart:
    return ReportPart(topic=TOPIC.name, topic_id=TOPIC.id, partition=0, spans=spans, **fields)  # type: ignore[arg-type]


def fetched(*ranges: tuple[int, int]) -> ReportSpan:
    return span("fetched", *ranges, level=0)


def test_records_fetched_by_tasks_are_processed_at_the_checkpoint() -> None:
    harness = StreamHarness(4)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:2:0"), fetched((0, 20)))
    harness.task(("0:2:0", "0:4:0"), fetched((20, 40)))
    harness.settle()
    assert (harness.processed(), harness.word(STREAM)) == (0, "in flight")
    harness.driver(committed="0:2:0")
    harness.settle()
    assert (harness.processed(), harness.word(STREAM)) == (20, "in flight")
    harness.driver(committed="0:4:0")
    harness.settle()
    assert (harness.processed(), harness.word(STREAM)) == (40, "ok")
    harness.settle(WAIT_MS)
    assert harness.found(grave=False) == []


def test_records_that_a_task_skipped_are_lost() -> None:
    harness = StreamHarness(4)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:3:0"), fetched((0, 10), (20, 30)))
    harness.task(("0:3:0", "0:4:0"), fetched((30, 40)))
    harness.driver(committed="0:4:0")
    harness.settle()
    assert harness.found(grave=False) == [(*LOST, ((10, 20),))]
    assert harness.word(STREAM) == "lost"


def test_a_report_that_comes_late_is_waited_for_and_one_that_is_missing_leaves_a_doubt() -> None:
    harness = StreamHarness(4)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:1:0"), fetched((0, 10)))
    harness.task(("0:3:0", "0:4:0"), fetched((35, 40)))
    harness.driver(committed="0:4:0")
    harness.settle()
    harness.settle(WAIT_MS - 1)
    assert harness.found(grave=False) == []
    harness.task(("0:1:0", "0:2:0"), fetched((10, 20)))
    harness.settle()
    harness.settle(WAIT_MS - 1)  # of the next gap
    assert (harness.found(grave=False), harness.processed()) == ([], 25)
    harness.settle(1)
    assert harness.found(grave=False) == [(*LOST, ((30, 35),)), (*HOLE, ((20, 30),))]
    harness.task(("0:2:0", "0:3:0"), fetched((20, 30)))
    harness.settle()
    assert (harness.found(grave=False), harness.processed()) == ([(*LOST, ((30, 35),))], 35)


def test_a_task_one_of_whose_reports_is_lost_proves_nothing_and_what_it_said_counts() -> None:
    harness = StreamHarness(2)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:2:0"), fetched((10, 20)), number=1)
    harness.driver(committed="0:2:0")
    harness.settle()
    harness.settle(WAIT_MS)
    assert (harness.found(grave=False), harness.processed()) == ([(*HOLE, ((0, 10),))], 10)


def test_a_task_may_say_what_it_did_in_several_reports() -> None:
    harness = StreamHarness(2)
    harness.driver("0:0:0", "start")
    client = harness.task(None, fetched((0, 10)), last=False)
    harness.settle()
    part = made(fetched((10, 20)), read=("0:0:0", "0:2:0"))
    harness.report(client, "spark-task", STREAM, part, {"last": True, "number": 1})
    harness.driver(committed="0:2:0")
    harness.settle()
    assert (harness.found(grave=False), harness.word(STREAM)) == ([], "ok")


def test_a_micro_batch_that_is_run_again_counts_once_however_it_is_cut() -> None:
    harness = StreamHarness(4)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:1:0"), fetched((0, 10)))
    harness.task(("0:1:0", "0:4:0"), fetched((10, 40)))
    harness.task(None, fetched((0, 5)))  # one that failed
    harness.settle()
    harness.driver("0:0:0", client=301)  # the first was killed before its checkpoint came on
    harness.task(("0:0:0", "0:3:0"), fetched((0, 30)))
    harness.task(("0:3:0", "0:4:0"), fetched((30, 40)))
    harness.driver(committed="0:4:0", client=301)
    harness.settle()
    harness.task(("0:0:0", "0:3:0"), fetched((0, 30)))  # a straggler of the same
    harness.settle(WAIT_MS)
    assert (harness.found(grave=False), harness.word(STREAM), harness.processed()) == ([], "ok", 40)


def test_a_driver_that_died_is_succeeded_by_the_next_one_with_its_checkpoint() -> None:
    harness = StreamHarness(4)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:4:0"), fetched((0, 10), (20, 40)))
    harness.settle(10 * WAIT_MS)  # nobody hears of it any more
    assert (harness.found(grave=False), harness.word(STREAM), harness.processed()) == ([], "in flight", 0)
    harness.driver("0:4:0", client=301)  # the checkpoint had come on
    harness.settle()
    assert (harness.found(), harness.processed()) == ([(*LOST, ((10, 20),))], 30)


def test_a_stream_that_goes_back_doubles_nothing_and_one_that_reads_twice_does() -> None:
    harness = StreamHarness(4)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:4:0"), fetched((0, 40)))
    harness.driver(committed="0:4:0")
    harness.settle()
    harness.driver("0:2:0", client=301)  # an older copy of the checkpoint
    harness.task(("0:2:0", "0:4:0"), fetched((20, 40)))
    harness.driver(committed="0:4:0", client=301)
    harness.driver("0:0:0", "start", client=302)  # a new one
    harness.task(("0:0:0", "0:4:0"), fetched((0, 40)))
    harness.driver(committed="0:4:0", client=302)
    harness.settle(WAIT_MS)
    assert (harness.found(grave=False), harness.word(STREAM)) == ([], "ok")
    harness.queue((PRODUCER, 40, 50))
    harness.task(("0:4:0", "0:5:0"), fetched((35, 50)))
    harness.driver(committed="0:5:0", client=302)
    harness.settle()
    assert harness.found() == [("doubled", "consumer", STREAM, PRODUCER, ((35, 40),))]


def test_micro_batches_end_within_batches() -> None:
    harness = StreamHarness(3)
    harness.driver("0:0:4", "start")  # what lies before it was never asked for
    harness.task(("0:0:4", "0:1:3"), fetched((4, 13)))
    harness.driver(committed="0:1:3")
    harness.settle()
    harness.task(("0:1:3", "0:2:5"), fetched((13, 25)))
    harness.driver(committed="0:2:5")
    harness.settle()
    harness.task(("0:2:5", "0:3:0"), fetched((25, 28)))
    harness.driver(committed="0:3:0")
    harness.settle()
    assert harness.found(grave=False) == [(*LOST, ((28, 30),))]
    assert harness.processed() == 24


def test_a_batch_in_which_a_gap_ends_is_not_judged() -> None:
    harness = StreamHarness(2)
    harness.driver("0:0:0", "start")
    harness.driver(committed="0:0:4")  # the report of the task that came there is missing
    harness.settle()
    harness.settle(WAIT_MS)
    harness.task(("0:0:4", "0:2:0"), fetched((4, 15)))
    harness.driver(committed="0:2:0")
    harness.settle()
    harness.settle(WAIT_MS)
    assert harness.found(grave=False) == [(*LOST, ((15, 20),))]


def test_damage_is_reported_by_the_reader_that_met_it_and_is_not_lost() -> None:
    harness = StreamHarness(3)
    damage = ReportedDamage(
        object=KEY, block=0, offset=1, records=10, cause="checksum", producer=PRODUCER, first=10, next=20
    )
    harness.driver("0:0:0", "start")
    harness.report(400, "spark-task", STREAM, made(damages=(damage,)), {"last": True})
    harness.task(("0:0:0", "0:3:0"), fetched((0, 10), (20, 30)))
    harness.driver(committed="0:3:0")
    harness.settle()
    assert [(kind, ranges) for kind, _, _, _, ranges in harness.found(grave=False)] == [("corrupt", ((10, 20),))]


def test_a_stream_that_nobody_drives_makes_nothing_unknown() -> None:
    harness = StreamHarness(1)
    harness.driver("0:0:0", "start")
    harness.task(("0:0:0", "0:1:0"), fetched((0, 10)))
    harness.driver(committed="0:1:0")
    harness.settle()
    harness.settle(10 * WAIT_MS)
    assert harness.word(STREAM) == "ok"
    assert [client.silent for client in harness.home.clients.values()] == [True]
    harness.driver(committed="0:1:0")
    assert [client.silent for client in harness.home.clients.values()] == [False]
    harness.settle(10 * WAIT_MS)
    harness.driver("0:1:0", client=301)
    assert list(harness.home.clients) == [301]


def test_tasks_that_wait_are_bounded() -> None:
    harness = StreamHarness(1)
    for _ in range(TASKS_MAX + 5):
        harness.task(("0:0:0", "0:1:0"), fetched((0, 10)))
    harness.settle()
    stream = harness.audit.state.groups[STREAM].stream
    assert stream is not None
    assert len(stream.tasks) == TASKS_MAX


@pytest.mark.soak
def test_random_streams_under_kills_lose_and_double_what_was_injected_and_nothing_else() -> None:
    for seed in range(repetitions(few=60, many=2_000)):
        run = RandomStream(random.Random(seed))
        run.go()
        found = run.harness.found(grave=False)
        assert found == run.expected(), f"seed {seed}"


class RandomStream:
    """A stream of micro-batches over a queue of 10 records each; drivers die at any point, cuts and reports vary."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.records = 10 * draw.randint(3, 20)
        self.harness = StreamHarness(self.records // 10)
        self.lost = RangeSet()
        self.at = 0
        self.client = 300
        self.begun = False

    def go(self) -> None:
        self.harness.driver("0:0:0", "start")
        while self.at < self.records:
            end = min(self.records, self.at + self.draw.randint(1, 35))
            self.micro_batch(self.at, end, injected=self.injected(self.at, end))
            self.at = end
            if self.draw.random() < 0.8:
                self.advance()
            else:
                self.restart()
            if self.draw.random() < 0.3:
                self.harness.settle(self.draw.choice((0, WAIT_MS // 3)))
        self.advance()
        self.harness.settle()
        self.harness.settle(WAIT_MS)

    def injected(self, first: int, end: int) -> RangeSet:
        """Let a whole batch within the micro-batch be passed over, now and then."""
        wholes = [at for at in range(0, self.records, 10) if first <= at and at + 10 <= end]
        chosen = RangeSet([(at, at + 10) for at in wholes if self.draw.random() < 0.1])
        for piece in chosen:
            self.lost.add(*piece)
        return chosen

    def micro_batch(self, first: int, end: int, *, injected: RangeSet) -> None:
        """Run it, perhaps some times in vain before."""
        while self.draw.random() < 0.3:
            self.tasks(first, end, injected, whole=False)
            if self.draw.random() < 0.5:
                self.restart(first)
        self.tasks(first, end, injected, whole=True)

    def tasks(self, first: int, end: int, injected: RangeSet, *, whole: bool) -> None:
        cuts = sorted({first, end, *(self.draw.randint(first, end) for _ in range(self.draw.randint(0, 3)))})
        stretches = list(pairwise(cuts))
        self.draw.shuffle(stretches)
        for low, high in stretches:
            read = (place(low), place(high))
            if whole or self.draw.random() < 0.5:
                self.harness.task(read, *(fetched(hole) for hole in injected.holes(low, high)))
            else:
                self.harness.task(None, fetched((low, self.draw.randint(low + 1, high))))

    def advance(self) -> None:
        self.harness.driver(committed=place(self.at), client=self.client)

    def restart(self, at: int | None = None) -> None:
        self.client += 1
        self.harness.driver(place(self.at if at is None else at), client=self.client)

    def expected(self) -> list[object]:
        return [(*LOST, tuple(self.lost))] if self.lost else []


def place(sequence: int) -> str:
    return f"0:{sequence // 10}:{sequence % 10}"
