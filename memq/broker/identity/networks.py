"""TLS of a broker by the section `[tls]`: its networks, and the check of what strangers reach."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memq.broker.identity.tokens import TokenSettings
from memq.errors import InvalidSettingError
from memq.runtime.logs import EventLog
from memq.runtime.network import Network, SocketNetwork, client_network, is_loopback
from memq.runtime.tls import Tls, followed_client, followed_server
from memq.settings import BrokerSettings, Section, read_section, section_setting

REPEAT_S = 10.0
REFUSED_KEPT_MAX = 1_000  # addresses and reasons in memory
_CLIENTS = {"anonymous": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Certificates of a broker or a client.

    A broker needs `cert_file` and `key_file`, a client `ca_file`.
    """

    cert_file: str = section_setting("", "PEM file of the certificate, and of intermediate authorities")
    key_file: str = section_setting("", "PEM file of its private key")
    key_password: str = section_setting("", "password of that key")
    ca_file: str = section_setting("", "PEM file of trusted authorities, instead of the system's")
    check_host: bool = section_setting(True, "check that the certificate of a broker names its host")
    token_file: str = section_setting("", "file with the token of a client; brokers have none")
    user: str = section_setting("", "name of a client that logs in with a password; brokers have none")
    password: str = section_setting("", "password of that user")
    password_file: str = section_setting("", "file with that password")
    clients: Literal["anonymous", "optional", "required"] = section_setting(
        "anonymous",
        "certificates of clients: not requested, checked if a client has one, required",
        choices=("anonymous", "optional", "required"),
    )
    http: bool = section_setting(True, "TLS on the HTTP port, too; no certificate of clients is requested there")


_EXPOSED = "without encryption and identity: everybody who reaches its port can read, write and delete all data"


def check_exposure(settings: BrokerSettings, sections: Mapping[str, Section]) -> None:
    """Refuse to listen beyond loopback without TLS and an identity of each client.

    With the setting `insecure` the operator accepts it.

    Raises: InvalidSettingError, UnknownSettingError.
    """
    if is_loopback(settings.host) or settings.insecure:
        return
    tls = read_section("tls", sections.get("tls", {}), TlsSettings)
    tokens = read_section("tokens", sections.get("tokens", {}), TokenSettings)
    if tls.cert_file and (tls.clients == "required" or tokens.required):
        return
    raise InvalidSettingError(
        f"the broker would listen on {settings.host} {_EXPOSED}",
        hint='give it certificates in [tls] with clients = "required", or set insecure = true in a network that only '
        "trusted machines reach",
    )


def warn_of_anonymous(settings: BrokerSettings, sections: Mapping[str, Section], events: EventLog) -> None:
    """Log a warning if permissions are checked, but all clients have the same principal.

    Raises: InvalidSettingError, UnknownSettingError.
    """
    asked = read_section("tls", sections.get("tls", {}), TlsSettings).clients != "anonymous"
    if settings.permissions and not asked and not sections.get("tokens"):
        events.warning(
            "permissions-anonymous",
            "permissions = true, and neither a certificate nor a token of clients is asked for: each client is "
            "'anonymous'",
        )


def warn_if_exposed(settings: BrokerSettings, events: EventLog, *, encrypted: bool) -> None:
    """Log a warning if other machines can reach the broker without encryption or identity."""
    if not is_loopback(settings.host) and (settings.insecure or not encrypted):
        events.warning("insecure", f"the broker listens on {settings.host} {_EXPOSED}")


class _RefusedHandshakes:
    """Logs refused handshakes: each reason of an address once in REPEAT_S, since clients repeat them.

    So many tries of one client do not use up the lines of the log for others.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._until_s: dict[tuple[str, str], float] = {}

    def note(self, peer: str, reason: str) -> None:
        """Log that a peer was refused."""
        now_s, key = self._events.now_s(), (peer.rpartition(":")[0], reason)
        if self._until_s.get(key, 0.0) > now_s:
            return
        if len(self._until_s) >= REFUSED_KEPT_MAX:
            self._until_s.clear()
        self._until_s[key] = now_s + REPEAT_S
        self._events.warning("handshake-refused", f"{peer}: no TLS: {reason}", source=key[0])


class BrokerNetworks(NamedTuple):
    """Networks: `data` for the data port and connections to brokers, `http` for the HTTP port."""

    data: Network
    http: Network


def broker_networks(section: Section, events: EventLog) -> BrokerNetworks:
    """Return the networks of a broker by its section `[tls]`; without TLS if the section is empty.

    A replaced file has an effect on later connections; `events` logs files that can't be loaded.
    Raises: InvalidSettingError, UnknownSettingError.
    """
    if not section:
        network = client_network()
        return BrokerNetworks(network, network)
    settings = read_section("tls", section, TlsSettings)
    tls = Tls(
        ca_file=settings.ca_file,
        cert_file=settings.cert_file,
        key_file=settings.key_file,
        key_password=settings.key_password,
        check_host=settings.check_host,
    )

    def failed(error: InvalidSettingError) -> None:
        events.error("tls-not-reloaded", f"{error}; connections get the certificate that was loaded before")

    refused = _RefusedHandshakes(events).note
    server = followed_server(tls, _CLIENTS[settings.clients], failed)
    data = SocketNetwork(server=server, client=followed_client(tls, failed), refused=refused)
    http = SocketNetwork()
    if settings.http:
        http = SocketNetwork(server=followed_server(tls, ssl.CERT_NONE, failed), refused=refused)
    return BrokerNetworks(data, http)
