"""A wrong answer of a store, once or twice, is no damage: reads of a fetcher against such a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    StoreError,
    UnsupportedFormatError,
)
from memq.format.batch import BlockPiece, is_whole
from memq.format.blocks.header import Buffer
from memq.runtime.logs import EventLog
from memq.storage_handlers.confirmed_reads import ROUNDS_MAX, ConfirmedReads, Way
from tests.brokers import log_lines
from tests.skipping_loop import LoopClock, run_skipping
from tests.unit.fetched_batch import BODY, POINTER, Shelf, batch, stored_object
from tests.unit.queue_model import Block

Answer = Callable[[bytes], bytes | Exception]


def flipped(at: int) -> Answer:
    """Change one bit."""

    def answer(body: bytes) -> bytes:
        changed = bytearray(body)
        changed[at] ^= 1
        return bytes(changed)

    return answer


def shortened(body: bytes) -> bytes:
    return body[:-40]


def gone(body: bytes) -> NotFoundError:
    return NotFoundError("no object 'key'")


def cut(body: bytes) -> CorruptDataError:
    return CorruptDataError("object 'key' has 12 bytes")


def of_another_batch(body: bytes) -> bytes:
    """Return as many sound blocks, as long, of the same topic partition."""
    other = batch([Block(3, 0, 2), Block(4, 0, 3), Block(3, 2, 4)])[1]
    assert len(other) == len(body)
    return other


class LyingShelf(Shelf):
    """Answers for the first reads of the whole batch with what was planned."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__(stored_object())
        self.answers = list(answers)

    async def get_range(self, key: str, offset: int, length: int) -> Buffer:
        body = bytes(await super().get_range(key, offset, length))
        if length != len(BODY) or not self.answers:
            return body
        answer = self.answers.pop(0)(body)
        if isinstance(answer, Exception):
            raise answer
        return answer


def fetch_confirmed(direct: Shelf | None, broker: Shelf) -> tuple[Sequence[BlockPiece], ConfirmedReads]:
    async def read(store: str, key: str, offset: int, length: int) -> Buffer:
        return await broker.get_range(key, offset, length)

    async def main() -> tuple[Sequence[BlockPiece], ConfirmedReads]:
        confirmed = ConfirmedReads(EventLog(LoopClock()))
        fetcher = BatchFetcher("auto" if direct else "broker", read, lambda store: direct, confirmed)
        return await fetcher.fetch(POINTER), confirmed

    return run_skipping(main())


LIES = [flipped(100), flipped(12), shortened, gone, cut, of_another_batch]


@pytest.mark.parametrize("through_broker", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_error_of_the_transfer_is_no_damage(lie: Answer, through_broker: bool) -> None:
    shelf = LyingShelf(lie)
    pieces, confirmed = fetch_confirmed(*((None, shelf) if through_broker else (shelf, Shelf(None))))
    assert is_whole(pieces)
    assert confirmed.transit_errors == 1


@pytest.mark.parametrize("lie", LIES)
def test_two_lies_that_differ_are_no_damage_either(lie: Answer) -> None:
    pieces, confirmed = fetch_confirmed(None, LyingShelf(lie, flipped(200)))
    assert is_whole(pieces)
    assert confirmed.transit_errors == 2


def test_two_answers_that_were_cut_on_their_way_are_no_damage() -> None:
    def cut_elsewhere(body: bytes) -> CorruptDataError:
        return CorruptDataError("object 'key' has 30 bytes")

    pieces, confirmed = fetch_confirmed(None, LyingShelf(cut, cut_elsewhere, cut))
    assert is_whole(pieces)
    assert confirmed.transit_errors == 2


def test_fetches_that_all_differ_are_a_store_error() -> None:
    answers = [flipped(60 + 8 * number) for number in range(ROUNDS_MAX)]
    with pytest.raises(StoreError, match="no two fetches agree"):
        fetch_confirmed(None, LyingShelf(*answers))


def test_damage_on_which_two_fetches_agree_is_that_of_the_object() -> None:
    pieces, confirmed = fetch_confirmed(None, LyingShelf(flipped(200), flipped(100), flipped(100)))
    assert not is_whole(pieces)
    assert confirmed.transit_errors == 1, "the answer that was damaged elsewhere"


def test_a_missing_object_is_asked_for_three_times() -> None:
    shelf = Shelf(None)
    with pytest.raises(NotFoundError):
        fetch_confirmed(None, shelf)
    assert shelf.reads == 3


def test_blocks_of_another_batch_that_lie_there_are_damage() -> None:
    stray = of_another_batch(BODY)
    pieces, _ = fetch_confirmed(None, Shelf(stray + stored_object()[len(BODY) :]))
    assert [str(piece.cause).endswith("is not one that the pointer names") for piece in pieces] == [True] * 3
    assert sum(piece.records for piece in pieces) == POINTER.records


def test_an_index_that_was_changed_on_the_way_is_fetched_again() -> None:
    class LyingIndex(Shelf):
        lies = 2

        async def get_range(self, key: str, offset: int, length: int) -> Buffer:
            found = bytearray(await super().get_range(key, offset, length))
            if self.lies:
                self.lies -= 1
                found[self.lies] ^= 1
            return found

    async def main() -> int:
        shelf, confirmed = LyingIndex(stored_object()), ConfirmedReads(EventLog(LoopClock()))
        fetcher = BatchFetcher("direct", no_broker, lambda store: shelf, confirmed)
        return len(await fetcher.index_of(POINTER))

    assert run_skipping(main()) == 3


async def no_broker(store: str, key: str, offset: int, length: int) -> Buffer:
    raise AssertionError("a direct reader asks no broker")


# ---- the table of the module: what follows from which answers -------------------------------------


def scripted(source: str, *answers: bytes | Exception) -> Way[bytes]:
    """Return a way that gives these answers, the last one again and again; one that begins with `ok` is whole."""
    left = list(answers)

    async def read() -> bytes:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Way(source, read)


def outcome(*ways: Way[bytes], missing_s: float = 0.0) -> tuple[object, float, int]:
    """Return what a read returns or raises, its virtual seconds, and how many answers were contradicted."""

    async def main() -> tuple[object, float, int]:
        confirmed = ConfirmedReads(missing_s=missing_s)
        result: bytes | MemqError
        try:
            result = await confirmed.read(ways, lambda value: value.startswith(b"ok"))
        except MemqError as error:
            result = error
        return result, round(LoopClock().monotonic(), 6), confirmed.transit_errors

    return run_skipping(main())


MISSING, DAMAGED = NotFoundError("no object"), CorruptDataError("bad checksum")
SICK, DENIED, NEWER = StoreError("503"), DeniedError("403"), UnsupportedFormatError("version 9")
BUG = InvalidRequestError("an argument is wrong")
ONE, TWO, THREE = 0.05, 0.2, 0.65  # virtual seconds at which the second, third and fourth round begin


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ([[b"ok"]], (b"ok", 0, 0)),
        # Failures alone end the first round; what may pass is named first, then what is denied, then what is missing.
        ([[DENIED], [SICK]], (SICK, 0, 0)),
        ([[BUG], [DENIED]], (DENIED, 0, 0)),
        ([[BUG]], (BUG, 0, 0)),
        ([[SICK], [b"ok"]], (b"ok", 0, 0)),
        # An object is missing when all ways say so three times. A way that failed may have it.
        ([[MISSING]], (MISSING, TWO, 0)),
        ([[MISSING], [SICK]], (SICK, TWO, 0)),
        ([[MISSING], [SICK, SICK, SICK, b"ok"]], (SICK, TWO, 0)),
        ([[MISSING], [SICK, SICK, b"ok"]], (b"ok", TWO, 0)),
        ([[MISSING, MISSING, b"ok"]], (b"ok", TWO, 2)),
        # Damage is settled by two equal answers of one source; sources that are missing are asked three times.
        ([[b"bad"]], (b"bad", ONE, 0)),
        ([[DAMAGED]], (DAMAGED, ONE, 0)),
        ([[NEWER]], (NEWER, ONE, 0)),
        ([[b"bad", b"worse", b"bad"]], (b"bad", TWO, 1)),
        ([[b"bad", DAMAGED, b"bad"]], (b"bad", TWO, 1)),
        ([[DAMAGED, UnsupportedFormatError("bad checksum"), DAMAGED]], (DAMAGED, TWO, 1)),
        ([[MISSING, b"bad"]], (b"bad", TWO, 1)),
        ([[b"bad"], [MISSING]], (b"bad", TWO, 0)),
        ([[MISSING], [DAMAGED]], (DAMAGED, TWO, 0)),
        ([[b"bad"], [SICK]], (b"bad", ONE, 0)),
        # Whole bytes are believed at once, from whichever way they come.
        ([[b"bad", b"ok"]], (b"ok", ONE, 1)),
        ([[b"bad"], [MISSING, b"ok"]], (b"ok", ONE, 1)),
        ([[MISSING, SICK], [b"ok"]], (b"ok", 0, 0)),
    ],
)
def test_result_of_a_read_follows_from_the_answers(
    ways: list[list[bytes | Exception]], expected: tuple[object, float, int]
) -> None:
    """Each way has a source of its own."""
    assert outcome(*(scripted(f"source {at}", *answers) for at, answers in enumerate(ways))) == expected


def hiding(hidden_s: float, then: bytes | MemqError = b"ok") -> Way[bytes]:
    """Return a way to an object that is not there for so long."""

    async def read() -> bytes:
        if LoopClock().monotonic() < hidden_s:
            raise MISSING
        if isinstance(then, MemqError):
            raise then
        return then

    return Way("object 'key'", read)


def test_missing_object_is_retried_for_the_time_of_the_caller() -> None:
    assert outcome(hiding(5.0)) == (MISSING, TWO, 0)
    assert outcome(hiding(5.0), missing_s=30.0) == (b"ok", 6.05, 5)
    assert outcome(hiding(29.0), missing_s=30.0) == (b"ok", 30.0, 11)
    assert outcome(hiding(31.0), missing_s=30.0) == (MISSING, 30.0, 0)
    assert outcome(hiding(6.3), missing_s=6.5) == (b"ok", 6.5, 6), "the last pause is as short as the time that is left"
    assert outcome(hiding(31.0), missing_s=0.1) == (MISSING, TWO, 0)
    assert outcome(hiding(31.0), missing_s=0.3) == (MISSING, 0.3, 0)


def test_retries_of_a_missing_object_end_no_sooner_with_other_answers() -> None:
    assert outcome(hiding(5.0, SICK), missing_s=30.0) == (SICK, 6.05, 0)
    assert outcome(hiding(0.5, b"bad"), missing_s=30.0) == (b"bad", 2.0, 3)
    assert outcome(hiding(5.0, b"bad"), missing_s=30.0)[0].__class__ is StoreError, "it may pass, and is no absence"
    assert outcome(hiding(60.0), scripted("object 'key'", SICK), missing_s=30.0) == (SICK, TWO, 0)


def test_only_the_same_place_contradicts_damage_and_only_the_same_way_an_absence() -> None:
    assert outcome(scripted("a", b"bad"), scripted("a", b"ok")) == (b"ok", 0, 1)
    assert outcome(scripted("a", b"bad"), scripted("b", b"ok")) == (b"ok", 0, 0)
    assert outcome(scripted("a", MISSING), scripted("a", b"ok")) == (b"ok", 0, 0)
    assert outcome(scripted("a", b"bad"), scripted("a", b"bad"), scripted("b", MISSING)) == (b"bad", TWO, 0)


def test_answers_that_never_agree_are_asked_for_six_seconds_and_all_named() -> None:
    error, seconds, _ = outcome(scripted("source", *(CorruptDataError(f"damage {number}") for number in range(9))))
    assert isinstance(error, StoreError)
    assert str(error) == "source was fetched 6 times, and no two fetches agree: " + "; ".join(
        f"damage {number}" for number in range(6)
    )
    assert seconds == pytest.approx(6.05)


def test_contradicted_answer_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> bytes:
        return await ConfirmedReads(EventLog(LoopClock())).read([scripted("object 'key'", DAMAGED, b"ok")])

    assert run_skipping(main()) == b"ok"
    assert log_lines(caplog) == ["bytes-differed: object 'key' had other bytes when it was fetched again: bad checksum"]


def test_only_what_is_missing_is_reported_while_it_is_asked_for_and_once(caplog: pytest.LogCaptureFixture) -> None:
    async def read(way: Way[bytes]) -> bytes:
        confirmed = ConfirmedReads(EventLog(LoopClock()), missing_s=30.0)
        return await confirmed.read([way], lambda value: value.startswith(b"ok"))

    assert run_skipping(read(scripted("object 'key'", b"bad"))) == b"bad"
    assert log_lines(caplog) == []
    with pytest.raises(NotFoundError):
        run_skipping(read(hiding(31.0)))
    assert log_lines(caplog) == ["object-missing: no object; asking again for 30 s"]
