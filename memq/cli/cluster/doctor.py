"""`memq doctor` and `memq config`: checks this machine and the broker, and shows the settings."""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from memq import __version__, kernel
from memq.cli.options import broker_options, json_option, settings_of, settings_options, shown_value
from memq.cli.output import colored, count_text, one_line, print_json, print_table, size_text
from memq.errors import LogLostError, MemqError
from memq.redaction import shown
from memq.runtime.clock import SystemClock
from memq.settings import RULES, BrokerSettings, PartSettings, Settings, Value, rules_of

PACKAGES = ("awscrt", "click", "h11", "lz4", "msgspec", "prometheus_client", "zstandard")
EXTRAS = {"pyarrow": "batch.arrow() and memq.read_arrow need it: pip install 'memq[arrow]'"}
DISK_BYTES_LEAST = 1 << 30
IMPORT_S_MAX = 60
_MARKS = {"ok": "green", "warning": "yellow", "failed": "red"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: `state` is ok, warning or failed; `hint` gives the next step."""

    what: str
    state: str
    text: str
    hint: str = ""


@click.command()
@broker_options
@json_option
def doctor(as_json: bool, config: str | None, profile: str | None, **flags: Value | None) -> int:
    """Check Python, packages, settings, the data folder, a cluster's parts and the broker.

    Exits with 1 when a check fails.
    """
    findings = list(_check_all(config, profile, flags))
    if as_json:
        print_json([{"what": one.what, "state": one.state, "text": one.text, "hint": one.hint} for one in findings])
    else:
        for one in findings:
            _print(one)
    return 1 if any(one.state == "failed" for one in findings) else 0


def _check_all(config: str | None, profile: str | None, flags: dict[str, Value | None]) -> Iterator[CheckResult]:
    yield CheckResult("memq", "ok", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")
    yield from _packages()
    yield _kernel()
    try:
        settings = _checked_settings(config, profile, **flags)
    except MemqError as error:
        yield CheckResult("settings", "failed", str(error), error.hint)
        return
    origins = {origin for origin in settings.origins.values() if origin != "default"}
    origins |= {origin for section in settings.sections.values() for _, origin in section.values()}
    yield CheckResult("settings", "ok", "from " + (", ".join(sorted(origins)) or "defaults alone"))
    yield from _machine(settings)
    yield from _spool(settings)
    yield from _parts(settings)
    yield _checked("broker", lambda: _broker(settings))


def _checked_settings(config: str | None, profile: str | None, **flags: Value | None) -> Settings:
    """Return the settings with checked sections. Raises: UnknownSettingError, InvalidSettingError."""
    settings = settings_of(config, profile, **flags)
    if settings.sections and sys.platform != "win32":
        from memq.broker.assembly import check_sections

        check_sections(settings.parts())
    return settings


def _packages() -> Iterator[CheckResult]:
    needed = PACKAGES if sys.platform == "win32" else (*PACKAGES, "uvloop")
    missing = [name for name in needed if not _is_there(name)]
    if missing:
        yield CheckResult("packages", "failed", f"missing: {', '.join(missing)}", "pip install memq again")
    else:
        yield CheckResult("packages", "ok", f"{len(needed)} of {len(needed)} can be imported")
    for name, hint in EXTRAS.items():
        if not _is_there(name):
            yield CheckResult("extras", "warning", f"{name} is not installed", hint)


def _kernel() -> CheckResult:
    """Show which code runs the hot loops.

    Python is no fault, unless an installed memq-native can't be used or MEMQ_NATIVE is wrong.
    """
    crash = _crash_of_kernel()
    if crash:
        os.environ[kernel.VARIABLE] = "0"  # the other checks run in this process
        return CheckResult("kernel", "failed", crash, f"pip install 'memq[native]' again, or set {kernel.VARIABLE}=0")
    fault, shown = kernel.fault(), kernel.description()
    text = shown if fault in shown else f"{shown}; {fault}"
    return CheckResult("kernel", "warning" if fault else "ok", text, kernel.remedy())


def _crash_of_kernel() -> str:
    """Choose the kernel in a process of its own, which a truncated file of memq-native ends by a signal."""
    choose = [sys.executable, "-c", "from memq import kernel; kernel.description()"]
    done = subprocess.run(choose, capture_output=True, check=False, timeout=IMPORT_S_MAX)  # noqa: S603 - constant text
    code = done.returncode
    return f"the import of memq-native ends the process by {signal.Signals(-code).name}" if code < 0 else ""


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _machine(settings: Settings) -> Iterator[CheckResult]:
    broker = settings.broker()
    folder = Path(broker.data).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield CheckResult("data folder", "failed", f"{existing} can't be written", "choose another one with --data")
    else:
        free = shutil.disk_usage(existing).free
        state = "ok" if free >= DISK_BYTES_LEAST else "warning"
        made = "" if folder.exists() else ", not made yet"
        yield CheckResult("data folder", state, f"{folder}{made}: {size_text(free)} free", "free some space")
    if sys.platform != "win32":
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        enough = limit == resource.RLIM_INFINITY or limit > broker.connections_max
        text = f"{limit} files may be open, connections_max is {broker.connections_max}"
        yield CheckResult("open files", "ok" if enough else "warning", text, f"ulimit -n {2 * broker.connections_max}")


def _spool(settings: Settings) -> Iterator[CheckResult]:
    """Check the spool, when a broker with these settings has one."""
    folder = settings.broker().spool
    if folder and sys.platform != "win32":
        from memq.broker.spool.files import inspect_spool

        now_ms = SystemClock().wall_ms()
        text, hint = inspect_spool(Path(folder).absolute(), settings.broker().spool_bytes_max, now_ms)
        yield CheckResult("spool", "warning" if hint else "ok", text, hint)


def _parts(settings: Settings) -> Iterator[CheckResult]:
    """Check each part of a cluster that the settings name, as a broker does at its start."""
    named = [name for name in rules_of(PartSettings) if settings.origins[name] != "default"]
    if named and sys.platform != "win32":
        from memq.broker.assembly import check_mark, check_part

        parts, own = settings.parts(), settings.broker()
        found: list[CheckResult] = []
        for name in named:
            found.append(_checked(name, lambda name=name: asyncio.run(check_part(name, parts, own))))  # type: ignore[misc]
            yield found[-1]
        of_many = not parts.coordinator.startswith("standalone:")  # a standalone one is locked
        if of_many and len(found) == len(rules_of(PartSettings)) and all(each.state == "ok" for each in found):
            yield _checked("store mark", lambda: asyncio.run(check_mark(parts, own)))
            yield _pointers(parts, own)


def _pointers(parts: PartSettings, own: BrokerSettings) -> CheckResult:
    """Compare what the queue and the store of a cluster have."""
    from memq.broker.assembly import check_pointers

    def read_pointers() -> str:
        lost = asyncio.run(check_pointers(parts, own))
        if lost:
            raise LogLostError(f"{lost[0]}; of {count_text(len(lost), 'partition')} the queue has lost the log")
        return "the queue has lost no topic and no partition"

    return _checked("pointers", read_pointers)


def _checked(what: str, check: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(what, "ok", check())
    except MemqError as error:
        return CheckResult(what, "failed", str(error), error.hint)


def _broker(settings: Settings) -> str:
    from memq.client.admin import Admin

    brokers = settings.client().brokers
    with Admin(brokers) as admin:
        return f"{brokers} answers, {count_text(len(admin.topics()), 'topic')}"


def _print(finding: CheckResult) -> None:
    hint = f" ({finding.hint})" if finding.hint and finding.state != "ok" else ""
    state = f"{finding.state:<8}"
    shown = click.style(state, fg=_MARKS[finding.state]) if colored() else state
    click.echo(f"{shown} {finding.what}: {one_line(finding.text)}{hint}")


@click.command()
@click.option("--show-origin", is_flag=True, help="Show the origin of each value.")
@json_option
@settings_options
def config(show_origin: bool, as_json: bool, config: str | None, profile: str | None) -> None:
    """Show the settings.

    Flags override the environment (MEMQ_PORT), which overrides the settings file, which overrides the defaults.
    """
    settings = _checked_settings(config, profile)
    sections = {
        f"{section}.{name}": (shown(name, value), origin)
        for section, named in settings.sections.items()
        for name, (value, origin) in named.items()
    }
    values = {name: shown(name, value) for name, value in settings.values.items()}
    if as_json:
        plain: dict[str, object] = {**values, **{name: value for name, (value, _) in sections.items()}}
        origins = {**settings.origins, **{name: origin for name, (_, origin) in sections.items()}}
        full = {name: {"value": value, "origin": origins[name]} for name, value in plain.items()}
        print_json(full if show_origin else plain)
        return
    if show_origin:
        rows = [(name, shown_value(name, value), settings.origins[name]) for name, value in values.items()]
        rows += [(name, str(value), origin) for name, (value, origin) in sections.items()]
        print_table(("setting", "value", "origin"), rows)
    else:
        rows = [(name, shown_value(name, value), RULES[name].doc) for name, value in values.items()]
        rows += [(name, str(value), "of this section") for name, (value, _) in sections.items()]
        print_table(("setting", "value", "meaning"), rows)
