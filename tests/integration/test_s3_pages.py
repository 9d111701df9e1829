"""The S3 store behind a proxy whose pages look like success: status 200, some with an ETag; over both data paths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from awscrt.checksums import crc32c

from memq.errors import StoreError
from memq.storage_handlers.s3.handler import S3Handler
from tests.s3_faults import PAGE, Fault, FaultyS3, faulty_s3, place_of

HANG_S = 60
Scenario = Callable[[FaultyS3, S3Handler], Awaitable[None]]
PLAIN = Fault("page")
OF_A_FILE_SERVER = Fault("page", etag='"5f3c1a2b-1b"')
OF_S3 = Fault("page", etag='"0123456789abcdef0123456789abcdef"')
SHORT_TIMES = {"deadline_ms": 500, "request_timeout_ms": 500}


def over(*paths: str, **settings: object) -> Callable[[Scenario], Callable[[str], None]]:
    """Make a test of a scenario, once per data path; the store is opened in the folder `f`."""

    def make(scenario: Scenario) -> Callable[[str], None]:
        @pytest.mark.parametrize("data_path", paths or ("obstore", "aiobotocore"))
        def test(data_path: str) -> None:
            asyncio.run(run(data_path))

        async def run(data_path: str) -> None:
            async with faulty_s3() as server, asyncio.timeout(HANG_S):
                store = place_of(server, data_path=data_path, **settings).open("f")
                try:
                    await scenario(server, store)
                finally:
                    await store.close()

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return make


def body_of(key: str) -> bytes:
    return f"bytes of {key}".encode()


async def put(store: S3Handler, key: str) -> None:
    await store.put(key, [body_of(key)], crc32c(body_of(key)))


@over()
async def test_a_page_that_has_an_etag_is_no_stored_object(server: FaultyS3, store: S3Handler) -> None:
    server.plan("PUT", OF_A_FILE_SERVER, OF_A_FILE_SERVER)
    await put(store, "k/one")
    assert server.objects["f/k/one"].body == body_of("k/one")


@over()
async def test_a_sound_put_costs_one_request(server: FaultyS3, store: S3Handler) -> None:
    for shows_checksums in (False, True):
        server.shows_checksums = shows_checksums
        await put(store, f"k/{shows_checksums}")
    assert [asked.method for asked in server.asked] == ["PUT", "PUT"]


@over()
async def test_a_server_with_etags_of_its_own_stores_objects(server: FaultyS3, store: S3Handler) -> None:
    """Each put costs a HEAD there."""
    server.etag, server.shows_checksums = '"1"', False
    for key in ("k/one", "k/two"):
        await put(store, key)
    assert [asked.method for asked in server.asked] == ["PUT", "HEAD"] * 2


@over(confirm_puts=True)
async def test_a_store_that_confirms_puts_takes_no_page_with_an_etag_like_s3s_for_an_object(
    server: FaultyS3, store: S3Handler
) -> None:
    server.shows_checksums = False
    server.plan("PUT", OF_S3)
    await put(store, "k/one")
    assert server.objects["f/k/one"].body == body_of("k/one")


@over("aiobotocore")
async def test_where_s3_shows_checksums_a_page_with_an_etag_like_s3s_is_no_object(
    server: FaultyS3, store: S3Handler
) -> None:
    await put(store, "k/one")
    server.plan("PUT", OF_S3)
    await put(store, "k/two")
    assert server.objects["f/k/two"].body == body_of("k/two")


@over("obstore")
async def test_without_checksums_a_page_with_an_etag_like_s3s_passes_once(server: FaultyS3, store: S3Handler) -> None:
    server.plan("PUT", OF_S3)
    await put(store, "k/one")
    for key in ("k/two", "k/three"):
        server.plan("PUT", OF_S3, OF_S3)
        await put(store, key)
    assert set(server.objects) == {"f/k/two", "f/k/three"}


@pytest.mark.parametrize("page", [PLAIN, OF_A_FILE_SERVER], ids=["plain", "with-etag"])
def test_a_store_behind_a_proxy_that_gives_its_page_each_second_time(page: Fault) -> None:
    """Put, get, ranges, sizes and listings are right. An object whose delete met the page stays for the sweep."""

    @over()
    async def scenario(server: FaultyS3, store: S3Handler) -> None:
        server.page_each_second = page
        keys = [f"k/{number}" for number in range(5)]
        for key in keys:
            await put(store, key)
        assert {key: each.body for key, each in server.objects.items()} == {f"f/{key}": body_of(key) for key in keys}
        for key in keys:
            assert await store.get(key) == body_of(key)
            assert await store.size(key) == len(body_of(key))
            assert await store.get_range(key, 1, 4) == body_of(key)[1:5]
        assert [entry.key async for entry in store.list("k/")] == keys
        for _ in range(2):
            await store.delete("k/0")
        server.page_each_second = None
        assert [entry.key async for entry in store.list("k/")] == keys[1:]

    for data_path in ("obstore", "aiobotocore"):
        scenario(data_path)


@over(**SHORT_TIMES)
async def test_an_object_is_neither_damaged_nor_short_because_of_a_page(server: FaultyS3, store: S3Handler) -> None:
    """Two equal pages were taken for a stored object that is damaged: a group that skips damage lost its records."""
    await put(store, "k/one")
    server.always = {"GET": OF_A_FILE_SERVER, "HEAD": OF_A_FILE_SERVER}
    for ask in (
        lambda: store.get("k/one", checked=False),
        lambda: store.get_range("k/one", 0, len(PAGE)),
        lambda: store.get_range("k/one", 0, 100),
        lambda: store.size("k/one"),
    ):
        with pytest.raises(StoreError):
            await ask()


@over()
async def test_a_listing_of_short_pages_is_whole_though_a_proxy_cuts_what_names_the_next(
    server: FaultyS3, store: S3Handler
) -> None:
    """Such a page was taken for the end of the listing: a sweep, a restore or a lost log saw a part of the objects."""
    keys = [f"k/{number}" for number in range(7)]
    for key in keys:
        await put(store, key)
    server.page_keys_max = 3
    server.plan("LIST", Fault("endless"), Fault("answer"), Fault("endless"))
    assert [entry.key async for entry in store.list("k/")] == keys
    server.plan("LIST", Fault("answer"), Fault("answer"), Fault("endless"))
    assert [entry.key async for entry in store.list("k/")] == keys
