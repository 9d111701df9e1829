"""Certificates of one side of a connection: arguments, variables, files that change, errors that name the file."""

from __future__ import annotations

import contextlib
import logging
import ssl
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.broker.identity.networks import broker_networks, warn_of_anonymous
from memq.cli import run
from memq.errors import InvalidSettingError, MemqError, UnknownSettingError
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tls import (
    Tls,
    client_context,
    followed_client,
    followed_server,
    server_context,
    subject_of,
    tls_of_environment,
)
from memq.settings import BrokerSettings
from tests.certificates import Certificates

EVENTS = EventLog(SystemClock())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cert_file": "a"}, "cert_file is set without key_file"),
        ({"key_file": "a"}, "key_file is set without cert_file"),
    ],
)
def test_a_certificate_and_its_key_go_together(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidSettingError, match=text):
        Tls(**arguments)  # type: ignore[arg-type]


def test_files_are_texts_and_a_password_is_not_shown() -> None:
    with pytest.raises(TypeError, match="ca_file must be str, not PosixPath"):
        Tls(ca_file=Path("ca.pem"))  # type: ignore[arg-type]
    assert "canary" not in repr(Tls(key_password="canary"))


def test_variables_name_the_certificates_of_a_client() -> None:
    assert tls_of_environment({}) is None
    assert tls_of_environment({"MEMQ_TLS_CHECK_HOST": "false", "MEMQ_TLS_HTTP": "false"}) is None
    assert tls_of_environment({"MEMQ_TLS_PORT": "tcp://10.0.0.1:9876", "MEMQ_TLS_SERVICE_HOST": "10.0.0.1"}) is None
    found = tls_of_environment({"MEMQ_TLS_CA_FILE": "ca.pem", "MEMQ_TLS_CHECK_HOST": "no"})
    assert found == Tls(ca_file="ca.pem", check_host=False)
    with pytest.raises(InvalidSettingError, match="key_file"):
        tls_of_environment({"MEMQ_TLS_CERT_FILE": "a.pem"})
    with pytest.raises(UnknownSettingError, match="unknown variable MEMQ_TLS_CA in the environment") as caught:
        tls_of_environment({"MEMQ_TLS_CA": "ca.pem"})
    assert caught.value.hint == "did you mean MEMQ_TLS_CA_FILE?"
    for misspelt in ("MEMQ_TSL_CA_FILE", "MEMQ_SSL_CA_FILE", "MEMQ_TL_CA_FIL"):
        with pytest.raises(UnknownSettingError, match=f"unknown variable {misspelt}") as caught:
            tls_of_environment({misspelt: "ca.pem"})
        assert caught.value.hint == "did you mean MEMQ_TLS_CA_FILE?"
    assert tls_of_environment({"MEMQ_TOKENS_CA_FILE": "ca.pem", "MEMQ_S3_CA_FILE": "ca.pem"}) is None


def test_a_runtime_takes_the_variables(authority: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMQ_TLS_CA_FILE", "/no/such/file")
    with pytest.raises(InvalidSettingError, match="can't read ca_file '/no/such/file': No such file"):
        Runtime()
    monkeypatch.setenv("MEMQ_TLS_CA_FILE", authority.trusted.ca_file)
    assert not Runtime().network.encrypted, "it has no listeners with TLS"


@pytest.mark.parametrize("kind", [memq.Producer, memq.Admin, memq.Queue, memq.aio.Producer, memq.aio.Queue])
def test_clients_check_their_argument(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"tls must be a memq\.Tls, not str"):
        kind("127.0.0.1:1", tls="ca.pem")
    with pytest.raises(InvalidSettingError, match="tls and runtime are given"):
        kind("127.0.0.1:1", tls=Tls(), runtime=Runtime())
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(InvalidSettingError, match=f"can't read ca_file '{empty}'"):
        kind("127.0.0.1:1", tls=Tls(ca_file=str(empty)))


def test_errors_name_the_file(authority: Certificates, tmp_path: Path) -> None:
    one, other = authority.issue("one", "localhost"), authority.issue("other", "localhost")
    with pytest.raises(InvalidSettingError, match="a broker with TLS has no cert_file"):
        server_context(authority.trusted)
    with pytest.raises(InvalidSettingError, match="no ca_file names their authority"):
        server_context(Tls(cert_file=one.cert_file, key_file=one.key_file), ssl.CERT_REQUIRED)
    with pytest.raises(InvalidSettingError, match=r"can't use certificate .*one\.pem' with key .*other-key\.pem'"):
        server_context(Tls(cert_file=one.cert_file, key_file=other.key_file))
    with pytest.raises(InvalidSettingError, match="can't read key_file '/no/such'"):
        server_context(Tls(cert_file=one.cert_file, key_file="/no/such"))
    with pytest.raises(UnknownSettingError, match="cert_fil"):
        broker_networks({"cert_fil": ("a", "memq.toml")}, EVENTS)
    with pytest.raises(InvalidSettingError, match="clients"):
        broker_networks({"clients": ("some", "memq.toml")}, EVENTS)


def test_a_context_follows_its_files_and_reports_a_broken_one_once(tmp_path: Path) -> None:
    own = Certificates(tmp_path / "certs")
    tls = own.issue("b1", "localhost")
    failures: list[MemqError] = []
    followed = followed_client(tls, failures.append)
    first = followed()
    assert followed() is first
    own.issue("b1", "localhost", again=True)
    second = followed()
    assert second is not first
    Path(tls.key_file).write_text("half")
    assert followed() is second
    assert followed() is second
    assert len(failures) == 1
    own.issue("b1", "localhost", again=True)
    assert followed() is not second


def test_a_subject_is_the_common_name() -> None:
    assert subject_of({"subject": ((("organizationName", "x"),), (("commonName", "alice"),))}) == "alice"
    assert subject_of({"subject": ()}) == ""
    assert subject_of({}) == subject_of(None) == ""


def test_certificates_have_errors_that_say_what_to_do(
    authority: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(authority.folder)
    authority.issue("taken")
    for arguments, code, text in (
        (["init", "--dir", folder], run.FAILED, "exists (choose another folder"),
        (["issue", "taken", "--dir", folder], run.FAILED, "exists (--replace makes it again)"),
        (["issue", "a/b", "--dir", folder], run.USAGE, "'a/b' can't name a certificate"),
        (["issue", "ca", "--dir", folder], run.USAGE, "'ca' can't name a certificate"),
        (["issue", "x" * 65, "--dir", folder], run.USAGE, "1 to 64 characters, not 65"),
        (["issue", "y", "--host", "h:9876", "--dir", folder], run.USAGE, "'h:9876' is no host"),
        (["issue", "y", "--dir", str(tmp_path)], run.NOT_FOUND, "has no authority (memq certs init makes one)"),
        (["show", str(tmp_path / "none.pem")], run.NOT_FOUND, "there is no file"),
        (["show", __file__], run.USAGE, "has no certificate"),
    ):
        assert run.run(["certs", *arguments]) == code
        assert text in capsys.readouterr().err
    assert not (authority.folder / "y.pem").exists()
    assert run.run(["certs", "show", authority.trusted.ca_file, "--json"]) == run.OK
    assert '"hosts":[]' in capsys.readouterr().out.replace(" ", "")


def test_a_folder_of_certificates_is_shown_without_its_keys(
    authority: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    authority.issue("shown")
    cert, key = str(authority.folder / "shown.pem"), str(authority.folder / "shown-key.pem")
    assert run.run(["certs", "show", cert, key, "--json"]) == run.OK
    assert capsys.readouterr().out.count('"file":') == 1
    assert run.run(["certs", "show", key]) == run.USAGE, "asked for alone, it is a mistake"
    assert "has no certificate" in capsys.readouterr().err


def test_keys_are_for_their_owner_alone(authority: Certificates) -> None:
    tls = authority.issue("b1", "localhost", again=True)
    assert Path(tls.key_file).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("permissions", "clients", "warned"),
    [(True, None, True), (True, "anonymous", True), (True, "required", False), (False, None, False)],
)
def test_permissions_without_principals_are_warned_of(
    permissions: bool, clients: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sections = {} if clients is None else {"tls": {"clients": (clients, "test")}}
    with caplog.at_level(logging.WARNING, "memq"):
        warn_of_anonymous(BrokerSettings(permissions=permissions), sections, EventLog(SystemClock()))
    assert ("permissions-anonymous" in caplog.text) == warned


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """Connect the two in memory; return the session that the client may resume, and whether it resumed one.

    Raises: SSLError of the side that refuses.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(10):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    ends[1].write(b"x")
    assert ends[0].read(1) == b"x"  # tickets come before the first bytes
    return ends[0].session, bool(ends[1].session_reused)


def test_no_session_outlives_the_authority_of_its_certificate(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    live = old.issue("broker", "127.0.0.1")
    server = followed_server(live, ssl.CERT_REQUIRED, lambda error: None)
    client = client_context(old.issue("ann"))
    session, resumed = handshake(server, client)
    assert not resumed
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE  # this one takes any broker
    fresh = new.issue("broker", "127.0.0.1")
    for name in ("ca_file", "cert_file", "key_file"):
        Path(getattr(live, name)).write_bytes(Path(getattr(fresh, name)).read_bytes())
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(server, client, session)
