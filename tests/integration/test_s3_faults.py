"""The S3 store against a server that errs: refusals, lost answers, stalls, damaged bodies; over both data paths."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from awscrt.checksums import crc32c

from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
)
from memq.storage_handlers.s3.handler import S3Handler
from tests.s3_faults import Fault, FaultyS3, faulty_s3, place_of
from tests.tls import server_context

HANG_S = 60
TIMES = {"deadline_ms": 300, "request_timeout_ms": 200}
KEY = "c/topics/clicks/one"
WHOLE = f"f/{KEY}"
Scenario = Callable[[FaultyS3, S3Handler], Awaitable[None]]

SLOW_DOWN = Fault("answer", 503, "SlowDown")
PASSING = [
    Fault("answer", 500, "InternalError"),
    SLOW_DOWN,
    Fault("answer", 400, "RequestTimeout"),
    Fault("answer", 400, "BadDigest"),
    Fault("answer", 429, "TooManyRequests"),
    Fault("answer", 409, "ConditionalRequestConflict"),
    Fault("answer", 400),
    Fault("answer", 400, "NotInThisVersion"),
    Fault("answer", 403),
    Fault("answer", 404),
    Fault("close"),
]


def over_paths(**settings: object) -> Callable[[Scenario], Callable[[str], None]]:
    """Make a test of a scenario, once per data path; the store is opened in the folder `f`."""

    def make(scenario: Scenario) -> Callable[[str], None]:
        @pytest.mark.parametrize("data_path", ["obstore", "aiobotocore"])
        def test(data_path: str) -> None:
            asyncio.run(run(data_path))

        async def run(data_path: str) -> None:
            async with faulty_s3() as server, asyncio.timeout(HANG_S):
                store = place_of(server, data_path=data_path, **settings).open("f")
                try:
                    await scenario(server, store)
                finally:
                    await store.close()

        test.__name__ = scenario.__name__
        return test

    return make


async def put(store: S3Handler, body: bytes = b"bytes", key: str = KEY) -> None:
    await store.put(key, [body], crc32c(body))


def hidden(store: S3Handler) -> tuple[int, ...]:
    """How many requests nobody counted: aiohttp sends again by itself when a kept connection is closed."""
    return (0,) if store.data_path == "obstore" else (0, 1)


@over_paths()
async def test_transient_store_faults_are_retried_and_counted(server: FaultyS3, store: S3Handler) -> None:
    for number, fault in enumerate(PASSING):
        server.plan("PUT", fault)
        await put(store, key=f"k/{number}")
        assert server.objects[f"f/k/{number}"].body == b"bytes"
        assert server.count("PUT") == 2 * (number + 1)
    assert store.counters.put_requests == store.counters.retries + len(PASSING)
    assert server.count("PUT") - store.counters.put_requests in hidden(store)
    assert store.counters.lost_answers == 0


@over_paths()
async def test_a_page_of_a_proxy_with_status_200_is_no_answer(server: FaultyS3, store: S3Handler) -> None:
    page = Fault("page")
    server.plan("PUT", page)
    await put(store)
    assert server.objects[WHOLE].body == b"bytes"
    server.plan("LIST", page)
    assert [entry.key async for entry in store.list()] == [KEY]


@over_paths(deadline_ms=1_000, request_timeout_ms=1_000)
async def test_a_proxy_that_answers_all_requests_with_its_page_has_no_empty_listing(
    server: FaultyS3, store: S3Handler
) -> None:
    server.always = {"LIST": Fault("page"), "GET": Fault("page")}
    with pytest.raises(StoreError, match="not S3's"):
        assert [entry async for entry in store.list()]
    server.always.clear()
    assert [entry async for entry in store.list()] == []


@over_paths()
async def test_a_put_carries_its_checksum_and_its_marks(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    (asked,) = server.asked
    assert asked.headers["x-amz-meta-memq-crc32c"] == f"{crc32c(b'bytes'):08x}"
    assert any(name.startswith("x-amz-checksum-crc") for name in asked.headers)
    assert asked.headers["if-none-match"] == "*"


@over_paths(storage_class="STANDARD_IA", sse="aws:kms", sse_kms_key_id="our-key")
async def test_a_put_asks_for_its_storage_class_and_encryption(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    (asked,) = server.asked
    named = ("x-amz-storage-class", "x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id")
    assert [asked.headers[name] for name in named] == ["STANDARD_IA", "aws:kms", "our-key"]
    assert asked.headers["content-type"] == "application/octet-stream"


@over_paths()
async def test_a_put_without_settings_asks_for_nothing_more(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    (asked,) = server.asked
    assert not any(name.startswith(("x-amz-storage", "x-amz-server-side")) for name in asked.headers)


@over_paths()
async def test_a_put_whose_answer_was_lost_is_a_success(server: FaultyS3, store: S3Handler) -> None:
    server.plan("PUT", Fault("lost"))
    await put(store)
    assert (server.writes, server.count("PUT"), server.count("HEAD")) == (1, 2, 1)
    assert store.counters.lost_answers == 1


@over_paths()
async def test_after_a_lost_answer_other_bytes_are_still_refused(server: FaultyS3, store: S3Handler) -> None:
    await put(store, b"other")
    server.plan("PUT", Fault("close"), Fault("lost"))
    with pytest.raises(ObjectExistsError, match="5 bytes"):
        await put(store, b"bytes")
    assert server.objects[WHOLE].body == b"other"


@over_paths()
async def test_a_second_put_of_the_same_bytes_writes_nothing(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    await put(store)
    assert server.writes == 1


@over_paths()
async def test_an_object_without_marks_is_compared_byte_by_byte(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    server.objects[WHOLE].marks = {}
    await put(store)
    server.objects[WHOLE].marks = {}
    with pytest.raises(ObjectExistsError):
        await put(store, b"betys")


@over_paths()
async def test_a_missing_right_is_reported_at_once(server: FaultyS3, store: S3Handler) -> None:
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        server.always[method] = Fault("answer", 403, "AccessDenied")
    for call in (put(store), store.get(KEY), store.get_range(KEY, 0, 1), store.size(KEY), store.delete(KEY)):
        with pytest.raises(DeniedError, match="bucket 'memq' at http"):
            await call
    assert store.counters.retries == 0


@over_paths()
async def test_a_clock_that_is_off_is_named(server: FaultyS3, store: S3Handler) -> None:
    server.plan("PUT", Fault("answer", 403, "RequestTimeTooSkewed"))
    with pytest.raises(DeniedError, match="RequestTimeTooSkewed") as caught:
        await put(store)
    assert "clock" in caught.value.hint


@over_paths()
async def test_a_bucket_that_is_gone_is_no_missing_object(server: FaultyS3, store: S3Handler) -> None:
    server.plan("GET", Fault("answer", 404, "NoSuchBucket"), Fault("answer", 404, "NoSuchKey"))
    with pytest.raises(InvalidRequestError, match="does not exist") as caught:
        await store.get(KEY)
    assert not isinstance(caught.value, NotFoundError)
    with pytest.raises(NotFoundError):
        await store.get(KEY)


@over_paths()
async def test_a_body_that_is_cut_or_changed_is_read_again(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    server.plan("GET", Fault("cut"), Fault("changed"), Fault("close"), SLOW_DOWN)
    assert await store.get(KEY) == b"bytes"
    assert (store.counters.damaged, server.count("GET")) == (1, 5)
    assert 4 - store.counters.retries in hidden(store)


@over_paths(deadline_ms=2_000, request_timeout_ms=2_000)
async def test_a_body_that_stays_changed_is_corrupt(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    server.always["GET"] = Fault("changed")
    with pytest.raises(CorruptDataError, match="crc32c"):
        await store.get(KEY)


@over_paths()
async def test_a_range_that_comes_short_is_read_again(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    server.plan("GET", Fault("short"), Fault("cut"))
    assert await store.get_range(KEY, 1, 3) == b"yte"
    with pytest.raises(CorruptDataError, match="5 bytes"):
        await store.get_range(KEY, 1, 5)


@over_paths(request_timeout_ms=1_000)
async def test_a_stalled_request_is_given_up_and_sent_again(server: FaultyS3, store: S3Handler) -> None:
    server.plan("PUT", Fault("stall"))
    await put(store)
    server.plan("GET", Fault("stall"))
    assert await store.get(KEY) == b"bytes"
    assert (store.counters.timeouts, store.counters.retries) == (2, 2)


@over_paths(request_timeout_ms=1_000)
async def test_a_put_that_was_done_and_stalled_is_a_success(server: FaultyS3, store: S3Handler) -> None:
    server.plan("PUT", Fault("stall-done"))
    await put(store)
    assert (server.writes, store.counters.lost_answers) == (1, 1)


@over_paths(deadline_ms=2_000, request_timeout_ms=2_000)
async def test_a_sick_store_is_an_error_in_time_and_well_again_later(server: FaultyS3, store: S3Handler) -> None:
    server.always["PUT"] = SLOW_DOWN
    results = await asyncio.gather(*(put(store, key=f"k/{number}") for number in range(8)), return_exceptions=True)
    assert all(isinstance(result, StoreError) and "bucket 'memq' at http" in str(result) for result in results)
    assert store.counters.slow_downs == server.count("PUT")
    assert not store.breaker.is_closed
    server.always.clear()
    while not store.breaker.is_closed:
        with suppress(StoreError):  # on a slow machine its time is over before the breaker asks again
            await put(store)


@over_paths()
async def test_a_slow_put_is_sent_a_second_time(server: FaultyS3, store: S3Handler) -> None:
    for number in range(60):
        await put(store, key=f"k/{number}")
    server.plan("PUT", Fault("stall"))
    await put(store)
    assert (store.counters.hedges_won >= 1, store.counters.retries) == (True, 0)
    await asyncio.gather(*(put(store, key=f"many/{number}") for number in range(60)))
    assert store.counters.hedges <= store.counters.put_requests * 0.05 + 1


@over_paths()
async def test_a_slow_put_that_was_done_is_recognised_by_its_second(server: FaultyS3, store: S3Handler) -> None:
    for number in range(60):
        await put(store, key=f"k/{number}")
    before = store.counters.lost_answers  # on a slow machine one of these is sent twice, too
    server.plan("PUT", Fault("stall-done"))
    await put(store)
    assert (store.counters.lost_answers - before, store.counters.retries) == (1, 0)
    assert server.writes == 61


@over_paths()
async def test_a_cancelled_put_lets_go_of_its_buffers(server: FaultyS3, store: S3Handler) -> None:
    server.always["PUT"] = Fault("stall")
    buffer = bytearray(4 << 20)
    task = asyncio.create_task(
        store.put(KEY, [memoryview(buffer)[: 1 << 20], memoryview(buffer)[1 << 20 :]], crc32c(buffer))
    )
    await server.came.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    buffer.clear()  # raises BufferError while anybody reads it


@over_paths(part_bytes=5 << 20)
async def test_a_long_range_is_read_in_parts(server: FaultyS3, store: S3Handler) -> None:
    body = bytes(range(256)) * (12 << 12)
    await put(store, body)
    server.plan("GET", Fault("cut"), SLOW_DOWN)
    assert await store.get_range(KEY, 3, len(body) - 7) == body[3:-4]
    assert server.count("GET") == 3 + 2
    with pytest.raises(CorruptDataError, match=f"{len(body)} bytes"):
        await store.get_range(KEY, 3, len(body))


@over_paths()
async def test_a_listing_continues_where_it_failed(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    one = server.objects.pop(WHOLE)
    server.objects.update({f"f/k/{number:04d}": one for number in range(1_500)})
    server.plan("LIST", SLOW_DOWN, Fault("answer"), Fault("close"), Fault("answer", 500, "InternalError"))
    assert [entry.key async for entry in store.list("k/")] == [f"k/{number:04d}" for number in range(1_500)]
    assert 3 - store.counters.retries in hidden(store)


@over_paths(deadline_ms=1_500, request_timeout_ms=1_000)
async def test_the_check_names_every_right_that_is_missing(server: FaultyS3, store: S3Handler) -> None:
    for method in ("LIST", "GET", "DELETE"):
        server.always[method] = Fault("answer", 403, "AccessDenied")
    with pytest.raises(DeniedError) as caught:
        await store.check()
    lines = str(caught.value).split("\n")
    assert [line.split()[0] for line in lines[1:]] == ["s3:ListBucket", "s3:GetObject", "s3:DeleteObject"]
    server.always = {"PUT": Fault("answer", 403, "AccessDenied")}
    with pytest.raises(DeniedError, match="s3:PutObject"):
        await store.check()
    server.always = {}
    await store.check()
    requests = len(server.asked)
    await store.check()  # proven a moment ago: is the store there?
    assert [asked.method for asked in server.asked[requests:]] == ["GET"]
    server.always = {"GET": Fault("answer", 403, "AccessDenied")}  # as where one may not list: the object is not there
    await store.check()
    server.always = {"GET": Fault("answer", 503, "SlowDown")}
    with pytest.raises(StoreError):
        await store.check()


@over_paths()
async def test_answers_of_another_server_are_no_missing_object(server: FaultyS3, store: S3Handler) -> None:
    server.always = {method: Fault("answer", 404, "NoSuchKey") for method in ("LIST", "PUT")}
    for deletes in (True, False):
        with pytest.raises(InvalidRequestError, match="as no S3 does") as caught:
            await store.check(deletes=deletes)
        assert "endpoint" in caught.value.hint


@over_paths(**TIMES)
async def test_a_refusal_without_a_reason_is_never_final(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    for status in (400, 403, 404):
        refused = Fault("answer", status)
        server.always = {"LIST": refused, "PUT": refused, "GET": refused, "DELETE": refused}
        calls = (store.check(), put(store, key="k"), store.get(KEY), store.get_range(KEY, 0, 1), store.delete(KEY))
        for call in calls:
            with pytest.raises(StoreError, match=f"says {status}") as caught:
                await call
            assert "endpoint" in caught.value.hint
    assert server.objects[WHOLE].body == b"bytes"


@over_paths()
async def test_a_read_is_tried_again_after_a_refusal_without_a_reason(server: FaultyS3, store: S3Handler) -> None:
    await put(store)
    for fault in (Fault("answer", 400), Fault("answer", 400, "RequestTimeout"), Fault("answer", 403)):
        for read in (store.get, lambda key: store.get_range(key, 0, 5)):
            server.plan("GET", fault, fault)
            assert await read(KEY) == b"bytes"
        server.plan("LIST", fault)
        assert [entry.key async for entry in store.list("c/")] == [KEY]
        server.plan("DELETE", fault)
        await store.delete("c/nothing")


@over_paths()
async def test_a_put_that_is_done_after_its_error_is_a_success(server: FaultyS3, store: S3Handler) -> None:
    server.plan("PUT", Fault("late", 500, "InternalError"))
    await put(store)
    assert (server.objects[WHOLE].body, server.writes, store.counters.lost_answers) == (b"bytes", 1, 1)


@over_paths()
async def test_one_wrong_look_at_a_taken_key_fences_nobody(server: FaultyS3, store: S3Handler) -> None:
    await put(store, b"other bytes", key="c/topics/clicks/two")
    server.plan("PUT", Fault("lost"))
    server.plan("HEAD", Fault("other"))
    await put(store)
    assert server.count("HEAD") == 2


@over_paths()
async def test_a_slow_body_is_a_whole_one(server: FaultyS3, store: S3Handler) -> None:
    await put(store, bytes(range(200)))
    server.plan("GET", Fault("slow"), Fault("slow"))
    assert await store.get(KEY) == bytes(range(200))
    assert await store.get_range(KEY, 10, 50) == bytes(range(10, 60))


@over_paths()
async def test_a_server_that_overwrites_is_refused(server: FaultyS3, store: S3Handler) -> None:
    server.put_if_absent = False
    with pytest.raises(InvalidRequestError, match="If-None-Match"):
        await store.check()
    assert not server.objects


@over_paths(**TIMES)
async def test_unreachable_store_is_named(server: FaultyS3, store: S3Handler) -> None:
    for method in ("PUT", "HEAD"):
        server.always[method] = Fault("close")
    with pytest.raises(MemqError, match="gives no answer") as caught:
        await put(store)
    assert isinstance(caught.value, StoreError)
    assert "endpoint" in caught.value.hint


@pytest.mark.parametrize("data_path", ["obstore", "aiobotocore"])
def test_tls_with_an_own_authority(data_path: str, tmp_path: Path) -> None:
    ours, authority = server_context(tmp_path, "127.0.0.1")
    named, other_authority = server_context(tmp_path, "another.test")

    async def works() -> None:
        async with faulty_s3(ours) as server:
            store = place_of(server, data_path=data_path, ca_file=str(authority)).open("f")
            await put(store)
            assert await store.get(KEY) == b"bytes"
            await store.close()

    async def fails(context: ssl.SSLContext, file: Path) -> None:
        async with faulty_s3(context) as server:
            store = place_of(server, data_path=data_path, ca_file=str(file), **TIMES).open("f")
            with pytest.raises(StoreError, match="gives no answer") as caught:
                await put(store)
            assert "ca_file" in caught.value.hint
            await store.close()

    asyncio.run(works())
    asyncio.run(fails(ours, other_authority))
    asyncio.run(fails(named, other_authority))  # the certificate is for another name


@pytest.mark.parametrize("turns", range(10))
def test_the_server_ends_whatever_a_client_has_just_begun(turns: int) -> None:
    """A connection whose task had not begun when it was cancelled stayed open: the end waited for it for ever."""

    async def connect_and_leave() -> None:
        async with asyncio.timeout(HANG_S), faulty_s3() as server:
            host, port = server.endpoint.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))):
                for _ in range(turns):
                    await asyncio.sleep(0)

    asyncio.run(connect_and_leave())
