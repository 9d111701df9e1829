"""Each planted bug is found by the simulation: otherwise it would miss the like of them."""

from __future__ import annotations

import pytest

from tests.simulation.bug import Planted
from tests.simulation.planted import BUGS, find

SEEDS_MAX = 60  # within so many seeds each must be found


@pytest.mark.planted
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Planted) -> None:
    count, found = find(bug, range(bug.seed, bug.seed + SEEDS_MAX))
    assert found, f"not found within {count} seeds"
