"""Patterns of rules: a name, or a prefix with a final `*`. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from memq.errors import InvalidRequestError

V = TypeVar("V")

NAME_CHARACTERS_MAX = 256
EVERY = "*"


def matches(pattern: str, name: str) -> bool:
    """Whether a name is the pattern, or begins with it up to a final `*`."""
    return name.startswith(pattern[:-1]) if pattern.endswith(EVERY) else name == pattern


def check_pattern(what: str, pattern: str) -> None:
    """Check a name, or a prefix with a final `*`. Raises: InvalidRequestError."""
    inner = pattern.removesuffix(EVERY)
    if not pattern or len(pattern) > NAME_CHARACTERS_MAX or not pattern.isprintable() or EVERY in inner:
        raise InvalidRequestError(
            f"{what} {pattern[:60]!a} of a rule is no name, and no prefix with a final '*'",
            hint=f"give 1 to {NAME_CHARACTERS_MAX} printable characters, and '*' only as the last one",
        )


class PatternMap(Generic[V]):
    """Values by pattern. It finds those of all patterns that match a name, without a scan of the others.

    `make` makes the value of a pattern that has none.
    """

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._values: dict[str, V] = {}
        self._lengths: list[int] = []  # of the prefixes, ascending

    def at(self, pattern: str) -> V:
        """Return the value of a pattern; make it if there is none."""
        found = self._values.get(pattern)
        if found is None:
            found = self._values[pattern] = self._make()
            length = len(pattern) - 1
            if pattern.endswith(EVERY) and length not in self._lengths:
                bisect.insort(self._lengths, length)
        return found

    def get(self, pattern: str) -> V | None:
        """Return the value of a pattern, None if there is none."""
        return self._values.get(pattern)

    def matching(self, name: str) -> Iterator[V]:
        """Return the values of the patterns that match a name."""
        if not name.endswith(EVERY) and (exact := self._values.get(name)) is not None:
            yield exact
        for length in self._lengths:
            if length > len(name):
                return
            if (found := self._values.get(name[:length] + EVERY)) is not None:
                yield found
