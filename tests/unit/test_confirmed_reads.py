"""What a store answers wrongly, once or twice, is no damage: a fetcher's reads against a store that lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from memq.client.fetcher import Fetcher
from memq.client.pieces import Piece, is_whole
from memq.errors import CorruptDataError, NotFoundError, StoreError
from memq.format.block import Buffer
from memq.logs import EventLog
from memq.storage_handlers.confirmed_reads import ROUNDS_MAX, ConfirmedReads
from tests.skipping_loop import LoopClock, run_skipping
from tests.unit.queue_model import Block
from tests.unit.test_consumer_pieces import BODY, POINTER, Shelf, batch, stored_object

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


def fetch_confirmed(direct: Shelf | None, broker: Shelf) -> tuple[Sequence[Piece], ConfirmedReads]:
    async def read(store: str, key: str, offset: int, length: int) -> Buffer:
        return await broker.get_range(key, offset, length)

    async def main() -> tuple[Sequence[Piece], ConfirmedReads]:
        confirmed = ConfirmedReads(EventLog(LoopClock()))
        fetcher = Fetcher("auto" if direct else "broker", read, lambda store: direct, confirmed)
        return await fetcher.fetch(POINTER), confirmed

    return run_skipping(main())


LIES = [flipped(100), flipped(12), shortened, gone, cut, of_another_batch]


@pytest.mark.parametrize("through_broker", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_what_goes_wrong_on_the_way_is_no_damage(lie: Answer, through_broker: bool) -> None:
    shelf = LyingShelf(lie)
    pieces, confirmed = fetch_confirmed(*((None, shelf) if through_broker else (shelf, Shelf(None))))
    assert is_whole(pieces)
    assert confirmed.transit_errors == 1


@pytest.mark.parametrize("lie", LIES)
def test_two_lies_that_differ_are_no_damage_either(lie: Answer) -> None:
    pieces, confirmed = fetch_confirmed(None, LyingShelf(lie, flipped(200)))
    assert is_whole(pieces)
    assert confirmed.transit_errors == 2


def test_what_comes_otherwise_each_time_is_not_known() -> None:
    answers = [flipped(60 + 8 * number) for number in range(ROUNDS_MAX)]
    with pytest.raises(StoreError, match="without two that agree"):
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
        fetcher = Fetcher("direct", no_broker, lambda store: shelf, confirmed)
        return len(await fetcher.index_of(POINTER))

    assert run_skipping(main()) == 3


async def no_broker(store: str, key: str, offset: int, length: int) -> Buffer:
    raise AssertionError("a direct reader asks no broker")
