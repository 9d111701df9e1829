"""Sources of keys for S3, without a server: profiles and processes, and how long keys are used."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from memq.errors import DeniedError, InvalidSettingError
from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3 import open_store
from memq.storage_handlers.s3.settings import Bucket, check_keys, obstore_keys, open_session, read_bucket, region_of

URL = "s3://logs?endpoint=http://127.0.0.1:1"


def bucket_of(profile: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return a bucket whose keys come from a profile with these lines, and from nowhere else."""
    for variable in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    (folder / "config").write_text(f"[profile logs]\n{profile}\n", encoding="utf-8")
    return read_bucket(URL, {"profile": ("logs", "memq.toml")})


def process(folder: Path, answer: str, code: int = 0) -> str:
    """Return the line of a profile that gets its keys from a process, which answers so."""
    file = folder / "keys"
    file.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n", encoding="utf-8")
    file.chmod(0o700)
    return f"credential_process = {file}"


def profile_of(case: str, folder: Path) -> str:
    match case:
        case "half a pair":
            return "aws_access_key_id = k"
        case "a process that fails":
            return process(folder, "no way", 3)
        case "one that is not there":
            return f"credential_process = {folder}/none"
        case "no JSON":
            return process(folder, "hello")
        case "a role of nobody":
            return "role_arn = arn:aws:iam::1:role/r\nsource_profile = nobody"
    return "region = eu-west-1"


@pytest.mark.parametrize(
    "case", ["half a pair", "a process that fails", "one that is not there", "no JSON", "a role of nobody", "nothing"]
)
@pytest.mark.parametrize("data_path", ["obstore", "aiobotocore"])
def test_keys_that_can_not_be_had_are_one_error(
    case: str, data_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket_of(profile_of(case, tmp_path), tmp_path, monkeypatch)

    async def use() -> None:
        section: dict[str, tuple[object, str]] = {"profile": ("logs", "test"), "data_path": (data_path, "test")}
        store = open_store(URL, Runtime(), section)
        try:
            await store.check()
        finally:
            await store.close()

    with pytest.raises(DeniedError, match=r"^no keys for bucket 'logs' at http://127\.0\.0\.1:1: .") as caught:
        asyncio.run(use())
    assert "\n" not in str(caught.value)
    assert "access_key_id" in caught.value.hint


def test_temporary_keys_are_not_used_when_they_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = datetime.now(UTC) + timedelta(minutes=16)  # noqa: TID251 - boto3 takes no other; it asks again in a minute
    keys = {"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s", "Expiration": ends.isoformat()}
    bucket = bucket_of(process(tmp_path, json.dumps(keys)), tmp_path, monkeypatch)
    session = open_session(bucket)
    check_keys(bucket, session)
    report = obstore_keys(session)()
    assert report["access_key_id"] == "k"
    until = report["expires_at"]
    assert until is not None
    assert until < ends


def test_a_region_that_is_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = bucket_of("region = the moon", tmp_path, monkeypatch)
    with pytest.raises(InvalidSettingError, match="'the moon'"):
        region_of(bucket, open_session(bucket))
