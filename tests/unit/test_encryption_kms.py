"""Keys of AWS KMS, against moto's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from memq.encryption.encryption import Encryption
from memq.encryption.kms import KmsKeys
from memq.errors import KeyMissingError, KeyProviderError
from memq.format.blocks.columns import open_block
from tests.golden.make import TOPIC_ID, full_builder, seal
from tests.unit.test_encryption import cause_of, opened


@pytest.fixture
def kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        yield boto3.client("kms")


def made(kms: Any) -> str:
    return str(kms.create_key()["KeyMetadata"]["KeyId"])


def test_a_block_opens_with_the_key_that_kms_has(kms: Any) -> None:
    key, other = made(kms), made(kms)
    stored = Encryption(f"aws-kms:{key}").seal_block(seal(full_builder(), "zstd", 42, 100), TOPIC_ID, 3)
    assert key in open_block(stored.data).envelope().key_id
    assert opened(Encryption(f"aws-kms:{key}"), stored.data).reader().count == 6
    assert opened(Encryption(f"aws-kms:{other},{key}"), stored.data).reader().count == 6
    assert isinstance(cause_of(opened(Encryption(f"aws-kms:{other}"), stored.data)), KeyMissingError)


def test_a_disabled_key_is_missing(kms: Any) -> None:
    key = made(kms)
    stored = Encryption(f"aws-kms:{key}").seal_block(seal(full_builder(), "zstd", 42, 100), TOPIC_ID, 3)
    kms.disable_key(KeyId=key)
    reader = Encryption(f"aws-kms:{key}")
    found = opened(reader, stored.data)
    if found.header is None:  # moto decrypts with disabled keys in some versions
        assert isinstance(found.cause, KeyMissingError)
    with pytest.raises(KeyMissingError, match="KMS refuses generate_data_key"):
        KmsKeys("alias/no-such-key").new_data_key()


def test_a_kms_that_is_away_is_tried_again() -> None:
    client = boto3.client(
        "kms",
        region_name="us-east-1",
        endpoint_url="http://127.0.0.1:1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=boto3.session.Config(retries={"total_max_attempts": 1}, connect_timeout=0.2),
    )
    with pytest.raises(KeyProviderError, match="generate_data_key"):
        KmsKeys("k1", client).new_data_key()
