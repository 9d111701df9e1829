"""The contract of the StorageHandler port over S3: both data paths, on a real server and on moto."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.contract.test_storage_handler  # noqa: F401 - fills SCENARIOS
from tests.contract.stores import SCENARIOS, run_scenario
from tests.s3_servers import S3Place, moto, seaweedfs

DATA_PATHS = ("obstore", "aiobotocore")
SERVERS = ("seaweedfs", "moto")
SLOW = ("test_a_listing_has_pages_without_a_seam", "moto")  # 2,100 objects: 1 s on the other server, 20 s on this one
CASES = [(name, server) for name in SCENARIOS for server in SERVERS if (name, server) != SLOW]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, S3Place]]:
    with seaweedfs(tmp_path_factory.mktemp("s3")) as real, moto() as mock:
        yield {"seaweedfs": real, "moto": mock}


@pytest.mark.parametrize("data_path", DATA_PATHS)
@pytest.mark.parametrize(("name", "server"), CASES)
def test_contract(name: str, server: str, data_path: str, places: dict[str, S3Place]) -> None:
    run_scenario(SCENARIOS[name], lambda: places[server].open(data_path=data_path))
