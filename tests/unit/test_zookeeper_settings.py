"""Settings of the connection to ZooKeeper: the URL, the section, and the client of kazoo that they make."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from memq.errors import InvalidSettingError, UnknownSettingError
from memq.governor.zookeeper import open_from_settings
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.security import SocketHandler, check_tools
from memq.governor.zookeeper.session import acl_of, end_client, make_client
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings, parse_url
from memq.runtime.runtime import Runtime
from memq.settings import PartSettings
from tests.contract.coordinators import open_zookeeper

ADDRESS = ZookeeperAddress("h1:1,h2:2", "/memq")


def test_urls() -> None:
    assert parse_url("zookeeper://a:1,[::1]:2,c/x/y/") == ZookeeperAddress("a:1,[::1]:2,c", "/x/y")
    assert parse_url("zookeeper://a") == ZookeeperAddress("a", "/memq")
    assert parse_url("zookeeper://a:1, b:2/x") == ZookeeperAddress("a:1,b:2", "/x")
    bad = [
        "zookeeper://",
        "zookeeper:///x",
        "zk://a",
        "zookeeper://a:b/x",
        "zookeeper://a:99999/x",
        "zookeeper://a:0/x",
        "zookeeper://a,/x",
    ]
    bad += [f"zookeeper://a/{path}" for path in ("zookeeper/x", "x,b:2/x", "x?y=1", "x\x01", "x/./y", "../x", "x//y")]
    for each in bad:
        with pytest.raises(InvalidSettingError):
            parse_url(each)
    with pytest.raises(InvalidSettingError, match="can't be used"):
        parse_url("zookeeper://a//x//y")


@given(st.text(max_size=60))
def test_any_url_is_read_or_refused(text: str) -> None:
    with suppress(InvalidSettingError):
        assert parse_url(f"zookeeper://{text}").path.startswith("/")


def test_settings_that_can_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(**section: str) -> ZookeeperCoordinator:
        return open_zookeeper("127.0.0.1:1", "/memq", **section)

    with pytest.raises(UnknownSettingError, match="unknown setting 'sesion_timeout_ms'"):
        opened(sesion_timeout_ms="1s")
    with pytest.raises(InvalidSettingError, match="acl"):
        opened(acl="nobody")
    for alone in (
        {"tls_ca_file": "a"},
        {"tls": "on", "tls_key_file": "k"},
        {"sasl_username": "u"},
        {"auth": "digest:u"},
    ):
        with pytest.raises(InvalidSettingError, match=next(reversed(alone))):
            opened(**alone)
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    monkeypatch.delitem(sys.modules, "memq.governor.zookeeper.coordinator")
    monkeypatch.delitem(sys.modules, "memq.governor.zookeeper.session")
    with pytest.raises(InvalidSettingError, match="needs kazoo") as caught:
        open_from_settings(PartSettings(coordinator="zookeeper://a"), Runtime(), "test")
    assert caught.value.hint == "pip install 'memq[zookeeper]'"


def client(**settings: Any) -> Any:
    return make_client(ADDRESS, ZookeeperSettings(**settings), logging.getLogger("test"))


def test_a_client_is_made_as_the_settings_say() -> None:
    plain = client(session_timeout_ms=3_000)
    assert plain.hosts == [("h1", 1), ("h2", 2)]
    assert (plain.auth_data, plain.default_acl) == (set(), list(OPEN_ACL_UNSAFE))
    assert isinstance(plain.handler, SocketHandler)
    secret = client(auth="digest:user:word:more", acl="creator")
    assert secret.auth_data == {("digest", "user:word:more")}
    assert secret.default_acl == list(CREATOR_ALL_ACL)


def test_acls_by_their_names() -> None:
    assert acl_of("open") == list(OPEN_ACL_UNSAFE)
    assert acl_of("creator") == list(CREATOR_ALL_ACL)
    first, readers = acl_of("creator-or-read")
    assert first == CREATOR_ALL_ACL[0]
    assert (readers.acl_list, readers.id.scheme, readers.id.id) == (["READ"], "world", "anyone")


@pytest.mark.parametrize("name", ["tls_ca_file", "tls_cert_file"])
def test_a_file_of_tls_that_can_not_be_used_is_named(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    settings = ZookeeperSettings(tls=True, **{name: str(file)})  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match=f"{name} '{file}' of .zookeeper. can't be used: No such file"):
        check_tools(settings)
    file.write_text("no certificate", encoding="utf-8")
    with pytest.raises(InvalidSettingError, match=f"{name} '{file}'"):
        check_tools(settings)
    check_tools(ZookeeperSettings(**{name: str(file)}))  # type: ignore[arg-type]  # without TLS it is not read


def test_a_client_that_can_not_be_stopped_is_closed() -> None:
    calls: list[str] = []

    class Client:
        def stop(self) -> None:
            calls.append("stop")
            if len(calls) == 1:
                raise OSError("no")

        def close(self) -> None:
            calls.append("close")

    with pytest.raises(OSError, match="no"):
        end_client(Client())
    end_client(Client())
    assert calls == ["stop", "close"] * 2
