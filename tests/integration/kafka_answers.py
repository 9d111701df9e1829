"""Kafka's answers as bytes, and wrong ones: each function gets a request and its true answer.

An answer begins with the request's id; versions are those that `pinned` lets a client choose: the newest ones of each
kind without compact fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

PINNED = {0: 8, 1: 11, 2: 5, 3: 8}  # PRODUCE, FETCH, LIST_OFFSETS, METADATA: their newest version in which to lie
# Of all other kinds: the newest version without compact fields, and the layout of its answer. A number is so many
# bytes, `s` a text behind its length, `b` bytes behind theirs, `E` an error code, `[...]` an array.
LAYOUTS = {
    8: (7, "4[s[4E]]"),  # OFFSET_COMMIT
    9: (5, "4[s[484sE]]E"),  # OFFSET_FETCH
    10: (2, "4E"),  # FIND_COORDINATOR
    15: (4, "4[Essss[ssssbb]4]"),  # DESCRIBE_GROUPS
    16: (2, "4E"),  # LIST_GROUPS
    19: (4, "4[sEs]"),  # CREATE_TOPICS
    20: (1, "4[sE]"),  # DELETE_TOPICS
    21: (1, "4[s[48E]]"),  # DELETE_RECORDS
    22: (1, "4E"),  # INIT_PRODUCER_ID
    32: (1, "4[Es1s[ss111[ss1]]]"),  # DESCRIBE_CONFIGS
    37: (1, "4[sEs]"),  # CREATE_PARTITIONS
    42: (1, "4[sE]"),  # DELETE_GROUPS
    44: (0, "4[Es1s]"),  # INCREMENTAL_ALTER_CONFIGS
}
OFFSET_COMMIT = 8
PINNED |= {key: version for key, (version, _) in LAYOUTS.items()}
Lie = Callable[[bytes, bytes], bytes]
RECORDS_HEAD = 12  # of a batch of records: its first offset, and its length


class Reader:
    """Where one is in an answer; its numbers can be replaced in place."""

    def __init__(self, body: bytes, at: int) -> None:
        self.body = bytearray(body)
        self.at = at

    def number(self, size_bytes: int) -> int:
        """Pass over a number, and return it."""
        self.at += size_bytes
        return int.from_bytes(self.body[self.at - size_bytes : self.at], signed=True)

    def skip(self, *, size_bytes: int) -> None:
        """Pass over a text or bytes behind their length, which is -1 for none."""
        length = self.number(size_bytes)
        self.at += max(0, length)

    def items(self, count: int | None = None) -> Iterator[int]:
        """Yield once for each item of an array, which the caller passes over."""
        yield from range(self.number(4) if count is None else count)

    def put(self, at: int, size_bytes: int, value: int) -> None:
        """Replace a number."""
        self.body[at : at + size_bytes] = value.to_bytes(size_bytes, signed=True)

    def cut(self, begin: int, length_at: int, size_bytes: int = 4) -> None:
        """Take out what lies between `begin` and here, which the number at `length_at` counts as one less."""
        del self.body[begin : self.at]
        self.at = begin
        self.put(length_at, size_bytes, int.from_bytes(self.body[length_at : length_at + size_bytes]) - 1)


def pinned(answer: bytes, version: int) -> bytes:
    """Return an answer to API_VERSIONS in which kinds that can be lied about have no newer version than `PINNED`."""
    found, compact = Reader(answer, 6), version >= 3
    count = found.number(1) - 1 if compact else found.number(4)
    for _ in found.items(count):
        key, newest = found.number(2), found.at + 2
        if key in PINNED:
            found.put(newest, 2, PINNED[key])
        found.at += 5 if compact else 4
    return bytes(found.body)


@dataclass(frozen=True)
class Offsets:
    """Lie about LIST_OFFSETS: an error, an offset in place of each, or one that is higher by `more`."""

    error: int = 0
    value: int | None = None
    more: int = 0

    def __call__(self, _: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        found = Reader(answer, 8)
        for _topic in found.items():
            found.skip(size_bytes=2)
            for _partition in found.items():
                found.at += 4
                if self.error:
                    found.put(found.at, 2, self.error)
                found.at += 10
                true = found.number(8)
                if not self.error:
                    found.put(found.at - 8, 8, true + self.more if self.value is None else self.value)
                found.at += 4
        return bytes(found.body)


@dataclass(frozen=True)
class Fetched:
    """Lie about FETCH: an error, a high watermark that is `older` by some records, or `empty`, without records.

    With `flipped` the last bit of each value is another one; a record has no headers, and a batch of its own.
    """

    error: int = 0
    older: int = 0
    empty: bool = False
    flipped: bool = False

    def __call__(self, _: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        found = Reader(answer, 14)
        for _topic in found.items():
            found.skip(size_bytes=2)
            for _partition in found.items():
                self._change(found)
        return bytes(found.body)

    def _change(self, found: Reader) -> None:
        found.at += 4
        if self.error:
            found.put(found.at, 2, self.error)
        found.at += 2
        shown = max(0, found.number(8) - self.older)
        for place in (found.at - 8, found.at):  # the high watermark, and the last stable offset
            found.put(place, 8, shown)
        found.at += 16
        for _aborted in found.items():
            found.at += 16
        found.at += 4
        length_at = found.at
        end = length_at + 4 + max(0, found.number(4))
        while found.at < end and not (self.error or self.empty):
            first, length = found.number(8), found.number(4)
            if first >= shown:
                found.at -= RECORDS_HEAD
                break
            found.at += length
            if self.flipped:
                found.body[found.at - 2] ^= 1
        if found.at < end:
            del found.body[found.at : end]
            found.put(length_at, 4, found.at - length_at - 4)


@dataclass(frozen=True)
class Produced:
    """Lie about PRODUCE: another error than the true one, which may be 0 for none, and the offset -1.

    Or an offset that is so many `more` than the true one.
    """

    error: int = 0
    more: int = 0

    def __call__(self, _: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        found = Reader(answer, 4)
        for _topic in found.items():
            found.skip(size_bytes=2)
            for _partition in found.items():
                found.put(found.at + 4, 2, self.error)
                true = int.from_bytes(found.body[found.at + 6 : found.at + 14], signed=True)
                found.put(found.at + 6, 8, true + self.more if self.more else -1)
                found.at += 30
                for _record in found.items():
                    found.at += 4
                    found.skip(size_bytes=2)
                found.skip(size_bytes=2)
        return bytes(found.body)


@dataclass(frozen=True)
class Described:
    """Lie about METADATA: an error of each topic, its `absence`, one partition `fewer`, or another `leader` of each."""

    error: int = 0
    absence: bool = False
    fewer: bool = False
    leader: int | None = None

    def __call__(self, _: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        found = Reader(answer, 8)
        for _broker in found.items():
            found.at += 4
            found.skip(size_bytes=2)
            found.at += 4
            found.skip(size_bytes=2)
        found.skip(size_bytes=2)
        found.at += 4
        topics_at = found.at
        for _topic in found.items():
            begin = found.at
            if self.error:
                found.put(begin, 2, self.error)
            found.at += 2
            found.skip(size_bytes=2)
            found.at += 1
            self._partitions(found)
            found.at += 4
            if self.absence:
                found.cut(begin, topics_at)
        return bytes(found.body)

    def _partitions(self, found: Reader) -> None:
        count_at = found.at
        begin = found.at + 4
        for _partition in found.items():
            begin = found.at
            if self.leader is not None:
                found.put(begin + 6, 4, self.leader)
            found.at += 14
            for _replicas in range(3):
                nodes = found.number(4)
                found.at += 4 * nodes
        if self.error:
            found.body[count_at : found.at] = bytes(4)
            found.at = count_at + 4
        elif self.fewer and found.at > begin:
            found.cut(begin, count_at)


@dataclass(frozen=True)
class Refused:
    """Lie about a kind of `LAYOUTS`: an error in place of each one, whatever Kafka has done."""

    error: int

    def __call__(self, request: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        found = Reader(answer, 4)
        self._refuse(found, LAYOUTS[int.from_bytes(request[:2])][1])
        return bytes(found.body)

    def _refuse(self, found: Reader, layout: str) -> None:
        """Pass over what a layout describes, and put the error into it."""
        at = 0
        while at < len(layout):
            part = layout[at]
            at += 1
            if part == "[":
                end = _end_of_array(layout, at)
                for _ in found.items():
                    self._refuse(found, layout[at:end])
                at = end + 1
            elif part == "E":
                found.put(found.at, 2, self.error)
                found.at += 2
            elif part in "sb":
                found.skip(size_bytes=2 if part == "s" else 4)
            else:
                found.at += int(part)


def _end_of_array(layout: str, at: int) -> int:
    """Return where the array ends whose first item begins at `at`."""
    depth = 1
    while depth:
        depth += {"[": 1, "]": -1}.get(layout[at], 0)
        at += 1
    return at - 1


@dataclass(frozen=True)
class FewerPartitions:
    """Lie about OFFSET_COMMIT or OFFSET_FETCH: the answer lacks the last partition of each topic, or all `topics`."""

    topics: bool = False

    def __call__(self, request: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        is_commit = int.from_bytes(request[:2]) == OFFSET_COMMIT
        found = Reader(answer, 8)
        topics_at = found.at
        for _topic in found.items():
            topic_begin = found.at
            found.skip(size_bytes=2)
            count_at = begin = found.at
            for _partition in found.items():
                begin = found.at
                found.at += 4 if is_commit else 16
                if not is_commit:
                    found.skip(size_bytes=2)
                found.at += 2
            if self.topics:
                found.cut(topic_begin, topics_at)
            elif begin > count_at:
                found.cut(begin, count_at)
        return bytes(found.body)


@dataclass(frozen=True)
class NoPositions:
    """Lie about OFFSET_FETCH: the group has stored no position."""

    def __call__(self, _: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        found = Reader(answer, 8)
        for _topic in found.items():
            found.skip(size_bytes=2)
            for _partition in found.items():
                found.put(found.at + 4, 8, -1)
                found.at += 16
                found.skip(size_bytes=2)
                found.at += 2
        return bytes(found.body)


class Older:
    """Answers each question as it was answered first."""

    def __init__(self) -> None:
        self._first: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return "Older()"  # the name of a test must be the same in all processes

    def __call__(self, request: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        return answer[:4] + self._first.setdefault(request[8:], answer[4:])


@dataclass(frozen=True)
class Fenced:
    """Lie about METADATA: no broker and no controller. So answers a Kafka that was paused, for a moment."""

    def __call__(self, _: bytes, answer: bytes) -> bytes:
        """See `Lie`."""
        found = Reader(answer, 8)
        brokers_at = found.at
        for _broker in found.items():
            begin = found.at
            found.at += 4
            found.skip(size_bytes=2)
            found.at += 4
            found.skip(size_bytes=2)
            found.cut(begin, brokers_at)
        found.skip(size_bytes=2)
        found.put(found.at, 4, -1)
        return bytes(found.body)
