"""The contract of the StorageHandler port over a real S3 server, through a proxy that spoils answers.

Each operation meets each harm, in each phase, over both data paths: a sample of them here, all in `make soak`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import tests.contract.test_storage_handler  # noqa: F401 - fills SCENARIOS
from tests.contract.stores import HANG_S, SCENARIOS
from tests.s3_proxy import METHODS, PlannedFault, harming_proxy, harms_of
from tests.s3_servers import S3Place, seaweedfs
from tests.soak import SOAKING

DATA_PATHS = ("obstore", "aiobotocore")
SLOW = "test_a_listing_has_pages_without_a_seam"  # 2,100 objects
TIMES: dict[str, object] = {"deadline_ms": 30_000, "request_timeout_ms": 5_000}
MEETING = (
    "test_stored_object_is_read_whole_and_in_ranges",
    "test_other_bytes_under_the_key_are_refused",
    "test_check_leaves_nothing",
)
SHARE = 0.2 if SOAKING else 0.1  # of the requests that are harmed in the sample
Choose = Callable[[str, bool], PlannedFault | None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Place]:
    with seaweedfs(tmp_path_factory.mktemp("s3")) as real:
        yield real


def fits(method: str, harm: PlannedFault, *, ranged: bool) -> bool:
    """Whether a store can notice it: a range has no checksum, so its bytes are for its reader to check."""
    return harm in harms_of(method) and not (ranged and harm.harm == "changed")


def run_harmed(name: str, place: S3Place, data_path: str, choose: Choose) -> dict[tuple[str, str], int]:
    """Run a scenario behind the proxy and return what its requests met."""

    async def run() -> dict[tuple[str, str], int]:
        async with harming_proxy(place.endpoint) as proxy, asyncio.timeout(HANG_S):
            proxy.choose = choose
            store = replace(place, endpoint=proxy.endpoint, settings=TIMES).open(data_path=data_path)
            try:
                await SCENARIOS[name](store)
            finally:
                await store.close()
            return proxy.met

    return asyncio.run(run())


@pytest.mark.parametrize("data_path", DATA_PATHS)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != SLOW])
def test_the_contract_holds_though_requests_are_harmed(name: str, data_path: str, place: S3Place) -> None:
    dice = random.Random(f"{name} {data_path}")

    def choose(method: str, ranged: bool) -> PlannedFault | None:
        if method not in METHODS or dice.random() >= SHARE:
            return None
        return dice.choice([harm for harm in harms_of(method) if fits(method, harm, ranged=ranged)])

    run_harmed(name, place, data_path, choose)


@pytest.mark.soak
@pytest.mark.parametrize("data_path", DATA_PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_each_operation_gets_over_each_harm(method: str, data_path: str, place: S3Place) -> None:
    """Every third request of a method is harmed, the first one included: one harm here, all of them in `make soak`."""
    dice = random.Random(f"{method} {data_path}")
    harms = harms_of(method)
    names = [name for name in SCENARIOS if name != SLOW or method == "LIST"]
    for harm in harms if SOAKING else dice.sample(harms, 1):
        met = 0
        for name in names if SOAKING else MEETING:
            asked = [0]

            def choose(
                kind: str, ranged: bool, harm: PlannedFault = harm, asked: list[int] = asked
            ) -> PlannedFault | None:
                asked[0] += kind == method
                return harm if kind == method and asked[0] % 3 == 1 and fits(kind, harm, ranged=ranged) else None

            met += sum(run_harmed(name, place, data_path, choose).values())
        assert met, f"no {method} met {harm}"
