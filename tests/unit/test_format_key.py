"""Keys of objects: each round-trips, and no other text is a key."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import InvalidRequestError
from memq.format.key import ObjectKey, SharedObjectKey, object_key, parse_object_key, shared_object_key, topic_prefix

ID = "0123456789abcdef" * 2
names = st.from_regex(r"\A[A-Za-z0-9._-]{1,40}\Z").filter(lambda name: name not in (".", ".."))
moments = st.integers(0, 4_000_000_000_000)
HOUR = 3_600_000


def test_a_key_sorts_by_its_numbers_and_names_its_hour() -> None:
    key = object_key("c1", "clicks", ID, 3, 17, 42, 1_700_000_000_000)
    last = "00003-0000000017-0000000000000042"
    assert key == f"c1/topics/clicks/01234567/{zlib.crc32(last.encode()) & 0xFF:02x}/2023-11-14/22/{last}"
    assert key.startswith(topic_prefix("c1", "clicks", ID))


@given(names, names, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1), st.integers(0, 10**16 - 1), moments)
def test_a_key_reads_back(cluster: str, topic: str, partition: int, epoch: int, sequence: int, sealed_ms: int) -> None:
    key = object_key(cluster, topic, ID, partition, epoch, sequence, sealed_ms)
    hour = sealed_ms // HOUR * HOUR
    assert parse_object_key(key) == ObjectKey(cluster, topic, ID[:8], partition, epoch, sequence, hour)


@given(names, names, st.integers(0, (1 << 32) - 1), st.integers(0, 10**16 - 1), moments)
def test_a_shared_key_reads_back(cluster: str, broker: str, epoch: int, sequence: int, sealed_ms: int) -> None:
    key = shared_object_key(cluster, broker, epoch, sequence, sealed_ms)
    assert parse_object_key(key) == SharedObjectKey(cluster, broker, epoch, sequence, sealed_ms // HOUR * HOUR)


KEY = object_key("c", "t", ID, 1, 2, 3, 1_700_000_000_000)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/" + KEY,
        KEY + "/",
        KEY + ".tmp",
        KEY + "\n",
        KEY.replace("/t/", "/../"),
        KEY.replace("c/", "c\0/", 1),
        KEY.replace("/topics/", "/Topics/"),
        KEY.replace("2023-11-14", "2023-11-31"),
        KEY.replace("/22/", "/24/"),
        KEY.replace("00001-", "00002-"),  # the prefix is no longer the one of the last part
        KEY.replace("01234567", "01234567ab"),
        KEY.replace("00001-", "0000١-"),
        shared_object_key("c", "b", 1, 2, 0).replace("/b-", "/b b-"),
        "c/shared/x",
    ],
)
def test_anything_else_is_no_key(key: str) -> None:
    assert isinstance(parse_object_key(KEY), ObjectKey)
    with pytest.raises(InvalidRequestError, match="is not the key"):
        parse_object_key(key)


@given(st.text(max_size=80))
def test_any_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_object_key(text)
