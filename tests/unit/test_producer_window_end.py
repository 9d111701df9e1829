"""The end of a producer's window: what a draining broker still takes, and what CLOSE reports."""

from __future__ import annotations

from memq.client.window_events import (
    Acked,
    CloseStream,
    Drained,
    Finish,
    Finished,
    Lost,
    Nacked,
    Opened,
    OpenFailed,
    OpenStream,
    Room,
    Sealed,
    Settle,
    Tick,
)
from memq.client.window_states import State
from memq.errors import TimedOutError, TooLargeError
from tests.unit.test_producer_window import LOST, D, block, new_window, opened


def test_a_draining_broker_that_owes_nothing_is_left_at_once() -> None:
    window = opened()
    window.handle(Acked(10))
    window.handle(Drained())
    assert window.handle(Sealed(block(10))) == [OpenStream(10, "", True)]


def test_a_draining_broker_takes_the_end_of_what_it_acked() -> None:
    window = opened()
    window.handle(Drained())
    window.handle(Finish(1.0))
    assert window.handle(Acked(10))[-1] == CloseStream(10, [])
    window = opened()
    window.handle(Drained())
    window.handle(Finish(1.0))
    assert window.handle(Tick(D))[-1] == CloseStream(10, [(0, 10)]), "or gave no answer for"


def test_a_block_that_is_over_its_time_is_not_written_when_there_is_room() -> None:
    window = new_window()
    window.handle(Sealed(block(0)))
    window.handle(Opened())
    (settle,) = window.handle(Room(D))
    assert isinstance(settle, Settle)
    assert type(settle.error) is TimedOutError


def test_an_ack_before_anything_was_written_settles_nothing() -> None:
    window = new_window()
    window.handle(Sealed(block(0, 1)))
    assert window.handle(Acked(1)) == []
    window.handle(OpenFailed(LOST, 0.0))
    assert window.handle(Acked(1)) == []


def test_the_end_is_reported_with_what_was_burned() -> None:
    window = opened(block(0), block(10))
    window.handle(Nacked(10, TooLargeError("big"), 1.0))
    window.handle(Opened())
    window.handle(Room(1.0))
    assert window.handle(Finish(1.0)) == []
    assert window.handle(Acked(10))[-1] == CloseStream(20, [(10, 20)])
    window.handle(Finished())
    assert window.state is State.CLOSED


def test_the_end_of_a_lost_stream_is_reported_over_a_new_one() -> None:
    window = opened()
    window.handle(Acked(10))
    window.handle(Lost(LOST, 1.0))
    assert window.state is State.RESTING
    assert window.handle(Finish(1.0)) == [OpenStream(10, "", True)]
    assert window.handle(Opened()) == [CloseStream(10, [])]


def test_a_window_that_never_sent_anything_has_nothing_to_report() -> None:
    window = new_window()
    assert window.handle(Finish(1.0)) == []
    assert window.state is State.CLOSED
