"""The producer's window: each pair of state and event, and its rules against a model of a broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memq.client.producer.window import BURNED_RANGES_MAX, ProducerWindow
from memq.client.producer.window_events import (
    TABLE,
    Abandon,
    Acked,
    BrokerDraining,
    CloseStream,
    ConnectionLost,
    Delayed,
    Event,
    Finish,
    Finished,
    Instruction,
    Nacked,
    Opened,
    OpenFailed,
    OpenStream,
    Room,
    Sealed,
    SealFailed,
    Settle,
    StreamRefused,
    Tick,
    UnackedBlock,
    WindowState,
    WriteBlock,
)
from memq.errors import (
    ClosedError,
    CorruptDataError,
    IdentityConflictError,
    MemqError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    OutOfSequenceError,
    ThrottledError,
    TimedOutError,
    TooLargeError,
    TooOldError,
)
from memq.protocol.frames import AckPosition
from tests.unit.producer_parts import LOST, D, block, moved, new_window, opened, sound_block


def test_each_block_gets_its_place_from_the_ack_that_settles_it() -> None:
    blocks = [block(0), block(10), block(20), block(30)]
    window = opened(*blocks)
    window.handle(Acked(30, [AckPosition(20, 25, 7, 99), AckPosition(0, 20, 7, 3)]))
    assert [each.position for each in blocks] == [AckPosition(0, 20, 7, 3)] * 2 + [None, None], (
        "one is not named as a whole"
    )
    window.handle(Acked(40))
    assert blocks[3].position is None


def in_state(state: WindowState) -> ProducerWindow:
    """Return a window in a state, with one live block where that is possible."""
    window = new_window()
    if state is WindowState.RESTING:
        return window
    if state in (WindowState.WAITING, WindowState.OPENING):
        window.handle(Sealed(block(0)))
        if state is WindowState.WAITING:
            window.handle(OpenFailed(LOST, 0.0))
        return window
    window = opened()
    steps: dict[WindowState, list[Event]] = {
        WindowState.OPEN: [],
        WindowState.LEAVING: [BrokerDraining()],
        WindowState.CLOSING: [Acked(10), Finish(1.0)],
        WindowState.CLOSED: [Abandon(ClosedError("closed"))],
    }
    for event in steps[state]:
        window.handle(event)
    return window


def some_events(first: int) -> list[Event]:
    """Return events of every kind, several where their content matters."""
    errors: list[MemqError] = [LOST, moved("h:1"), TooOldError("old"), NotFoundError("gone"), CorruptDataError("bad")]
    return [
        Sealed(block(first)),
        SealFailed(block(first), TooLargeError("no")),
        Opened(),
        *(OpenFailed(error, 1.0) for error in errors),
        *(Nacked(number, error, 1.0) for error in errors for number in (0, 10, 77)),
        *(StreamRefused(error, 1.0) for error in errors),
        *(Acked(number) for number in (0, 5, 10, 77)),
        BrokerDraining(),
        ConnectionLost(LOST, 1.0),
        Room(1.0),
        Room(D + 1),
        Tick(1.0),
        Tick(D + 1),
        Delayed(LOST),
        Finish(1.0),
        Finished(),
        Abandon(ClosedError("closed")),
    ]


@pytest.mark.parametrize("state", WindowState)
def test_every_pair_of_state_and_event_does_what_the_table_says(state: WindowState) -> None:
    assert in_state(state).state is state
    first = in_state(state).next_sequence
    for event in some_events(first):
        window = in_state(state)
        successors = TABLE[state].get(type(event))
        if successors is None:
            with pytest.raises(AssertionError, match="cannot happen"):
                window.handle(event)
        else:
            window.handle(event)
            assert window.state in successors, event


def test_every_kind_of_event_is_walked() -> None:
    kinds = {kind for row in TABLE.values() for kind in row}
    assert kinds == {type(event) for event in some_events(0)}


def test_a_block_opens_the_stream_and_is_written_after_the_answer() -> None:
    window = new_window()
    first = block(0)
    assert window.handle(Sealed(first)) == [OpenStream(0, "", False)]
    assert window.handle(Room(0.0)) == []  # not before OPEN was answered
    window.handle(Opened())
    assert window.handle(Room(2.5)) == [WriteBlock(first)]
    assert first.first_sent_s == 2.5
    assert window.handle(Acked(10)) == [Settle(first, None)]
    assert window.live == 0


def test_a_lost_connection_sends_all_again_from_the_oldest_in_order() -> None:
    blocks = [block(0), block(10), block(20)]
    window = opened(*blocks)
    window.handle(Acked(10))
    assert window.handle(ConnectionLost(LOST, 5.0)) == []
    assert window.next_deadline_s is not None
    assert window.handle(Tick(window.next_deadline_s)) == [OpenStream(10, "", True)]
    window.handle(Opened())
    assert [window.handle(Room(6.0)), window.handle(Room(6.0))] == [[WriteBlock(blocks[1])], [WriteBlock(blocks[2])]]
    assert blocks[1].first_sent_s == 1.0  # the age counts from the first write
    assert blocks[1].writes == 2


def test_the_window_goes_where_it_is_sent_at_once_and_backs_off_when_sent_again() -> None:
    window = opened()
    assert window.handle(StreamRefused(moved("other:1"), 1.0)) == [OpenStream(0, "other:1", False)]
    assert window.handle(OpenFailed(moved("third:1"), 1.0)) == []
    assert window.state is WindowState.WAITING
    assert window.handle(Tick(50.0)) == [OpenStream(0, "third:1", False)]


def test_a_throttled_stream_waits_at_least_as_long_as_the_answer_says() -> None:
    window = opened()
    window.handle(StreamRefused(ThrottledError("slow", retry_after_ms=3_000), 1.0))
    assert window.next_deadline_s is not None
    assert window.next_deadline_s >= 4.0
    assert window.handle(Tick(3.9)) == []
    assert window.handle(Tick(10.0)) == [OpenStream(0, "", False)]


def test_retries_wait_longer_and_longer_below_a_bound_until_an_ack_comes() -> None:
    window = new_window()
    window.handle(Sealed(block(0, deadline_s=1e9)))
    now_s = 0.0
    waits: list[float] = []
    for _ in range(200):
        window.handle(OpenFailed(LOST, now_s))
        assert window.next_deadline_s is not None
        waits.append(window.next_deadline_s - now_s)
        now_s = window.next_deadline_s
        assert window.handle(Tick(now_s)) == [OpenStream(0, "", True)]
    assert waits[0] <= 0.05
    assert 0.15 < sum(waits[10:]) / len(waits[10:]) < 0.35  # half of the bound of 0.5 s on average: full jitter
    assert max(waits) <= 0.5
    window.handle(Opened())
    window.handle(Room(now_s))
    window.handle(Acked(10))
    window.handle(Sealed(block(10, deadline_s=1e9)))
    window.handle(ConnectionLost(LOST, now_s))
    assert window.next_deadline_s is not None
    assert window.next_deadline_s - now_s <= 0.05


def test_a_block_that_was_never_written_times_out_and_one_that_was_is_unknown() -> None:
    window = opened(block(0), block(10))
    third = block(20, deadline_s=D + 50)
    window.handle(StreamRefused(ThrottledError("slow"), 1.0))
    window.handle(Sealed(third))
    settled = window.handle(Tick(D + 0.1))
    errors = [each.error for each in settled if isinstance(each, Settle)]
    assert [type(error) for error in errors] == [OutcomeUnknownError] * 2
    assert all("within the delivery timeout: slow" in str(error) for error in errors), "it says what stood in the way"
    assert "10 records of topic 't' partition 0 from sequence 10 on" in str(errors[1])
    assert window.burned == [(0, 20)]
    window = in_state(WindowState.WAITING)
    (settle,) = window.handle(Tick(D))
    assert isinstance(settle, Settle)
    assert type(settle.error) is TimedOutError
    assert window.state is WindowState.RESTING


def test_after_a_gap_the_stream_is_opened_again_once_all_before_it_is_acked() -> None:
    """A stream is dense: block 10 is burned, so 20 can't follow on 0 and waits until that is acked."""
    first, third = block(0), block(20)
    window = opened(first)
    window.handle(SealFailed(block(10), TooLargeError("no")))
    window.handle(Sealed(third))
    assert window.handle(Room(1.0)) == []
    window.handle(Acked(10))
    assert window.handle(Room(1.0)) == [OpenStream(20, "", False)]
    window.handle(Opened())
    assert window.handle(Room(1.0)) == [WriteBlock(third)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TooOldError("old"), OutcomeUnknownError),
        (CorruptDataError("bad"), CorruptDataError),
        (TooLargeError("big"), TooLargeError),
        (NotFoundError("gone"), NotFoundError),
    ],
)
def test_a_condemned_block_fails_alone_and_the_stream_opens_at_the_oldest_live_one(
    error: MemqError, expected: type[MemqError]
) -> None:
    first, second, third = blocks = [block(0), block(10), block(20)]
    window = opened(*blocks)
    instructions = window.handle(Nacked(10, error, 2.0))
    settle, opening = instructions
    assert isinstance(settle, Settle)
    assert settle.block is second
    assert type(settle.error) is expected
    assert opening == OpenStream(0, "", False)
    assert window.burned == [(10, 20)]
    window.handle(Opened())
    assert window.handle(Room(2.0)) == [WriteBlock(first)]
    assert window.handle(Room(2.0)) == []  # not over the gap
    window.handle(Acked(10))
    assert window.handle(Room(2.0)) == [OpenStream(20, "", False)]
    window.handle(Opened())
    assert window.handle(Room(2.0)) == [WriteBlock(third)]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(CorruptDataError("bad"), OutcomeUnknownError), (IdentityConflictError("other"), IdentityConflictError)],
)
def test_a_condemned_block_that_an_earlier_stream_carried_is_unknown_unless_others_have_its_place(
    error: MemqError, outcome: type[MemqError]
) -> None:
    window = opened()
    window.handle(ConnectionLost(LOST, 1.0))
    window.handle(Tick(50.0))
    window.handle(Opened())
    window.handle(Room(50.0))
    (settle,) = window.handle(Nacked(0, error, 51.0))
    assert isinstance(settle, Settle)
    assert type(settle.error) is outcome


def test_a_sound_block_fails_at_the_second_refusal_as_damaged() -> None:
    """A bit that changed on the way is no damage of the block: the same bytes may arrive the next time."""
    first, second, third = blocks = [sound_block(0), sound_block(10), sound_block(20)]
    window = opened(*blocks)
    assert window.handle(Nacked(10, CorruptDataError("bad"), 2.0)) == [OpenStream(0, "", False)]
    window.handle(Opened())
    written = [window.handle(Room(2.0)) for _ in range(4)]
    assert written == [[WriteBlock(first)], [WriteBlock(second)], [WriteBlock(third)], []]
    window.handle(Acked(10))
    settle, opening = window.handle(Nacked(10, CorruptDataError("worse"), 3.0))
    assert isinstance(settle, Settle)
    assert (settle.block, type(settle.error), str(settle.error)) == (second, CorruptDataError, "worse")
    assert opening == OpenStream(20, "", False)
    assert window.burned == [(10, 20)]
    window.handle(Opened())
    assert window.handle(Room(3.0)) == [WriteBlock(third)]
    assert window.handle(Nacked(20, CorruptDataError("bad"), 4.0)) == [OpenStream(20, "", False)], "its own first"


def test_only_damage_on_the_way_gives_a_block_a_second_try() -> None:
    window = opened(sound_block(0))
    (settle,) = window.handle(Nacked(0, TooLargeError("big"), 2.0))
    assert isinstance(settle, Settle)
    changed = sound_block(0)
    changed.data = bytes(changed.data[:-1]) + b"w"  # in the producer's memory, after its seal
    (settle,) = opened(changed).handle(Nacked(0, CorruptDataError("bad"), 2.0))
    assert isinstance(settle, Settle)
    assert type(settle.error) is CorruptDataError


def test_out_of_sequence_and_what_passes_condemn_nothing() -> None:
    for error in (OutOfSequenceError("no"), ThrottledError("slow"), NotReadyError("wait")):
        window = opened()
        assert window.handle(Nacked(0, error, 1.0)) == []
        assert window.live == 1
        assert window.state is WindowState.WAITING


def test_an_ack_that_comes_after_the_stream_was_closed_still_counts_up_to_what_it_took() -> None:
    first, second = block(0), block(10)
    window = opened(first, second)
    window.handle(Nacked(10, ThrottledError("slow"), 1.0))
    assert window.handle(Acked(10)) == [Settle(first, None)]
    assert window.handle(Acked(20)) == []  # the stream never took the second
    window = opened(block(0), block(10))
    window.handle(StreamRefused(ThrottledError("slow"), 1.0))
    window.handle(ConnectionLost(LOST, 1.0))
    assert window.handle(Acked(20)) == []  # of which connection would that be?


def test_an_ack_never_covers_what_was_not_written() -> None:
    first, second = block(0), block(10)
    window = new_window()
    window.handle(Sealed(first))
    window.handle(Sealed(second))
    window.handle(Opened())
    window.handle(Room(1.0))
    assert window.handle(Acked(20)) == [Settle(first, None)]


def test_a_draining_broker_acks_what_it_took_and_the_rest_goes_to_the_next() -> None:
    first = block(0)
    window = opened(first)
    second = block(10)
    window.handle(BrokerDraining())
    window.handle(Sealed(second))
    assert window.handle(Room(1.0)) == []
    assert window.handle(Acked(10)) == [Settle(first, None)]
    assert window.handle(Tick(1.0)) == [OpenStream(10, "", True)]


def test_a_topic_that_is_gone_fails_all_blocks() -> None:
    window = new_window()
    window.handle(Sealed(block(0)))
    window.handle(Sealed(block(10)))
    settled = window.handle(OpenFailed(NotFoundError("gone"), 1.0))
    assert [type(each.error) for each in settled if isinstance(each, Settle)] == [NotFoundError] * 2
    assert window.state is WindowState.RESTING


def test_without_acks_a_block_is_done_when_it_is_written() -> None:
    window = new_window(wants_acks=False)
    first = block(0)
    window.handle(Sealed(first))
    window.handle(Opened())
    assert window.handle(Room(1.0)) == [WriteBlock(first), Settle(first, None)]
    assert window.live == 0
    last = block(10)
    window.handle(Sealed(last))
    window.handle(Finish(1.0))
    assert window.handle(Room(1.0)) == [WriteBlock(last), Settle(last, None), CloseStream(20, [])]


def test_abandoned_blocks_fail_with_the_given_error_or_as_unknown() -> None:
    window = opened(block(0))
    window.handle(StreamRefused(ThrottledError("slow"), 1.0))
    window.handle(Sealed(block(10)))
    settled = window.handle(Abandon(ClosedError("closed")))
    assert [type(each.error) for each in settled if isinstance(each, Settle)] == [OutcomeUnknownError, ClosedError]
    (late,) = window.handle(Sealed(block(20)))
    assert isinstance(late, Settle)
    assert type(late.error) is ClosedError


def test_burned_ranges_join_and_are_bounded() -> None:
    window = new_window()
    first = 0
    for number in range(2 * BURNED_RANGES_MAX + 10):
        if number % 2:
            window.handle(SealFailed(block(first, 1), TooLargeError("no")))
        else:
            window.handle(Sealed(block(first, 1)))
        first += 1
    assert len(window.burned) == BURNED_RANGES_MAX
    window.handle(SealFailed(block(first, 5), TooLargeError("no")))
    assert window.burned[-1] == (first - 1, first + 5)


class WindowAgainstBroker(RuleBasedStateMachine):
    """The window against a broker that keeps the rules: dense streams, cumulative acks, NACKs that close.

    What the broker took is its truth: no block is acked that it did not take, none is settled twice, none is
    lost, and the order in which it takes them first is the order of the sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.window = new_window()
        self.now_s = 0.0
        self.next_sequence = 0
        self.settled: dict[int, MemqError | None] = {}
        self.data: dict[int, bytes] = {}
        self.taken: set[int] = set()  # by the broker, on any stream
        self.stream_open = False  # at the broker
        self.expected = 0
        self.stream_start = 0
        self.acked = 0
        self.opening: OpenStream | None = None
        self.closes: list[CloseStream] = []
        self.finishing = False
        self.damages: dict[int, int] = {}  # by first sequence: how often the broker called the block damaged

    def feed(self, event: Event) -> None:
        self.obey(self.window.handle(event))

    def obey(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Settle):
                assert each.block.first not in self.settled, "settled twice"
                self.settled[each.block.first] = each.error
                if each.error is None:
                    assert each.block.first in self.taken, "acked without being taken"
                elif not isinstance(each.error, OutcomeUnknownError):
                    assert not isinstance(each.error, CorruptDataError) or self.damages[each.block.first] == 2
                    assert each.block.first not in self.taken or isinstance(each.error, TooLargeError)
            elif isinstance(each, OpenStream):
                self.opening = each
                self.stream_open = False
            elif isinstance(each, WriteBlock):
                self.write(each.block)
            else:
                self.closes.append(each)

    def write(self, written: UnackedBlock) -> None:
        assert written.data == self.data[written.first], "not the same bytes"
        assert self.opening is None, "written before OPEN was answered"
        if not self.stream_open:
            return  # on its way when the broker closed the stream
        assert written.first == self.expected, "the stream is not dense"
        self.taken.add(written.first)
        self.expected = written.next

    @initialize()
    def start(self) -> None:
        self.seal(1)

    @precondition(lambda self: not self.finishing)
    @rule(records=st.integers(1, 5))
    def seal(self, records: int) -> None:
        sealed = sound_block(self.next_sequence, records, self.now_s + 100.0)
        self.data[sealed.first] = bytes(sealed.data)
        self.next_sequence = sealed.next
        self.feed(Sealed(sealed))

    @precondition(lambda self: not self.finishing)
    @rule()
    def spoil(self) -> None:
        spoiled = block(self.next_sequence, 1, self.now_s + 100.0)
        self.data[spoiled.first] = b""
        self.next_sequence = spoiled.next
        self.feed(SealFailed(spoiled, TooLargeError("no")))

    @precondition(lambda self: self.opening is not None)
    @rule()
    def answer_open(self) -> None:
        assert self.opening is not None
        self.expected = self.stream_start = self.opening.sequence
        self.stream_open = True
        self.opening = None
        self.feed(Opened())

    @precondition(lambda self: self.opening is not None)
    @rule(address=st.sampled_from(["", "other:1"]))
    def refuse_open(self, address: str) -> None:
        self.opening = None
        self.feed(OpenFailed(moved(address) if address else NotReadyError("wait"), self.now_s))

    @precondition(lambda self: self.window.state is WindowState.OPEN)
    @rule()
    def room(self) -> None:
        self.feed(Room(self.now_s))

    @precondition(lambda self: self.stream_open)
    @rule(share=st.floats(0, 1))
    def ack(self, share: float) -> None:
        """Ack a prefix of what the stream took."""
        firsts = sorted(first for first in self.taken if self.stream_start <= first < self.expected)
        if firsts:
            self.feed(Acked(self.expected if share > 0.9 else firsts[int(share * (len(firsts) - 1))]))

    @precondition(lambda self: self.stream_open)
    @rule(kind=st.sampled_from(["throttle", "redirect", "nack", "damage", "condemn"]))
    def close_stream(self, kind: str) -> None:
        """Refuse the next block: what was written after it is not taken."""
        self.stream_open = False
        if kind == "throttle":
            self.feed(StreamRefused(ThrottledError("slow", retry_after_ms=10), self.now_s))
        elif kind == "redirect":
            self.feed(StreamRefused(moved("other:1"), self.now_s))
        elif kind == "nack":
            self.feed(Nacked(self.expected, OutOfSequenceError("no"), self.now_s))
        elif kind == "damage":
            self.damages[self.expected] = self.damages.get(self.expected, 0) + 1
            self.feed(Nacked(self.expected, CorruptDataError("bad"), self.now_s))
        else:
            self.feed(Nacked(self.expected, TooLargeError("big"), self.now_s))

    @rule()
    def lose(self) -> None:
        if self.window.state in (WindowState.OPEN, WindowState.LEAVING, WindowState.OPENING, WindowState.CLOSING):
            self.stream_open = False
            self.opening = None
            self.feed(ConnectionLost(LOST, self.now_s))

    @rule()
    def drain(self) -> None:
        self.feed(BrokerDraining()) if self.window.state is WindowState.OPEN else None

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Tick(self.now_s))

    @precondition(lambda self: not self.finishing)
    @rule()
    def finish(self) -> None:
        self.finishing = True
        self.feed(Finish(self.now_s))

    @precondition(lambda self: self.window.state is WindowState.CLOSING)
    @rule()
    def answer_close(self) -> None:
        assert self.closes[-1].next_sequence == self.next_sequence
        assert len(self.settled) == len(self.data), "CLOSE came before all was settled"
        self.feed(Finished())

    @invariant()
    def every_block_is_live_or_settled(self) -> None:
        live = [each.first for each in self.window.blocks()]
        assert live == sorted(live)
        assert sorted([*live, *self.settled]) == sorted(self.data)

    @invariant()
    def what_failed_is_burned(self) -> None:
        failed = {first for first, error in self.settled.items() if error is not None}
        for first in failed:
            assert any(low <= first < high for low, high in self.window.burned)
        for first, error in self.settled.items():
            if error is None:
                assert not any(low <= first < high for low, high in self.window.burned)

    @invariant()
    def something_will_happen(self) -> None:
        """While a block is live there is an open stream, an attempt under way, or a time to wait for."""
        if self.window.live and self.window.state is not WindowState.CLOSED:
            assert self.window.next_deadline_s is not None

    def assert_closed(self) -> None:
        assert self.window.state is WindowState.CLOSED
        assert len(self.settled) == len(self.data)

    def teardown(self) -> None:
        """However it went: with a broker that behaves and time, all is settled, and the end is reported."""
        if self.window.state is WindowState.CLOSED:
            return
        if not self.finishing:
            self.finish()
        steps: list[Callable[[], None]] = [self.answer_open, self.room, lambda: self.wait(5.0)]
        for _ in range(500):
            if self.window.state in (WindowState.CLOSING, WindowState.CLOSED):
                break
            if self.opening is not None:
                steps[0]()
            elif self.window.state is WindowState.OPEN and self.window.queued:
                steps[1]()
                if self.stream_open:
                    self.feed(Acked(self.expected))
            else:
                if self.stream_open:
                    self.feed(Acked(self.expected))
                steps[2]()
        if self.window.state is WindowState.CLOSING:
            self.answer_close()
        self.assert_closed()


TestWindowAgainstBroker = WindowAgainstBroker.TestCase
TestWindowAgainstBroker.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
