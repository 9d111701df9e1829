"""The dashboard beside a broker or an auditor: made of the settings, where its extra is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any

from memq.clock import SystemClock
from memq.errors import InvalidSettingError, MemqError
from memq.logs import EventLog
from memq.settings import Settings

NEEDED = ("starlette", "uvicorn")


def dashboard_beside(loaded: Settings) -> Callable[[str], Coroutine[Any, Any, None]] | None:
    """Return what serves the dashboard for the brokers at an address; None where it is off, or not installed.

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
    from memq.audit.dashboard.server import Dashboard, check_settings

    check_settings(settings)
    events = EventLog(SystemClock())

    async def run(address: str) -> None:
        try:
            async with Dashboard(address, settings):
                await asyncio.Event().wait()  # until it is cancelled
        except MemqError as error:
            events.error("dashboard.failed", f"there is no dashboard: {error}", error)

    return run
