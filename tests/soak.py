"""How often a test repeats: few times in `make check`, as often as its promise says in `make soak`.

pytestmark = pytest.mark.soak            # `make soak` runs these, with MEMQ_SOAK=1

for _ in range(repetitions(few=2, many=20)): ...
"""

from __future__ import annotations

import os

# Read once, here: tests see none of the machine's MEMQ_… variables.
SOAKING = os.environ.get("MEMQ_SOAK", "0") not in ("", "0")


def repetitions(few: int, many: int) -> int:
    """Return `few`, or `many` under MEMQ_SOAK=1."""
    return many if SOAKING else few


def seconds(few: float, many: float) -> float:
    """Return for how long a fault lasts: `few` seconds, or `many` under MEMQ_SOAK=1."""
    return many if SOAKING else few


def report(line: str) -> None:
    """Print a line of progress or of figures; `make soak` shows it at once, a failing test with its output."""
    print(line, flush=True)
