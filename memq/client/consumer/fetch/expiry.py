"""The error of a reader that retention overtook: where it can continue, and its losses. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from memq.errors import PositionExpiredError
from memq.topic import Position, ReadPartition, Totals


@dataclass(frozen=True, slots=True)
class Gap:
    """The removed part: everything before offset `first`, with `before` records as far as known."""

    first: int
    before: Totals = field(default_factory=Totals)


def expired_error(partition: ReadPartition, position: Position, first: int, records: int = 0) -> PositionExpiredError:
    """Return what says that a position lies before offset `first`, the first one that is left."""
    valid = Position(partition.partition, first)
    lost = f": {records} records are gone" if records else ""
    error = PositionExpiredError(
        f"position {position} of topic '{partition.topic}' is before {valid}, the first one that retention left{lost}",
        hint=f"continue at {valid}, at 'beginning', or read with on_expired='skip'",
    )
    error.topic, error.first = partition.topic, str(valid)
    return error
