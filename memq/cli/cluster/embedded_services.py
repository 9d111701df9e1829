"""Services next to a broker or auditor: an auditor, and the dashboard where it is installed.

A thread imports both after clients can connect. Their import takes half as long as that of the broker, which would
not answer meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memq.audit.dashboard.exposure import check_settings
from memq.audit.live.storage.database import Database, SqliteDatabase
from memq.errors import InvalidSettingError, MemqError, NotFoundError
from memq.runtime.clock import SystemClock, backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.settings import AuditorSettings, Settings

EmbeddedService = Callable[[str], Coroutine[Any, Any, None]]  # a service, started with the address of a broker
NEEDED = ("starlette", "uvicorn")
_RETRY_S_BASE = 0.5
_RETRY_S_MAX = 30.0
OpenState = Callable[[], Database]
POSTGRES = ("postgresql://", "postgres://")
SQLITE = "sqlite:"
STATE_FILE = "audit.sqlite"  # in the data folder of `memq dev`


def embedded_auditor(open_state: OpenState, keep_ms: int) -> EmbeddedService:
    """Return the auditor of a broker's cluster: errors are logged, and it continues from its state."""

    async def run(address: str) -> None:
        await asyncio.to_thread(import_module, "memq.audit.live.service")
        from memq.audit.live.service import live_audit

        runtime = Runtime()
        outage = EventLog(runtime.clock).outage("audit.stopped", "audit.goes-on")
        failures = 0
        while True:
            try:
                async with AsyncExitStack() as stack:
                    state = open_state()
                    stack.push_async_callback(state.close)
                    audit = await stack.enter_async_context(live_audit(address, state, keep_ms, runtime))
                    await audit.step()
                    outage.passed()
                    failures = 0
                    await audit.run()
            except MemqError as error:
                outage.failed(str(error))
                failures += 1
            await asyncio.sleep(backoff_s(runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))

    return run


def embedded_dashboard(loaded: Settings, open_state: OpenState | None) -> EmbeddedService | None:
    """Return the service that serves the dashboard for the brokers at an address.

    The result is None when the dashboard is off, or not installed.
    `open_state` opens the state of the auditors; None without an auditor.

    If the port is taken, the service logs this, and the broker continues. Raises: InvalidSettingError when the settings
    ask for a dashboard whose extra is not installed, or which would be exposed.
    """
    settings, events = loaded.dashboard(), EventLog(SystemClock())
    if settings.dashboard_port < 0:
        return None
    asked = [name for name, origin in loaded.origins.items() if name.startswith("dashboard_") and origin != "default"]
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing and asked:
        raise InvalidSettingError(
            f"{' and '.join(asked)} can't be kept: {' and '.join(missing)} of the dashboard is not installed",
            hint="pip install 'memq[dashboard]', or set dashboard_port = -1",
        )
    if missing:
        events.info("dashboard.not-installed", "there is no dashboard: pip install 'memq[dashboard]'")
        return None
    check_settings(settings)

    async def run(address: str) -> None:
        await asyncio.to_thread(import_module, "memq.audit.dashboard.server")
        from memq.audit.dashboard.audited import LiveSource
        from memq.audit.dashboard.server import Dashboard

        state = open_state() if open_state is not None else None
        audit = LiveSource(state, SystemClock()) if state is not None else None
        try:
            async with Dashboard(address, settings, audit=audit):
                await asyncio.Event().wait()  # until it is cancelled
        except MemqError as error:
            events.warning("dashboard.failed", f"there is no dashboard: {error} ({error.hint}; it is dashboard_port)")
        finally:
            if state is not None:
                await state.close()

    return run


def database_at(url: str) -> OpenState:
    """Return a function that opens `sqlite:FILE` or `postgresql://…`. Raises: InvalidSettingError."""
    if url.startswith(POSTGRES):
        try:
            from memq.audit.live.storage.postgres import PostgresDatabase
        except ImportError as error:
            raise InvalidSettingError(
                "the audit's state in PostgreSQL needs a driver", hint="pip install 'memq[audit]'"
            ) from error
        return partial(PostgresDatabase, url)
    if not url.startswith(SQLITE) or url == SQLITE:
        raise InvalidSettingError(
            f"audit state '{url[:60]}' is no database", hint="write sqlite:FILE or postgresql://USER@HOST/NAME"
        )
    return partial(SqliteDatabase, Path(url.removeprefix(SQLITE)))


def state_of(settings: AuditorSettings) -> OpenState:
    """Return a function that opens the state that a setting names. Raises: InvalidSettingError."""
    if not settings.audit_state:
        raise InvalidSettingError(
            "no audit state is named", hint=f"give --audit-state {SQLITE}memq-data/{STATE_FILE}, or postgresql://…"
        )
    return database_at(settings.audit_state)


def state_setting(settings: Settings) -> AuditorSettings:
    """Return an auditor's settings; without a state, the existing one in the data folder of `memq dev`."""
    auditor, found = settings.auditor(), Path(settings.broker().data) / STATE_FILE
    if auditor.audit_state or not found.exists():
        return auditor
    return replace(auditor, audit_state=f"{SQLITE}{found}")


def written_state(settings: AuditorSettings) -> OpenState:
    """Return the same for readers; fail if no auditor has written the state.

    Without this check, an empty list of findings would prove nothing. Raises: InvalidSettingError, NotFoundError.
    """
    opener, url = state_of(settings), settings.audit_state
    if url.startswith(SQLITE) and not Path(url.removeprefix(SQLITE)).exists():
        raise NotFoundError(f"audit state '{url[:200]}' does not exist", hint="check the path; memq auditor creates it")
    return opener


def embedded_state(settings: AuditorSettings, data: Path) -> OpenState:
    """Return a function that opens the state of `memq dev`: in its data folder, unless a setting names it.

    Raises: InvalidSettingError.
    """
    return database_at(settings.audit_state or f"{SQLITE}{data / STATE_FILE}")
