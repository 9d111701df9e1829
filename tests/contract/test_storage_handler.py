"""The contract of the StorageHandler port, over every handler."""

from __future__ import annotations

import asyncio

import pytest
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, InvalidRequestError, NotFoundError, ObjectExistsError
from memq.storage_handlers import Buffer, StorageHandler, check_key
from tests.contract.stores import over_stores
from tests.soak import repetitions

KEY = "c/topics/clicks/0a0b0c0d/7f/2026-01-02/03/0-1-5"


async def put(store: StorageHandler, key: str, body: bytes) -> None:
    await store.put(key, [body], crc32c(body))


async def keys(store: StorageHandler, prefix: str = "") -> list[str]:
    return [entry.key async for entry in store.list(prefix)]


@over_stores
async def test_stored_object_is_read_whole_and_in_ranges(store: StorageHandler) -> None:
    parts: list[Buffer] = [b"head", memoryview(bytearray(b"-middle-")), bytearray(b"tail"), b""]
    await store.put(KEY, parts, crc32c(b"head-middle-tail"))
    assert await store.get(KEY) == b"head-middle-tail"
    assert await store.get_range(KEY, 5, 6) == b"middle"
    assert await store.get_range(KEY, 16, 0) == b""
    assert await store.size(KEY) == 16


@over_stores
async def test_the_bytes_are_those_of_the_time_of_the_put(store: StorageHandler) -> None:
    buffer = bytearray(b"first")
    await store.put(KEY, [buffer], crc32c(b"first"))
    buffer[:] = b"other"
    assert await store.get(KEY) == b"first"


@over_stores
async def test_thousands_of_buffers_make_one_object(store: StorageHandler) -> None:
    buffers = [bytes([number % 251]) * (number % 7) for number in range(3_000)]
    body = b"".join(buffers)
    await store.put(KEY, buffers, crc32c(body))
    assert await store.get(KEY) == body


@over_stores
async def test_an_empty_object_is_an_object(store: StorageHandler) -> None:
    await store.put(KEY, [], 0)
    assert (await store.get(KEY), await store.size(KEY), await keys(store)) == (b"", 0, [KEY])


@over_stores
async def test_the_same_bytes_may_be_put_again(store: StorageHandler) -> None:
    await put(store, KEY, b"one")
    await put(store, KEY, b"one")
    assert await store.get(KEY) == b"one"


@over_stores
async def test_other_bytes_under_the_key_are_refused(store: StorageHandler) -> None:
    await put(store, KEY, b"one")
    for other in (b"two", b"longer", b""):
        with pytest.raises(ObjectExistsError, match="0-1-5"):
            await put(store, KEY, other)
    assert await store.get(KEY) == b"one"


@over_stores
async def test_one_of_many_racing_puts_wins_and_the_others_know(store: StorageHandler) -> None:
    async def race(key: str) -> None:
        bodies = [bytes([number]) * 4_096 for number in range(8)]
        results = await asyncio.gather(*(put(store, key, body) for body in bodies), return_exceptions=True)
        winners = [body for body, result in zip(bodies, results, strict=True) if result is None]
        assert len(winners) == 1
        assert all(result is None or isinstance(result, ObjectExistsError) for result in results)
        assert await store.get(key) == winners[0]

    await asyncio.gather(*(race(f"race/{turn}") for turn in range(repetitions(few=8, many=20))))


@over_stores
async def test_bytes_that_changed_in_memory_become_no_object(store: StorageHandler) -> None:
    with pytest.raises(CorruptDataError, match="crc32c"):
        await store.put(KEY, [b"damaged"], crc32c(b"as sealed"))
    assert await keys(store) == []
    await put(store, KEY, b"as sealed")


@over_stores
async def test_missing_name_is_not_found(store: StorageHandler) -> None:
    await put(store, KEY, b"one")
    folder, below = KEY.rpartition("/")[0], f"{KEY}/below"
    for key in ("c/absent", folder, below):
        with pytest.raises(NotFoundError, match=key):
            await store.get(key)
        with pytest.raises(NotFoundError):
            await store.get_range(key, 0, 1)
        with pytest.raises(NotFoundError):
            await store.size(key)


@over_stores
async def test_a_range_beyond_the_end_is_never_a_short_answer(store: StorageHandler) -> None:
    await put(store, KEY, b"12345")
    for offset, length in ((0, 6), (5, 1), (100, 1)):
        with pytest.raises(CorruptDataError, match="5 bytes"):
            await store.get_range(KEY, offset, length)


@over_stores
async def test_deleting_is_done_once_and_fine_twice(store: StorageHandler) -> None:
    await put(store, KEY, b"one")
    await store.delete(KEY)
    await store.delete(KEY)
    await store.delete("never/there")
    with pytest.raises(NotFoundError):
        await store.get(KEY)
    await put(store, KEY, b"two")
    assert await store.get(KEY) == b"two"


@over_stores
async def test_deleting_leaves_the_neighbours(store: StorageHandler) -> None:
    await put(store, "a/b/one", b"1")
    await put(store, "a/b/two", b"2")
    await store.delete("a/b/one")
    await store.delete("a/b")
    assert await keys(store) == ["a/b/two"]


@over_stores
async def test_a_listing_is_by_key_and_by_any_prefix(store: StorageHandler) -> None:
    expected = sorted(["a-b/x", "a/x", "a/y/1", "a/y/2", "a/y.z", "a0", "b/-", "b/0", "b/a/b/c"])
    for key in reversed(expected):
        await put(store, key, key.encode())
    assert await keys(store) in (expected, sorted(expected, key=lambda key: key.split("/")))
    for prefix in ("a", "a/", "a/y", "a/y/", "b/a/b/c", "absent", "a/x/", "b/."):
        assert sorted(await keys(store, prefix)) == [key for key in expected if key.startswith(prefix)]
    assert [entry.size async for entry in store.list("b/a")] == [len("b/a/b/c")]


@over_stores
async def test_a_listing_has_pages_without_a_seam(store: StorageHandler) -> None:
    expected = [f"many/{number:05d}" for number in range(repetitions(few=1_050, many=2_100))]  # pages hold 1,000
    for start in range(0, len(expected), 100):  # more at once would wait for each other too long on a slow machine
        await asyncio.gather(*(put(store, key, b"") for key in expected[start : start + 100]))
    assert await keys(store) == expected


@over_stores
async def test_a_listing_continues_while_objects_go(store: StorageHandler) -> None:
    for number in range(50):
        await put(store, f"d{number:02d}/x", b"1")
    seen = []
    async for entry in store.list():
        seen.append(entry.key)
        await store.delete(entry.key)
    assert seen == [f"d{number:02d}/x" for number in range(50)]
    assert await keys(store) == []


@over_stores
async def test_keys_outside_the_grammar_are_refused(store: StorageHandler) -> None:
    odd = ["", "/", "/a", "a/", "a//b", "..", "a/../b", "a/./b", "a\0b", "a\\b", "c:d", "a b", "é", "a\n", "x" * 256]
    for key in [*odd, "/".join(["x" * 200] * 6)]:
        reads = store.get(key), store.get_range(key, 0, 1), store.size(key)
        for call in (*reads, store.delete(key), store.put(key, [b""], 0)):
            with pytest.raises(InvalidRequestError, match="key"):
                await call
    for prefix in ("../", "/", "a//", "a/../", "a/b c"):
        with pytest.raises(InvalidRequestError, match="key"):
            await keys(store, prefix)
    assert await keys(store) == []


@over_stores
async def test_a_key_has_up_to_1024_characters(store: StorageHandler) -> None:
    longest = "/".join(["x" * 204] * 5)
    assert len(longest) == 1_024
    assert check_key(longest) == longest
    assert await keys(store, longest) == []
    for call in (store.get(f"{longest}x"), store.put(f"{longest}x", [b""], 0), keys(store, f"{longest}x")):
        with pytest.raises(InvalidRequestError, match="has 1025 characters"):
            await call
    long = longest[:1_000]  # S3 counts the prefix of the bucket's URL, too
    await store.put(long, [b"1"], crc32c(b"1"))
    assert await store.get(long) == b"1"
    assert await keys(store, long) == [long]


@over_stores
async def test_check_leaves_nothing(store: StorageHandler) -> None:
    await store.check()
    await store.check()
    assert await keys(store) == []


@over_stores
async def test_closing_twice_is_fine(store: StorageHandler) -> None:
    await store.close()


@over_stores
async def test_the_url_names_a_scheme(store: StorageHandler) -> None:
    assert store.url.split(":")[0] in ("memory", "file", "s3")
