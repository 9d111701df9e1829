"""Public keys of tokens from a URL: real HTTPS, new keys, outages, and servers that lie."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from memq.broker.identity.key_sets import SET_BYTES_MAX, KeyUrl
from memq.errors import DeniedError, NotReadyError, UnreachableError
from memq.runtime.logs import EventLog
from memq.runtime.tls import server_context
from tests.certificates import Certificates
from tests.component.token_rig import CLOCK, Issuer, Rig, bounded, followed, send_one


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return followed(tmp_path, monkeypatch)


class Provider:
    """An HTTPS server of one document. `answer` is sent to each request, in one piece; `held`: then it stays silent."""

    def __init__(self, certificates: Certificates) -> None:
        self.answer = b""
        self.held = False
        self.requests: list[bytes] = []
        self.port = 0
        self.use(certificates)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    def use(self, certificates: Certificates, host: str = "127.0.0.1") -> None:
        """Show a certificate of this authority and host."""
        self.certificates = certificates
        self._context = server_context(certificates.issue("provider", host, again=True))

    def publish(self, document: str | bytes, status: str = "200 OK", *heads: str) -> None:
        """Answer with a document from now on."""
        body = document if isinstance(document, bytes) else document.encode()
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *heads]
        self.answer = "\r\n".join([*lines, "", ""]).encode() + body

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}/keys"

    async def start(self) -> None:
        self._server = await asyncio.start_server(  # noqa: TID251 -- a server that is no part of memq
            self._serve, "127.0.0.1", self.port, ssl=self._context
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.answer)
            await writer.drain()
            if self.held:
                await reader.read()
            writer.close()
            await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            self._open.discard(writer)


@asynccontextmanager
async def provider(certificates: Certificates) -> AsyncIterator[Provider]:
    """Run a provider."""
    made = Provider(certificates)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch keys after 50 ms again, and wait 0.5 s for an answer."""
    monkeypatch.setattr("memq.broker.identity.key_sets.FETCH_INTERVAL_S", 0.05)
    monkeypatch.setattr("memq.broker.identity.key_sets.FETCH_S_MAX", 0.5)


def names(keys: KeyUrl) -> list[str]:
    """Return the ids of the keys that count now."""
    try:
        return [key.key_id for key in keys.current()]
    except NotReadyError:
        return []


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, within the limit of the test."""
    while not condition():  # noqa: ASYNC110 - logs and keys have no event
        await asyncio.sleep(0)


def ca_of(rig: Rig) -> str:
    return rig.certificates.trusted.ca_file


def test_a_new_key_counts_and_old_keys_stay_while_the_provider_is_away(
    rig: Rig, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with provider(rig.certificates) as found:
            found.publish(rig.issuer.content)
            section = {"jwks_file": "", "jwks_url": found.url, "jwks_ca_file": ca_of(rig), "required": True}
            async with rig.broker(**section) as broker:
                await send_one(broker, rig.tls(rig.issuer.token("alice")))
                rig.issuer.renew("two")
                found.publish(rig.issuer.content)
                await send_one(broker, rig.tls(rig.issuer.token("bob")))  # an unknown key: fetched at once
                await found.stop()
                forged = Issuer(rig.token_file.parent)
                forged.renew("three")
                with pytest.raises((DeniedError, UnreachableError), match="key 'three'"):
                    await send_one(broker, rig.tls(forged.token("mallory")))
                await until(lambda: "keys-not-fetched" in caplog.text)
                await send_one(broker, rig.tls(rig.issuer.token("carol")))

    bounded(work)
    assert [name for name in rig.names if name != "anonymous"] == ["alice", "bob", "carol"]


def test_a_broker_starts_without_its_provider_and_clients_wait(
    rig: Rig, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with provider(rig.certificates) as found:
            found.publish(rig.issuer.content)
            await found.stop()
            section = {"jwks_file": "", "jwks_url": found.url, "jwks_ca_file": ca_of(rig)}
            async with rig.broker(**section) as broker:
                sending = asyncio.create_task(send_one(broker, rig.tls(rig.issuer.token("alice"))))
                await until(lambda: "has not fetched the keys" in caplog.text)
                assert not sending.done()
                await found.start()
                await sending

    bounded(work)
    assert "alice" in rig.names


SECRET = json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "alg": "HS256"}]})


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ("empty set", "no JWK set"),
        ("no set", "no JWK set"),
        ("deep", "no JWK set"),
        ("secret", "secret key"),
        ("html", "no JWK set"),
        ("redirect", "status 302"),
        ("error", "status 500"),
        ("huge", f"more than {SET_BYTES_MAX} bytes"),
        ("endless heads", f"more than {SET_BYTES_MAX} bytes"),
        ("cut", "no whole answer of HTTP"),
        ("no http", "no whole answer of HTTP"),
        ("nothing", "no whole answer of HTTP"),
        ("silent", "did not answer in 0.5 s"),
        ("slow", "did not answer in 0.5 s"),
        ("away", "can't reach"),
        ("other authority", "certificate"),
        ("other host", "certificate"),
    ],
)
def test_a_provider_that_lies_changes_no_key(
    rig: Rig, quick: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, lie: str, text: str
) -> None:
    caplog.set_level(logging.WARNING)

    async def work() -> None:
        async with provider(rig.certificates) as found:
            found.publish(rig.issuer.content)
            keys = KeyUrl(found.url, ca_of(rig), 0, CLOCK, EventLog(CLOCK))
            following = asyncio.create_task(keys.follow())
            await until(lambda: names(keys) == ["one"])
            rig.issuer.renew("two")
            await tell(found, lie, rig.issuer.content, tmp_path)
            await until(lambda: text in caplog.text)
            assert names(keys) == ["one"]
            following.cancel()
            await asyncio.wait([following])

    bounded(work)
    assert "keys-not-fetched: https://127.0.0.1" in caplog.text
    assert "the 1 keys before count" in caplog.text


async def tell(found: Provider, lie: str, sound: str, tmp_path: Path) -> None:
    """Let the provider answer with a lie. Each holds the sound set where it can."""
    whole = found.answer
    found.publish(sound)
    if lie in ("silent", "slow"):
        found.held = True
        found.answer = b"" if lie == "silent" else found.answer[:-1]
    elif lie == "redirect":
        found.publish(sound, "302 Found", f"Location: {found.url}")
    elif lie == "error":
        found.publish(sound, "500 Internal Server Error")
    elif lie in ("away", "other authority", "other host"):
        await found.stop()
        if lie == "other authority":
            found.use(Certificates(tmp_path / "other"), "127.0.0.1")
        if lie == "other host":
            found.use(found.certificates, "id.example")
        if lie != "away":
            await found.start()
    else:
        found.answer = {
            "empty set": _document('{"keys": []}'),
            "no set": _document('["keys"]'),
            "deep": _document("[" * 100_000),
            "secret": _document(SECRET),
            "html": _document("<html>log in</html>"),
            "huge": _document(sound + " " * SET_BYTES_MAX),
            "endless heads": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 60_000,
            "cut": whole[:-20],
            "no http": sound.encode(),
            "nothing": b"",
        }[lie]


def _document(text: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def test_an_answer_in_chunks_is_read(rig: Rig, quick: None) -> None:
    async def work() -> None:
        async with provider(rig.certificates) as found:
            text = rig.issuer.content.encode()
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (text[:50], text[50:])) + b"0\r\n\r\n"
            found.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
            keys = KeyUrl(found.url, ca_of(rig), 0, CLOCK, EventLog(CLOCK))
            following = asyncio.create_task(keys.follow())
            await until(lambda: names(keys) == ["one"])
            following.cancel()
            await asyncio.wait([following])
            assert found.requests[0].startswith(b"GET /keys HTTP/1.1\r\nHost: 127.0.0.1:")

    bounded(work)
