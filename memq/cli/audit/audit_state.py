"""The auditors' state for the command line: a URL of the settings, or the folder of `memq dev`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from memq.audit.live.storage.database import Database, SqliteDatabase
from memq.errors import InvalidSettingError, NotFoundError
from memq.settings import AuditorSettings

OpenState = Callable[[], Database]
POSTGRES = ("postgresql://", "postgres://")
SQLITE = "sqlite:"
STATE_FILE = "audit.sqlite"  # in the data folder of `memq dev`


def database_at(url: str) -> OpenState:
    """Return what opens the database at `sqlite:FILE` or `postgresql://…`. Raises: InvalidSettingError."""
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
    """Return what opens the state that a setting names. Raises: InvalidSettingError."""
    if not settings.audit_state:
        raise InvalidSettingError(
            "no audit state is named", hint=f"give --audit-state {SQLITE}memq-data/{STATE_FILE}, or postgresql://…"
        )
    return database_at(settings.audit_state)


def written_state(settings: AuditorSettings) -> OpenState:
    """Return the same for readers: fail if no auditor has written, since no finding would mean nothing.

    Raises: InvalidSettingError, NotFoundError.
    """
    opener, url = state_of(settings), settings.audit_state
    if url.startswith(SQLITE) and not Path(url.removeprefix(SQLITE)).exists():
        raise NotFoundError(f"audit state '{url[:200]}' does not exist", hint="check the path; memq auditor creates it")
    return opener


def state_beside(settings: AuditorSettings, data: Path) -> OpenState:
    """Return what opens the state of `memq dev`, in its data folder unless a setting says where.

    Raises: InvalidSettingError.
    """
    return database_at(settings.audit_state or f"{SQLITE}{data / STATE_FILE}")
