"""TLS of a broker: the section `[tls]` of its settings, and the networks of its ports."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memq.errors import InvalidSettingError
from memq.runtime.logs import EventLog
from memq.runtime.network import Network, SocketNetwork, client_network
from memq.runtime.tls import FollowedContext, Tls, client_context, followed_server
from memq.settings import BrokerSettings, Section, read_section, section_setting

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
    clients: Literal["anonymous", "optional", "required"] = section_setting(
        "anonymous",
        "certificates of clients: none is asked for, one is checked if a client has it, each client needs one",
        choices=("anonymous", "optional", "required"),
    )
    http: bool = section_setting(True, "TLS on the HTTP port, too; no certificate of clients is asked for there")


def warn_of_anonymous(settings: BrokerSettings, section: Section, events: EventLog) -> None:
    """Log that permissions are checked, and that each client has the same principal."""
    asked = bool(section) and read_section("tls", section, TlsSettings).clients != "anonymous"
    if settings.permissions and not asked:
        events.warning(
            "permissions-anonymous",
            "permissions = true, and no certificate of clients is asked for: each client is 'anonymous'",
        )


class BrokerNetworks(NamedTuple):
    """The network of the port for clients and of connections to brokers, and that of the HTTP port."""

    data: Network
    http: Network


def broker_networks(section: Section, events: EventLog) -> BrokerNetworks:
    """Return the networks of a broker by its section `[tls]`; without one there is no TLS.

    Files that are replaced count for later connections; `events` logs those that can't be loaded.
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

    followed = FollowedContext(tls, client_context, failed)
    data = SocketNetwork(
        server=followed_server(tls, _CLIENTS[settings.clients], failed), client=lambda: followed.context
    )
    http = SocketNetwork(server=followed_server(tls, ssl.CERT_NONE, failed)) if settings.http else SocketNetwork()
    return BrokerNetworks(data, http)
