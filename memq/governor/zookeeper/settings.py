"""The section `[zookeeper]` of the settings, and the coordinator's URL. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from memq.errors import InvalidSettingError
from memq.redaction import Redacted
from memq.settings import section_setting

SCHEME = "zookeeper"
_URL = re.compile(r"zookeeper://(?P<hosts>[^/]+)(?P<path>/[^\s]*)?\Z")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+)(:(?P<port>\d{1,5}))?\Z")
# A comma is refused, since the path follows the last host only. ZooKeeper takes no control characters.
_NOT_IN_PATH = re.compile(r"[,?#\x00-\x1f\x7f-\x9f]")


_TOGETHER = {
    "tls": ("tls_ca_file", "tls_cert_file"),  # without `tls` the connection would not be encrypted
    "tls_cert_file": ("tls_key_file",),
    "tls_key_file": ("tls_key_password",),
    "sasl_mechanism": ("sasl_username", "sasl_password", "sasl_service", "sasl_principal"),
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ZookeeperSettings(Redacted):
    """Settings of the connection to ZooKeeper. Those of TLS and SASL are passed to kazoo."""

    session_timeout_ms: int = section_setting(10_000, "silence after which a broker counts as dead", 1_000, 300_000)
    connect_timeout_ms: int = section_setting(15_000, "time for which a start waits for ZooKeeper", 100, 600_000)
    auth: str = section_setting("", "digest:USER:PASSWORD, or another scheme:credential")
    acl: str = section_setting("open", "access to the nodes", choices=("open", "creator", "creator-or-read"))
    tls: bool = section_setting(False, "use TLS")
    tls_ca_file: str = section_setting("", "PEM file of trusted certificate authorities, instead of the system's")
    tls_cert_file: str = section_setting("", "PEM file of this broker's certificate")
    tls_key_file: str = section_setting("", "PEM file of its key")
    tls_key_password: str = section_setting("", "password of that key")
    tls_verify: bool = section_setting(True, "check the server's certificate")
    tls_check_hostname: bool = section_setting(True, "check that the certificate has the host's name")
    sasl_mechanism: str = section_setting(
        "", "mechanism of SASL; needs the package pure-sasl", choices=("", "DIGEST-MD5", "GSSAPI")
    )
    sasl_username: str = section_setting("", "user of DIGEST-MD5")
    sasl_password: str = section_setting("", "password of DIGEST-MD5")
    sasl_service: str = section_setting("", "service of GSSAPI")
    sasl_principal: str = section_setting("", "principal of GSSAPI")


@dataclass(frozen=True, slots=True)
class ZookeeperAddress:
    """The servers as `HOST:PORT,HOST:PORT`, and the node above all nodes of memq, as `/memq`."""

    hosts: str
    path: str


def parse_url(url: str) -> ZookeeperAddress:
    """Parse `zookeeper://HOST:PORT,HOST:PORT/PATH`.

    The default port is 2181, the default path `/memq`.

    Raises: InvalidSettingError.
    """
    match = _URL.match(url)
    hosts = [host.strip() for host in match["hosts"].split(",")] if match is not None else []
    if match is None or not all(_is_host(host) for host in hosts):
        raise InvalidSettingError(
            f"coordinator '{url[:200]}' is no address of ZooKeeper", hint="write zookeeper://HOST:PORT,HOST:PORT/PATH"
        )
    path = "/" + (match["path"] or "/memq").strip("/")
    if path == "/" or "//" in path or _NOT_IN_PATH.search(path) or {".", "..", "zookeeper"} & set(path.split("/")[1:]):
        raise InvalidSettingError(
            f"path '{match['path']}' of coordinator '{url[:200]}' can't be used", hint="name a node of its own: /memq"
        )
    return ZookeeperAddress(",".join(hosts), path)


def check_together(settings: ZookeeperSettings) -> ZookeeperSettings:
    """Return the settings. Raises: InvalidSettingError for one that has no effect without another."""
    scheme, _, credential = settings.auth.partition(":")
    if settings.auth and not (scheme and credential and (scheme != "digest" or ":" in credential)):
        raise InvalidSettingError("setting auth in [zookeeper] is no scheme:credential", hint="digest:USER:PASSWORD")
    values = asdict(settings)
    for first, others in _TOGETHER.items():
        alone = [name for name in others if values[name]]
        if alone and not values[first]:
            raise InvalidSettingError(
                f"[zookeeper] has {alone[0]}, but not {first}: it would not be used",
                hint=f"set {first}, or leave it out",
            )
    return settings


def _is_host(text: str) -> bool:
    match = _HOST.match(text)
    return match is not None and int(match["port"] or 1) in range(1, 65_536)
