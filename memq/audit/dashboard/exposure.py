"""Checks which clients the settings of the dashboard admit, before it is imported or listens."""

from __future__ import annotations

import ssl
from pathlib import Path

from memq.errors import InvalidSettingError
from memq.runtime.network import is_loopback
from memq.settings import DashboardSettings

TOKEN_CHARS_MIN = 16


def check_settings(settings: DashboardSettings) -> None:
    """Refuse settings that would expose the dashboard, or can't be read. Raises: InvalidSettingError."""
    check_exposure(settings)
    read_token(settings)
    tls_of(settings)


def read_token(settings: DashboardSettings) -> str:
    """Return the token, "" when none is set. Raises: InvalidSettingError."""
    if not settings.dashboard_token_file:
        return ""
    try:
        token = Path(settings.dashboard_token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettingError(
            f"can't read dashboard_token_file {settings.dashboard_token_file}: {error}", hint="check path and rights"
        ) from error
    if len(token) < TOKEN_CHARS_MIN:
        raise InvalidSettingError(
            f"the token in {settings.dashboard_token_file} has {len(token)} characters, {TOKEN_CHARS_MIN} is the least",
            hint="make one: head -c 24 /dev/urandom | base64",
        )
    return token


def tls_of(settings: DashboardSettings) -> ssl.SSLContext | None:
    """Return the TLS context, None when none is set. Raises: InvalidSettingError."""
    cert, key = settings.dashboard_tls_cert, settings.dashboard_tls_key
    if not cert and not key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidSettingError(
            f"can't load dashboard_tls_cert '{cert}' with dashboard_tls_key '{key}': {error}",
            hint="both are PEM files, and belong together",
        ) from error
    return context


def check_exposure(settings: DashboardSettings) -> None:
    """Refuse to be reached from other machines without TLS and a token. Raises: InvalidSettingError."""
    if is_loopback(settings.dashboard_host):
        return
    wanted = ("dashboard_tls_cert", "dashboard_tls_key", "dashboard_token_file")
    missing = [name for name in wanted if not getattr(settings, name)]
    if missing:
        raise InvalidSettingError(
            f"the dashboard would be reached at {settings.dashboard_host} without {' and '.join(missing)}",
            hint="set these, or leave dashboard_host at 127.0.0.1 and connect through an SSH tunnel",
        )
