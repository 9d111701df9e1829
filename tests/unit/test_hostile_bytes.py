"""No bytes of a stranger crash, hang or inflate a parser, also with right checksums."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile_bytes import TARGETS, Edit, changed, check, corpus, edits
from tests.soak import SOAKING


@pytest.mark.parametrize("name", TARGETS)
def test_sound_inputs_are_within_the_bounds(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].parse(seed)
        check(name, seed)


def test_the_corpus_is_within_the_bounds() -> None:
    kept = list(corpus())
    assert {name for name, _ in kept} == set(TARGETS)
    for name, data in kept:
        check(name, data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), changes=edits, sealed=st.booleans())
def test_changed_inputs_are_within_the_bounds(
    name: str, data: st.DataObject, changes: list[Edit], sealed: bool
) -> None:
    _try(name, data, changes, sealed=sealed)


@pytest.mark.soak
@pytest.mark.skipif(not SOAKING, reason="hours: make soak")
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=1_000_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), changes=edits, sealed=st.booleans())
def test_a_million_changed_inputs_are_within_the_bounds(
    name: str, data: st.DataObject, changes: list[Edit], sealed: bool
) -> None:
    _try(name, data, changes, sealed=sealed)


def _try(name: str, data: st.DataObject, changes: list[Edit], *, sealed: bool) -> None:
    target = TARGETS[name]
    found = changed(data.draw(st.sampled_from(target.seeds)), changes)
    check(name, target.sealed(found) if sealed else found)
