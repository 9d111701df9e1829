"""When the keys of tokens are fetched from their URL, on virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from memq.broker.identity import key_sets
from memq.broker.identity.key_sets import FETCH_INTERVAL_S, SET_BYTES_MAX, KeyUrl, keys_in
from memq.errors import CorruptDataError, NotReadyError, UnreachableError
from memq.runtime.logs import EventLog
from tests.skipping_loop import now_s, run_skipping, skip, skipping_runtime

REFRESH_S = 300


class Key:
    """A key by its id."""

    key_id = "one"


class Issuer:
    """Counts fetches, which fail while `down`. Each takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: list[float] = []
        self.down = False
        self.count = 1  # of keys
        monkeypatch.setattr(key_sets, "https_get", self._get)
        monkeypatch.setattr(key_sets, "keys_in", lambda data: [Key()] * self.count)
        clock = skipping_runtime().clock
        self.keys = KeyUrl("https://issuer/keys", "", REFRESH_S * 1_000, clock, EventLog(clock))

    async def _get(self, *_: object, **__: object) -> bytes:
        self.times.append(now_s())
        await skip(1)
        if self.down:
            raise UnreachableError("not now")
        return b"key"

    async def following(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.keys.follow())
        await skip(2)
        return task


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Issuer:
    return Issuer(monkeypatch)


def test_an_unknown_key_causes_one_fetch_and_not_more_than_one_in_an_interval(issuer: Issuer) -> None:
    async def work() -> None:
        with pytest.raises(NotReadyError):
            issuer.keys.current()
        task = await issuer.following()
        assert [each.key_id for each in issuer.keys.current()] == ["one"]
        assert not issuer.keys.renew(), "it was just read"
        await skip(FETCH_INTERVAL_S)
        assert issuer.keys.renew()
        await skip(0.5)
        assert issuer.keys.renew(), "it is being fetched"
        await skip(FETCH_INTERVAL_S - 1)
        assert not issuer.keys.renew()
        assert len(issuer.times) == 2
        await skip(REFRESH_S - FETCH_INTERVAL_S)
        assert len(issuer.times) == 2
        task.cancel()

    run_skipping(work())


def test_new_keys_are_logged_and_the_same_ones_are_not(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        task = await issuer.following()
        assert caplog.text.count("keys-changed: https://issuer/keys: keys one") == 1
        await skip(REFRESH_S)
        assert caplog.text.count("keys-changed") == 1
        issuer.count = 2
        await skip(REFRESH_S + 2)
        assert caplog.text.count("keys-changed: https://issuer/keys: keys one, one") == 1
        task.cancel()

    caplog.set_level(logging.INFO)
    run_skipping(work())


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xff",
        b"null",
        b'["keys"]',
        b'{"keys": []}',
        b'{"keys": [5]}',
        b'{"keys": [{"kty": 5}]}',
        b'{"keys": [{"kty": "oct", "k": "AAAA"}]}',
        b"[" * 100_000,
        b" " * (SET_BYTES_MAX + 1),
    ],
)
def test_a_document_without_public_keys_is_refused(document: bytes) -> None:
    with pytest.raises(CorruptDataError):
        keys_in(document)


def test_keys_are_fetched_each_refresh_and_soon_after_a_failure(
    issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        task = await issuer.following()
        await skip(REFRESH_S + 1)
        assert len(issuer.times) == 2
        issuer.down = True
        await skip(REFRESH_S)
        assert len(issuer.times) == 3
        assert issuer.keys.current(), "the keys before count"
        await skip(3 * (FETCH_INTERVAL_S + 1))
        assert len(issuer.times) == 6
        assert "keys-not-fetched: https://issuer/keys: not now" in caplog.text
        assert "the 1 keys before count" in caplog.text
        task.cancel()

    run_skipping(work())
