"""The folder of a demo: created again at each run; a folder of other content is refused."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import TextIO

MARK = ".memq-demo"  # lies in the folders that demos have made, and is locked while one runs there


def claim(folder: Path) -> TextIO:
    """Make the folder, and hold it for as long as what is returned is open.

    Raises: SystemExit where another demo runs, or a file or anything that no demo has made lies.
    """
    mark = folder / MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not mark.exists():
            raise SystemExit(f"memq: error: '{folder}' is not a demo's (remove it, or choose another with --data)")
        lock = mark.open("a", encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"memq: error: {folder}: {error.strerror} (choose another folder with --data)") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise SystemExit(f"memq: error: a demo runs in '{folder}' (choose another folder with --data)") from error
    return lock


def clear(folder: Path) -> None:
    """Remove what the last run has left in a folder that was claimed."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()
