"""The memory of a broker, which gives wrong bytes of published batches, as one with a faulty bit does."""

from __future__ import annotations

from collections.abc import Callable

from memq.broker.partition.recent_batch_cache import RecentBatchCache
from memq.simulation.ports.wrong_answers import MEMORY_LIES, WrongAnswers


def lie_from_memory(hot: RecentBatchCache, wrong: WrongAnswers, node: str, now_s: Callable[[], float]) -> None:
    """Let some reads of `hot` return flipped bits, too few bytes, or the bytes of the read before."""
    true_read, last = hot.read, b""

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

    hot.read = read  # type: ignore[method-assign]  # what only this simulation does
