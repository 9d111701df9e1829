"""Batches prepared in advance change no position, lag, pause, commit or counter of the user."""

from __future__ import annotations

import concurrent.futures
import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memq
from memq.client.consumer.assigned import Assigned
from memq.client.consumer.batch import Batch, TopicPartition
from memq.client.consumer.core import AHEAD_SHARE
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.fetch.ready_batches import ReadyBatch, ReadyBatches
from memq.client.observers.traces import ConsumerTraces
from memq.limits import MIB
from memq.storage_handlers import confirmed_reads
from memq.testing import Cluster
from memq.topic import Committed, Position, ReadPartition, TopicSettings, Totals
from tests.component.test_traces import Recorded

CLICKS = TopicPartition("clicks", 0)
COUNT = 6


class RecordingBatches(ReadyBatches):
    """The batches of a consumer; the last one that was made is noted."""

    last: ReadyBatches

    def __init__(self) -> None:
        super().__init__()
        RecordingBatches.last = self


class SecondFails(Batch):
    """Batches of which the second can't be made."""

    made = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        SecondFails.made += 1
        if SecondFails.made == 2:
            raise MemoryError("no memory for a batch")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("memq.client.consumer.core.ReadyBatches", RecordingBatches)
    with Cluster() as cluster:
        yield cluster


def send_apart(cluster: Cluster, count: int = COUNT, partition: int = 0) -> None:
    """Send records, each of them as a batch of its own."""
    with memq.Producer(cluster.address) as producer:
        for number in range(count):
            producer.send("clicks", b"%d" % number, partition=partition).result(10)


def take(consumer: memq.Consumer) -> memq.Batch:
    batch = consumer.poll(20)
    assert batch is not None
    return batch


def at_hand() -> list[Batch]:
    """Return the batches that the last consumer has made ahead."""
    return [handout.batch for handout in RecordingBatches.last]


def take_until_some_are_ahead(consumer: memq.Consumer, cluster: Cluster) -> memq.Batch:
    """Poll from the beginning until a batch came with all others at hand: all depends on what was fetched by then."""
    while True:
        batch = take(consumer)
        if batch.values() == [b"0"] and len(at_hand()) == COUNT - 1:
            return batch
        consumer.seek("clicks", 0, "beginning")


def test_place_lag_and_counters_are_those_of_what_was_taken(cluster: Cluster) -> None:
    send_apart(cluster)
    with memq.Consumer(cluster.address, "clicks") as consumer:
        take_until_some_are_ahead(consumer, cluster)
        before = consumer.stats().counts.records
        for number in range(1, COUNT):
            assert consumer.lag()[CLICKS].records == COUNT - number
            batch = take(consumer)
            assert batch.values() == [b"%d" % number]
            assert consumer.position()[CLICKS] == batch.next or number == COUNT - 1  # then control pointers follow
            assert consumer.stats().counts.records == before + number
        assert consumer.lag()[CLICKS].records == 0


def test_a_pause_holds_back_what_is_at_hand_and_a_seek_drops_it(cluster: Cluster) -> None:
    cluster.create_topic("clicks", partitions=2)
    send_apart(cluster)
    with memq.Consumer(cluster.address, "clicks") as consumer:
        take_until_some_are_ahead(consumer, cluster)
        consumer.pause("clicks", 0)
        assert consumer.poll(0.05) is None
        send_apart(cluster, 1, partition=1)
        assert take(consumer).partition == 1
        consumer.resume("clicks", 0)
        assert take(consumer).values() == [b"1"]
        consumer.seek("clicks", 0, "end")
        assert consumer.poll(0.05) is None
        assert at_hand() == []


def test_only_what_was_taken_and_left_behind_is_committed(cluster: Cluster) -> None:
    send_apart(cluster)
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit_interval_ms=3_600_000) as consumer:
        take_until_some_are_ahead(consumer, cluster)
        done, taken = take(consumer), take(consumer)
    with memq.Consumer(cluster.address, "clicks", group="g") as consumer:
        assert consumer.committed() == {CLICKS: done.next}
        assert take(consumer).values() == taken.values()


def test_a_commit_takes_what_was_left_behind_without_being_read(cluster: Cluster) -> None:
    send_apart(cluster)
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as consumer:
        take_until_some_are_ahead(consumer, cluster)
        left, taken = take(consumer), take(consumer)
        consumer.commit()
        assert consumer.committed() == {CLICKS: left.next}
        assert taken.values() == [b"2"]
        consumer.commit()
        assert consumer.committed() == {CLICKS: taken.next}, "what is read to its end is done, too"


def test_prepared_batches_end_with_the_iteration_and_with_close(cluster: Cluster) -> None:
    send_apart(cluster)
    with memq.Consumer(cluster.address, "clicks", end="end") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"%d" % n for n in range(COUNT)]
    with memq.Consumer(cluster.address, "clicks") as consumer:
        take_until_some_are_ahead(consumer, cluster)
        consumer.close()
        with pytest.raises(memq.errors.ClosedError):
            consumer.poll(0)


@pytest.mark.parametrize("came", [True, False])
def test_a_batch_that_came_while_a_poll_was_interrupted_comes_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, came: bool
) -> None:
    """A program that catches what its signal handler raises, and polls on, has not got it: it is not done."""
    result, interrupts = concurrent.futures.Future.result, list[bool]()

    def interrupted(future: concurrent.futures.Future[object], timeout: float | None = None) -> object:
        if not interrupts:
            return result(future, timeout)
        if interrupts.pop():
            result(future, timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    send_apart(cluster, 1)
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as consumer:
        first = take(consumer)
        assert first.values() == [b"0"]
        send_apart(cluster, 2)
        interrupts.append(came)
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(20)
        consumer.commit()
        committed = consumer.committed()[CLICKS]
        batches = [take(consumer), take(consumer)]
        assert [batch.values() for batch in batches] == [[b"0"], [b"1"]]
        assert first.next <= committed <= batches[0].first


def test_a_consumer_that_fails_while_it_makes_batches_ahead_commits_none_of_them(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that left its cursor, and is in no list, would be before the next one that is done."""
    monkeypatch.setattr("memq.client.consumer.core.Batch", SecondFails)
    SecondFails.made = 0
    send_apart(cluster)
    with memq.Consumer(cluster.address, "clicks", group="g") as consumer:
        got: list[bytes | None] = []
        with pytest.raises(MemoryError):
            got.extend(value for batch in consumer for value in batch.values())
        with pytest.raises(MemoryError):
            consumer.poll(1)
    monkeypatch.undo()
    with memq.Consumer(cluster.address, "clicks", group="g", end="end") as consumer:
        left = [value for batch in consumer for value in batch.values()]
    assert set(left) | set(got) == {b"%d" % number for number in range(COUNT)}


def test_a_batch_that_a_tracer_fails_to_note_comes_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, handed, failures = Recorded(), ConsumerTraces.handed, [True, True]

    def fail(traces: ConsumerTraces, batch: Batch) -> None:
        handed(traces, batch)
        if batch.values() != [b"0"] and failures:
            failures.pop()
            raise RuntimeError("the exporter is full")

    monkeypatch.setattr(ConsumerTraces, "handed", fail)
    send_apart(cluster)
    got: list[bytes | None] = []
    with memq.Consumer(cluster.address, "clicks", group="g", tracer_provider=recorded.provider) as consumer:
        while len(got) < COUNT:
            with suppress(RuntimeError):
                got += take(consumer).values()
    assert got == [b"%d" % number for number in range(COUNT)]
    assert not failures


def test_prepared_batches_are_small_compared_with_the_budget(cluster: Cluster) -> None:
    send_apart(cluster, 40)
    with memq.Consumer(cluster.address, "clicks", prefetch_bytes_max=1 * MIB) as consumer:
        for _ in range(40):
            take(consumer)
            held = sum(len(piece.data) for batch in at_hand() for piece in batch.pieces)
            assert held <= 1 * MIB // AHEAD_SHARE + 512


def test_damage_goes_to_the_dead_letters_though_batches_around_it_are_made_ahead(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)
    send_apart(cluster, 3)
    cluster.damage(cluster.records("clicks")[1].position, "clicks")
    with memq.Consumer(cluster.address, "clicks", on_damaged="dead-letter") as consumer:
        assert take(consumer).values() == [b"0"]
        consumer.seek("clicks", 0, "beginning")
        for _ in range(10):  # round trips, in which all three come
            consumer.lag()
        assert [take(consumer).values() for _ in range(3)] == [[b"0"], [], [b"2"]]
        assert consumer.stats().dead_letters == 1


def test_batches_that_are_done_are_not_kept(cluster: Cluster) -> None:
    send_apart(cluster, 40)
    with memq.Consumer(cluster.address, "clicks") as consumer:
        for _ in range(40):
            take(consumer)
        assert consumer.poll(0) is None
        gc.collect()
        kept = [each for each in gc.get_objects() if isinstance(each, Batch)]
        assert len(kept) <= 2, "without a group no commit takes them away"


# ---- the machine alone -----------------------------------------------------------------------------


@dataclass
class Model:
    """Handouts, compared with a plain list of what should come out."""

    ready_batches: ReadyBatches = field(default_factory=ReadyBatches)
    assigned: list[Assigned] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)  # partition and offset
    taken: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(3):
            cursor = PartitionCursor(ReadPartition("clicks", "00" * 16, number), Position(number, 0), window_ms=1_000)
            self.assigned.append(Assigned(cursor, TopicSettings(), [number]))
            self.offsets.append(0)

    def add(self, number: int) -> None:
        offset = self.offsets[number]
        self.offsets[number] += 1
        place = TopicPartition("clicks", number)
        batch = Batch(place, (Position(number, offset), Position(number, offset + 1)), [], [], "o")
        entry = self.assigned[number].ledger.hand(Committed(batch.next))
        self.ready_batches.add(ReadyBatch(self.assigned[number], batch, Totals(offset, 0), entry))
        self.waiting.append((number, offset))

    def take(self) -> None:
        self.ready_batches.finish()
        batch = self.ready_batches.take()
        self.waiting = [each for each in self.waiting if not self.assigned[each[0]].removed]
        ready = [each for each in self.waiting if not self.assigned[each[0]].cursor.paused]
        assert (batch and (batch.partition, batch.first.pointer_offset)) == (ready[0] if ready else None)
        if ready:
            self.waiting.remove(ready[0])
            self.taken.append(ready[0])

    def check(self) -> None:
        """All that was taken and left behind is done, and nothing else."""
        self.ready_batches.settle()
        for number, assigned in enumerate(self.assigned):
            if assigned.removed:
                continue
            done = [offset for partition, offset in self.taken[:-1] if partition == number]
            due = assigned.ledger.prefix
            assert (due.position.pointer_offset if due is not None else 0) >= len(done)
            first = next((offset for partition, offset in self.waiting if partition == number), None)
            ahead = self.ready_batches.ahead_of(assigned)
            assert (None if ahead is None else ahead[0].pointer_offset) == first
            assert due is None or due.position.pointer_offset <= len(done) + 1
            if first is not None and due is not None:
                assert due.position.pointer_offset <= first


def test_only_the_batch_of_the_question_under_way_is_put_back() -> None:
    """One before it may wait for its partition's commit."""
    model = Model()
    model.add(0)
    model.add(0)
    batches: list[Batch | None] = []
    for _ in range(2):
        model.ready_batches.ask()
        model.ready_batches.finish()
        batches.append(model.ready_batches.take())
    model.ready_batches.take_back()
    assert model.ready_batches.take() is batches[1]
    model.ready_batches.ask()
    model.ready_batches.take_back()
    assert model.ready_batches.take() is None, "it has arrived"


STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "take", "pause", "resume", "remove"]), st.integers(0, 2)))


@given(STEPS)
def test_batches_come_in_order_and_are_done_when_the_next_is_asked_for(steps: list[tuple[str, int]]) -> None:
    model = Model()
    for step, number in steps:
        if step == "add":
            if not model.assigned[number].removed:
                model.add(number)
        elif step == "take":
            model.take()
        elif step == "remove":
            model.assigned[number].removed = True
        else:
            model.assigned[number].cursor.paused = step == "pause"
        if step != "remove":
            model.check()
