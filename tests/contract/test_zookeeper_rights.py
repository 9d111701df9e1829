"""TLS and rights on a real ZooKeeper: allowed calls work, others fail with cause and remedy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.security import make_digest_acl

from memq.errors import DeniedError, InvalidSettingError, MemqError, UnreachableError
from memq_localstack.servers import Server, start_zookeeper
from tests.contract.coordinators import open_zookeeper, path_of, topic
from tests.tls import server_context
from tests.zookeeper_nodes import outsider

pytestmark = pytest.mark.thorough
HOST = "127.0.0.1"
# kazoo leaves the socket of a handshake that failed to the garbage collector.
leaves_sockets = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A ZooKeeper that speaks TLS, and the file of its authority."""
    folder = tmp_path_factory.mktemp("secure")
    _, authority = server_context(folder, HOST)
    settings = {
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "client.portUnification": "true",
        "ssl.keyStore.location": str(folder / f"server-{HOST}.pem"),
        "ssl.keyStore.type": "PEM",
        "ssl.clientAuth": "none",
    }
    with start_zookeeper(folder / "zookeeper", settings=settings) as server:
        yield server, str(authority)


def topics_at(address: str, path: str, **section: str) -> list[str]:
    async def ask() -> list[str]:
        coordinator = open_zookeeper(address, path, **section)
        try:
            return [each.name for each in await coordinator.topics()]
        finally:
            await coordinator.close()

    return asyncio.run(ask())


def refusal(address: str, path: str, **section: str) -> MemqError:
    with pytest.raises(MemqError) as caught:
        topics_at(address, path, **section)
    return caught.value


def test_wrong_connection_settings_are_named_before_a_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server_context(tmp_path, HOST)
    server_context(tmp_path, "another.test")
    ours, junk = tmp_path / f"server-{HOST}.pem", tmp_path / "junk.pem"
    junk.write_text("junk", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "puresasl", None)
    for name, section in {
        "tls_ca_file": {"tls": "on", "tls_ca_file": str(tmp_path / "none")},
        "tls_cert_file": {"tls": "on", "tls_cert_file": str(ours), "tls_key_file": str(junk)},
        "pure-sasl": {"sasl_mechanism": "DIGEST-MD5", "sasl_username": "u", "sasl_password": "p"},
    }.items():
        error = refusal("127.0.0.1:1", "/x", **section)
        assert isinstance(error, InvalidSettingError)
        assert name in str(error)
        assert error.hint


def test_tls(secure: tuple[Server, str], tmp_path: Path) -> None:
    server, authority = secure
    assert topics_at(server.address, path_of(tmp_path), tls="true", tls_ca_file=authority) == []


@leaves_sockets
def test_certificates_that_are_not_to_be_trusted(secure: tuple[Server, str], tmp_path: Path) -> None:
    server, authority = secure
    path, soon = path_of(tmp_path), "3s"
    other_name = server.address.replace(HOST, "localhost")
    wrong_name = refusal(other_name, path, tls="true", tls_ca_file=authority, connect_timeout_ms=soon)
    wrong_authority = refusal(server.address, path, tls="true", connect_timeout_ms=soon)
    for error, cause in ((wrong_name, "ostname mismatch"), (wrong_authority, "unable to get local issuer")):
        assert isinstance(error, DeniedError)
        assert cause in str(error)
        assert "tls_ca_file of [zookeeper]" in error.hint
    assert topics_at(other_name, path, tls="true", tls_ca_file=authority, tls_check_hostname="false") == []


@leaves_sockets
def test_tls_with_a_server_that_speaks_none(zookeeper: Server, tmp_path: Path) -> None:
    error = refusal(zookeeper.address, path_of(tmp_path), tls="true", connect_timeout_ms="3s", session_timeout_ms="1s")
    assert isinstance(error, UnreachableError)


def lock(server: Server, path: str) -> None:
    """Make a node that only another one may use."""
    with outsider(server) as client:
        client.ensure_path(path)
        client.set_acls(path, [make_digest_acl("other", "secret", all=True)])


def test_a_path_without_rights_is_named(zookeeper: Server, tmp_path: Path) -> None:
    path = path_of(tmp_path)
    lock(zookeeper, path)
    error = refusal(zookeeper.address, f"{path}/memq")
    assert isinstance(error, DeniedError)
    assert f"denies access to node {path}/memq" in str(error)
    assert "check auth, acl and sasl in [zookeeper]" in error.hint
    assert topics_at(zookeeper.address, f"{path}/memq", auth="digest:other:secret", acl="creator") == []


def test_start_and_doctor_name_a_path_without_rights(zookeeper: Server, tmp_path: Path) -> None:
    path = path_of(tmp_path)
    lock(zookeeper, path)
    parts = {
        "store": f"file:{tmp_path}/objects",
        "queue": f"sqlite:{tmp_path}/queue.sqlite",
        "coordinator": f"zookeeper://{zookeeper.address}{path}/memq",
    }
    config = tmp_path / "memq.toml"
    config.write_text("".join(f'{name} = "{value}"\n' for name, value in parts.items()))
    for words, code in ((("broker", "--port", "0", "--http-port", "-1"), 4), (("doctor",), 1)):
        command = [sys.executable, "-m", "memq", *words, "--config", str(config)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        said = ended.stdout + ended.stderr
        assert ended.returncode == code, said
        assert f"denies access to node {path}/memq" in said
        assert "check auth, acl and sasl in [zookeeper]" in said


def test_nodes_created_with_rights_are_used_with_them(zookeeper: Server, tmp_path: Path) -> None:
    async def run() -> None:
        mine = {"auth": "digest:memq:secret", "acl": "creator-or-read"}
        owner = open_zookeeper(zookeeper.address, path_of(tmp_path), **mine)
        stranger = open_zookeeper(zookeeper.address, path_of(tmp_path))
        try:
            await owner.create_topic(topic(partitions=1))
            assert [each.name for each in await stranger.topics()] == ["clicks"]
            (entry,) = await stranger.assignments()
            with pytest.raises(DeniedError, match="denies access to node"):
                await stranger.set_assignment(entry)
        finally:
            await owner.close()
            await stranger.close()

    asyncio.run(run())
