"""Storing one object: a failing store is retried without end, while the result is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from memq.broker.partition.batch import ObjectBody
from memq.broker.services import Services
from memq.errors import ObjectExistsError
from memq.runtime.backoff import backoff_s
from memq.settings import BrokerSettings

BACKOFF_S_MAX = 0.5  # how many requests a sick store gets is up to its breaker
STORE_TIMEOUT_S = 60.0


async def store_object(
    services: Services, body: ObjectBody, name: str, wanted: Callable[[], bool] = lambda: True
) -> float | None:
    """Put an object; return when its first put began (monotonic s): no store dates it earlier.

    The result is None when it was not stored, and is not `wanted` any more or its key's time is over: see `key_s`.
    `name` says in the log whose it is. Raises: ObjectExistsError when other bytes lie under its key.
    """
    clock, counters = services.runtime.clock, services.counters
    started_s, tries = clock.monotonic(), 0
    while wanted() and clock.monotonic() < started_s + key_s(services.settings):
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await services.store.put(body.key, body.buffers, body.checksum)
        except ObjectExistsError:
            raise
        except Exception as error:  # noqa: BLE001 - the ring holds the only copy: no error may let go of it
            tries += 1
            counters.store_retries += 1
            services.events.warning("store-retry", f"{name}, try {tries}: {str(error) or repr(error)}")
            await asyncio.sleep(backoff_s(services.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX))
            continue
        counters.stored_objects += 1
        counters.stored_bytes += body.bytes
        counters.store_seconds.observe(clock.monotonic() - started_s)
        return started_s
    return None


def key_s(settings: BrokerSettings) -> float:
    """Return how long a key is used after its first put: half the age of the sweep.

    A pointer that is not handed over to the queue by then must name another object: see `memq.broker.upkeep.sweep`.
    """
    return settings.sweep_age_ms / 2000
