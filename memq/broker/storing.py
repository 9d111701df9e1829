"""Putting one object until it is stored: a store that fails is tried again for ever, while somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from memq.backoff import backoff_s
from memq.broker.batch import ObjectBody
from memq.broker.services import Services
from memq.errors import MemqError, ObjectExistsError

BACKOFF_S_MAX = 2.0
STORE_TIMEOUT_S = 60.0


async def store_object(
    services: Services, body: ObjectBody, name: str, wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Put an object; return True when it is stored, False when it was not and is not `wanted` any more.

    `name` says in the log whose it is. Raises: ObjectExistsError when other bytes lie under its key.
    """
    clock, counters = services.runtime.clock, services.counters
    started_s, tries = clock.monotonic(), 0
    while wanted():
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await services.store.put(body.key, body.buffers, body.checksum)
        except ObjectExistsError:
            raise
        except (MemqError, TimeoutError) as error:
            tries += 1
            counters.store_retries += 1
            services.events.warning("store-retry", f"{name}, try {tries}: {error}")
            await asyncio.sleep(backoff_s(services.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX))
            continue
        counters.stored_objects += 1
        counters.stored_bytes += body.bytes
        counters.store_seconds.observe(clock.monotonic() - started_s)
        return True
    return False
