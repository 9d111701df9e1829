"""What a reader is told when retention was faster: where it can go on, and what it will not see. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from memq.errors import PositionExpiredError
from memq.topic import Position, ReadPartition, Totals


@dataclass(frozen=True, slots=True)
class Gap:
    """What retention took: all before offset `first`, before which `before` lay in all, as far as that is known."""

    first: int
    before: Totals = field(default_factory=Totals)


def expired_error(partition: ReadPartition, position: Position, first: int, records: int = 0) -> PositionExpiredError:
    """Return what says that a position lies before offset `first`, the first one that is left."""
    valid = Position(partition.partition, first)
    lost = f": {records} records are gone" if records else ""
    error = PositionExpiredError(
        f"position {position} of topic '{partition.topic}' is before {valid}, the first one that retention left{lost}",
        hint=f"go on at {valid}, at 'beginning', or read with on_expired='skip'",
    )
    error.first = str(valid)
    return error
