"""What a reader is told when retention was faster: where it can go on, and what it will not see. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from memq.errors import PositionExpiredError
from memq.topic import Position, ReadPartition, Totals


@dataclass(frozen=True, slots=True)
class Gap:
    """What retention took: all before offset `first`, before which `before` lay in all; None when nothing says that."""

    first: int
    before: Totals | None = None


def expired_error(partition: ReadPartition, position: Position, first: int, records: int = 0) -> PositionExpiredError:
    """Return what says that a position lies before offset `first`, the first one that is left.

    `records` are those that are gone, at most 0 when nothing says how many.
    """
    valid = Position(partition.partition, first)
    lost = f": {records} records are gone" if records > 0 else ""
    error = PositionExpiredError(
        f"position {position} of topic '{partition.topic}' is before {valid}, the first one that retention left{lost}",
        hint=f"go on at {valid}, at 'beginning', or read with on_expired='skip'",
    )
    error.first = str(valid)
    return error
