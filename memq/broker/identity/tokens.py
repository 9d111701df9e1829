"""Signed tokens (JWT) of clients, by the section `[tokens]`. Source: RFC 7519."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memq.broker.identity.key_sets import NOT_READY_MS, KeyFile, KeySource, KeyUrl
from memq.errors import DeniedError, InvalidSettingError, NotReadyError
from memq.protocol.connection import Principal
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.settings import Section, read_section, section_setting

LEEWAY_S = 10  # between the clocks of issuer and broker
PRINCIPAL_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Signed tokens (JWT) by which clients identify themselves."""

    jwks_file: str = section_setting("", "file with the public keys of the issuer, as a JWK set")
    jwks_url: str = section_setting("", "URL of that set instead of a file; it begins with https://")
    jwks_ca_file: str = section_setting("", "PEM file of authorities for jwks_url, instead of the system's")
    jwks_refresh_ms: int = section_setting(300_000, "interval between fetches of jwks_url", low=10_000, high=86_400_000)
    issuer: str = section_setting("", "the claim `iss` of a token")
    audience: str = section_setting("", "a value of the claim `aud` of a token")
    claim: str = section_setting("sub", "claim that names the principal")
    required: bool = section_setting(False, "refuse clients that have neither a token nor a certificate")


class TokenBearer(NamedTuple):
    """The principal of a token, and the Unix time in s at which the token ends."""

    principal: Principal
    ends_s: float


class Tokens:
    """Checks the tokens of clients.

    Raises: InvalidSettingError for settings that do not fit, and for a file without keys.
    """

    def __init__(self, settings: TokenSettings, clock: Clock, events: EventLog) -> None:
        missing = [name for name in ("issuer", "audience") if not getattr(settings, name)]
        if missing:
            raise InvalidSettingError(f"[tokens] has no {' and no '.join(missing)}", hint="set both, or no [tokens]")
        if bool(settings.jwks_file) == bool(settings.jwks_url):
            both = "both jwks_file and jwks_url" if settings.jwks_file else "neither jwks_file nor jwks_url"
            raise InvalidSettingError(f"[tokens] has {both}", hint="set one of them")
        self.required = settings.required
        self._settings = settings
        self._source: KeySource = (
            KeyFile(settings.jwks_file, events)
            if settings.jwks_file
            else KeyUrl(settings.jwks_url, settings.jwks_ca_file, settings.jwks_refresh_ms, clock, events)
        )

    async def follow(self) -> None:
        """Keep the keys new, without end if there is anything to do."""
        await self._source.follow()

    def bearer(self, token: str) -> TokenBearer:
        """Return the bearer of a token.

        Raises: DeniedError, which never repeats the token; NotReadyError while keys are fetched.
        """
        import jwt

        settings = self._settings
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            fitting = [key for key in self._source.current() if key_id is None or key.key_id == key_id]
            if not fitting and self._source.renew():
                raise NotReadyError(
                    f"the broker fetches key '{str(key_id)[:60]}' of the token", retry_after_ms=NOT_READY_MS
                )
            if len(fitting) != 1:
                raise DeniedError(
                    f"the token is signed by key '{str(key_id)[:60]}', and [tokens] knows {len(fitting)} of this id",
                    hint="the set of jwks_file or jwks_url needs this public key",
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


def tokens_of(section: Section, clock: Clock, events: EventLog) -> Tokens | None:
    """Return the check of tokens by the section `[tokens]`; None without one.

    Raises: InvalidSettingError, UnknownSettingError.
    """
    return Tokens(read_section("tokens", section, TokenSettings), clock, events) if section else None
