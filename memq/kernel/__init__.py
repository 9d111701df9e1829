"""The hot loops over blocks: compiled where the distribution memq-native is installed, else in Python.

`MEMQ_NATIVE=0` switches the compiled code off; a list of parts (`MEMQ_NATIVE=broker`) leaves only these on.
"""

from __future__ import annotations

import logging
import os
from typing import Any

ABI = 1  # of the module memq_native: changes with each of its signatures
PARTS = ("broker", "producer")


def _load() -> Any:
    try:
        import memq_native
    except ImportError:
        return None
    if memq_native.ABI != ABI:
        logging.getLogger("memq").warning(
            "memq-native %s has ABI %s, but memq wants %s: memq runs in Python; install a memq-native of this release",
            memq_native.VERSION,
            memq_native.ABI,
            ABI,
        )
        return None
    return memq_native


def compiled(part: str) -> Any:
    """Return the compiled module if it is installed and `part` is not switched off, else None."""
    wanted = os.environ.get("MEMQ_NATIVE", "1")
    if wanted not in ("", "1") and part not in wanted.split(","):
        return None
    return _load()
