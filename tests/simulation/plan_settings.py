"""Settings of a simulated topic: drawn, and scaled down to seconds."""

from __future__ import annotations

import random

import msgspec

from memq.simulation.cluster import SETTINGS
from memq.topic import CLOCK_ERROR_MS, TopicSettings

NAMED_STORM_MS = 150_000  # for how long a storm may keep a name from its topic


def draw_settings(
    stale_ms: int, delivery_ms: int, draw: random.Random, clock_error_ms: int = CLOCK_ERROR_MS, *, retry_ms: int = 0
) -> TopicSettings:
    """Return topic settings that keep the bounds, scaled down to seconds; tasks run again for `retry_ms`."""
    return msgspec.structs.replace(
        SETTINGS,
        stale_publish_ms=stale_ms,
        delivery_timeout_ms=delivery_ms,
        dedup_window_ms=delivery_ms + 2 * (stale_ms + clock_error_ms) + retry_ms,
        batch_age_ms_max=draw.choice([0, 20, 200]),
        seal_when_idle=draw.random() < 0.5,
        batch_blocks_max=draw.choice([1, 3, 50]),
        ring_slots=draw.choice([2, 4, 16]),
        uploads_in_flight_max=draw.choice([1, 2, 4]),
    )


def that_remembers_names(settings: TopicSettings, rest_s: float) -> TopicSettings:
    """Return the settings with retention that outlasts a rest, and the storm behind it: a name is forgotten with it."""
    if not settings.retention_ms or not rest_s:
        return settings
    return msgspec.structs.replace(settings, retention_ms=settings.retention_ms + int(rest_s * 1000) + NAMED_STORM_MS)
