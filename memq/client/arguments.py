"""Checks of client arguments: an error is raised at once, and not at the first use."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from memq.errors import InvalidSettingError, UnknownSettingError
from memq.kafka_words import kafka_hint
from memq.limits import NAME_CHARS_MAX
from memq.runtime.network import client_network
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.topic import TopicSettings, check_name

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from memq.encryption.encryption import Encryption

Function = TypeVar("Function", bound=Callable[..., Any])

_FOR_EVER_S = 1e9  # from here on a timeout is none: the system's clocks can't wait for so long


def public_name(name: str) -> Callable[[Function], Function]:
    """Name a constructor as users call it: Python's errors about its arguments begin with this name.

    Arguments that have a name of Kafka get an error with memq's word.
    """

    def rename(function: Function) -> Function:
        function.__qualname__ = name
        return with_kafka_hints(function)

    return rename


def with_kafka_hints(function: Function) -> Function:
    """Return the method with hints for users of Kafka.

    An argument that only Kafka has raises UnknownSettingError with memq's word. So does a setting of topics, if the
    method takes these as `settings`.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        for word in named:
            setting = "settings" in known and word in TopicSettings.__struct_fields__
            hint = f"write settings={{'{word}': …}}" if setting else kafka_hint(word)
            if hint and word not in known:
                raise UnknownSettingError(f"{function.__qualname__}() has no argument '{word}'", hint=hint)
        if len(args) == 2 and isinstance(args[1], Mapping):  # of a client of confluent-kafka
            hints = [f"{word}: {hint}" for word in args[1] if (hint := kafka_hint(str(word)))]
            raise InvalidSettingError(
                f"the settings of {function.__qualname__}() are arguments, not a mapping", hint="; ".join(hints[:3])
            )
        return function(*args, **named)

    return cast(Function, checked)


def check_connect_timeout(value: object) -> int:
    """Return the setting when it holds. Raises: InvalidSettingError."""
    check_number("connect_timeout_ms", value, 1, 86_400_000, int)
    assert isinstance(value, int)
    return value


def check_number(name: str, value: object, low: float, high: float, kinds: type | UnionType = int | float) -> None:
    """Refuse what is no number, or out of bounds. Raises: InvalidSettingError."""
    _check_kinds(name, value, kinds, "number")
    if not low <= value <= high:  # type: ignore[operator]  # `kinds` has numbers only
        raise InvalidSettingError(f"{name} = {value!r} is outside {low} to {high}")


def check_seconds(name: str, value: object, low: float, high: float) -> None:
    """Refuse what is no number of seconds, or out of bounds, with the unit. Raises: InvalidSettingError."""
    _check_kinds(name, value, int | float, "number of seconds")
    assert isinstance(value, int | float)
    if not low <= value <= high:
        fits = high < value and low <= value / 1_000 <= high
        hint = f"{name} is in seconds: write {value / 1_000:g} for {value} ms" if fits else f"{name} is in seconds"
        raise InvalidSettingError(f"{name} = {value!r} s is outside {low:.10g} s to {high:.10g} s", hint=hint)


def _check_kinds(name: str, value: object, kinds: type | UnionType, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        meant = _number_of(name, value, "second" in wanted) if isinstance(value, str) else ""
        hint = f"write {meant} in place of {value!r}" if meant else "write a number, without a unit"
        raise InvalidSettingError(f"{name} = {value!r} is no {wanted}", hint=hint)


def _number_of(name: str, text: str, in_seconds: bool) -> str:
    """Return the number that a text with a unit means, in the unit of the argument; "" for another text."""
    from memq.settings import parse_size, parse_time_ms  # only a mistake needs it

    if "bytes" in name:
        return str(parse_size(text) or "")
    time_ms = parse_time_ms(text)
    if time_ms is None or "_ms" in name:
        return str(time_ms or "")
    return f"{time_ms / 1_000:g}" if in_seconds else ""


def check_client_id(value: str) -> str:
    """Return the name of a client, or "" for none. Raises: InvalidNameError, TypeError."""
    return check_name(value, "client") if check_str("client_id", value) else ""


def check_str(name: str, value: str) -> str:
    """Return the value of an argument that is a text. Raises: TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be str, not {type(value).__name__}")
    return value


def check_kind(name: str, value: object, kind: type[int | str]) -> None:
    """Refuse a value that is neither None nor a `kind`; a bool is not an int. Raises: TypeError."""
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise TypeError(f"{name} must be {kind.__name__}, not {type(value).__name__}")


def check_switch(name: str, value: object) -> None:
    """Refuse a value other than True and False: the text "false" would be true. Raises: TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be bool, not {type(value).__name__}")


def check_zone(value: str) -> str:
    """Return the zone of a client, or "" for none. Raises: InvalidSettingError, TypeError."""
    if len(check_str("zone", value)) > NAME_CHARS_MAX:
        raise InvalidSettingError(f"zone has {len(value)} characters, {NAME_CHARS_MAX} are allowed")
    return value


def check_timeout(timeout: float | None) -> float | None:
    """Return how many seconds to wait, None for ever; below 0 is as 0. Raises: TypeError.

    InvalidSettingError.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, or None to wait for ever, not {type(timeout).__name__}")
    if math.isnan(timeout):
        raise InvalidSettingError("timeout = nan is no number of seconds", hint="give seconds, or None for ever")
    return timeout if timeout < _FOR_EVER_S else None


def encryption_of(value: Encryption | str | None) -> Encryption | None:
    """Return the keys of an argument `encryption`.

    Raises: TypeError, InvalidSettingError, KeyProviderError.
    """
    if value is None:
        return None
    from memq.encryption.encryption import Encryption

    if isinstance(value, Encryption):
        return value
    if not isinstance(value, str):
        raise TypeError(f"encryption must be a memq.Encryption or a text, not {type(value).__name__}")
    return Encryption(value)


def runtime_of(runtime: Runtime | None, tls: Tls | None = None) -> Runtime:
    """Return the runtime that a client was given, else the system's, with TLS by `tls`.

    Raises: TypeError; InvalidSettingError for files of `tls` that can't be loaded, and for both arguments.
    """
    if runtime is not None and not isinstance(runtime, Runtime):
        raise TypeError(f"runtime must be a memq.runtime.runtime.Runtime, not {type(runtime).__name__}")
    if tls is None:
        return runtime or Runtime()
    if not isinstance(tls, Tls):
        raise TypeError(f"tls must be a memq.Tls, not {type(tls).__name__}")
    if runtime is not None:
        raise InvalidSettingError("tls and runtime are given", hint="the network of a runtime has its own TLS")
    return Runtime(network=client_network(tls))


def check_tracer_provider(provider: TracerProvider | None) -> None:
    """Refuse what gives no tracers, as a tracer itself. Raises: TypeError."""
    if provider is not None and not callable(getattr(provider, "get_tracer", None)):
        raise TypeError(f"tracer_provider must be a TracerProvider of OpenTelemetry, not {type(provider).__name__}")


def check_callbacks(**callbacks: object) -> None:
    """Refuse, by their names, callbacks that can't be called. Raises: TypeError."""
    for name, callback in callbacks.items():
        if callback is not None and not callable(callback):
            raise TypeError(f"{name} must be a function, not {type(callback).__name__}")
