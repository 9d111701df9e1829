"""Wrong answers of stores, queues, coordinators, disks and memory, as seen on real ones.

A lie is an error of another kind than its cause, or a wrong answer without an error. If a port's contract excludes a
wrong answer, the port's implementation converts it to an error. The lies here are those that contracts do not exclude.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from memq.broker.partition.recent_batch_cache import RecentBatchCache

STORE_LIES = ("denied", "denied-landed", "not-found", "flipped", "foreign", "short", "list-omits", "list-repeats")
QUEUE_LIES = ("denied", "denied-landed", "not-found", "refused-landed", "short-read", "short-log")
COORDINATOR_LIES = ("denied", "denied-landed", "stale", "no-watch", "expired")
MEMORY_LIES = ("flipped", "foreign", "short")  # of a broker's cache of published batches
WRONG_BYTES = frozenset({"flipped", "foreign", "short"})


@dataclass(frozen=True, slots=True)
class WrongAnswerRates:
    """The lies of a service: for a share of its calls, and for all calls of an episode. Times in seconds."""

    kinds: tuple[str, ...] = ()
    rate: float = 0.0
    every_s: float = 0.0  # mean time between episodes; 0: none
    lasts_s_max: float = 0.0


@dataclass(slots=True)
class Episode:
    """One wrong answer that a service gives until `until_s` (virtual): to the process `node`, "" for all."""

    kind: str
    node: str
    until_s: float


@dataclass(slots=True)
class WrongAnswers:
    """Decides which answers of one service are wrong."""

    draw: random.Random
    lies: WrongAnswerRates = field(default_factory=WrongAnswerRates)
    episode: Episode | None = None

    def lie(self, node: str, now_s: float, possible: tuple[str, ...]) -> str:
        """Return one of the `possible` lies for a call of `node`; "" for a true answer."""
        if not self.lies.kinds:
            return ""
        kind = self._of_episode(node, now_s)
        if kind not in possible:
            kind = ""
            if self.draw.random() < self.lies.rate:
                kinds = [each for each in self.lies.kinds if each in possible]
                kind = self.draw.choice(kinds) if kinds else ""
        return kind

    def _of_episode(self, node: str, now_s: float) -> str:
        episode = self.episode
        if episode is None or now_s >= episode.until_s or episode.node not in ("", node):
            return ""
        return episode.kind

    def begin_episode(self, now_s: float, nodes: list[str]) -> None:
        """Begin an episode for one process or all, if none lasts. Not of wrong bytes: that would be damage."""
        kinds = [kind for kind in self.lies.kinds if kind not in WRONG_BYTES]
        if kinds and (self.episode is None or now_s >= self.episode.until_s):
            node = self.draw.choice(["", *nodes])
            lasts_s = self.lies.lasts_s_max * self.draw.uniform(0.1, 1.0)
            self.episode = Episode(self.draw.choice(kinds), node, now_s + lasts_s)

    def end(self) -> None:
        """End all lies."""
        self.lies, self.episode = WrongAnswerRates(), None


def lie_from_memory(cache: RecentBatchCache, wrong: WrongAnswers, node: str, now_s: Callable[[], float]) -> None:
    """Let some reads of `cache` return a changed bit, too few bytes, or the bytes of the read before."""
    true_read, last = cache.read, b""

    def read(key: str, offset: int, length: int) -> bytes | None:
        nonlocal last
        data = true_read(key, offset, length)
        lie = wrong.lie(node, now_s(), MEMORY_LIES) if data else ""
        if not data or not lie:
            return data
        before, last = last, data
        if lie == "foreign":
            return before or None
        if lie == "short":
            return data[: wrong.draw.randrange(len(data))]
        changed = bytearray(data)
        changed[wrong.draw.randrange(len(data))] ^= 1 << wrong.draw.randrange(8)
        return bytes(changed)

    cache.read = read  # type: ignore[method-assign]  # no port: the broker's memory can't be replaced otherwise
