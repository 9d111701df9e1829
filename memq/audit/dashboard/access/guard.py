"""Access control of the dashboard: permitted requests, and headers that protect browsers.

Theory. A page of somebody else's, open in the same browser, can send requests to a listener on loopback. It must not be
able to read answers or to change anything: so the Host header must name this machine (else a name of that page's own
may point here), nothing is said of cross-origin sharing, and what changes something must come from a page of ours.
Beyond loopback a token is asked for as the password of basic authentication, which browsers keep for one origin; the
user's name is free, and says who acknowledged a finding.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

USER_CHARS_MAX = 100
ANONYMOUS = "somebody"
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Guard:
    """Wraps the pages: refuses who may not ask, and adds the headers of safety to every answer.

    `loopback` says that the listener is; `token` is "" where nobody is asked for one.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, token: str) -> None:
        self._app = app
        self._loopback = loopback
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._loopback and host.rsplit(":", 1)[0].lower() not in _NAMES and host.lower() not in _NAMES:
            return _refused(421, "this host name is not the dashboard's; open it as http://127.0.0.1:PORT")
        if self._token:
            user = _user_of(headers.get("authorization", ""), self._token)
            if user is None:
                challenge = {"WWW-Authenticate": 'Basic realm="memq", charset="UTF-8"'}
                return _refused(401, "any user name, and the token as the password", challenge)
            scope["user_name"] = user
        if scope["method"] not in ("GET", "HEAD") and not _is_ours(headers, host):
            return _refused(403, "what changes something must come from a page of the dashboard")
        return None


def user_of(scope: Scope) -> str:
    """Return the name that the user gave."""
    return str(scope.get("user_name", ANONYMOUS))


def _refused(status: int, text: str, headers: Mapping[str, str] | None = None) -> PlainTextResponse:
    return PlainTextResponse(f"{text}\n", status, headers)


def _user_of(authorization: str, token: str) -> str | None:
    """Return the user's name when the password, or the bearer's token, is the right one."""
    scheme, _, given = authorization.partition(" ")
    user = ANONYMOUS
    if scheme.lower() == "basic":
        try:
            user, _, given = base64.b64decode(given, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
    elif scheme.lower() != "bearer":
        return None
    return (user[:USER_CHARS_MAX] or ANONYMOUS) if hmac.compare_digest(given.encode(), token.encode()) else None


def _is_ours(headers: Headers, host: str) -> bool:
    """Whether a page of this origin sent the request.

    Browsers say so; other clients must send JSON, which forms can't.
    """
    origin = headers.get("origin")
    same = origin is None or origin.partition("://")[2].lower() == host.lower()
    fetch_site = headers.get("sec-fetch-site", "same-origin")
    return same and fetch_site == "same-origin" and headers.get("content-type", "") == "application/json"
