"""TLS of connections to ZooKeeper, and refused connections in kazoo's log."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kazoo.protocol.states import KazooState

from memq.errors import DeniedError, InvalidSettingError, UnreachableError
from memq.governor.zookeeper import session as session_module
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.security import SocketHandler, refusal_in
from memq.governor.zookeeper.settings import ZookeeperSettings
from memq.runtime.tls import Tls
from tests.certificates import Certificates
from tests.unit.zookeeper_fakes import run
from tests.zookeeper_in_memory import MemoryKazoo, MemoryZookeeper, settled

HOST, LIMIT_S = "127.0.0.1", 10.0
DISTRUST = "Connection dropped: socket connection error: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"


# ---- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(name="known")
def certificates(tmp_path: Path) -> Certificates:
    (tmp_path / "known").mkdir()
    return Certificates(tmp_path / "known")


@contextmanager
def server(tls: Tls) -> Iterator[tuple[tuple[str, int], list[str]]]:
    """Run a server that asks for certificates, for one connection; the names of its clients."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    context.load_verify_locations(tls.ca_file)
    context.verify_mode = ssl.CERT_OPTIONAL
    names: list[str] = []

    def serve() -> None:
        with suppress(OSError):
            plain, _ = listener.accept()
            plain.settimeout(LIMIT_S)
            with context.wrap_socket(plain, server_side=True) as connected:
                found: Any = connected.getpeercert()
                names.append(dict(each[0] for each in found["subject"])["commonName"] if found else "")

    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(LIMIT_S)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname(), names
        finally:
            thread.join(LIMIT_S)


def connect(address: tuple[str, int], host: str = HOST, **settings: Any) -> None:
    handler = SocketHandler(ZookeeperSettings(**settings))
    with closing(handler.create_connection(address, hostname=host, timeout=LIMIT_S)) as connected:
        assert isinstance(connected, ssl.SSLSocket) == settings.get("tls", False)
        if settings.get("tls"):
            assert connected.recv(1) == b"", "the server has read the certificate"


def test_a_certificate_of_the_authority_is_taken_and_the_own_one_is_shown(known: Certificates) -> None:
    mine = known.issue("broker-1")
    with server(known.issue("zookeeper", HOST)) as (address, names):
        connect(address, tls=True, tls_ca_file=mine.ca_file, tls_cert_file=mine.cert_file, tls_key_file=mine.key_file)
    assert names == ["broker-1"]


def test_a_file_of_certificate_and_key_is_shown(known: Certificates, tmp_path: Path) -> None:
    mine = known.issue("broker-1")
    both = tmp_path / "both.pem"
    both.write_text(Path(mine.cert_file).read_text() + Path(mine.key_file).read_text())
    with server(known.issue("zookeeper", HOST)) as (address, names):
        connect(address, tls=True, tls_ca_file=mine.ca_file, tls_cert_file=str(both))
    assert names == ["broker-1"]


def test_the_authorities_of_the_system_are_not_added(
    known: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other").trusted
    serving = known.issue("zookeeper", HOST)
    monkeypatch.setenv("SSL_CERT_FILE", serving.ca_file)
    with server(serving) as (address, _):
        connect(address, tls=True)
    with server(serving) as (address, _), pytest.raises(ssl.SSLCertVerificationError):
        connect(address, tls=True, tls_ca_file=other.ca_file)
    with server(serving) as (address, _):
        connect(address, tls=True, tls_ca_file=other.ca_file, tls_verify=False)


@pytest.mark.parametrize("checked", [True, False])
def test_the_name_of_the_host_is_checked(known: Certificates, checked: bool) -> None:
    serving = known.issue("zookeeper", "zookeeper.example")
    with server(serving) as (address, _):
        connect(address, "zookeeper.example", tls=True, tls_ca_file=serving.ca_file)
    with server(serving) as (address, _):
        if checked:
            with pytest.raises(ssl.SSLCertVerificationError):
                connect(address, tls=True, tls_ca_file=serving.ca_file)
        else:
            connect(address, tls=True, tls_ca_file=serving.ca_file, tls_check_hostname=False)


def test_without_tls_the_socket_is_plain(known: Certificates) -> None:
    with server(known.issue("zookeeper", HOST)) as (address, _):
        connect(address)


def test_a_file_that_was_lost_since_the_start_is_named(known: Certificates) -> None:
    mine = replace(known.issue("broker-1"), ca_file="lost.pem")
    lost = pytest.raises(InvalidSettingError, match=r"tls_ca_file 'lost\.pem'")
    with server(known.issue("zookeeper", HOST)) as (address, _), lost:
        connect(address, tls=True, tls_ca_file=mine.ca_file)


# ---- refused connections -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text", "hint"),
    [
        (f"{DISTRUST}: certificate has expired (_ssl.c:1006)", "is not trusted", "memq certs issue NAME --host"),
        (f"{DISTRUST}: unable to get local issuer certificate", "is not trusted", "not of an authority in tls_ca_file"),
        ("[SSL: SSLV3_ALERT_CERTIFICATE_UNKNOWN] sslv3 alert", "refuses the certificate", "memq certs show"),
        ("[SSL: SSLV3_ALERT_BAD_CERTIFICATE] sslv3 alert", "refuses the certificate", "memq certs show"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca", "refuses the certificate", "trust store"),
        ("AUTH_FAILED closing: ", "refuses the credentials", "check auth"),
    ],
)
def test_refusals(line: str, text: str, hint: str) -> None:
    found = refusal_in(line)
    assert found is not None
    assert text in found.text
    assert hint in found.hint


@pytest.mark.parametrize("line", ["", "Connection time-out: timed out", "[Errno 111] Connection refused"])
def test_an_outage_is_no_refusal(line: str) -> None:
    assert refusal_in(line) is None


Clients = Callable[[str], MemoryZookeeper]


@pytest.fixture(name="saying")
def server_whose_clients_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    servers: list[MemoryZookeeper] = []

    def make(line: str) -> MemoryZookeeper:
        server = MemoryZookeeper()
        servers.append(server)

        def client(address: object, settings: object, logger: logging.Logger) -> MemoryKazoo:
            logger.warning(line)
            return server.client()

        monkeypatch.setattr(session_module, "make_client", client)
        return server

    yield make
    assert all(client.ended == 2 for server in servers for client in server.clients)


def test_a_start_is_denied_only_by_a_refusal_of_its_own_time(saying: Clients) -> None:
    server = saying(DISTRUST)
    server.silent = True

    async def scenario(one: ZookeeperCoordinator) -> None:
        with pytest.raises(DeniedError, match="is not trusted: Connection dropped"):
            await one.session.start()
        with pytest.raises(UnreachableError) as caught:  # ZooKeeper may be down by now
            await one.session.start()
        assert "not of an authority" in caught.value.hint

    run(scenario, server.coordinator(connect_timeout_ms=10))


def test_a_running_session_is_never_denied(saying: Clients) -> None:
    server = saying("AUTH_FAILED closing: ")

    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.session.start()
        server.silent = True
        server.clients[0].take(KazooState.SUSPENDED)
        await settled()
        with pytest.raises(UnreachableError):
            await one.session.start()

    run(scenario, server.coordinator(connect_timeout_ms=1_000))
