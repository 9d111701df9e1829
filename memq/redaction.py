"""Replaces secrets in text that people read: messages, log lines, tables of settings, `repr`."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")
MASK = "***"
_SECRET_NAME = re.compile(r"secret|password|token|credential|sasl.jaas|auth|key[._]pem", re.IGNORECASE)
_USER_INFO = re.compile(r"(://)([^\s/@'\"]*)@")
# The beginning of user and password in a URL that a message has cut after 60 or 120 characters. A port has digits.
_CUT_CHARS_MIN = 55  # from the opening quotation mark to the cut
_CUT_USER_INFO = re.compile(r"(://[^\s/@:?#'\"\[]+:)(?!PORT|\d{1,5}(?!\w))[^\s/@?#'\"]+(?=['\"…]|$)")
_PARAMETER = re.compile(r"((?:secret|password|passwd|token|credential)[\w.]*=)[^\s&;,'\"]+", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def is_secret(name: str) -> bool:
    """Whether a setting with this name has a secret value."""
    return bool(_SECRET_NAME.search(name)) and not name.endswith("_file")


def redacted(text: str) -> str:
    """Return `text` with MASK in place of private keys, users and secrets in URLs, secret parameters."""
    if "PRIVATE KEY" in text:
        text = _PRIVATE_KEY.sub(MASK, text)
    if "://" in text:
        text = _CUT_USER_INFO.sub(_without_cut_password, _USER_INFO.sub(rf"\1{MASK}@", text))
    return _PARAMETER.sub(rf"\1{MASK}", text) if "=" in text else text


def _without_cut_password(found: re.Match[str]) -> str:
    quoted = found.end() - 1 - found.string.rfind("'", 0, found.start())
    return f"{found[1]}{MASK}" if quoted >= _CUT_CHARS_MIN else found[0]


def shown(name: str, value: T) -> T | str:
    """Return the value of a setting with MASK in place of secrets."""
    if value and is_secret(name):
        return MASK
    return redacted(value) if isinstance(value, str) else value


class Redacted:
    """Base of dataclasses of settings, whose `repr` shows no secrets. Declare them with `repr=False`."""

    __slots__ = ()

    def __repr__(self) -> str:
        parts = (f"{each.name}={_inner(each.name, getattr(self, each.name))!r}" for each in fields(self))  # type: ignore[arg-type]  # a dataclass
        return f"{type(self).__name__}({', '.join(parts)})"


def _inner(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _inner(key, inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_inner(name, inner) for inner in value)
    return shown(name, value)
