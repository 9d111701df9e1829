"""The ready items of one queue, by key. Pure.

This is start-time fair queueing (Goyal et al. 1996), with the work in flight as the cost of an item. Each key has a
heap of spans, ordered by priority, due time and arrival. Items without a key have the key "". Each key has a *turn*, a
number. The next item is one of the key whose first span has the lowest priority number; of several, of the key with the
lowest turn. Then the turn of that key grows by one and the number of its items in flight. So a key with a long backlog,
or with many slow items, waits for the others. A new key begins at the turn that is served now.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from memq.queues.range_map import Range

SPARE = 64  # stale ranks or spans beyond as many as are live


class ReadySpan(NamedTuple):
    """Items `begin` to `end` (exclusive) of one block, with the values that order them."""

    priority: int
    due_ms: int
    arrival: int
    begin: int
    end: int
    block: int


FirstFree = Callable[[ReadySpan], Range | None]  # the first items in a row of a span that may be granted


class _Rank(NamedTuple):
    priority: int
    turn: int
    span: ReadySpan
    key: str


class _Key:
    __slots__ = ("spans", "turn")

    def __init__(self, turn: int) -> None:
        self.spans: list[ReadySpan] = []
        self.turn = turn

    def rank(self, key: str) -> _Rank:
        return _Rank(self.spans[0].priority, self.turn, self.spans[0], key)


class ReadyItems:
    """Orders the ready items of one queue. A span may be stale: items are checked when they are taken.

    `is_live` returns whether the block of a span exists. `served` is the turn of the queue among the queues of a shard.
    """

    __slots__ = ("_first", "_is_live", "_keys", "_pushed", "_pushed_max", "_ranks", "_turn", "served")

    def __init__(self, is_live: Callable[[ReadySpan], bool], served: int = 0) -> None:
        self.served = served
        self._is_live = is_live
        self._keys: dict[str, _Key] = {}
        self._ranks: list[_Rank] = []  # a heap; each key has its present rank in it, and some are stale
        self._pushed, self._pushed_max = 0, SPARE  # spans since the last trim
        self._turn = 0  # of the key that was served last
        self._first: Range | None = None  # free items of the span that `first` has returned

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def entries(self) -> int:
        """Number of spans and ranks in memory, also stale ones."""
        return len(self._ranks) + sum(len(known.spans) for known in self._keys.values())

    def copy(self) -> ReadyItems:
        """Return a copy, from which items can be taken without a change here."""
        made = ReadyItems(self._is_live, self.served)
        for key, known in self._keys.items():
            copied = made._keys[key] = _Key(known.turn)
            copied.spans = known.spans.copy()
        made._ranks, made._turn = self._ranks.copy(), self._turn
        return made

    def push(self, key: str, span: ReadySpan, in_flight: int) -> None:
        """Add items of a key, which has `in_flight` other items in flight."""
        known = self._keys.get(key)
        if known is None:
            known = self._keys[key] = _Key(self._turn + in_flight)
        heapq.heappush(known.spans, span)
        if known.spans[0] is span:
            self._note_rank(key, known)
        self._pushed += 1
        if self._pushed > self._pushed_max:
            self.trim()

    def trim(self) -> None:
        """Drop the spans of ended blocks: without a dequeue of this queue, nothing else removes them."""
        for key, known in list(self._keys.items()):
            known.spans = list({each for each in known.spans if self._is_live(each)})
            heapq.heapify(known.spans)
            if not known.spans:
                del self._keys[key]
        self._rank_all()
        self._pushed, self._pushed_max = 0, SPARE + sum(len(each.spans) for each in self._keys.values())

    def take_later(self, now_ms: int) -> list[ReadySpan]:
        """Remove and return the spans that are due after `now_ms`, to which the clock was set back."""
        found: list[ReadySpan] = []
        for key, known in list(self._keys.items()):
            found += [each for each in known.spans if each.due_ms > now_ms]
            known.spans = [each for each in known.spans if each.due_ms <= now_ms]
            heapq.heapify(known.spans)
            if not known.spans:
                del self._keys[key]
        self._rank_all()
        return found

    def first(self, first_free: FirstFree) -> ReadySpan | None:
        """Return the first span that begins with a free item. Spans without one are dropped."""
        while self._ranks:
            rank = self._ranks[0]
            known = self._keys.get(rank.key)
            if known is None or known.turn != rank.turn or known.spans[0] != rank.span:
                heapq.heappop(self._ranks)
            elif (found := _clean(known, first_free)) is None:
                heapq.heappop(self._ranks)
                del self._keys[rank.key]
            elif known.spans[0] == rank.span:
                self._first = found
                return rank.span
            else:
                heapq.heapreplace(self._ranks, known.rank(rank.key))
        return None

    def take(self, count: int, in_flight: Callable[[str], int], first_free: FirstFree) -> list[Range]:
        """Take free items of the span that `first` has just returned.

        They are at most `count`, and one if there are other keys.
        """
        rank = heapq.heappop(self._ranks)
        span, known = rank.span, self._keys[rank.key]
        heapq.heappop(known.spans)
        left = count if len(self._keys) == 1 else 1
        taken: list[Range] = []
        found = self._first
        while found is not None and left:
            begin, end = found[0], min(found[1], found[0] + left)
            taken.append((begin, end))
            left -= end - begin
            found = first_free(span._replace(begin=end)) if end < span.end else None
        if found is not None:
            heapq.heappush(known.spans, span._replace(begin=found[0]))
        self._turn = max(self._turn, known.turn)
        known.turn = self._turn + 1 + in_flight(rank.key)
        if known.spans:
            self._note_rank(rank.key, known)
        else:
            del self._keys[rank.key]
        return taken

    def _note_rank(self, key: str, known: _Key) -> None:
        heapq.heappush(self._ranks, known.rank(key))
        if len(self._ranks) > 2 * len(self._keys) + SPARE:
            self._rank_all()

    def _rank_all(self) -> None:
        self._ranks = [known.rank(key) for key, known in self._keys.items()]
        heapq.heapify(self._ranks)


def _clean(known: _Key, first_free: FirstFree) -> Range | None:
    """Let the spans of a key begin with a free item; return the first free ones."""
    spans = known.spans
    while spans:
        span = spans[0]
        found = first_free(span)
        if found is not None and found[0] == span.begin:
            return found
        heapq.heappop(spans)
        if found is not None:
            heapq.heappush(spans, span._replace(begin=found[0]))
    return None
