"""Reduced constants: each is one of the product, and holds only while a run lasts."""

from __future__ import annotations

import importlib
import random
import sys

import pytest

import memq.limits
from memq.errors import InvalidSettingError
from memq.topic import TopicSettings
from tests.simulation.aspects import ASPECTS
from tests.simulation.plan import draw_plan
from tests.simulation.reduced_constants import CLOCK_ERROR, TABLE, draw_constants, scaled


def usual(place: str) -> float:
    home, name = place.split(":")
    value: float = getattr(importlib.import_module(home), name)
    return value


@pytest.mark.parametrize("place", TABLE)
def test_each_constant_is_there_and_becomes_smaller(place: str) -> None:
    for value in TABLE[place]:
        assert value < usual(place)
        with scaled({place: value}):
            assert usual(place) == value
        assert usual(place) != value


def test_a_constant_is_small_wherever_it_was_imported_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = memq.limits.READ_BYTES_MAX
    importers = ("memq.broker.api.reader_requests", "memq.client.broker_router")
    users = [importlib.import_module(name).__dict__ for name in importers]
    monkeypatch.delitem(sys.modules, "memq.client.consumer.fetch.fetcher")
    with scaled({"memq.limits:READ_BYTES_MAX": 100}):
        late = importlib.import_module("memq.client.consumer.fetch.fetcher").__dict__
        assert [names["READ_BYTES_MAX"] for names in (*users, late)] == [100] * 3
    assert [names["READ_BYTES_MAX"] for names in (*users, late)] == [before] * 3


def test_a_small_clock_error_makes_the_least_dedup_window_small() -> None:
    settings = TopicSettings(delivery_timeout_ms=1_000, stale_publish_ms=1_000, dedup_window_ms=3_400)
    with pytest.raises(InvalidSettingError):
        settings.check()
    with scaled({CLOCK_ERROR: 200}):
        settings.check()


def test_plans_with_all_aspects_keep_the_bounds_on_a_small_scale() -> None:
    """The others follow the scale, in whatever order they are drawn."""
    for seed in range(100):
        draw = random.Random(seed)
        aspects = ("thin", *(aspect for aspect in ASPECTS if aspect != "thin" and draw.random() < 0.4))
        plan = draw_plan(seed, "stormy", aspects=tuple(draw.sample(aspects, len(aspects))))
        with scaled(plan.constants):
            settings = plan.shape.settings.check()
        least_ms = settings.dedup_window_ms - plan.retry_ms
        slack_ms = least_ms - settings.delivery_timeout_ms - 2 * settings.stale_publish_ms
        assert plan.retry_ms > 2_000 * plan.faults.chaos.pause_s_max or "direct" not in aspects
        assert slack_ms == 2 * plan.shape.clock_error_ms == 2 * plan.constants[CLOCK_ERROR]
    assert draw_constants(random.Random(1)) == draw_constants(random.Random(1))


def test_a_plan_does_not_depend_on_the_order_of_its_aspects() -> None:
    """Else a seed that was found with the drawn aspects runs otherwise with the argument --aspects."""
    for seed in range(20):
        draw = random.Random(seed)
        aspects = tuple(aspect for aspect in ASPECTS if draw.random() < 0.4)
        shuffled = tuple(draw.sample(aspects, len(aspects)))
        assert draw_plan(seed, "stormy", aspects=shuffled) == draw_plan(seed, "stormy", aspects=aspects)
