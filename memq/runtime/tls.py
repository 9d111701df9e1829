"""TLS between clients and brokers: certificate files, and contexts that follow their changes.

Both sides need TLS 1.3 (RFC 8446).
"""

from __future__ import annotations

import difflib
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from memq.errors import InvalidSettingError, UnknownSettingError

TOKEN_CHARS_MAX = 3_500  # a HELLO has 4 KiB, with the names of the client
VARIABLES = "MEMQ_TLS_"
_FILES = ("ca_file", "cert_file", "key_file")
_TEXTS = (*_FILES, "key_password", "token_file", "user", "password", "password_file")
_KNOWN = (*_TEXTS, "check_host", "clients", "http")  # the last two are of brokers
_VARIABLE = re.compile(r"MEMQ_(?P<word>[TLS]{2,4})_(?P<key>.+)")  # also MEMQ_SSL_…, MEMQ_TSL_…
_SERVICE_LINKS = ("SERVICE_", "PORT")  # Kubernetes sets such variables for a service 'memq-tls'
Contexts = Callable[[], ssl.SSLContext]
Content = TypeVar("Content")
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificates of one side of a connection, as PEM files.

    Clients need only `ca_file`, unless brokers require certificates of clients. A replaced file has an effect on later
    connections.

    Args:
        ca_file: certificates of the trusted authorities; "": those of the system.
        cert_file: the own certificate, followed by those of intermediate authorities.
        key_file: the private key of the own certificate.
        key_password: password of that key.
        check_host: whether the certificate of a broker must name the host of its address.
        token_file: file with a signed token (JWT) that names this client; it is read for each connection.
        user: name of a user that logs in with a password.
        password: its password.
        password_file: file with that password; it is read for each connection.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    key_password: str = field(default="", repr=False)
    check_host: bool = True
    token_file: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be str, not {type(getattr(self, name)).__name__}")
        if bool(self.cert_file) != bool(self.key_file):
            given, missing = ("cert_file", "key_file") if self.cert_file else ("key_file", "cert_file")
            raise InvalidSettingError(f"{given} is set without {missing}", hint="a certificate and its key go together")
        if self.password and self.password_file:
            raise InvalidSettingError("password and password_file are set", hint="set one of them")
        if bool(self.user) != bool(self.password or self.password_file):
            raise InvalidSettingError("user and password go together", hint="set user and password_file")

    @property
    def files(self) -> tuple[str, ...]:
        """The files of certificates and keys."""
        return self.ca_file, self.cert_file, self.key_file


def token_of(tls: Tls) -> str:
    """Read and return the token of a client; "" without a file. Raises: InvalidSettingError."""
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


class Login(NamedTuple):
    """User and password of a client."""

    user: str
    password: str


def login_of(tls: Tls) -> Login | None:
    """Return user and password of a side as they are now; None without a user.

    Raises: InvalidSettingError.
    """
    if not tls.user:
        return None
    if not tls.password_file:
        return Login(tls.user, tls.password)
    try:
        with open(tls.password_file, encoding="utf-8") as file:
            return Login(tls.user, file.read(TOKEN_CHARS_MAX).rstrip("\r\n"))
    except (OSError, ValueError) as error:
        raise _unreadable("password_file", tls.password_file, error, "a file with a password") from error


def tls_of_environment(environment: Mapping[str, str] = os.environ) -> Tls | None:
    """Return the certificates that variables `MEMQ_TLS_…` name; None if there is no such variable.

    Raises: InvalidSettingError; UnknownSettingError for a misspelt variable, which would leave connections without TLS.
    """
    for variable in sorted(environment):
        found = _VARIABLE.fullmatch(variable)
        if found is None or found["key"].startswith(_SERVICE_LINKS):
            continue
        if found["word"] != "TLS" or found["key"].lower() not in _KNOWN:
            known = [f"{VARIABLES}{name.upper()}" for name in _KNOWN]
            near = difflib.get_close_matches(f"{VARIABLES}{found['key']}", known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"these exist: {', '.join(known)}"
            raise UnknownSettingError(f"unknown variable {variable} in the environment", hint=hint)
    named = {name: environment.get(f"{VARIABLES}{name.upper()}", "") for name in _TEXTS}
    if not any(named.values()):
        return None
    check_host = environment.get(f"{VARIABLES}CHECK_HOST", "true").lower() not in ("false", "0", "no")
    return Tls(**named, check_host=check_host)


class FollowedFiles(Generic[Content]):
    """The content of some files, which is loaded again when one of them has changed.

    If the files can't be loaded, for example half a pair, the content does not change, and `failed` gets the error
    once. Raises: InvalidSettingError when the files can't be loaded at first.
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
    """Return a context for connections from clients; `wanted` is whether they need a certificate.

    Raises: InvalidSettingError.
    """
    if not tls.cert_file:
        raise InvalidSettingError("a broker with TLS has no cert_file", hint="memq certs issue makes one")
    if wanted != ssl.CERT_NONE and not tls.ca_file:
        raise InvalidSettingError(
            "certificates of clients are required, but no ca_file names their authority",
            hint="set ca_file of [tls]",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = wanted
    context.num_tickets = 0  # a resumed session would keep a client whose authority or certificate is trusted no more
    _load(context, tls)
    return context


def followed_client(tls: Tls, failed: Callable[[InvalidSettingError], None] = lambda error: None) -> Contexts:
    """Return a function that returns the context for the next connection, by the present files.

    Raises: InvalidSettingError.
    """
    followed = FollowedFiles(tls.files, lambda: client_context(tls), failed)
    return lambda: followed.content


def followed_server(tls: Tls, wanted: ssl.VerifyMode, failed: Callable[[InvalidSettingError], None]) -> ssl.SSLContext:
    """Return a context for a listener. Each handshake uses the present files.

    Raises: InvalidSettingError.
    """
    followed = FollowedFiles(tls.files, lambda: server_context(tls, wanted), failed)

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = followed.content

    listening = server_context(tls, wanted)
    listening.sni_callback = choose
    return listening


def subject_of(certificate: object) -> str:
    """Return the common name of a certificate in the format of `getpeercert`; "" without one."""
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
    """Return modification time, size and inode of each file; zeros for an absent file."""
    stamps = []
    for file in files:
        try:
            found = os.stat(file)
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
