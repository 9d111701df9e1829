"""The section `[zookeeper]` of the settings, and the coordinator's URL. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memq.errors import InvalidSettingError
from memq.settings import section_setting

SCHEME = "zookeeper"
_URL = re.compile(r"zookeeper://(?P<hosts>[^/\s]+)(?P<path>/[^\s]*)?\Z")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+)(:\d{1,5})?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZookeeperSettings:
    """How ZooKeeper is reached. What is about TLS and SASL is handed on to kazoo."""

    session_timeout_ms: int = section_setting(10_000, "a broker that is silent so long is dead", 1_000, 300_000)
    connect_timeout_ms: int = section_setting(15_000, "how long a start waits for ZooKeeper", 100, 600_000)
    auth: str = section_setting("", "digest:USER:PASSWORD, or another scheme:credential")
    acl: str = section_setting("open", "who may touch the nodes", choices=("open", "creator", "creator-or-read"))
    tls: bool = section_setting(False, "speak TLS")
    tls_ca_file: str = section_setting("", "PEM file of the authorities to trust, instead of the system's")
    tls_cert_file: str = section_setting("", "PEM file of this broker's certificate")
    tls_key_file: str = section_setting("", "PEM file of its key")
    tls_key_password: str = section_setting("", "password of that key")
    tls_verify: bool = section_setting(True, "check the server's certificate")
    tls_check_hostname: bool = section_setting(True, "check that the certificate is the host's")
    sasl_mechanism: str = section_setting("", "DIGEST-MD5 or GSSAPI; it needs the package pure-sasl")
    sasl_username: str = section_setting("", "user of DIGEST-MD5")
    sasl_password: str = section_setting("", "password of DIGEST-MD5")
    sasl_service: str = section_setting("", "service of GSSAPI")
    sasl_principal: str = section_setting("", "principal of GSSAPI")


@dataclass(frozen=True, slots=True)
class ZookeeperAddress:
    """The servers as `HOST:PORT,HOST:PORT`, and the node below which everything lies, as `/memq`."""

    hosts: str
    path: str


def parse_url(url: str) -> ZookeeperAddress:
    """Parse `zookeeper://HOST:PORT,HOST:PORT/PATH`; the port is 2181 and the path `/memq` when they are left out.

    Raises: InvalidSettingError.
    """
    match = _URL.match(url)
    if match is None or not all(_HOST.match(host) for host in match["hosts"].split(",")):
        raise InvalidSettingError(
            f"coordinator '{url[:200]}' is no address of ZooKeeper", hint="write zookeeper://HOST:PORT,HOST:PORT/PATH"
        )
    path = "/" + (match["path"] or "/memq").strip("/")
    if path == "/" or "//" in path or {".", "..", "zookeeper"} & set(path.split("/")[1:]):
        raise InvalidSettingError(
            f"path '{match['path']}' of coordinator '{url[:200]}' can't be used", hint="name a node of its own: /memq"
        )
    return ZookeeperAddress(match["hosts"], path)
