"""The kazoo client of a session: how it connects, and how it takes answers that no client can read."""

from __future__ import annotations

import logging
import ssl
from importlib.util import find_spec
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, ConnectionDropped, KazooException, SessionExpiredError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.connection import ConnectionHandler, RWServerAvailable
from kazoo.security import ACL, ANYONE_ID_UNSAFE, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, Permissions

from memq.errors import InvalidSettingError
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings

RETRY_DELAY_S_MAX = 2
# What kazoo's loop takes: it connects again, or ends the session.
_HANDLED = (ConnectionDropped, KazooTimeoutError, AuthFailedError, SessionExpiredError, RWServerAvailable)


class ZooKeeperConnection(ConnectionHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's connection. kazoo's own loop ends at an answer that it can't read; this one connects again."""

    def _connect(self, *args: Any) -> Any:
        return _readable(super()._connect, *args)

    def _read_socket(self, *args: Any) -> Any:
        return _readable(super()._read_socket, *args)


def _readable(read: Any, *args: Any) -> Any:
    try:
        return read(*args)
    except _HANDLED:
        raise
    except Exception as error:
        raise ConnectionDropped(f"an answer that can't be read: {error!r}") from error


class KazooLog(logging.Handler):
    """Log of one kazoo client: its last warning explains a failed connect; errors go to memq's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self.logger = logging.Logger("memq.kazoo", logging.WARNING)  # noqa: LOG001 - of one client, and gone with it
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning, in a thread of kazoo."""
        self.last = record.getMessage()
        if record.levelno >= logging.ERROR:
            logging.getLogger(record.name).handle(record)


def make_client(address: ZookeeperAddress, settings: ZookeeperSettings, logger: logging.Logger) -> Any:
    """Return a kazoo client that tries to connect for ever."""
    sasl = {
        "mechanism": settings.sasl_mechanism,
        "username": settings.sasl_username,
        "password": settings.sasl_password,
        "service": settings.sasl_service,
        "principal": settings.sasl_principal,
    }
    scheme, _, credential = settings.auth.partition(":")
    try:
        client = KazooClient(
            hosts=address.hosts,
            timeout=settings.session_timeout_ms / 1000,
            default_acl=acl_of(settings.acl),
            auth_data=[(scheme, credential)] if settings.auth else None,
            sasl_options={key: value for key, value in sasl.items() if value} if settings.sasl_mechanism else None,
            connection_retry={"max_tries": -1, "delay": 0.1, "max_delay": RETRY_DELAY_S_MAX},
            logger=logger,
            use_ssl=settings.tls,
            ca=settings.tls_ca_file or None,
            certfile=settings.tls_cert_file or None,
            keyfile=settings.tls_key_file or None,
            keyfile_password=settings.tls_key_password or None,
            verify_certs=settings.tls_verify,
            check_hostname=settings.tls and settings.tls_verify and settings.tls_check_hostname,
        )
    except (KazooException, ValueError) as error:
        raise InvalidSettingError(f"ZooKeeper can't be reached as the settings say: {error}") from error
    plain = client._connection
    client._connection = ZooKeeperConnection(
        client, plain.retry_sleeper, logger=logger, sasl_options=plain.sasl_options
    )
    return client


def check_tools(settings: ZookeeperSettings) -> None:
    """Check the packages that kazoo needs; kazoo would only log their absence again and again.

    Raises: InvalidSettingError.
    """
    if settings.sasl_mechanism and find_spec("puresasl") is None:
        raise InvalidSettingError(
            "sasl_mechanism of [zookeeper] needs the package pure-sasl, which is not installed",
            hint="pip install pure-sasl",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    certificate, key = settings.tls_cert_file, settings.tls_key_file
    for name, file, load in (
        ("tls_ca_file", settings.tls_ca_file, context.load_verify_locations),
        # A password, if only an empty one: without it OpenSSL would ask for one on the terminal.
        (
            "tls_cert_file",
            certificate,
            lambda file: context.load_cert_chain(file, key or None, settings.tls_key_password),
        ),
    ):
        try:
            if settings.tls and file:
                load(file)
        except OSError as error:
            raise InvalidSettingError(
                f"{name} '{file}' of [zookeeper] can't be used: {error.strerror or error}",
                hint="give PEM files, the key's too, and its password as tls_key_password",
            ) from error


def end_client(client: Any) -> None:
    """End a client's session and its threads; it waits for them."""
    try:
        client.stop()
    finally:
        client.close()


def acl_of(name: str) -> list[Any]:
    """Return the rights on every node that is made."""
    if name == "open":
        return list(OPEN_ACL_UNSAFE)
    everybody = [ACL(Permissions.READ, ANYONE_ID_UNSAFE)] if name == "creator-or-read" else []
    return [*CREATOR_ALL_ACL, *everybody]
