"""The end of a producer's streams: late acks, a draining broker, the content of CLOSE."""

from __future__ import annotations

import pytest

from memq.client.producer.window_events import (
    Acked,
    BrokerDraining,
    CloseStream,
    ConnectionLost,
    Delayed,
    Finish,
    Finished,
    Nacked,
    Opened,
    OpenFailed,
    OpenStream,
    Room,
    Sealed,
    Settle,
    StreamRefused,
    Tick,
    WindowState,
)
from memq.errors import MemqError, NotReadyError, ProducerFencedError, TimedOutError, TooLargeError
from tests.unit.producer_parts import LOST, D, block, moved, new_window, opened


def test_a_draining_broker_that_owes_nothing_is_left_at_once() -> None:
    window = opened()
    window.handle(Acked(10))
    window.handle(BrokerDraining())
    assert window.handle(Sealed(block(10))) == [OpenStream(10, "", True)]


def test_a_draining_broker_takes_the_end_of_what_it_acked() -> None:
    window = opened()
    window.handle(BrokerDraining())
    window.handle(Finish(1.0))
    assert window.handle(Acked(10))[-1] == CloseStream(10, [])
    window = opened()
    window.handle(BrokerDraining())
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


def test_an_ack_of_a_connection_that_was_lost_settles_nothing() -> None:
    window = opened(block(0, 1))
    window.handle(ConnectionLost(LOST, 1.0))
    assert window.handle(Acked(1)) == [], "a block of one record, the least that an ack can cover"


@pytest.mark.parametrize("wants_acks", [True, False])
def test_after_a_success_the_next_redirect_is_followed_at_once_again(*, wants_acks: bool) -> None:
    window = opened(wants_acks=wants_acks)
    window.handle(StreamRefused(moved("h:1"), 1.0))
    window.handle(Sealed(block(10)))
    window.handle(Opened())
    while window.handle(Room(2.0)):
        pass
    window.handle(Acked(20))
    window.handle(Sealed(block(20)))
    assert window.handle(StreamRefused(moved("h:2"), 3.0)) == [OpenStream(20, "h:2", False)]


def test_a_producer_that_brokers_send_to_and_fro_asks_for_the_owner() -> None:
    """Two brokers that the coordinator does not reach may name each other, whoever is the owner by now."""
    window = opened(block(0))
    steps = [*window.handle(StreamRefused(moved("h:1"), 0.0))]
    for number in range(2, 9):
        steps += window.handle(OpenFailed(moved(f"h:{number}"), 0.0))
        steps += window.handle(Tick(1.0))
    assert [step.address for step in steps if isinstance(step, OpenStream)] == [
        *("h:1", "h:2", "h:3", ""),
        *("h:5", "h:6", "h:7", ""),
    ]
    assert [step.refresh for step in steps if isinstance(step, OpenStream)] == [*[False] * 3, True] * 2


def test_the_end_is_reported_with_what_was_burned() -> None:
    window = opened(block(0), block(10))
    window.handle(Nacked(10, TooLargeError("big"), 1.0))
    window.handle(Opened())
    window.handle(Room(1.0))
    assert window.handle(Finish(1.0)) == []
    assert window.handle(Acked(10))[-1] == CloseStream(20, [(10, 20)])
    window.handle(Finished())
    assert window.state is WindowState.CLOSED


def test_the_end_of_a_lost_stream_is_reported_over_a_new_one() -> None:
    window = opened()
    window.handle(Acked(10))
    window.handle(ConnectionLost(LOST, 1.0))
    assert window.state is WindowState.RESTING
    assert window.handle(Finish(1.0)) == [OpenStream(10, "", True)]
    assert window.handle(Opened()) == [CloseStream(10, [])]


def test_a_window_that_never_sent_anything_has_nothing_to_report() -> None:
    window = new_window()
    assert window.handle(Finish(1.0)) == []
    assert window.state is WindowState.CLOSED


def test_silence_counts_from_the_oldest_block_under_way() -> None:
    window = opened()
    assert window.oldest_sent_s == 1.0
    window.handle(Sealed(block(10)))
    window.handle(Room(2.0))
    assert window.oldest_sent_s == 1.0
    window.handle(Acked(10))
    assert window.oldest_sent_s == 2.0
    window.handle(Acked(20))
    assert window.oldest_sent_s is None


def test_sequences_that_are_passed_over_are_reported_as_burned() -> None:
    window = opened()
    window.handle(Sealed(block(15)))
    assert window.burned == [(10, 15)]


def test_an_owner_that_is_not_ready_is_looked_up_again_every_fourth_time() -> None:
    window, asked = opened(), []
    window.handle(StreamRefused(NotReadyError("opening"), 0.0))
    for number in range(1, 9):
        (order,) = window.handle(Tick(float(number)))
        assert isinstance(order, OpenStream)
        asked.append(order.refresh)
        window.handle(OpenFailed(NotReadyError("opening"), float(number)))
    assert asked == [False, False, False, True] * 2


def test_an_instance_that_a_newer_one_fenced_sends_nothing_more() -> None:
    window = new_window()
    window.handle(Sealed(block(0)))
    (settle,) = window.handle(OpenFailed(ProducerFencedError("a newer instance"), 0.0))
    assert isinstance(settle, Settle)
    assert isinstance(settle.error, ProducerFencedError)
    assert window.state is WindowState.RESTING


def test_a_block_that_is_given_up_names_why_acks_were_late_since_the_last_one() -> None:
    window = opened()
    window.handle(Delayed(NotReadyError("the disk is full", hint="make room")))
    settled = [each for each in window.handle(Tick(D + 1)) if isinstance(each, Settle)]
    assert settled
    for each in settled:
        assert each.error is not None
        cause = each.error.__cause__ or each.error
        assert "within the delivery timeout: the disk is full" in str(cause)
        assert isinstance(cause, MemqError)
        assert cause.hint == "make room"
    window = new_window()
    window.handle(Delayed(LOST))
    assert window.why is None, "nothing is owed"
