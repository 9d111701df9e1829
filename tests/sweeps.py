"""Two passes of the sweep, the second of which confirms the first at once."""

from __future__ import annotations

from dataclasses import replace

from memq.broker.services import Services
from memq.broker.sweep.broker_sweep import sweep


async def sweep_twice(services: Services, age_ms: int) -> tuple[int, int]:
    """Return how many objects, and bytes, went; the first pass deletes what earlier ones have found."""
    services = replace(services, settings=replace(services.settings, sweep_confirm_ms=0))
    first, second = await sweep(services, age_ms), await sweep(services, age_ms)
    return first.objects + second.objects, first.bytes + second.bytes
