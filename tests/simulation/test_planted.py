"""Each planted bug is found by the simulation: otherwise it would miss the like of them."""

from __future__ import annotations

import pytest

from tests.simulation.bug import Planted
from tests.simulation.fresh_seeds import some_of
from tests.simulation.planted import BUGS, find
from tests.soak import SOAKING

SEEDS_MAX = 60  # within so many seeds each must be found
# A commit tries a third of the others, drawn from its hash.
# These take longest, 15 s to 45 s each: their like is found by others sooner. `make soak` finds them all.
LONG = frozenset(
    {
        "opening without the batches that nobody counted",
        "retention takes objects before pointers",
        "audit misses what retention took",
        "epoch used again",
        "assignments are set whatever their version",
        "opened without reading the tail",
        "ack=1 before the fsync",
        "sweep takes what pointers name",
        "late batches counted again and again",
        "retention takes what the dedup window needs",
        "lag from too few pointers",
        "lost wake-up after a publish",
        "sweep leaves what it finds",
        "stop without what is held for others",
        "ack=1 blocks dropped with their epoch",
        "nothing left out at publishing",
        "an open block continues over a change of the map",
        "age not refused by the queue",
        "reader passes over what retention took",
        "a slow opening counts",
        "blocks of a lost epoch forwarded at once",
        "sweep takes large objects that manifests name",
        "reader of cold parts passes over the first pointer",
        "late batches never counted",
    }
)


@pytest.mark.soak
@pytest.mark.thorough
@pytest.mark.parametrize(
    "bug", some_of(bug for bug in BUGS if SOAKING or bug.name not in LONG), ids=lambda bug: bug.name
)
def test_a_planted_bug_is_found(bug: Planted) -> None:
    count, found = find(bug, range(bug.seed, bug.seed + SEEDS_MAX))
    assert found, f"not found within {count} seeds"


def test_what_is_left_to_the_soak_is_there() -> None:
    assert {bug.name for bug in BUGS} >= LONG
