"""An object is put until it is stored, while a batch needs it and its key may be used; each failure is named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from awscrt.checksums import crc32c

from memq.broker.partition.batch import ObjectBody
from memq.broker.partition.storing import BACKOFF_S_MAX, STORE_TIMEOUT_S, key_s, store_object
from memq.broker.services import Services
from memq.errors import ObjectExistsError, StoreError
from memq.format.blocks.header import Buffer
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.component.test_broker_opening import Opening
from tests.skipping_loop import run_skipping, skip

PARTS: list[bytes | memoryview] = [b"one", b"two"]
BODY = ObjectBody("memq/one", PARTS, crc32c(b"onetwo"), 6)


class Sick(MemoryHandler):
    """Its first puts fail, or hang; `asked_s` are the times of all."""

    def __init__(self, opening: Opening, fails: Sequence[Exception | None]) -> None:
        super().__init__(opening.clock)
        self.fails = list(fails)
        self.asked_s: list[float] = []

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        self.asked_s.append(asyncio.get_running_loop().time())
        if self.fails:
            error = self.fails.pop(0)
            if error is None:
                await asyncio.get_running_loop().create_future()  # for ever
            else:
                raise error
        await skip(0.25)
        await super().put(key, buffers, checksum)


def services_on(fails: Sequence[Exception | None]) -> tuple[Services, Sick]:
    opening = Opening()
    store = Sick(opening, fails)
    return replace(opening.services, stores={"main": store}, settings=BrokerSettings(sweep_age_ms=600_000)), store


def test_a_put_that_fails_is_tried_again_after_a_pause_that_doubles(caplog: pytest.LogCaptureFixture) -> None:
    pauses_s = [0.1, 0.2, 0.4, BACKOFF_S_MAX, BACKOFF_S_MAX]

    async def work() -> None:
        services, store = services_on([StoreError("it is down"), RuntimeError(), *[StoreError("still")] * 3])
        await skip(3.0)
        assert await store_object(services, BODY, "batch 7") == 3.0, "no store dates it earlier"
        assert [later - first for first, later in pairwise(store.asked_s)] == pytest.approx(pauses_s)
        assert store.objects == {BODY.key: b"onetwo"}
        counters = services.counters
        assert (counters.store_retries, counters.stored_objects, counters.stored_bytes) == (5, 1, 6)
        assert counters.store_seconds.sum_s == pytest.approx(sum(pauses_s) + 0.25)

    run_skipping(work())
    assert caplog.messages == [
        "store-retry: batch 7, try 1: it is down",
        "store-retry: batch 7, try 2: RuntimeError()",
        *(f"store-retry: batch 7, try {number}: still" for number in (3, 4, 5)),
    ]


def test_a_put_that_hangs_is_one_that_fails() -> None:
    async def work() -> None:
        services, store = services_on([None])
        assert await store_object(services, BODY, "batch 7") == 0.0
        assert store.asked_s == pytest.approx([0.0, STORE_TIMEOUT_S + 0.1])

    run_skipping(work())


def test_other_bytes_under_the_key_end_it() -> None:
    async def work() -> None:
        services, store = services_on([ObjectExistsError("others")])
        with pytest.raises(ObjectExistsError, match="others"):
            await store_object(services, BODY, "batch 7")
        assert (services.counters.store_retries, services.counters.stored_objects) == (0, 0)
        assert len(store.asked_s) == 1

    run_skipping(work())


def test_nothing_is_put_that_is_wanted_no_more() -> None:
    async def work() -> None:
        services, store = services_on([StoreError("it is down")] * 3)
        assert await store_object(services, BODY, "batch 7", lambda: len(store.asked_s) < 2) is None
        assert len(store.asked_s) == 2

    run_skipping(work())


def test_a_key_is_used_for_half_of_the_age_of_the_sweep() -> None:
    async def work() -> None:
        services, store = services_on([StoreError("it is down")] * 9)
        services = replace(services, settings=BrokerSettings(sweep_age_ms=2_400))
        assert key_s(services.settings) == 1.2
        assert await store_object(services, BODY, "batch 7") is None
        assert store.asked_s == pytest.approx([0.0, 0.1, 0.3, 0.7]), "the next one would come at 1.2 s"

    run_skipping(work())
