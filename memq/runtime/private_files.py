"""The modes of files and folders that memq creates: only their owner can open them.

A program with the umask 022 would let every user of the machine read records. Clients of other users read through
brokers. What exists already keeps its mode, which is the operator's choice.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def ensure_private(path: Path) -> None:
    """Create an empty file if it does not exist; its writer, which opens it by name, reports a failure."""
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))
