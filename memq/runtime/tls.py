"""TLS between clients and brokers: the files of one side, and contexts that follow these files.

Source: RFC 8446 (TLS 1.3), which both sides need.
"""

from __future__ import annotations

import difflib
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from memq.errors import InvalidSettingError, UnknownSettingError

TOKEN_CHARS_MAX = 3_500  # a HELLO has 4 KiB, with the names of the client
VARIABLES = "MEMQ_TLS_"
_FILES = ("ca_file", "cert_file", "key_file")
_KNOWN = (*_FILES, "key_password", "token_file", "check_host", "clients", "http")  # the last two are of brokers
_SERVICE_LINKS = ("SERVICE_", "PORT")  # Kubernetes sets such variables for a service 'memq-tls'
Contexts = Callable[[], ssl.SSLContext]
Content = TypeVar("Content")
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificates of one side of a connection, as PEM files.

    Clients need `ca_file` alone, unless brokers want a certificate of them, too. Files that are replaced count for
    later connections.

    Args:
        ca_file: certificates of the authorities that are trusted; "": those of the system.
        cert_file: the own certificate, followed by those of intermediate authorities.
        key_file: the private key of the own certificate.
        key_password: password of that key.
        check_host: whether the certificate of a broker must name the host that is connected to.
        token_file: file with a signed token (JWT) that names this client; it is read for each connection.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    key_password: str = field(default="", repr=False)
    check_host: bool = True
    token_file: str = ""

    def __post_init__(self) -> None:
        for name in (*_FILES, "key_password", "token_file"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be str, not {type(getattr(self, name)).__name__}")
        if bool(self.cert_file) != bool(self.key_file):
            given, missing = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise InvalidSettingError(f"{given} is set without {missing}", hint="a certificate and its key go together")

    @property
    def files(self) -> tuple[str, ...]:
        """The files of certificates and keys."""
        return self.ca_file, self.cert_file, self.key_file


def token_of(tls: Tls) -> str:
    """Return the token of a side as it is now; "" without one. Raises: InvalidSettingError."""
    if not tls.token_file:
        return ""
    try:
        with open(tls.token_file, encoding="ascii") as file:
            token = file.read(TOKEN_CHARS_MAX + 2).strip()  # with the end of its line
    except (OSError, ValueError) as error:
        raise _unreadable("token_file", tls.token_file, error, "a file with a token (JWT)") from error
    if len(token) > TOKEN_CHARS_MAX:
        raise InvalidSettingError(
            f"the token in token_file '{tls.token_file}' is longer than {TOKEN_CHARS_MAX} characters",
            hint="ask its issuer for one with fewer claims",
        )
    return token


def tls_of_environment(environment: Mapping[str, str] = os.environ) -> Tls | None:
    """Return the certificates that variables `MEMQ_TLS_…` name; None if there is no such variable.

    Raises: InvalidSettingError; UnknownSettingError: a misspelt variable would leave the connections without TLS.
    """
    for variable in sorted(environment):
        key = variable.removeprefix(VARIABLES)
        if key != variable and not key.startswith(_SERVICE_LINKS) and key.lower() not in _KNOWN:
            known = [f"{VARIABLES}{name.upper()}" for name in _KNOWN]
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"these exist: {', '.join(known)}"
            raise UnknownSettingError(f"unknown variable {variable} in the environment", hint=hint)
    texts = (*_FILES, "key_password", "token_file")
    named = {name: environment.get(f"{VARIABLES}{name.upper()}", "") for name in texts}
    if not any(named.values()):
        return None
    check_host = environment.get(f"{VARIABLES}CHECK_HOST", "true").lower() not in ("false", "0", "no")
    return Tls(**named, check_host=check_host)


class FollowedFiles(Generic[Content]):
    """The content of some files, read again when one of them has changed.

    A change that can't be loaded, as half a pair of files, leaves the content as it was; `failed` gets the error once.
    Raises: InvalidSettingError when the files can't be loaded at first.
    """

    def __init__(
        self,
        files: Sequence[str],
        load: Callable[[], Content],
        failed: Callable[[InvalidSettingError], None] = lambda error: None,
    ) -> None:
        self._files = files
        self._load = load
        self._failed = failed
        self._stamp = _stamp(files)
        self._content = load()

    @property
    def content(self) -> Content:
        """The content of the files as they are now."""
        stamp = _stamp(self._files)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._content = self._load()
            except InvalidSettingError as error:
                self._failed(error)
        return self._content


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return a context for connections to brokers. Raises: InvalidSettingError."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if tls.ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the system's authorities are not trusted then
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = tls.check_host
    _load(context, tls)
    return context


def server_context(tls: Tls, wanted: ssl.VerifyMode = ssl.CERT_NONE) -> ssl.SSLContext:
    """Return a context for connections from clients; `wanted`: whether they need a certificate.

    Raises: InvalidSettingError.
    """
    if not tls.cert_file:
        raise InvalidSettingError("a broker with TLS has no cert_file", hint="memq certs issue makes one")
    if wanted != ssl.CERT_NONE and not tls.ca_file:
        raise InvalidSettingError(
            "certificates of clients are wanted, and no ca_file says which authority makes them",
            hint="set ca_file of [tls]",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = wanted
    context.num_tickets = 0  # a resumed session would keep a client whose authority or certificate is trusted no more
    _load(context, tls)
    return context


def followed_client(tls: Tls, failed: Callable[[InvalidSettingError], None] = lambda error: None) -> Contexts:
    """Return the maker of contexts for connections to brokers, by the files as they are then.

    Raises: InvalidSettingError.
    """
    followed = FollowedFiles(tls.files, lambda: client_context(tls), failed)
    return lambda: followed.content


def followed_server(tls: Tls, wanted: ssl.VerifyMode, failed: Callable[[InvalidSettingError], None]) -> ssl.SSLContext:
    """Return a context for a listener, which takes files that are replaced for its next handshake.

    Raises: InvalidSettingError.
    """
    followed = FollowedFiles(tls.files, lambda: server_context(tls, wanted), failed)

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = followed.content

    listening = server_context(tls, wanted)
    listening.sni_callback = choose
    return listening


def subject_of(certificate: object) -> str:
    """Return the common name in a certificate as `getpeercert` returns it; "" if it has none."""
    if not isinstance(certificate, dict):
        return ""
    names = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return str(names[-1]) if names else ""


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    """Load the files of a side into a context. Raises: InvalidSettingError, which names the file."""
    if tls.ca_file:
        try:
            context.load_verify_locations(tls.ca_file)
        except (OSError, ValueError) as error:
            raise _unreadable("ca_file", tls.ca_file, error) from error
    if not tls.cert_file:
        return
    for name in ("cert_file", "key_file"):
        try:
            with open(getattr(tls, name), "rb") as file:
                file.read(1)
        except OSError as error:
            raise _unreadable(name, getattr(tls, name), error) from error
    try:
        # without a function OpenSSL would ask for the password on the terminal
        context.load_cert_chain(tls.cert_file, tls.key_file, lambda: tls.key_password)
    except (OSError, ValueError) as error:
        raise InvalidSettingError(
            f"can't use certificate '{tls.cert_file}' with key '{tls.key_file}': {_reason(error)}",
            hint="both are PEM files and belong together; an encrypted key needs key_password",
        ) from error


def _unreadable(name: str, file: str, error: Exception, kind: str = "a PEM file") -> InvalidSettingError:
    return InvalidSettingError(f"can't read {name} '{file}': {_reason(error)}", hint=f"it is {kind}")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate in it").lower().replace("_", " ")
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _stamp(files: Sequence[str]) -> _Stamp:
    """Return times, sizes and numbers of the files; a file that is absent has zeros."""
    stamps = []
    for file in files:
        try:
            found = os.stat(file)
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
