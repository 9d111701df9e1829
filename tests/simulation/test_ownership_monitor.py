"""The monitor of ownership: a correct history passes, and each broken rule is named by its number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from memq.format.pointer import Location, Pointer, encode_pointer
from memq.notification import Entries, Entry, Publication
from memq.simulation.ports.ownership_monitor import OwnershipMonitor, Publish
from memq.topic import ReadPartition

TOPIC_ID = "ab" * 16
PARTITION = ReadPartition("t", TOPIC_ID, 0)
STALE_S, WINDOW_S = 3.0, 10.0
TASK = 7  # the one of each process that publishes


class History:
    """Takes the steps of owners, one after another; `now_s` is the time, and every clock is right."""

    def __init__(self, refuse: Literal["epoch", "age"] = "age") -> None:
        self.findings: list[str] = []
        self.now_s = 100.0
        self.entries: list[Entry] = []
        self.monitor = OwnershipMonitor(self.findings.append, refuse)
        self.monitor.key_valid_s = 5.0
        log = self.monitor.log(PARTITION)
        log.stale_s, log.window_s = STALE_S, WINDOW_S

    def claim(self, process: int, epoch: int) -> None:
        """Let a process claim an epoch."""
        self.monitor.claiming((process, TASK))
        self.monitor.claimed(TOPIC_ID, 0, epoch, process)

    def read(self, process: int, offset: int = 0, took_s: float = 0.0) -> None:
        """Let a process read from an offset to the end."""
        reading = self.monitor.reads((process, TASK), PARTITION, offset, self.now_s)
        self.monitor.happens(reading)
        found = Entries(self.entries[offset:], len(self.entries))
        self.now_s += took_s
        self.monitor.shows(reading, found, self.now_s)

    def hand_over(
        self, process: int, epoch: int, kind: str = "data", *, dated_s: float | None = None, task: int = TASK
    ) -> tuple[Publish, Publication]:
        """Let a process hand over a pointer, dated now or at another moment."""
        location = (Location(store="main", key="k", offset=0, length=1),) if kind == "data" else ()
        pointer = Pointer(
            kind=kind,
            cluster="c",
            topic="t",
            topic_id=TOPIC_ID,
            partition=0,
            epoch=epoch,
            locations=location,
            records=len(location),
        )
        time_ms = int((self.now_s if dated_s is None else dated_s) * 1000)
        publication = Publication(PARTITION, 0, epoch, time_ms, encode_pointer(pointer))
        return self.monitor.publishes(process, (process, task), publication, pointer, self.now_s), publication

    def land(self, handed: tuple[Publish, Publication]) -> int:
        """Let what was handed over land; return its offset."""
        publish, publication = handed
        offset = len(self.entries)
        self.monitor.lands(publish, publication, offset, self.now_s * 1000, self.now_s)
        self.entries.append(Entry(offset, publication.time_ms, publication.body))
        return offset

    def publish(
        self, process: int, epoch: int, kind: str = "data", *, dated_s: float | None = None, took_s: float = 0.0
    ) -> None:
        """Let a process publish, and get the answer."""
        handed = self.hand_over(process, epoch, kind, dated_s=dated_s)
        offset = self.land(handed)
        self.now_s += took_s
        self.monitor.answers(handed[0], offset, self.now_s)

    def open(self, process: int, epoch: int, took_s: float = 0.0) -> None:
        """Let a process claim and open an epoch as it should."""
        self.claim(process, epoch)
        self.read(process)
        self.publish(process, epoch, "opened", took_s=took_s)


def test_a_history_that_keeps_the_rules_passes() -> None:
    history = History()
    history.open(1, 1)
    for _ in range(3):
        history.now_s += 0.5
        history.read(1)
        history.publish(1, 1)
    late = history.hand_over(1, 1, dated_s=history.now_s)
    history.now_s += 1.0
    history.open(2, 2)
    history.land(late)
    history.monitor.fails(late[0], history.now_s)
    history.read(2)
    history.publish(2, 2)
    history.publish(2, 2, "closed")
    assert history.findings == []


def epoch_again(history: History) -> None:
    """Claim an epoch that was claimed before."""
    history.open(1, 1)
    history.claim(2, 1)


def opened_by_another(history: History) -> None:
    """Open an epoch that another process has claimed."""
    history.claim(1, 1)
    history.publish(2, 1, "opened")


def opened_slowly(history: History) -> None:
    """Publish in an epoch whose opening was answered too late."""
    history.open(1, 1, took_s=STALE_S + 1)
    history.read(1)
    history.publish(1, 1)


def tail_unread(history: History) -> None:
    """Publish without having read what the last owner left."""
    history.open(1, 1)
    history.publish(1, 1)
    history.claim(2, 2)
    history.read(2, 1)
    history.publish(2, 2, "opened")
    history.publish(2, 2)


def dated_at_the_answer(history: History) -> None:
    """Date a pointer when the answer to a read was read."""
    history.open(1, 1)
    history.now_s += 0.5
    history.read(1, took_s=0.5)
    history.publish(1, 1)


def dated_beyond_what_is_known(history: History) -> None:
    """Take a publish for a proof, though something came between."""
    history.open(1, 1)
    history.open(2, 2)
    history.now_s += 0.5
    handed = history.hand_over(1, 1, dated_s=100.0)
    history.monitor.answers(handed[0], history.land(handed), history.now_s)
    history.publish(1, 1)


def proof_too_old(history: History) -> None:
    """Publish with a proof that is older than a third of S."""
    history.open(1, 1)
    history.now_s += STALE_S / 2
    history.publish(1, 1, dated_s=100.0)


def two_in_flight(history: History) -> None:
    """Publish while another publish is in flight."""
    history.open(1, 1)
    history.hand_over(1, 1)
    history.hand_over(1, 1)


def unread_after_an_error(history: History) -> None:
    """Publish again after an error, without reading to the end."""
    history.open(1, 1)
    handed = history.hand_over(1, 1)
    history.now_s += 0.1
    history.monitor.fails(handed[0], history.now_s)
    history.publish(1, 1, dated_s=100.0)


def too_old_for_the_queue(history: History) -> None:
    """Let the queue take what is older than S."""
    history.open(1, 1)
    handed = history.hand_over(1, 1)
    history.now_s += STALE_S + 1
    history.land(handed)


def fenced(history: History) -> None:
    """Publish after a higher epoch was read."""
    history.open(1, 1)
    history.open(2, 2)
    history.read(1)
    history.publish(1, 1)


def after_closed(history: History) -> None:
    """Publish after `closed`."""
    history.open(1, 1)
    history.publish(1, 1, "closed")
    history.publish(1, 1)


def forwarded_early(history: History) -> None:
    """Forward blocks while a publish of their epoch may land yet."""
    history.open(1, 1)
    history.publish(1, 1)
    history.now_s += STALE_S / 2
    history.monitor.forwards((1, 9), PARTITION, 0, 1, history.now_s)


def key_too_old(history: History) -> None:
    """Publish a batch long after its object was stored."""
    history.open(1, 1)
    history.monitor.stored("k", history.now_s)
    history.now_s += 6.0
    history.read(1)
    history.publish(1, 1)


def log_lost(history: History) -> None:
    """Cut the log of an owner, and let the owner learn of it by its next batch."""
    history.open(1, 1)
    history.publish(1, 1)
    history.monitor.cuts(PARTITION, 1, history.now_s)
    del history.entries[1:]
    history.now_s += 0.1
    history.read(1)
    history.publish(1, 1)
    assert not history.findings


def publishes_after_a_cut(history: History) -> None:
    """Publish one more batch in that epoch."""
    log_lost(history)
    history.publish(1, 1)


def acks_after_a_cut(history: History) -> None:
    """Ack the batch: it may have left out copies of lost blocks."""
    log_lost(history)
    history.monitor.acks(TOPIC_ID, 0, 1)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (epoch_again, "rule 1: epoch 1 of partition 0 is given a second time"),
        (opened_by_another, "rule 1: epoch 1 of t/0: 'opened' by a process that has not claimed it"),
        (opened_slowly, "rule 1: epoch 1 of t/0: 'data' is published, but its opening was not answered within 3 s"),
        (tail_unread, "rule 1: epoch 2 of t/0: 'data' is published, and 0 to 2 of the tail was not read"),
        (dated_at_the_answer, "rule 3: epoch 1 of t/0: 'data' is dated 0.000 s ago, when no request was handed over"),
        (dated_beyond_what_is_known, "not all was read that lay there then"),
        (proof_too_old, "rule 3: epoch 1 of t/0: 'data' is dated 1.500 s ago, and nothing was read since"),
        (two_in_flight, "rule 4: epoch 1 of t/0: 'data' is published while another is in flight"),
        (unread_after_an_error, "rule 4: epoch 1 of t/0: 'data' is published after an error, without reading"),
        (too_old_for_the_queue, "rule 4: the queue took epoch 1 of t/0: 'data', 4.000 s old"),
        (fenced, "rule 5: epoch 1 of t/0: 'data' is published after epoch 2 was read"),
        (after_closed, "rule 5: epoch 1 of t/0: 'data' is published after 'closed'"),
        (forwarded_early, "rule 5: blocks of epoch 1 are forwarded 1.500 s after its last publish"),
        (key_too_old, "rule 10: epoch 1 of t/0: 'data' is published 6.0 s after its object was stored"),
        (publishes_after_a_cut, "rule 12: epoch 1 of t/0: 'data' is published after a cut of the log that its owner"),
        (acks_after_a_cut, "rule 12: epoch 1 of partition 0 acks after a cut that its owner has seen"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_rule_is_named(broken: Callable[[History], None], words: str) -> None:
    history = History()
    broken(history)
    assert any(words in finding for finding in history.findings), history.findings


def test_next_epoch_of_a_process_starts_without_the_reads_of_the_last() -> None:
    history = History()
    history.open(1, 1)
    history.read(1)
    assert history.hand_over(1, 1)[0].read_to == 1
    history.claim(1, 2)
    assert history.hand_over(1, 2, "opened")[0].read_to == 0


def test_a_queue_that_refuses_by_epoch_takes_no_lower_one() -> None:
    history = History("epoch")
    history.open(1, 1)
    late = history.hand_over(1, 1)
    history.open(2, 2)
    history.land(late)
    assert "rule 4: the queue took epoch 1 of t/0: 'data' after epoch 2" in history.findings


def test_a_log_that_comes_back_empty_after_its_topic_is_gone_has_no_rules() -> None:
    history = History("epoch")
    history.open(1, 1)
    history.publish(1, 1)
    history.monitor.drops(PARTITION)
    history.entries.clear()
    history.publish(1, 1)
    assert history.findings == []
