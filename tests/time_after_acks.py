"""Moments between batches."""

from __future__ import annotations

from datetime import UTC, datetime

from memq.runtime.clock import SystemClock


def time_after_acks() -> datetime:
    """Return a time that no batch was sealed at, behind all that were acked before."""
    clock = SystemClock()
    start_ms = clock.wall_ms()
    while clock.wall_ms() <= start_ms + 2:
        pass
    return datetime.fromtimestamp((start_ms + 1.5) / 1000, UTC)
