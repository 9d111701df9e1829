"""Limits of clients as settings: client ids, `default` for all others, lines like `soft 10MiB/s`."""

from __future__ import annotations

from typing import cast, get_args

from memq.broker.ingest.quotas import DEFAULT, ClientLimits
from memq.broker.ingest.rate_limit import RatePerSecond
from memq.errors import InvalidSettingError
from memq.settings import Section, did_you_mean, parse_size
from memq.topic import LimitMode, check_name

_EXAMPLE = "write it as 'soft 10MiB/s 500/s': a mode, then bytes or requests per second, or both"


def client_limits(section: Section) -> ClientLimits:
    """Return the limits of a section `[clients]`. Raises: InvalidSettingError, InvalidNameError."""
    named: dict[str, RatePerSecond] = {}
    for name, (raw, origin) in section.items():
        if name != DEFAULT:
            check_name(name, "client")
        named[name] = parse_limit(str(raw), f"{name} from {origin} [clients]")
    return ClientLimits(named.pop(DEFAULT, RatePerSecond()), named)


def parse_limit(text: str, what: str = "limit") -> RatePerSecond:
    """Return the limit of a line, such as `hard 10MiB/s 500/s` or `off`. Raises: InvalidSettingError."""
    mode, *rates = text.split() or [""]
    if mode not in get_args(LimitMode):
        known = did_you_mean(mode, get_args(LimitMode), known=False) or _EXAMPLE
        raise InvalidSettingError(f"{what} = '{text[:60]}' begins with no mode", hint=known)
    found: dict[str, int] = {}
    for rate in rates:
        amount, slash, second = rate.partition("/")
        count = parse_size(amount) if slash and second == "s" else None
        unit = "requests_s" if amount.isdigit() else "bytes_s"
        if not count or unit in found:
            raise InvalidSettingError(f"{what} = '{text[:60]}' can't be read at '{rate[:30]}'", hint=_EXAMPLE)
        found[unit] = count
    if bool(found) != (mode != "off"):
        raise InvalidSettingError(f"{what} = '{text[:60]}' limits nothing", hint=f"{_EXAMPLE}; or 'off' alone")
    return RatePerSecond(cast(LimitMode, mode), **found)
