"""The records that both sides send: compressible lines of JSON of one length, the same every time."""

from __future__ import annotations

import random
from functools import lru_cache

DISTINCT = 20_000


def lines(size: int, count: int) -> list[bytes]:
    """Return `count` values of `size` bytes; after 20,000 they repeat."""
    distinct = _distinct(size)[:count]
    return (distinct * (count // len(distinct) + 1))[:count]


@lru_cache
def _distinct(size: int) -> list[bytes]:
    dice = random.Random(size)
    return [_line(dice, number, size) for number in range(DISTINCT)]


def _line(dice: random.Random, number: int, size: int) -> bytes:
    """Fields of a flight record: words from short lists and numbers, again and again until the line is full."""
    text = f'{{"flight":{number}'
    while len(text) < size:
        carrier = dice.choice(("AA", "B6", "DL", "EV", "MQ", "UA", "US", "WN"))
        delay, time, tail = dice.randrange(-20, 300), dice.randrange(2400), dice.randrange(1000)
        text += f',"carrier":"{carrier}","dep_delay":{delay},"time":{time},"tailnum":"N{tail}{carrier}"'
    return (text[: size - 1] + "}").encode()


def keys(count: int) -> list[bytes]:
    """Return `count` keys of 8 bytes: users that come back."""
    distinct = _distinct_keys()[:count]
    return (distinct * (count // len(distinct) + 1))[:count]


@lru_cache
def _distinct_keys() -> list[bytes]:
    dice = random.Random(8)
    return [f"user{dice.randrange(10_000):04}".encode() for _ in range(DISTINCT)]
