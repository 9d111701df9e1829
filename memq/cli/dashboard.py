"""The dashboard beside a broker or an auditor: made of the settings, where its extra is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any

from memq.audit.live.database import Database
from memq.clock import SystemClock
from memq.errors import InvalidSettingError, MemqError
from memq.logs import EventLog
from memq.settings import Settings

Beside = Callable[[str], Coroutine[Any, Any, None]]  # what runs beside others, given the address of a broker
NEEDED = ("starlette", "uvicorn")


def dashboard_beside(loaded: Settings, open_state: Callable[[], Database] | None) -> Beside | None:
    """Return what serves the dashboard for the brokers at an address; None where it is off, or not installed.

    `open_state` opens what auditors store, None where nobody audits.

    A port that is taken is logged, and the broker goes on. Raises: InvalidSettingError when settings ask for it, and
    its extra is not installed, or it would be exposed.
    """
    settings = loaded.dashboard()
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
        return None
    from memq.audit.dashboard.audited import LiveSource
    from memq.audit.dashboard.server import Dashboard, check_settings

    check_settings(settings)
    events = EventLog(SystemClock())

    async def run(address: str) -> None:
        state = open_state() if open_state is not None else None
        audit = LiveSource(state, SystemClock()) if state is not None else None
        try:
            async with Dashboard(address, settings, audit=audit):
                await asyncio.Event().wait()  # until it is cancelled
        except MemqError as error:
            events.warning("dashboard.failed", f"there is no dashboard: {error}")
        finally:
            if state is not None:
                await state.close()

    return run
