"""Puts over HTTP without TLS: signature, answers, and the choice between them and obstore."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.http_put import Keys, Reply, open_http_put, read_reply, sign_put
from memq.storage_handlers.s3.settings import read_bucket

KEYS = {"access_key_id": ("id", "the test"), "secret_access_key": ("secret", "the test")}
DONE = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n'
REFUSED = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbody"
CHUNKED = b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n3\r\n, 2\r\n0\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.0 400 Bad\r\n\r\nbody"


@pytest.mark.parametrize("token", ["", "of-a-session"])
def test_the_signature_is_that_of_botocore(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    now = datetime(2026, 3, 1, 23, 59, 59, tzinfo=UTC)
    headers = {
        "host": "h:9000",
        "if-none-match": "*",
        "x-amz-checksum-crc32c": "AAAAAA==",
        "x-amz-meta-memq-crc32c": "0",
    }
    headers |= {"x-amz-security-token": token} if token else {}
    request = AWSRequest("PUT", "http://h:9000/bucket/f/c_1/a-b.c", headers=headers)
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *args, **kwargs: now.replace(tzinfo=None))
    S3SigV4Auth(Credentials("id", "secret", token or None), "s3", "eu-west-1").add_auth(request)

    headers["x-amz-content-sha256"] = "UNSIGNED-PAYLOAD"
    keys = Keys("id", "secret", token, "eu-west-1")
    found = sign_put("/bucket/f/c_1/a-b.c", headers, keys, int(now.timestamp() * 1000))

    assert found == request.headers["Authorization"]
    assert headers["x-amz-date"] == request.headers["X-Amz-Date"]


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (DONE, Reply(200, '"e"', b"", reusable=True)),
        (REFUSED, Reply(503, "", b"body", reusable=True)),
        (REFUSED.replace(b"\r\n", b"\r\nConnection: close\r\n", 1), Reply(503, "", b"body", reusable=False)),
        (CHUNKED, Reply(400, "", b"body, 2", reusable=False)),
    ],
)
def test_an_answer_is_read_when_it_is_complete(data: bytes, reply: Reply) -> None:
    assert read_reply(data, ended=False) == reply
    for end in range(data.index(b"\r\n\r\n") + 4 if reply.body else len(data)):
        assert read_reply(data[:end], ended=False) is None
        with pytest.raises(StoreAnswer):
            read_reply(data[:end], ended=True)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    assert read_reply(UNTIL_CLOSED, ended=False) is None
    assert read_reply(UNTIL_CLOSED, ended=True) == Reply(400, "", b"body", reusable=False)


@pytest.mark.parametrize("data", [b"no HTTP\r\n\r\n", b"HTTP/1.1 x\r\n\r\n", DONE[:-2] + b"A: " + bytes(65536)])
def test_bytes_that_are_no_answer_are_a_failure_that_may_pass(data: bytes) -> None:
    with pytest.raises(StoreAnswer) as found:
        read_reply(data, ended=False)
    assert found.value.status == 0


@pytest.mark.parametrize(
    ("endpoint", "proxy", "direct"),
    [("http://h:1", "", True), ("https://h:1", "", False), ("", "", False), ("http://h:1", "http://proxy:1", False)],
)
def test_tls_and_proxies_stay_with_obstore(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, proxy: str, *, direct: bool
) -> None:
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", proxy)
    bucket = read_bucket("s3://memq/f", KEYS | {"endpoint": (endpoint, "the test")})
    assert (open_http_put(bucket, Runtime()) is not None) == direct
