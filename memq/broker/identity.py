"""Identity of clients at a broker: certificates by the section `[tls]`, tokens by `[tokens]`."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memq.errors import DeniedError, InvalidSettingError
from memq.protocol.connection import Principal
from memq.runtime.logs import EventLog
from memq.runtime.network import Network, SocketNetwork, client_network, is_loopback
from memq.runtime.tls import FollowedFiles, Tls, followed_client, followed_server
from memq.settings import BrokerSettings, Section, read_section, section_setting

LEEWAY_S = 10  # between the clocks of issuer and broker
PRINCIPAL_CHARS_MAX = 200
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
    clients: Literal["anonymous", "optional", "required"] = section_setting(
        "anonymous",
        "certificates of clients: not requested, checked if a client has one, required",
        choices=("anonymous", "optional", "required"),
    )
    http: bool = section_setting(True, "TLS on the HTTP port, too; no certificate of clients is requested there")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Signed tokens (JWT) by which clients identify themselves."""

    jwks_file: str = section_setting("", "file with the public keys of the issuer, as a JWK set; empty: no tokens")
    issuer: str = section_setting("", "the claim `iss` of a token")
    audience: str = section_setting("", "a value of the claim `aud` of a token")
    claim: str = section_setting("sub", "claim that names the principal")
    required: bool = section_setting(False, "refuse clients that have neither a token nor a certificate")


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

    server = followed_server(tls, _CLIENTS[settings.clients], failed)
    data = SocketNetwork(server=server, client=followed_client(tls, failed))
    http = SocketNetwork(server=followed_server(tls, ssl.CERT_NONE, failed)) if settings.http else SocketNetwork()
    return BrokerNetworks(data, http)


class TokenBearer(NamedTuple):
    """The principal of a token, and the Unix time in s at which the token ends."""

    principal: Principal
    ends_s: float


class Tokens:
    """Checks the tokens of clients. It reads the file of keys again after a change.

    Raises: InvalidSettingError for missing settings, and for an invalid file of keys.
    """

    def __init__(self, settings: TokenSettings, events: EventLog) -> None:
        missing = [name for name in ("jwks_file", "issuer", "audience") if not getattr(settings, name)]
        if missing:
            raise InvalidSettingError(f"[tokens] has no {' and no '.join(missing)}", hint="set all three, or none")
        self.required = settings.required
        self._settings = settings

        def failed(error: InvalidSettingError) -> None:
            events.error("keys-not-reloaded", f"{error}; the keys that were loaded before count")

        self._keys = FollowedFiles((settings.jwks_file,), lambda: _read_keys(settings.jwks_file), failed)

    def bearer(self, token: str) -> TokenBearer:
        """Return the bearer of a token. Raises: DeniedError, which never repeats the token."""
        import jwt

        settings = self._settings
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            fitting = [key for key in self._keys.content if key_id is None or key.key_id == key_id]
            if len(fitting) != 1:
                raise DeniedError(
                    f"the token is signed by key '{str(key_id)[:60]}', and [tokens] knows {len(fitting)} of this id",
                    hint="add the public key to jwks_file",
                )
            claims = jwt.decode(
                token,
                fitting[0].key,
                algorithms=[fitting[0].algorithm_name],
                issuer=settings.issuer,
                audience=settings.audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", settings.claim]},
            )
        except jwt.PyJWTError as error:
            raise DeniedError(
                f"the token is refused: {str(error)[:200]}", hint="get a new token of the issuer"
            ) from error
        name = claims[settings.claim]
        if not isinstance(name, str) or not 0 < len(name) <= PRINCIPAL_CHARS_MAX:
            raise DeniedError(f"the claim '{settings.claim}' of the token names no principal")
        return TokenBearer(Principal(name), float(claims["exp"]) + LEEWAY_S)


def tokens_of(section: Section, events: EventLog) -> Tokens | None:
    """Return the checker of tokens by the section `[tokens]`; None if the section is empty.

    Raises: InvalidSettingError, UnknownSettingError.
    """
    return Tokens(read_section("tokens", section, TokenSettings), events) if section else None


def _read_keys(file: str) -> list[Any]:
    """Return the keys of a JWK set. Raises: InvalidSettingError."""
    try:
        import jwt
    except ImportError as error:
        raise InvalidSettingError("[tokens] needs the package pyjwt", hint="pip install 'memq[tokens]'") from error
    try:
        with open(file, encoding="utf-8") as opened:
            keys = jwt.PyJWKSet.from_dict(json.load(opened)).keys
    except (OSError, ValueError, AttributeError, jwt.PyJWTError) as error:
        raise InvalidSettingError(f"can't read jwks_file '{file}': {error}", hint="it is a JWK set, in JSON") from error
    symmetric = [key for key in keys if key.key_type == "oct"]
    if symmetric:  # who can check such a token can also make one
        raise InvalidSettingError(f"jwks_file '{file}' has a secret key", hint="use public keys: RS256, ES256, EdDSA")
    return list(keys)
