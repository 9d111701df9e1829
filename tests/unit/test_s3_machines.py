"""The decisions of the S3 store without a server: answers, breaker, hedges, settings, parts."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    SSOError,
)
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    NotFoundError,
    StoreError,
    UnknownSettingError,
)
from memq.storage_handlers.s3.aio_path import _answers
from memq.storage_handlers.s3.answers import Meaning, StoreAnswer, error_for, meaning
from memq.storage_handlers.s3.attempts import Attempts, S3Counters
from memq.storage_handlers.s3.data_path import cut_parts, head_of
from memq.storage_handlers.s3.obstore_path import read_answer
from memq.storage_handlers.s3.request_policy import (
    HEDGES_BURST_MAX,
    SAMPLES_MIN,
    BreakerState,
    CircuitBreaker,
    Hedger,
    Latencies,
)
from memq.storage_handlers.s3.settings import read_bucket
from tests.skipping_loop import run_skipping, skip, skipping_runtime

ANSWERS = [
    (0, "", Meaning.TRY_AGAIN, StoreError),
    (200, "BadDigest", Meaning.DAMAGED, CorruptDataError),
    (400, "BadDigest", Meaning.DAMAGED, StoreError),
    (400, "RequestTimeout", Meaning.TRY_AGAIN, StoreError),
    (400, "ExpiredToken", Meaning.DENIED, DeniedError),
    (400, "InvalidArgument", Meaning.REFUSED, InvalidRequestError),
    (301, "PermanentRedirect", Meaning.REFUSED, InvalidRequestError),
    (401, "", Meaning.DENIED, DeniedError),
    (403, "AccessDenied", Meaning.DENIED, DeniedError),
    (400, "", Meaning.UNEXPLAINED, StoreError),
    (400, "ServerBusyToday", Meaning.UNEXPLAINED, StoreError),
    (400, "KMS.ThrottlingException", Meaning.SLOW_DOWN, StoreError),
    (400, "InvalidPart", Meaning.TRY_AGAIN, StoreError),
    (403, "", Meaning.UNEXPLAINED, StoreError),
    (403, "Forbidden", Meaning.UNEXPLAINED, StoreError),
    (404, "", Meaning.UNEXPLAINED, StoreError),
    (404, "NoSuchKey", Meaning.NO_KEY, NotFoundError),
    (404, "NoSuchBucket", Meaning.NO_BUCKET, InvalidRequestError),
    (409, "ConditionalRequestConflict", Meaning.TAKEN, StoreError),
    (412, "PreconditionFailed", Meaning.TAKEN, StoreError),
    (416, "InvalidRange", Meaning.NO_RANGE, InvalidRequestError),
    (429, "", Meaning.SLOW_DOWN, StoreError),
    (500, "InternalError", Meaning.TRY_AGAIN, StoreError),
    (501, "NotImplemented", Meaning.REFUSED, InvalidRequestError),
    (503, "SlowDown", Meaning.SLOW_DOWN, StoreError),
    (503, "", Meaning.TRY_AGAIN, StoreError),
]
SECTION = {"hedge_permille": (50, "the test"), "request_timeout_ms": (10_000, "the test")}


@pytest.mark.parametrize(("status", "code", "expected", "error"), ANSWERS)
def test_an_answer_has_one_meaning_and_one_error(
    status: int, code: str, expected: Meaning, error: type[MemqError]
) -> None:
    assert meaning(status, code) is expected
    raised = error_for(StoreAnswer(status, code, "text"), "object 'k' not stored", "bucket 'b'", "k")
    assert type(raised) is error
    assert "k" in str(raised)


@pytest.mark.parametrize(
    ("status", "expected"), [(400, Meaning.UNEXPLAINED), (403, Meaning.DENIED), (404, Meaning.NO_KEY)]
)
def test_the_answer_to_a_head_has_no_code(status: int, expected: Meaning) -> None:
    assert StoreAnswer(status, has_body=False).meaning is expected


def test_every_meaning_is_met() -> None:
    assert {expected for _, _, expected, _ in ANSWERS} == set(Meaning)


@given(st.integers(0, 599), st.text(max_size=20))
def test_any_answer_has_a_meaning(status: int, code: str) -> None:
    assert meaning(status, code) in Meaning


@given(st.text(max_size=300))
def test_any_text_of_the_library_is_an_answer(text: str) -> None:
    assert read_answer(text).meaning in Meaning


def test_the_librarys_text_is_read() -> None:
    text = 'status: 503,\n body: "<Error><Code>SlowDown</Code><Message>Please reduce</Message></Error>"'
    answer = read_answer(text)
    assert (answer.status, answer.code, answer.text) == (503, "SlowDown", "Please reduce")
    text = "Error performing GET http://h:1/b/k - HTTP error: error sending request\n\nDebug source:\n    Connect,\n"
    assert (read_answer(text).status, read_answer(text).text) == (0, "error sending request: Connect")
    causes = 'source: "one cause",\n    message: "another cause",\n    error: the last cause,\n'
    assert read_answer(f"HTTP error: no answer\n    {causes}").text == "no answer: another cause: the last cause"
    causes = "UnknownIssuer, CertExpired, BadSignature"
    assert read_answer(f"HTTP error: no trust\n{causes}").text == "no trust: UnknownIssuer: CertExpired"


def test_a_bucket_of_another_region_is_no_server_that_is_away() -> None:
    answer = read_answer(
        "Generic S3 error: Error performing list request: Error performing GET https://b.s3.us-east-1.amazonaws.com "
        "in 1ms - Received redirect without LOCATION, this normally indicates an incorrectly configured region"
    )
    assert (answer.status, answer.meaning) == (301, Meaning.REFUSED)


def test_keys_that_can_not_be_had_are_no_server_that_is_away() -> None:
    answer = read_answer(
        "The operation lacked valid authentication credentials for path External AWS credential provider: "
        "NoRegionError: You must specify a region.\n\nDebug source:\nUnauthenticated"
    )
    assert (answer.status, answer.text) == (0, "NoRegionError: You must specify a region.")
    error = error_for(answer, "object 'k' not stored", "bucket 'b'", "k")
    assert isinstance(error, StoreError)  # a role's keys may come later
    assert "boto3" in error.hint


@pytest.mark.parametrize(
    ("error", "status", "code", "text"),
    [
        (NoCredentialsError(), 401, "NoCredentials", "Unable to locate credentials"),
        (PartialCredentialsError(provider="env", cred_var="secret"), 401, "NoCredentials", "secret"),
        (NoRegionError(), 0, "NoCredentials", "specify a region"),
        (CredentialRetrievalError(provider="role", error_msg="gone"), 0, "NoCredentials", "gone"),
        (SSOError(), 0, "NoCredentials", "unspecified"),
        (RuntimeError(""), 0, "NoCredentials", "RuntimeError"),
        (ValueError("no JSON"), 0, "NoCredentials", "no JSON"),
        (EndpointConnectionError(endpoint_url="http://h"), 0, "", "http://h"),
        (aiohttp.ClientPayloadError("cut"), 0, "", "cut"),
        (OSError(), 0, "", "OSError"),
        (KeyError("ContentLength"), 0, "", "an answer without 'ContentLength'"),
        (ClientError({"Error": {"Code": "SlowDown", "Message": "x" * 400}}, "Put"), 0, "SlowDown", "x" * 300),
        (ClientError({"Error": {"Code": "404"}, "ResponseMetadata": {"HTTPStatusCode": 404}}, "Head"), 404, "", ""),
        (ClientError({}, "Put"), 0, "", ""),
    ],
)
def test_each_error_of_the_second_library_is_an_answer(error: Exception, status: int, code: str, text: str) -> None:
    for has_body in (True, False):
        with pytest.raises(StoreAnswer) as caught, _answers(has_body=has_body):
            raise error
        answer = caught.value
        assert (answer.status, answer.code) == (status, code)
        assert text in answer.text
        assert len(answer.text) <= 300
        if isinstance(error, ClientError):
            assert answer.has_body is has_body


# ---- breaker ---------------------------------------------------------------------------------


def failed(breaker: CircuitBreaker, times: int, now_s: float = 0.0) -> None:
    for _ in range(times):
        breaker.failed(now_s)


def state_of(breaker: CircuitBreaker) -> BreakerState:
    return breaker.state


def test_the_breaker_opens_after_failures_in_a_row_and_lets_one_try_at_a_time() -> None:
    breaker = CircuitBreaker(random.Random(1), failures_max=3, pause_s_base=1.0, pause_s_max=8.0)
    failed(breaker, 2)
    breaker.succeeded()
    failed(breaker, 2)
    assert breaker.ask(0.0, 5.0) == 0.0
    failed(breaker, 1)
    assert state_of(breaker) is BreakerState.OPEN
    pause_s = breaker.ask(0.0, 5.0)
    assert 0.0 < pause_s <= 2.0
    assert breaker.ask(pause_s, 5.0) == 0.0
    assert state_of(breaker) is BreakerState.TRYING
    assert breaker.ask(pause_s, 5.0) == pytest.approx(5.0)  # the others wait for the one that tries
    breaker.succeeded()
    assert breaker.is_closed
    assert breaker.opened == 1


def test_a_try_that_nobody_hears_of_holds_nobody_up_for_ever() -> None:
    breaker = CircuitBreaker(random.Random(1), failures_max=1)
    failed(breaker, 1)
    assert breaker.ask(10.0, 5.0) == 0.0
    breaker.cancelled(11.0)
    assert breaker.ask(11.0, 5.0) == 0.0
    assert breaker.ask(16.0, 5.0) == 0.0


def test_pauses_grow_to_their_bound_and_no_further() -> None:
    breaker = CircuitBreaker(random.Random(1), failures_max=1, pause_s_base=0.1, pause_s_max=1.0)
    failed(breaker, 1_000)
    assert breaker.ask(0.0, 5.0) <= 1.0
    assert breaker.opened == 1


@given(st.lists(st.sampled_from(["ask", "failed", "succeeded", "left", "later"]), max_size=60), st.integers())
def test_the_breaker_never_shuts_for_good(events: list[str], seed: int) -> None:
    breaker, now_s = CircuitBreaker(random.Random(seed), failures_max=2), 0.0
    for event in events:
        match event:
            case "ask":
                assert 0.0 <= breaker.ask(now_s, 3.0) <= 3.0
            case "failed":
                breaker.failed(now_s)
            case "succeeded":
                breaker.succeeded()
                assert breaker.is_closed
            case "left":
                breaker.cancelled(now_s)
            case _:
                now_s += 0.5
    assert breaker.ask(now_s + 3.0, 3.0) == 0.0


# ---- hedges ----------------------------------------------------------------------------------


def test_the_p95_is_known_after_some_and_forgets_the_old() -> None:
    latencies = Latencies()
    for _ in range(SAMPLES_MIN - 1):
        latencies.add(9.0)
    assert latencies.p95_s() is None
    for number in range(200):
        latencies.add(float(number))
    p95_s = latencies.p95_s()
    assert p95_s is not None
    assert 192.0 <= p95_s <= 195.0


def test_hedges_stay_within_their_part_of_all_requests() -> None:
    hedger, hedges = Hedger(50), 0
    for number in range(2_000):
        delay_s = hedger.delay_s("put", 1_000)
        hedger.took("put", 1_000, 0.010)
        assert (delay_s is None) == (number < SAMPLES_MIN)
        hedges += delay_s is not None and hedger.spend()  # every request is slow: the store is
    assert 0 < hedges <= 0.05 * 2_000


def test_saved_hedges_are_bounded() -> None:
    hedger = Hedger(50)
    for _ in range(10_000):
        hedger.delay_s("get", 1)
    assert sum(hedger.spend() for _ in range(100)) == int(HEDGES_BURST_MAX)


def test_large_objects_are_not_slow_small_ones_and_zero_is_none() -> None:
    hedger, off = Hedger(50), Hedger(0)
    for _ in range(SAMPLES_MIN):
        hedger.took("put", 1_000, 0.010)
        off.took("put", 1_000, 0.010)
    assert hedger.delay_s("put", 1_000) == 0.010
    assert {hedger.delay_s("put", size) for size in (512, 1_024, 2_047)} == {0.010}, "one class, a factor of four"
    assert [hedger.delay_s("put", size) for size in (511, 2_048, 64 << 20)] == [None] * 3
    assert hedger.delay_s("get", 1_000) is None
    assert off.delay_s("put", 1_000) is None


# ---- settings and parts ----------------------------------------------------------------------


def test_a_bucket_is_named_by_a_url_that_others_can_use() -> None:
    url = "s3://logs/a/b?endpoint=http://127.0.0.1:9000&region=eu-west-1"
    bucket = read_bucket(url, {"secret_access_key": ("s", "test"), "access_key_id": ("k", "test")})
    assert (bucket.name, bucket.prefix, bucket.path_style, bucket.url) == ("logs", "a/b/", True, url)
    plain = read_bucket("s3://logs", {})
    assert (plain.prefix, plain.path_style, plain.url) == ("", False, "s3://logs")
    virtual = read_bucket("s3://logs?addressing=virtual&endpoint=https://h", {})
    assert not virtual.path_style
    assert read_bucket(virtual.url, {}) == virtual
    assert read_bucket("s3://logs.of.a.b", {}).path_style  # the certificate of *.s3.REGION.amazonaws.com is not for it
    for endpoint in ("https://[::1]:9000", "http://s3_1.internal/", "https://h.example/storage/v1/s3"):
        assert read_bucket(f"s3://logs?endpoint={endpoint}", {}).settings.endpoint == endpoint


@pytest.mark.parametrize(
    ("url", "section", "error", "said"),
    [
        ("s3://", {}, InvalidSettingError, "names no bucket"),
        ("s3://b!", {}, InvalidSettingError, "'b!' in 's3://b!' is no name of a bucket"),
        ("s3://b/p", {}, InvalidSettingError, "'b' in 's3://b/p' is no name of a bucket"),
        ("http://bucket", {}, InvalidSettingError, "names no bucket"),
        ("s3://bucket/a b", {}, InvalidRequestError, "not allowed"),
        ("s3://bucket?endpont=http://h", {}, UnknownSettingError, "endpont"),
        ("s3://[bucket", {}, InvalidSettingError, "no URL"),
        ("s3://bucket?endpoint=host:1", {}, InvalidSettingError, "no URL"),
        ("s3://bucket?endpoint=http://[::1", {}, InvalidSettingError, "no URL"),
        ("s3://bucket?endpoint=http://host:port", {}, InvalidSettingError, "no URL"),
        ("s3://bucket?endpoint=http://host:99999", {}, InvalidSettingError, "no URL"),
        ("s3://bucket?endpoint=http://the host", {}, InvalidSettingError, "no URL"),
        ("s3://bucket?endpoint=http://user:secret@host", {}, InvalidSettingError, "no URL"),
        ("s3://bucket?endpoint=http://10.0.0.1:9000&addressing=virtual", {}, InvalidSettingError, "virtual"),
        ("s3://bucket", {"storage_class": "STANDARD\n"}, InvalidSettingError, "storage_class from .* line break"),
        ("s3://bucket", {"acess_key_id": "x"}, UnknownSettingError, "acess_key_id"),
        ("s3://bucket", {"access_key_id": "x"}, InvalidSettingError, "one of"),
        ("s3://bucket", {"sse": "rot13"}, InvalidSettingError, "sse"),
        ("s3://bucket", {"sse_kms_key_id": "x"}, InvalidSettingError, "sse_kms_key_id"),
        ("s3://bucket", {"deadline_ms": "1s"}, InvalidSettingError, "over deadline_ms"),
        ("s3://bucket", {"data_path": "boto3"}, InvalidSettingError, "data_path"),
    ],
)
def test_mistakes_in_settings_are_named(url: str, section: dict[str, str], error: type[MemqError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        read_bucket(url, {name: (value, "memq.toml") for name, value in section.items()})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        (400, "", "check endpoint in [s3]"),
        (405, "", "check endpoint in [s3]"),
        (400, "InvalidStorageClass", "set storage_class in [s3]"),
        (400, "KMS.NotFoundException", "check sse_kms_key_id in [s3]"),
        (301, "PermanentRedirect", "set region and endpoint in [s3]"),
    ],
)
def test_a_refusal_says_which_setting_cures_it(status: int, code: str, hint: str) -> None:
    error = error_for(StoreAnswer(status, code, "text"), "object 'k' not stored", "bucket 'b'", "k")
    assert error.hint.startswith(hint)


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(1, 40))
def test_parts_are_all_bytes_in_order(buffers: list[bytes], part_bytes: int) -> None:
    parts = [b"".join(part) for part in cut_parts([memoryview(buffer) for buffer in buffers], part_bytes)]
    assert b"".join(parts) == b"".join(buffers)
    assert all(len(part) == part_bytes for part in parts[:-1])
    assert all(parts)


def test_marks_of_others_are_no_checksum() -> None:
    assert head_of(3, {"memq-crc32c": "0000002a", "memq-put": "7"}, "").checksum == 42
    for text in ("", "2a", "xxxxxxxx", "0000002a0"):
        assert head_of(3, {"memq-crc32c": text}, "").checksum is None


def test_a_hedge_that_the_budget_refused_is_sent_when_it_is_earned() -> None:
    async def work() -> None:
        counters = S3Counters()
        bucket = read_bucket("s3://memq?endpoint=http://h", SECTION)
        attempts = Attempts(bucket, skipping_runtime(), counters)
        warm_s = [0.01] * 20 + [0.02] * 3  # the last ones first: no request is above the p95 while that is learned
        slow_s = [9.0, 9.0]  # of the first tries of two requests; their hedges are quick

        async def request() -> float:
            pause_s = warm_s.pop() if warm_s else slow_s.pop() if slow_s else 0.01
            await skip(pause_s)
            return pause_s

        async def ask() -> float:
            return await attempts.run("get", 1_000, request, "not read", hedge=True)

        while warm_s:  # so many that the p95 is known, and one hedge is earned
            await ask()
        stalled = [asyncio.create_task(ask()) for _ in range(2)]
        await skip(1)
        assert (counters.hedges, [task.done() for task in stalled]) == (1, [True, False]), "one hedge was earned"
        for _ in range(22):
            await ask()
        await skip(0.1)
        assert (counters.hedges, stalled[1].done()) == (2, True)

    run_skipping(work())
