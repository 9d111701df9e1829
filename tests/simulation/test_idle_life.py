"""The rule about idle topics finds deletions that come too early, and no others."""

from __future__ import annotations

import pytest

from tests.simulation.idle_life import read_throughout, too_early


@pytest.mark.parametrize(("gone_s", "early"), [(140.0, True), (155.9, True), (156.0, False), (400.0, False)])
def test_a_topic_that_goes_before_its_time_is_found(gone_s: float, early: bool) -> None:
    assert too_early(gone_s, used_s=100.0, idle_ms=60_000, clock_error_ms=2_000) is early


@pytest.mark.parametrize(("held_s", "found"), [(0.0, False), (100.0, True), (152.0, True), (153.0, False)])
def test_a_topic_that_goes_with_a_reader_is_found(held_s: float, found: bool) -> None:
    assert read_throughout(200.0, held_s, idle_ms=60_000) is found
