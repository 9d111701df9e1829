"""Waits between retries: random below a bound that doubles, for any number of retries."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from memq.runtime.clock import backoff_s


class Most(random.Random):
    """Draws the greatest number."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_the_bound_doubles_up_to_the_most() -> None:
    waits = [backoff_s(Most(), tries, base_s=0.1, most_s=1.0) for tries in range(6)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@given(st.integers(0, 1 << 40), st.integers())
def test_any_number_of_tries_has_a_wait(tries: int, seed: int) -> None:
    assert 0.0 <= backoff_s(random.Random(seed), tries, base_s=0.05, most_s=2.0) <= 2.0
