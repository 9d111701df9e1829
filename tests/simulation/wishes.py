"""Tags and headers of the simulation's records, and the filters that its readers have. Pure.

The value of a record says which tag and headers it was sent with. So the checker believes neither blocks nor tag bits,
and a wish is a function in Python: it shares nothing with the product's filters.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memq.format.blocks.header import tag_bit
from tests.simulation.reader import Delivered

_MARK = re.compile(rb"(?:\S+ ){3}@([!-~]*) ")  # after the producer's name, the partition and the number
_TWIN = next(f"paid{number}" for number in range(10_000) if tag_bit(f"paid{number}") == tag_bit("paid"))
TAGS = (None, "paid", "late", "open", _TWIN)  # the last one has the bit of another one
AMOUNTS = (b"7", b"50", b"51", b"900", b"many", b"-3.5", None)
REGIONS = (b"EU", b"US")
ALIKE_RATE = 0.6  # of the blocks whose records have the same tag and headers
BARE_RATE = 0.3  # of the others, whose records have no headers


class Facets(NamedTuple):
    """The tag and the headers of a record."""

    tag: str | None
    headers: tuple[tuple[str, bytes | None], ...]

    def header(self, name: str) -> bytes | None:
        """Return the last header of a name; None if there is none, or it is null."""
        return dict(self.headers).get(name)

    @property
    def amount(self) -> float | None:
        """The number in the header `amount`; None if it is no number."""
        text = self.header("amount")
        return None if text in (None, b"many") else float(text)


def facets_of(value: bytes) -> Facets:
    """Return the tag and headers that the value of a record says it was sent with."""
    found = _MARK.match(value)
    if found is None:
        return Facets(None, ())
    tag, *headers = found[1].split(b";")
    pairs = [header.partition(b"=") for header in headers]
    return Facets(tag.decode() or None, tuple((name.decode(), text if sign else None) for name, sign, text in pairs))


def draw_marks(draw: random.Random, count: int) -> list[bytes]:
    """Return for each record of a block the word of its value that says its tag and headers."""
    bare = draw.random() < BARE_RATE
    if draw.random() < ALIKE_RATE:
        return [_mark(draw, bare=bare)] * count
    return [_mark(draw, bare=bare) for _ in range(count)]


def _mark(draw: random.Random, *, bare: bool) -> bytes:
    words = [(draw.choice(TAGS) or "").encode()]
    for name, values in ((b"amount", AMOUNTS), (b"amount", AMOUNTS), (b"region", REGIONS)):
        if not bare and draw.random() < 0.5:
            value = draw.choice(values)
            words.append(name if value is None else name + b"=" + value)
    return b"@" + b";".join(words) + b" "


@dataclass(frozen=True, slots=True)
class Wish:
    """A filter: the options of the consumer, and the truth about which records it wants."""

    wants: Callable[[Facets], bool]
    tags: str | Sequence[str] | None = None
    where: str | None = None

    def wants_value(self, value: bytes) -> bool:
        """Whether the record of a value is wanted."""
        return self.wants(facets_of(value))


def _is_over_50(facets: Facets) -> bool | None:
    return None if facets.amount is None else facets.amount > 50


WISHES = (
    Wish(lambda facets: facets.tag == "paid", tags="paid"),
    Wish(lambda facets: facets.tag in ("late", "paid"), tags="late || paid"),
    Wish(lambda facets: facets.tag == "open", tags=["open", "never sent"]),
    Wish(lambda facets: False, tags="never sent"),
    Wish(lambda facets: _is_over_50(facets) is True, where="amount > 50"),
    Wish(lambda facets: _is_over_50(facets) is False, where="NOT amount > 50"),
    Wish(lambda facets: facets.header("amount") is None, where="amount IS NULL"),
    Wish(lambda facets: facets.header("region") == b"EU" or facets.amount == 7, where="region = 'EU' OR amount IN (7)"),
    Wish(lambda facets: facets.tag == "paid" and _is_over_50(facets) is True, tags="paid", where="amount > 50"),
)


@dataclass(slots=True)
class WantedPlaces:
    """The places of a growing stream that have wanted records."""

    wish: Wish
    _places: list[int] = field(default_factory=list)
    _seen: int = 0  # records of the stream that were judged

    def next(self, stream: Sequence[Delivered], at: int) -> int:
        """Return the place of the first wanted record from `at` on; the end of the stream if there is none."""
        for place in range(self._seen, len(stream)):
            if self.wish.wants_value(stream[place].value):
                self._places.append(place)
        self._seen = len(stream)
        index = bisect_left(self._places, at)
        return self._places[index] if index < len(self._places) else max(at, len(stream))

    def cut(self, end: int) -> None:
        """Forget the places from `end` on."""
        del self._places[bisect_left(self._places, end) :]
        self._seen = min(self._seen, end)
