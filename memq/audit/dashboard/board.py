"""The board: the latest value of all that the pages show, with the version at which each changed.

Pure.
A browser that has seen version v is told what changed since; one that comes new, or comes back after what was taken off
the board has been forgotten, is told everything. So an update costs what changed, however much there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Place = tuple[str, str]  # kind, key
GONE_MAX = 10_000


@dataclass(frozen=True, slots=True)
class BoardUpdate:
    """The changes since `version` for a browser.

    `whole`: drop everything shown before. None: removed from the board.
    """

    version: int
    whole: bool
    values: tuple[tuple[Place, object | None], ...]


class Board:
    """Values by kind and key. Versions begin at 1 with the first value."""

    def __init__(self) -> None:
        self.version = 0
        self._values: dict[Place, object] = {}
        self._changed: dict[Place, int] = {}  # in the order of the versions
        self._gone = 0
        self._forgotten = 0  # the highest version of a removal that is not known any more

    def put(self, kind: str, key: str, value: object | None) -> None:
        """Set a value; None takes it off. What is as it was is no change."""
        place = (kind, key)
        if self._values.get(place) == value:
            return
        if value is None:
            del self._values[place]
            self._gone += 1
        else:
            if place not in self._values and place in self._changed:
                self._gone -= 1
            self._values[place] = value
        self.version += 1
        self._changed.pop(place, None)
        self._changed[place] = self.version
        if self._gone > GONE_MAX:
            self._forget()

    def put_all(self, kind: str, values: Mapping[str, object]) -> None:
        """Set all values of a kind; others of that kind are taken off."""
        for old_kind, key in list(self._values):
            if old_kind == kind and key not in values:
                self.put(kind, key, None)
        for key, value in values.items():
            self.put(kind, key, value)

    def get(self, kind: str, key: str) -> object | None:
        """Return a value, None when there is none."""
        return self._values.get((kind, key))

    def since(self, version: int) -> BoardUpdate:
        """Return what changed since a version, in the order of the changes.

        A version that is too old gets everything.
        """
        if not self._forgotten <= version <= self.version or version == 0:
            return BoardUpdate(self.version, True, tuple(self._values.items()))
        found = []
        for place in reversed(self._changed):
            if self._changed[place] <= version:
                break
            found.append((place, self._values.get(place)))
        return BoardUpdate(self.version, False, tuple(reversed(found)))

    def _forget(self) -> None:
        """Forget the older half of what was taken off."""
        gone = [place for place in self._changed if place not in self._values]
        for place in gone[: len(gone) // 2]:
            self._forgotten = self._changed.pop(place)
            self._gone -= 1
