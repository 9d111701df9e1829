"""Refuses brokers that other machines reach: they have no TLS and no identity."""

from __future__ import annotations

from memq.errors import InvalidSettingError
from memq.runtime.logs import EventLog
from memq.runtime.network import is_loopback
from memq.settings import BrokerSettings

_EXPOSED = "without encryption and identity: everybody who reaches its port can read, write and delete all data"


def check_exposure(settings: BrokerSettings) -> None:
    """Refuse to listen beyond loopback, unless the operator accepts that. Raises: InvalidSettingError."""
    if is_loopback(settings.host) or settings.insecure:
        return
    raise InvalidSettingError(
        f"the broker would listen on {settings.host} {_EXPOSED}",
        hint="memq has neither for brokers yet: keep host = 127.0.0.1, or set insecure = true in a network that only "
        "trusted machines reach",
    )


def warn_if_exposed(settings: BrokerSettings, events: EventLog) -> None:
    """Log at each start that other machines reach the broker."""
    if not is_loopback(settings.host):
        events.warning("insecure", f"the broker listens on {settings.host} {_EXPOSED}")
