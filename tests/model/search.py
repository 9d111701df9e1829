"""The search of a model for planted bugs: the first schedule that fails, and the command of each file of bugs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

Rules = TypeVar("Rules")
SCHEDULES = 3_000


def first_failure(seeds: Iterable[int], run: Callable[[int], object]) -> str | None:
    """Return what the first schedule finds that fails; None: all of them hold."""
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:  # noqa: BLE001 - a bug may break an invariant of the code, too
            return f"seed {seed}: {error!r}"
    return None


def search_each(
    names: Iterable[str],
    planted: Callable[[str], AbstractContextManager[Rules]],
    first_found: Callable[[Iterable[int], Rules], str | None],
) -> None:
    """Search for each bug whose name has the first argument of the command, in as many schedules as the second says."""
    part, schedules = (sys.argv[1] if len(sys.argv) > 1 else ""), int(sys.argv[2]) if len(sys.argv) > 2 else SCHEDULES
    for name in (each for each in names if part in each):
        with planted(name) as rules:
            print(f"{name}: {first_found(range(schedules), rules)}")
