"""TLS of connections to ZooKeeper, and the texts by which a refused connection is recognised."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kazoo.handlers.threading import SequentialThreadingHandler

from memq.errors import InvalidSettingError
from memq.governor.zookeeper.settings import ZookeeperSettings

_TLS = "tls_cert_file and tls_key_file of [zookeeper]"


@dataclass(frozen=True, slots=True)
class RefusedConnection:
    """The meaning of a line of kazoo's log: a refused connection, and the remedy."""

    line: re.Pattern[str]
    text: str
    hint: str


# ZooKeeper is another party, down or slow in all other lines. The first that matches counts.
_REFUSALS = (
    RefusedConnection(
        re.compile("CERTIFICATE_VERIFY_FAILED.*has expired"),
        "is not trusted",
        "the certificate of ZooKeeper, or of its authority, has expired: replace it (memq certs issue NAME --host HOST "
        "--replace), and restart ZooKeeper",
    ),
    RefusedConnection(
        re.compile("CERTIFICATE_VERIFY_FAILED"),
        "is not trusted",
        "its certificate is not of an authority in tls_ca_file of [zookeeper], or does not name the host that is "
        "connected to: name the authority's file, and the host in coordinator = zookeeper://HOST:PORT/PATH as the "
        "certificate does",
    ),
    RefusedConnection(
        re.compile("ALERT_[A-Z_]*(CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED)"),
        "refuses the certificate of this broker",
        f"name a valid certificate in {_TLS}, of an authority in the trust store of ZooKeeper: memq certs show FILE "
        "prints authority and validity",
    ),
    RefusedConnection(
        re.compile("AUTH_FAILED"),
        "refuses the credentials",
        "check auth, acl and sasl in [zookeeper], and the rights of the node",
    ),
)


def refusal_in(line: str) -> RefusedConnection | None:
    """Return the refusal that a line of kazoo's log reports, None for any other line."""
    return next((each for each in _REFUSALS if each.line.search(line)), None)


class SocketHandler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads, and sockets that trust `tls_ca_file` alone.

    kazoo's own sockets trust the authorities of the system in addition.
    """

    def __init__(self, settings: ZookeeperSettings) -> None:
        super().__init__()
        self._settings = settings

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, timeout: float | None = None, **_: Any
    ) -> Any:
        """Connect, with TLS if the settings have it. `timeout` bounds the connection and the handshake, each."""
        plain = super().create_connection(address, timeout=timeout)
        if not self._settings.tls:
            return plain
        try:
            return _context(self._settings).wrap_socket(plain, server_hostname=hostname)
        except BaseException:
            plain.close()
            raise


def check_tools(settings: ZookeeperSettings) -> None:
    """Check the packages and files that connections need.

    kazoo would only log their absence again and again.

    Raises: InvalidSettingError.
    """
    if settings.sasl_mechanism and find_spec("puresasl") is None:
        raise InvalidSettingError(
            "sasl_mechanism of [zookeeper] needs the package pure-sasl, which is not installed",
            hint="pip install pure-sasl",
        )
    if settings.tls:
        _context(settings)


def _context(settings: ZookeeperSettings) -> ssl.SSLContext:
    """Return the context of a connection, from the files as they are now. Raises: InvalidSettingError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = settings.tls_verify and settings.tls_check_hostname
    context.verify_mode = ssl.CERT_REQUIRED if settings.tls_verify else ssl.CERT_NONE
    name, file = "tls_ca_file", settings.tls_ca_file
    try:
        if file:
            context.load_verify_locations(file)
        else:
            context.load_default_certs()
        name, file = "tls_cert_file", settings.tls_cert_file
        if file:
            # The password may be empty, but not None: then OpenSSL would ask for one on the terminal.
            context.load_cert_chain(file, settings.tls_key_file or None, settings.tls_key_password)
    except OSError as error:
        raise InvalidSettingError(
            f"{name} '{file}' of [zookeeper] can't be used: {error.strerror or error}",
            hint="give PEM files, the key's too, and its password as tls_key_password",
        ) from error
    return context
