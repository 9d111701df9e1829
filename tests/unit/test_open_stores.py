"""How a client opens the stores that brokers name: with the section `[s3]` of its settings."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from memq.client.link_pool import LinkPool
from memq.client.metadata import ClusterMetadata
from memq.client.stores import OpenStores
from memq.errors import InvalidSettingError, UnknownSettingError
from memq.protocol.messages import StoreMetadata
from memq.runtime.runtime import Runtime
from memq.runtime.waits import Waits
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.storage_handlers.s3.handler import S3Handler
from memq.storage_handlers.s3.settings import S3Settings

BUCKET = "s3://memq/data?endpoint=http://127.0.0.1:1"
KEYS = {"access_key_id": "id", "secret_access_key": "secret"}


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration names the endpoint of the store."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")


def test_a_folder_that_this_user_may_not_read_is_left_to_the_brokers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_dir(path: Path) -> bool:
        raise PermissionError(path)

    assert isinstance(store_of(None, tmp_path.as_uri()), FilesystemHandler)
    monkeypatch.setattr(Path, "is_dir", is_dir)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert store_of(None, tmp_path.as_uri()) is None


def store_of(s3: dict[str, object] | None, url: str = BUCKET) -> StorageHandler | None:
    """Return the store that a broker names."""
    runtime = Runtime()
    metadata = ClusterMetadata(runtime, LinkPool(runtime, []))
    metadata.stores = (StoreMetadata(name="main", url=url),)
    return OpenStores(metadata, runtime, s3)("main")


def opened(s3: dict[str, object] | None) -> S3Settings:
    """Return the settings with which a bucket is opened that a broker names."""
    store = store_of(s3)
    assert isinstance(store, S3Handler)
    return store.bucket.settings


def test_a_producer_that_stages_parts_gives_the_store_as_long_as_a_broker() -> None:
    runtime = Runtime()
    metadata = ClusterMetadata(runtime, LinkPool(runtime, []))
    metadata.stores = (StoreMetadata(name="main", url=BUCKET),)
    patient = OpenStores(metadata, runtime, dict(KEYS), patient=True)("main")
    assert isinstance(patient, S3Handler)
    assert patient.bucket.settings.deadline_ms == S3Settings().deadline_ms > opened(dict(KEYS)).deadline_ms


def test_a_store_is_opened_once_by_its_name_and_again_after_a_close(tmp_path: Path) -> None:
    async def work() -> None:
        runtime = Runtime()
        metadata = ClusterMetadata(runtime, LinkPool(runtime, []))
        urls = {name: (tmp_path / name).as_uri() for name in ("main", "archive")}
        metadata.stores = tuple(StoreMetadata(name=name, url=url) for name, url in urls.items())
        stores = OpenStores(metadata, runtime)
        assert stores("main") is None, "no folder is there"
        for name in urls:
            (tmp_path / name).mkdir()
            (tmp_path / name / "k").write_bytes(name.encode())
        opened = {name: stores(name) for name in urls}
        assert {name: store.url for name, store in opened.items() if store is not None} == urls
        assert {name: stores(name) for name in urls} == opened
        assert stores("other") is None
        waits = Waits(runtime.clock)
        assert stores.reader("other", waits) is None
        reader = stores.reader("archive", waits)
        assert reader is not None
        assert bytes(await reader.get_range("k", 0, 4)) == b"arch"
        await stores.close()
        again = stores("main")
        assert again is not None
        assert again is not opened["main"], "the first one has ended its threads"
        await stores.close()

    asyncio.run(work())


def test_a_store_that_is_no_folder_of_this_machine_is_left_to_the_brokers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert store_of(None, (tmp_path / "file").as_uri()) is None
    assert store_of(None, f"file://elsewhere{tmp_path}") is None
    assert store_of(None, f"memory:{tmp_path}") is None


def test_the_section_that_is_given_is_heeded() -> None:
    found = opened({**KEYS, "data_path": "aiobotocore", "hedge_permille": 0})
    assert (found.access_key_id, found.data_path, found.hedge_permille) == ("id", "aiobotocore", 0)
    assert found.endpoint == "http://127.0.0.1:1", "the URL wins"
    assert found.deadline_ms == 6_000, "short: a broker can read instead"


def test_times_of_the_section_are_kept() -> None:
    found = opened({**KEYS, "deadline_ms": 20_000})
    assert (found.deadline_ms, found.request_timeout_ms) == (20_000, 10_000)


def test_without_one_that_of_the_process_is_heeded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memq.toml").write_text('[s3]\naccess_key_id = "id"\nsecret_access_key = "of the file"\n')
    monkeypatch.setenv("MEMQ_S3_SECRET_ACCESS_KEY", "of the environment")
    found = opened(None)
    assert (found.access_key_id, found.secret_access_key) == ("id", "of the environment")


def test_a_mistake_in_the_section_is_reported() -> None:
    with pytest.raises(UnknownSettingError, match="acces_key"):
        opened({"acces_key_id": "id"})


@pytest.mark.parametrize("line", ["acces_key_id = 'id'", "deadline_ms = -1"])
def test_a_mistake_in_the_settings_of_the_process_leaves_the_bucket_to_the_brokers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    """The program gave none of them: it may not know this file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memq.toml").write_text(f"[s3]\n{line}\n")
    assert store_of(None) is None


def test_a_bucket_without_keys_is_left_to_the_brokers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert store_of({"region": "x"}) is None


def test_half_of_a_pair_of_keys_is_reported() -> None:
    with pytest.raises(InvalidSettingError, match="has one of access_key_id and secret_access_key"):
        opened({"access_key_id": "id"})
