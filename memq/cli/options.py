"""Options shared by several commands, from the table of settings, and the resulting settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from memq.settings import DEFAULTS, RULES, Settings, Value, environment_settings

Command = TypeVar("Command", bound=Callable[..., Any])

# Letters of settings; they are kcat's.
_LETTERS = {"brokers": "-b", "codec": "-z"}
_METAVARS = {
    "brokers": "ADDR",
    "data": "DIR",
    "spool": "DIR",
    "host": "HOST",
    "advertise": "ADDR",
    "cluster": "NAME",
    "broker_id": "NAME",
    "zone": "NAME",
    "store": "URL",
    "queue": "URL",
    "coordinator": "URL",
    "audit_state": "URL",
    "dashboard_host": "HOST",
    "dashboard_tls_cert": "FILE",
    "dashboard_tls_key": "FILE",
    "dashboard_token_file": "FILE",
}

_TIME_UNITS = (("h", 3_600_000), ("min", 60_000), ("s", 1_000))


def settings_options(command: Command) -> Command:
    """Add `--config` and `--profile`."""
    command = click.option("--profile", metavar="NAME", help="Use [profile.NAME] of the settings file.")(command)
    return click.option("--config", metavar="FILE", help="Settings file, instead of ./memq.toml.")(command)


def json_option(command: Command) -> Command:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Add an option for each of these settings, with `--config` and `--profile`.

    What is not given is None.
    """

    def decorate(command: Command) -> Command:
        command = settings_options(command)
        for name in reversed(names):
            command = _setting_option(name)(command)
        return command

    return decorate


def broker_options(command: Command) -> Command:
    """Add what a command needs that asks a broker: `-b`, `--config`, `--profile`."""
    return setting_options("brokers")(command)


def settings_of(config: str | None, profile: str | None, **flags: Value | None) -> Settings:
    """Return the settings with these flags on top; a flag that is None was not given."""
    return environment_settings(flags, config, profile)


def section_values(settings: Settings, name: str) -> dict[str, object]:
    """Return what the settings say in a section, by name."""
    return {setting: value for setting, (value, _) in settings.parts().section(name).items()}


def brokers_of(config: str | None, profile: str | None, flags: Mapping[str, Value | None]) -> str:
    """Return the brokers that the options, or the settings behind them, name."""
    return settings_of(config, profile, **flags).client().brokers


def _setting_option(name: str) -> Callable[[Command], Command]:
    rule, default = RULES[name], DEFAULTS[name]
    long = "--" + name.replace("_", "-")
    text = f"{rule.doc[:1].upper()}{rule.doc[1:]} (default {shown_default(name)})."
    if isinstance(default, bool):
        return click.option(f"{long}/--no-{long[2:]}", name, default=None, help=text)
    metavar = "|".join(rule.choices) if rule.choices else _metavar(name, default)
    letters = [_LETTERS[name]] if name in _LETTERS else []
    return click.option(*letters, long, name, metavar=metavar, help=text)


def _metavar(name: str, default: Value) -> str:
    if "bytes" in name:
        return "SIZE"
    if name.endswith("_ms"):
        return "TIME"
    return "N" if isinstance(default, int) else _METAVARS[name]


def shown_default(name: str) -> str:
    """Return a default as a person would write it."""
    return shown_value(name, DEFAULTS[name])


def shown_value(name: str, value: Value) -> str:
    """Return a setting's value as a person would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and "bytes" in name and value % (1 << 20) == 0:
        return f"{value >> 20}MiB"
    if isinstance(value, int) and name.endswith("_ms"):
        units = [(unit, ms) for unit, ms in _TIME_UNITS if value and value % ms == 0]
        unit, length_ms = units[0] if units else ("ms", 1)
        return f"{value // length_ms}{unit}"
    return str(value) or "none"
