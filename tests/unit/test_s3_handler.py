"""The S3 store on a fake data path, on virtual time: requests, times and counters."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, DeniedError, InvalidRequestError, ObjectExistsError, StoreError
from memq.limits import MIB
from memq.runtime.runtime import Runtime
from memq.storage_handlers import KEPT_CHECK, ObjectEntry
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.data_path import ObjectHead, PutOrder, release_views
from memq.storage_handlers.s3.handler import CHECK_S, S3Handler
from memq.storage_handlers.s3.settings import read_bucket
from tests.skipping_loop import LongestWait, LoopClock, now_s, run_skipping, skip

BODY = b"bytes"
KEY = "c/one"
SLOW_DOWN = StoreAnswer(503, "SlowDown")
BROKEN = StoreAnswer(500, "InternalError")
DENIED = StoreAnswer(403, "AccessDenied")
CONFLICT = StoreAnswer(409, "ConditionalRequestConflict")


@dataclass
class ScriptedPath:
    """A bucket in memory. `answers` are raised in order by the requests of a kind, `always` by all of them."""

    objects: dict[str, tuple[bytes, int | None]] = field(default_factory=dict)
    answers: dict[str, list[StoreAnswer]] = field(default_factory=dict)
    always: dict[str, StoreAnswer] = field(default_factory=dict)
    short: int = 0  # bytes that the next whole or ranged reads lack
    stalls: dict[str, list[float]] = field(default_factory=dict)  # how long the next requests of a kind take
    asked: list[tuple[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each was asked
    opened: bool = False
    closed: bool = False
    under_way: int = 0
    under_way_most: int = 0

    async def _answer(self, kind: str, key: str) -> None:
        assert self.opened
        self.asked.append((kind, key))
        self.times.append(now_s())
        self.under_way += 1
        self.under_way_most = max(self.under_way_most, self.under_way)
        stalls = self.stalls.get(kind)
        try:
            await skip(stalls.pop(0) if stalls else 0.001)
        finally:
            self.under_way -= 1
        if self.answers.get(kind):
            raise self.answers[kind].pop(0)
        if kind in self.always:
            raise self.always[kind]
        if kind in ("get", "head", "range") and key not in self.objects:
            raise StoreAnswer(404, "NoSuchKey")

    async def open(self) -> None:
        self.opened = True

    async def put(self, order: PutOrder) -> None:
        await self._answer("put", order.key)
        if order.key in self.objects:
            raise StoreAnswer(412, "PreconditionFailed")
        self.objects[order.key] = (b"".join(order.views), order.checksum)

    async def get(self, key: str) -> tuple[bytes, ObjectHead]:
        await self._answer("get", key)
        body, checksum = self.objects[key]
        return self._cut(body), ObjectHead(len(body), checksum)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        await self._answer("range", key)
        return self._cut(self.objects[key][0][offset : offset + length])

    def _cut(self, body: bytes) -> bytes:
        short, self.short = self.short, 0
        return body[: len(body) - short]

    async def head(self, key: str) -> ObjectHead:
        await self._answer("head", key)
        body, checksum = self.objects[key]
        return ObjectHead(len(body), checksum)

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectEntry]]:
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        for at in range(0, len(keys), 2):
            await self._answer("list", after)
            yield [ObjectEntry(key, len(self.objects[key][0]), 7) for key in keys[at : at + 2]]

    async def delete(self, key: str) -> None:
        await self._answer("delete", key)
        self.objects.pop(key, None)

    async def close(self) -> None:
        self.closed = True

    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.asked)


Test = Callable[[ScriptedPath, S3Handler], Awaitable[None]]


def over(test: Test, parts: ScriptedPath | None = None, **settings: int) -> ScriptedPath:
    """Run a test on a store in folder `f` of a bucket."""
    path = ScriptedPath()
    section: dict[str, tuple[object, str]] = {name: (value, "the test") for name, value in settings.items()}
    bucket = read_bucket("s3://memq/f?endpoint=http://h", section)
    store = S3Handler(bucket, path, parts or path, Runtime(clock=LoopClock(), random=LongestWait()))

    async def work() -> None:
        await test(path, store)

    run_skipping(work())
    return path


async def put(store: S3Handler, body: bytes = BODY, key: str = KEY) -> None:
    await store.put(key, [body], crc32c(body))


# ---- what the handler asks -----------------------------------------------------------------------


def test_while_the_breaker_is_open_a_call_waits_or_says_what_the_last_one_met() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.always["head"] = BROKEN
        tasks = [asyncio.create_task(store.size(KEY)) for _ in range(5)]
        await skip(0.05)
        assert not store.breaker.is_closed
        asked = len(path.asked)
        late = asyncio.create_task(store.size(KEY))
        await skip(0.04)
        assert len(path.asked) == asked, "it waits"
        path.always.clear()
        path.objects[f"f/{KEY}"] = (BODY, None)
        assert await late == 5
        assert [await task for task in tasks] == [5] * 5
        path.always["head"] = BROKEN
        results = await asyncio.gather(*(store.size(KEY) for _ in range(8)), return_exceptions=True)
        assert all(isinstance(each, StoreError) and "says 500 InternalError" in str(each) for each in results)
        notes = Counter(note for each in results if isinstance(each, StoreError) for note in each.__notes__)
        assert "not asked again so soon: it has failed too often" in notes
        assert dict(store_counts(store))["breaker_open"]
        path.always["head"] = StoreAnswer(400)
        await skip(1.1)
        with pytest.raises(StoreError):
            await store.size(KEY)
        assert store.breaker.is_closed, "a refusal is an answer"

    over(test, deadline_ms=2_000, request_timeout_ms=1_000)


def store_counts(store: S3Handler) -> list[tuple[str, int]]:
    return [(count.name, int(count.value)) for count in store.counts()]


def test_no_request_is_sent_for_what_is_no_key() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        calls = (put(store, key="a/../b"), store.get("a b"), store.get_range("", 0, 1), store.size("/"))
        for call in (*calls, store.delete("a//b")):
            with pytest.raises(InvalidRequestError):
                await call

    assert over(test).asked == []


def test_a_taken_key_is_ours_by_its_mark_or_else_by_its_bytes() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        for mark, body, ours, asked in (
            (crc32c(BODY), BODY, True, {"put": 1, "head": 1}),
            (None, BODY, True, {"put": 1, "head": 1, "get": 1}),
            (7, BODY, False, {"put": 2, "head": 2}),
            (None, b"longer", False, {"put": 2, "head": 2}),
        ):
            path.asked.clear()
            before = store.counters.lost_answers
            path.objects[f"f/{KEY}"] = (body, mark)
            if ours:
                await put(store)
            else:
                with pytest.raises(ObjectExistsError, match=f"another object of {len(body)} bytes has the key"):
                    await put(store)
            assert path.kinds() == asked
            assert store.counters.lost_answers - before == int(ours)
        path.always = {"put": DENIED}
        with pytest.raises(DeniedError):
            await put(store)

    over(test)


@pytest.mark.parametrize("kind", ["put", "head", "range"])
def test_a_call_has_one_deadline_for_all_that_it_asks(kind: str) -> None:
    """Four vain tries take 1.5 s; what then fails has the rest of the time, and not all of it once more."""

    async def test(path: ScriptedPath, store: S3Handler) -> None:
        absent, damaged = StoreAnswer(404, "NoSuchKey"), StoreAnswer(400, "BadDigest")
        if kind == "range":
            path.objects[f"f/{KEY}"] = (BODY, None)
            path.answers, path.always = {"range": [StoreAnswer(416, "InvalidRange")] * 4}, {"range": damaged}
        else:
            path.answers = {"put": [CONFLICT] * 4, "head": [absent] * 4}
            path.always = {"put": CONFLICT, "head": damaged} if kind == "head" else {"put": damaged}
        with pytest.raises(StoreError, match="BadDigest"):
            await (store.get_range(KEY, 0, 3) if kind == "range" else put(store))
        first = "range" if kind == "range" else "put"
        times = [at for (asked, _), at in zip(path.asked, path.times, strict=True) if asked == first]
        assert [round(later - earlier, 1) for earlier, later in pairwise(times)][:4] == [0.1, 0.2, 0.4, 0.8]
        assert 2.0 < now_s() < 3.0

    over(test, deadline_ms=3_000, request_timeout_ms=1_000)


@pytest.mark.parametrize(
    ("kind", "hedged"), [("put", True), ("get", True), ("range", True), ("head", False), ("delete", False)]
)
def test_slow_puts_and_reads_are_sent_twice_and_nothing_else(kind: str, *, hedged: bool) -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects[f"f/{KEY}"] = (BODY, crc32c(BODY))
        calls: dict[str, Callable[[int], Awaitable[object]]] = {
            "put": lambda number: put(store, key=f"k/{number}"),
            "get": lambda number: store.get(KEY),
            "range": lambda number: store.get_range(KEY, 0, 5),
            "head": lambda number: store.size(KEY),
            "delete": lambda number: store.delete("k/none"),
        }
        for number in range(60):
            await calls[kind](number)
        begin_s, path.stalls = now_s(), {kind: [4.0]}
        await calls[kind](60)
        assert (now_s() - begin_s < 0.1, store.counters.hedges) == (hedged, int(hedged))

    over(test)


def test_large_objects_have_the_time_of_their_size() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        large = bytes(4 * MIB)
        path.objects[f"f/{KEY}"] = (large, None)
        path.stalls = {"range": [2.5], "get": [2.5], "put": [2.5]}
        await store.get_range(KEY, 0, 4 * MIB)
        await put(store, large)
        assert path.kinds() == {"range": 1, "put": 1, "head": 1, "get": 1}
        assert store.counters.timeouts == 0

    over(test, request_timeout_ms=1_000)


def test_a_part_that_fails_ends_the_others() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects[f"f/{KEY}"] = (bytes(15 * MIB), None)
        path.stalls, path.answers = {"range": [0.5, 3.0, 3.0]}, {"range": [DENIED]}
        with pytest.raises(DeniedError):
            await store.get_range(KEY, 0, 15 * MIB)
        assert (now_s(), path.under_way) == (0.5, 0)

    over(test, part_bytes=5 * MIB)


def test_bytes_that_are_not_those_of_the_checksum_are_not_stored() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        with pytest.raises(CorruptDataError, match=f"have crc32c {crc32c(BODY):08x}, not 00000007"):
            await store.put(KEY, [b"by", b"", b"tes"], 7)
        await store.put(KEY, [b"by", b"", b"tes"], crc32c(BODY))
        assert path.objects == {f"f/{KEY}": (BODY, crc32c(BODY))}

    assert over(test).kinds() == {"put": 1}


def test_a_large_object_goes_over_the_path_for_parts_and_both_are_closed() -> None:
    parts = ScriptedPath()
    large = bytes(5 * MIB)

    async def test(path: ScriptedPath, store: S3Handler) -> None:
        await put(store, large[:-1], "c/small")
        await put(store, large, "c/large")
        assert (list(path.objects), list(parts.objects)) == (["f/c/small"], ["f/c/large"])
        await store.close()

    path = over(test, parts, multipart_bytes_min=5 * MIB, part_bytes=5 * MIB)
    assert (path.closed, parts.closed) == (True, True)


def test_a_key_that_is_neither_free_nor_taken_is_tried_until_the_deadline() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.answers["put"] = [CONFLICT]
        await put(store)
        assert path.kinds() == {"put": 2, "head": 1}
        path.always["put"] = CONFLICT
        begin_s = now_s()
        with pytest.raises(StoreError, match="neither free nor taken"):
            await put(store, key="c/other")
        assert 1.0 < now_s() - begin_s < 3.0

    over(test, deadline_ms=3_000, request_timeout_ms=1_000)


@pytest.mark.parametrize("checked", [True, False])
def test_a_body_is_compared_with_its_mark_unless_the_caller_does(*, checked: bool) -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects[f"f/{KEY}"] = (BODY, 7)
        path.objects["f/c/plain"] = (BODY, None)
        assert await store.get("c/plain", checked=checked) == BODY
        if checked:
            with pytest.raises(CorruptDataError, match="not 00000007"):
                await store.get(KEY)
        else:
            assert await store.get(KEY, checked=False) == BODY
        path.short = 1
        assert await store.get("c/plain") == BODY, "a short one is read again"

    over(test, deadline_ms=2_000, request_timeout_ms=1_000)


def test_ranges_are_read_in_parts_at_a_bounded_pace() -> None:
    body = bytes(range(256)) * (16 << 10)  # 4 MiB

    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects[f"f/{KEY}"] = (body * 4, None)
        assert await store.get_range(KEY, 1, 5 * MIB) == (body * 4)[1 : 1 + 5 * MIB]
        assert path.kinds() == {"range": 1}
        assert await store.get_range(KEY, 1, 5 * MIB + 1) == (body * 4)[1 : 2 + 5 * MIB]
        assert path.kinds() == {"range": 3}
        assert await store.get_range(KEY, 0, 16 * MIB) == body * 4
        assert path.under_way_most == 2
        assert path.kinds() == {"range": 7}
        with pytest.raises(CorruptDataError, match=f"{16 * MIB} bytes, asked for 1 from {16 * MIB}"):
            await store.get_range(KEY, 16 * MIB, 1)
        assert await store.get_range(KEY, 16 * MIB, 0) == b""
        with pytest.raises(CorruptDataError):
            await store.get_range(KEY, 16 * MIB + 1, 0)
        path.answers["range"] = [StoreAnswer(416, "InvalidRange")]
        assert await store.get_range(KEY, 3, 1) == b"\x03", "the object is longer than that answer says"

    over(test, part_bytes=5 * MIB, parts_in_flight_max=2)


def test_a_range_that_always_comes_short_is_an_error_in_time() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects[f"f/{KEY}"] = (BODY, None)
        path.always["range"] = StoreAnswer(416, "InvalidRange")
        with pytest.raises(StoreError, match="0 bytes came of 3 from 1"):
            await store.get_range(KEY, 1, 3)
        assert 1.0 < now_s() < 2.0
        assert path.kinds()["range"] == path.kinds()["head"] > 2

    over(test, deadline_ms=2_000, request_timeout_ms=1_000)


def test_a_listing_that_failed_is_asked_for_behind_the_last_key_that_was_seen() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        for number in range(5):
            path.objects[f"f/k/{number}"] = (bytes(number), None)
        path.answers["list"] = [BROKEN]
        found = []
        async for entry in store.list("k/"):
            found.append((entry.key, entry.size, entry.modified_ms))
            if len(found) == 2:
                path.answers["list"] = [SLOW_DOWN]
        assert found == [(f"k/{number}", number, 7) for number in range(5)]
        assert [after for kind, after in path.asked if kind == "list"] == ["", "", "", "f/k/1", "f/k/1"]

    over(test)


def test_delete_of_an_absent_object_succeeds() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.answers["delete"] = [StoreAnswer(404, "NoSuchKey")]
        await store.delete(KEY)
        path.answers["delete"] = [DENIED]
        with pytest.raises(DeniedError, match=f"^object '{KEY}' not deleted: bucket 'memq'"):
            await store.delete(KEY)
        path.objects["f/k/1"], path.answers["list"] = (b"", None), [DENIED]
        with pytest.raises(DeniedError, match=r"^objects under 'k/' not listed: "):
            await anext(store.list("k/"))

    over(test)


# ---- rights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deletes", [True, False])
def test_rights_are_proven_once_a_minute_and_the_store_is_asked_between(*, deletes: bool) -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects["f/memq-check/x"] = (b"", None)
        await skip(40)
        await store.check(deletes=deletes)
        begin_s = now_s()
        proven = path.kinds()
        assert proven["put"] == 2 or (not deletes and proven["put"] == 1)
        assert (proven["list"] > 0, proven["delete"]) == (deletes, int(deletes))
        kept = {"f/memq-check/x"} if deletes else {"f/memq-check/x", f"f/{KEPT_CHECK}"}
        assert set(path.objects) == kept
        await skip(CHECK_S - (now_s() - begin_s) - 0.01)
        await store.check(deletes=deletes)
        assert path.kinds() - proven == {"get": 1}
        assert path.asked[-1] == ("get", f"f/{KEPT_CHECK}")
        await skip(1)
        before = path.kinds()["put"]
        await store.check(deletes=deletes)
        assert path.kinds()["put"] > before

    over(test)


@pytest.mark.parametrize(
    ("denied", "lines"),
    [
        (("get",), ["1 of 4 rights are missing", "s3:GetObject"]),
        (("list", "delete"), ["2 of 4 rights are missing", "s3:ListBucket", "s3:DeleteObject"]),
        (("put",), ["1 of 4 rights are missing", "s3:PutObject"]),
    ],
)
def test_missing_rights_are_counted_and_named(denied: tuple[str, ...], lines: list[str]) -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects["f/memq-check/x"] = (b"", None)
        path.always = dict.fromkeys(denied, DENIED)
        with pytest.raises(DeniedError) as caught:
            await store.check()
        head, *rest = str(caught.value).split("\n  ")
        assert [head.partition(": ")[2], *(line.split()[0] for line in rest)] == lines
        if {"get", "put"}.isdisjoint(denied):
            await store.check(deletes=False)
            return
        with pytest.raises(DeniedError, match="1 of 2 rights are missing"):
            await store.check(deletes=False)

    over(test)


def test_wrong_keys_or_bucket_are_no_missing_right() -> None:
    async def test(path: ScriptedPath, store: S3Handler) -> None:
        path.objects["f/memq-check/x"] = (b"", None)
        path.always = {"list": StoreAnswer(403, "SignatureDoesNotMatch")}
        with pytest.raises(DeniedError, match=r"not checked.*SignatureDoesNotMatch") as caught:
            await store.check()
        assert "secret_access_key" in caught.value.hint
        path.always = {"list": StoreAnswer(404, "NoSuchBucket")}
        with pytest.raises(InvalidRequestError, match="does not exist"):
            await store.check()
        path.always, path.short = {}, 1
        with pytest.raises(StoreError, match="was read back with other bytes"):
            await store.check()
        path.always = {"get": StoreAnswer(412, "PreconditionFailed")}
        with pytest.raises(StoreError):
            await store.check()
        assert path.kinds()["delete"] == 2, "what was put is deleted all the same"

    over(test)


# ---- memory --------------------------------------------------------------------------------------


def test_memory_is_waited_for_in_growing_pauses_also_when_cancelled() -> None:
    async def work() -> None:
        await release_views([memoryview(b"free")])
        assert now_s() == 0.0
        view = memoryview(bytearray(8))
        reader = re.finditer(b"x", view)  # reads the memory as long as it exists
        task = asyncio.create_task(release_views([memoryview(b"free"), view]))
        await skip(0.5)
        rounds = 0
        while rounds < 20 and not task.done():
            await skip(0.05)
            rounds += 1
        assert rounds == 20
        task.cancel()
        await skip(0.1)
        assert not task.done(), "the memory is read still"
        del reader
        await skip(0.06)
        assert task.cancelled()

    run_skipping(work())
