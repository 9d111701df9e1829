"""Settings of workers, and the step after each answer of a handler."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import memq
from memq.client.queue.worker_settings import Return, WorkerSettings, note_of, outcome_of, queues_of
from memq.errors import InvalidNameError, InvalidRequestError, InvalidSettingError
from memq.queues.decisions import NackKind

DELAYS_S = (1.0, 5.0)
SETTINGS = WorkerSettings(queues=("jobs",), concurrency=4, prefetch=None, retry_delays_s=DELAYS_S, drain_s=1)


@pytest.mark.parametrize(
    ("answer", "attempt", "step"),
    [
        (None, 1, None),
        ("anything", 1, None),
        (ValueError("bad"), 1, Return(1.0, b"ValueError: bad", NackKind.FAILED)),
        (ValueError(), 2, Return(5.0, b"ValueError", NackKind.FAILED)),
        (ValueError("bad"), 99, Return(5.0, b"ValueError: bad", NackKind.FAILED)),
        (asyncio.CancelledError(), 1, Return(1.0, b"CancelledError", NackKind.FAILED)),
        (memq.Retry, 1, Return(1.0, b"the handler asked for a retry", NackKind.FAILED)),
        (memq.Retry(after=0.5, reason="half done"), 2, Return(0.5, b"half done", NackKind.FAILED)),
        (memq.DeadLetter("no such user"), 1, Return(0, b"no such user", NackKind.DEAD)),
        (memq.Park, 1, Return(0, b"given up by the handler", NackKind.DEAD)),
    ],
)
def test_the_answer_of_a_handler_is_an_ack_or_a_nack(answer: object, attempt: int, step: Return | None) -> None:
    assert outcome_of(answer, attempt, DELAYS_S) == step


def test_a_note_has_at_most_a_kib_and_whole_characters() -> None:
    assert note_of("é" * 600) == ("é" * 512).encode()
    assert note_of("x" + "é" * 600) == ("x" + "é" * 511).encode()
    assert note_of("\ud800") == b"?"


def test_items_are_leased_ahead_for_short_handlers_only() -> None:
    assert (SETTINGS.leased_max(None), SETTINGS.leased_max(2.0), SETTINGS.leased_max(0.1)) == (4, 4, 8)
    assert {replace(SETTINGS, prefetch=1).leased_max(each) for each in (None, 2.0, 0.1)} == {5}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"queues": ()}, InvalidRequestError),
        ({"queues": tuple(f"q{number}" for number in range(300))}, InvalidRequestError),
        ({"queues": ("a/b/c",)}, InvalidNameError),
        ({"concurrency": 0}, InvalidSettingError),
        ({"prefetch": -1}, InvalidSettingError),
        ({"drain_s": -1}, InvalidSettingError),
        ({"retry_delays_s": ()}, InvalidSettingError),
        ({"retry_delays_s": (-1,)}, InvalidSettingError),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        replace(SETTINGS, **changes).check()
    assert SETTINGS.check() is SETTINGS


def test_a_queue_is_named_once() -> None:
    assert queues_of("jobs") == ("jobs",)
    assert queues_of(["b", "a", "b"]) == ("b", "a")
