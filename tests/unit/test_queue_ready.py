"""Ready items of a queue under random pushes, takes and ends of blocks: none is lost, and their order holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from memq.queues import ready
from memq.queues.range_map import Range
from memq.queues.ready import ReadyItems, ReadySpan


class Reference:
    """Ready items next to a plain list of those that are free."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.free: dict[tuple[int, int], tuple[str, ReadySpan]] = {}
        self.taken: list[str] = []
        self.ready = ReadyItems(lambda span: any(block == span.block for block, _ in self.free))
        self.blocks = 0

    def push(self) -> None:
        self.blocks += 1
        count, key = self.draw.randrange(1, 4), self.draw.choice("abc")
        span = ReadySpan(self.draw.randrange(2), self.draw.randrange(9), self.blocks, 0, count, self.blocks)
        for number in range(count):
            self.free[self.blocks, number] = key, span
        for _ in range(self.draw.choice([1, 1, 2])):  # the same items may come again
            self.ready.push(key, span, 0)

    def end(self) -> None:
        """Let some item, or all of a block, be no longer free."""
        if self.free:
            item = self.draw.choice(list(self.free))
            whole = self.draw.random() < 0.7
            self.free = {
                each: found for each, found in self.free.items() if each[0] != item[0] or (not whole and each != item)
            }

    def take(self, count: int = 2) -> None:
        span = self.ready.first(self.first_free)
        if span is None:
            assert not self.free, f"{self.free} wait, and are not offered"
            return
        key, _ = self.free[span.block, span.begin]
        assert span.priority == min(each.priority for _, each in self.free.values())
        order = min((each.priority, each.due_ms, block, number) for (block, number), (_, each) in self.of(key))
        assert order == (span.priority, span.due_ms, span.block, span.begin), "the order within a key"
        for begin, end in self.ready.take(count, lambda _: 0, self.first_free):
            for number in range(begin, end):
                del self.free[span.block, number]
                self.taken.append(key)

    def of(self, key: str) -> list[tuple[tuple[int, int], tuple[str, ReadySpan]]]:
        return [(item, found) for item, found in self.free.items() if found[0] == key]

    def first_free(self, span: ReadySpan) -> Range | None:
        return first_of(span, lambda *item: item in self.free)


def first_of(span: ReadySpan, is_free: Callable[[int, int], bool]) -> Range | None:
    """Return the first items in a row that are free."""
    first = next((number for number in range(span.begin, span.end) if is_free(span.block, number)), None)
    if first is None:
        return None
    return first, next((number for number in range(first, span.end) if not is_free(span.block, number)), span.end)


def all_free(span: ReadySpan) -> Range:
    return span.begin, span.end


@pytest.mark.parametrize("spare", [0, 3, 64])
def test_no_ready_item_is_lost_and_their_order_holds(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    monkeypatch.setattr(ready, "SPARE", spare)
    taken = 0
    for seed in range(100):
        run = Reference(seed)
        for _ in range(60):
            run.draw.choices([run.push, run.end, run.take], [3, 1, 2])[0]()
            copied = run.ready.copy()
            assert copied.first(run.first_free) == run.ready.first(run.first_free)
        while run.free:
            run.take()
        run.take()
        assert not run.ready
        taken += len(run.taken)
    assert taken > 3_000


def test_spans_of_blocks_that_are_gone_are_dropped_although_nobody_takes_items() -> None:
    live = {1}
    items = ReadyItems(lambda span: span.block in live)
    for block in range(1, 20_000):
        items.push(f"key {block}", ReadySpan(5, block, block, 0, 1, block), 0)
        assert items.entries < 1_000
    assert items.first(lambda span: (0, 1) if span.block in live else None) == ReadySpan(5, 1, 1, 0, 1, 1)


def test_a_key_with_items_in_flight_begins_behind_others() -> None:
    items = ReadyItems(lambda _: True)
    items.push("slow", ReadySpan(5, 0, 1, 0, 1, 1), 7)
    for block in range(2, 12):
        items.push(f"key {block}", ReadySpan(5, 1, block, 0, 1, block), 0)
    order: list[int] = []
    while (span := items.first(lambda span: (0, 1) if span.block not in order else None)) is not None:
        items.take(1, lambda _: 0, all_free)
        order.append(span.block)
    assert order == [*range(2, 12), 1]


def test_a_queue_with_one_key_gives_many_items_of_a_block_at_once() -> None:
    items = ReadyItems(lambda _: True)
    items.push("", ReadySpan(5, 0, 1, 0, 9, 1), 0)
    free = partial(first_of, is_free=lambda _, number: number != 2)
    assert items.first(free) is not None
    assert items.take(5, lambda _: 0, free) == [(0, 2), (3, 6)]
    items.push("other", ReadySpan(5, 0, 2, 0, 9, 2), 0)
    assert items.first(all_free) == ReadySpan(5, 0, 2, 0, 9, 2)
    assert items.take(5, lambda _: 0, all_free) == [(0, 1)]
    assert items.first(all_free) == ReadySpan(5, 0, 1, 6, 9, 1)


def test_ranks_of_keys_that_are_not_served_do_not_pile_up() -> None:
    items = ReadyItems(lambda _: True)
    items.push("first", ReadySpan(0, 0, 1, 0, 1, 1), 0)
    for block in range(2, 5_000):  # each one is the first span of its key
        items.push("later", ReadySpan(5, 10_000 - block, block, 0, 1, block), 0)
    assert 5_000 <= items.entries < 5_200
    assert items.first(all_free) == ReadySpan(0, 0, 1, 0, 1, 1)
