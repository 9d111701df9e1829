"""Unnamed objects that a log accounts for: those that its owners released, none that it has lost."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from memq.broker.sweep.log_coverage import LogCoverage
from memq.broker.upkeep.retention import expired
from memq.format.pointer import Pointer
from memq.notification import Entry
from memq.topic import CLOCK_ERROR_MS, TopicSettings, Totals

HOUR_MS = 3_600_000


def pointer(text: str, records: int = 0) -> Pointer:
    """Return the pointer of `o3` (epoch 3 is opened) or `3.7` (its batch 7), after so many records."""
    epoch, _, batch = text.removeprefix("o").partition(".")
    return Pointer(
        kind="opened" if text.startswith("o") else "data",
        cluster="c",
        topic="clicks",
        topic_id="0" * 32,
        partition=0,
        epoch=int(epoch),
        batch_sequence=int(batch or 0),
        totals=Totals(records, records),
    )


def shown(text: str, *, trimmed: bool = False, before: int = 0) -> LogCoverage:
    """Return a log of such pointers, the first one after `before` records."""
    log = LogCoverage()
    for number, each in enumerate(text.split()):
        log.take(pointer(each, before + number if number or before else 0), trimmed=trimmed)
    return log


def test_an_object_older_than_the_first_pointer_that_retention_left_is_not_after_the_end() -> None:
    """An idle partition has only a repeated `opened` left: it shows no batch number of its epoch."""
    log = LogCoverage()
    log.take(pointer("o3", 9), trimmed=True, time_ms=10 * HOUR_MS)
    assert not log.is_after_end(3, 7, 10 * HOUR_MS - CLOCK_ERROR_MS - 1)
    assert log.is_after_end(3, 7, 10 * HOUR_MS - CLOCK_ERROR_MS)
    assert not log.is_after_end(2, 7, 11 * HOUR_MS), "of another epoch"
    log.take(pointer("3.6", 9), trimmed=True, time_ms=10 * HOUR_MS)
    assert log.is_after_end(3, 7, 0), "an outage of the queue: the object waited for hours until it got its pointer"
    whole = LogCoverage()
    whole.take(pointer("o3"), trimmed=False, time_ms=10 * HOUR_MS)
    assert whole.is_after_end(3, 0, 0)


SOUND, TRIMMED, LOST, RESTORED, UNDER_OWNER = "o1 1.0 o2 2.0", "2.5 o3", "o4 4.0", "1.0 2.0 2.1 o5 5.0", "3.8 3.9 o4"
GAP, GAP_AT_FIRST, TRIMMED_THEN_GAP = "o1 1.0 1.1 1.4 o2 2.0", "o1 1.0 o2 2.1", "2.5 2.7 o3 3.2"


@pytest.mark.parametrize(
    ("text", "trimmed", "before", "gone", "kept"),
    [
        (SOUND, False, 0, "1.5 2.0 2.9", "3.0 9.0"),
        (TRIMMED, True, 10, "1.0 2.0 2.6 3.0", "4.0"),
        ("o1 o4 4.0", False, 0, "1.7 4.2", "2.0 3.5 5.0"),
        ("", False, 0, "", "1.0 2.0"),
        (LOST, False, 0, "4.0 4.9", "1.0 3.9 5.0"),
        (RESTORED, False, 0, "1.0 1.9 2.1 5.3", "2.2 3.0 4.9 6.0"),
        (UNDER_OWNER, False, 10, "4.0", "1.0 3.0 3.7 3.9 5.0"),
        (GAP, False, 0, "1.0 1.1 1.4 1.5 2.0 2.1", "1.2 1.3"),
        (GAP_AT_FIRST, False, 0, "1.0 1.1 2.1 2.2", "2.0"),
        (TRIMMED_THEN_GAP, True, 10, "1.0 2.0 2.4 2.5 2.7 2.8 3.2 3.3", "2.6 3.0 3.1"),
        ("2.3 4.9 o5", True, 10, "1.7 2.0 4.0 4.8", "3.0 6.0"),
        ("o1 1.1", False, 0, "1.1", "1.0 2.0"),
        ("o2 2.5", True, 10, "1.0 2.0 2.4 2.5", "3.0"),
    ],
    ids=[
        *(
            "sound",
            "trimmed by retention",
            "epoch missing",
            "empty",
            "opened again",
            "restored",
            "lost under its owner",
        ),
        *("gap", "gap at the first batch", "trimmed, then a gap", "trimmed with a late pointer in front"),
        *("gap at the first batch of all", "trimmed behind an opening that was repeated"),
    ],
)
def test_log_accounts_for_its_batches(text: str, trimmed: bool, before: int, gone: str, kept: str) -> None:
    log = shown(text, trimmed=trimmed, before=before)
    for each in f"{gone} {kept}".split():
        place = pointer(each)
        assert log.accounts_for(place.epoch, place.batch_sequence) is (each in gone.split()), each


def test_a_log_with_holes_between_its_offsets_accounts_only_for_what_it_shows() -> None:
    log = shown(SOUND)
    log.note_holes()
    assert [log.accounts_for(*place) for place in [(1, 0), (2, 0), (1, 5), (2, 1)]] == [True, True, False, False]
    assert log.lost


def test_which_logs_have_lost_pointers_that_they_had() -> None:
    lost = [shown(""), shown(UNDER_OWNER, before=10), shown("o1 1.0", before=10), shown(GAP), shown(GAP_AT_FIRST)]
    assert [log.lost for log in lost] == [True] * 5
    assert [log.lost for log in (shown(SOUND), shown(RESTORED), shown("2.5 2.6 o3", trimmed=True))] == [False] * 3


@pytest.mark.parametrize("seed", range(50))
def test_any_batch_whose_pointer_is_lost_between_others_of_its_epoch_is_not_accounted_for(seed: int) -> None:
    draw = random.Random(seed)
    log = [pointer(f"{epoch}.{batch}" if batch >= 0 else f"o{epoch}") for epoch in (1, 2, 3) for batch in range(-1, 6)]
    begin = draw.randint(0, 8)
    lost = draw.choice([each for each in log[begin + 1 :] if each.kind == "data" and each.batch_sequence < 5])
    shown = LogCoverage()
    for each in log[begin:]:
        if each is not lost:
            shown.take(each, trimmed=begin > 0)
    place = (lost.epoch, lost.batch_sequence)
    # `opened` is repeated: behind the one that a trimmed log begins with, retention may have taken the first batches.
    in_front = begin > 0 and lost is log[begin + 1] and log[begin].kind == "opened"
    assert shown.accounts_for(*place) is in_front


@pytest.mark.parametrize("seed", range(50))
def test_whatever_owners_and_retention_did_is_accounted_for_and_a_lost_end_is_not(seed: int) -> None:
    """Owners open, store, publish in order or die; late pointers land behind higher epochs; retention trims."""
    draw = random.Random(seed)
    log: list[Pointer] = []
    stored: list[tuple[int, int]] = []
    late: list[Pointer] = []
    for epoch in range(1, draw.randint(2, 9)):
        log.append(pointer(f"o{epoch}", 10 * len(log)))
        dead = False
        for batch in range(draw.randint(0, 4)):
            stored.append((epoch, batch))
            each = pointer(f"{epoch}.{batch}", 10 * len(log))
            if not dead and draw.random() < 0.7:
                log.append(each)
            elif not dead:
                late.append(each)  # the one that is in flight when its owner dies
                dead = True
        if late and draw.random() < 0.5:
            log.append(late.pop())
    kept = draw.randint(0, len(log) - 1)
    sound = LogCoverage()
    for each in log[kept:]:
        sound.take(each, trimmed=kept > 0)
    left = [each.epoch for each in log[kept:]]
    for epoch, batch in stored:
        if epoch in left or epoch < min(left):
            assert sound.accounts_for(epoch, batch)
    lost, begun = LogCoverage(), draw.randint(1, max(left))
    for each in log[kept:]:
        if each.epoch < begun:
            lost.take(each, trimmed=kept > 0)
    assert not any(lost.accounts_for(epoch, batch) for epoch, batch in stored if epoch >= begun)


@pytest.mark.parametrize("seed", range(50))
def test_a_log_with_late_tries_has_lost_nothing_wherever_retention_trims_it(seed: int) -> None:
    """Two writers share a log. A try to publish is late, so that its pointer lands again behind later batches."""
    draw = random.Random(seed)
    log: list[Pointer] = []
    for epoch in (1, 2):
        for batch in range(12):
            log += [replace(pointer(f"{epoch}.{batch}"), partition=writer, stored_bytes=1) for writer in (0, 1)]
    for _ in range(draw.randint(1, 5)):
        at = draw.randrange(len(log))
        log.insert(min(len(log), at + draw.randint(1, 8)), log[at])
    log = [replace(pointer("o1"), partition=writer) for writer in (0, 1)] + log
    last = [(replace(pointer("o3"), partition=writer), HOUR_MS) for writer in (0, 1)]
    timed = [(each, 0) for each in log] + last
    entries = [(Entry(offset, time_ms, b""), each) for offset, (each, time_ms) in enumerate(timed)]
    settings = TopicSettings(retention_ms=0, retention_bytes=draw.randint(1, len(log)))
    before = expired(entries, settings, 2 * HOUR_MS).before
    for writer in (0, 1):
        left = LogCoverage()
        for _, each in entries[before:]:
            if each.partition == writer:
                left.take(each, trimmed=before > 0)
        assert not left.lost
        assert all(left.accounts_for(epoch, batch) for epoch in (1, 2) for batch in range(12))
