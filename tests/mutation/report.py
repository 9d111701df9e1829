"""The results of mutants: a line as each ends, a table by part, JSON, and the check of the score."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.mutation.mutant import BY_HAND
from tests.mutation.nearest import replace_file
from tests.mutation.scope import part_of

TARGET = 0.95
FLOOR = 0.80  # what samples reach on this tree; it may only rise, up to the target
DOUBT = 0.01  # a sample this improbable at the target is clearly below it
STAGES = ("nearest", "fast", "simulation")


class Verdict(msgspec.Struct, frozen=True):
    """One mutant's end: `outcome` is killed, timeout, survived, equivalent, unfit or unknown; `ran` says on what."""

    key: str
    path: str
    line: int
    function: str
    operator: str
    outcome: str
    stage: str = ""
    by: str = ""
    why: str = ""
    diff: str = ""
    ran: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    reason: str = ""

    @property
    def found(self) -> bool:
        """Whether the tests found it."""
        return self.outcome in ("killed", "timeout")

    @property
    def counts(self) -> bool:
        """Whether it goes into the score."""
        return self.found or self.outcome == "survived"

    def text(self) -> str:
        """Return one line, and the diff of a survivor."""
        place = f"{self.path}:{self.line} {self.function}: {self.reason or self.operator} [{self.key}]"
        if self.found:
            return f"{self.outcome:8} {self.stage:10} {self.cpu_s:5.1f} s {place} by {self.by}"
        if self.outcome == "survived":
            return f"SURVIVED {self.cpu_s:16.1f} s {place}\n{self.diff}\n  ran {self.ran}"
        return f"{self.outcome:8} {place}: {self.why}"


def score(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    """Return how many were found, of how many that count."""
    counted = [verdict for verdict in verdicts if verdict.counts]
    return sum(verdict.found for verdict in counted), len(counted)


def clearly_below(found: int, count: int, target: float = FLOOR) -> bool:
    """Whether so few found of so many is improbable for tests that find `target` of them."""
    tail = sum(math.comb(count, k) * target**k * (1 - target) ** (count - k) for k in range(found + 1))
    return count > 0 and tail < DOUBT


def table(verdicts: list[Verdict]) -> str:
    """Return the score by part, and by operator or by hand, with what killed what."""
    lines = [
        f"{'part':18} {'found':>11} {'score':>6} {'nearest':>8} {'fast':>5} {'simul.':>6} {'timeout':>8} {'equiv.':>6}"
    ]
    parts = sorted({part_of(verdict.path) for verdict in verdicts})
    groups = [(part, [verdict for verdict in verdicts if part_of(verdict.path) == part]) for part in parts]
    groups.append(("by hand", [verdict for verdict in verdicts if verdict.operator == BY_HAND]))
    groups.append(("all", verdicts))
    for name, group in groups:
        found, count = score(group)
        if not group:
            continue
        stages = Counter(verdict.stage for verdict in group if verdict.found)
        ends = Counter(verdict.outcome for verdict in group)
        share = f"{found / count:.0%}" if count else "-"
        lines.append(
            f"{name:18} {found:5}/{count:5} {share:>6} {stages['nearest']:8} {stages['fast']:5} "
            f"{stages['simulation']:6} {ends['timeout']:8} {ends['equivalent']:6}"
        )
    return "\n".join(lines)


def store(verdicts: list[Verdict], path: Path) -> None:
    """Write all verdicts as JSON, survivors first."""
    path.parent.mkdir(exist_ok=True)
    ordered = sorted(verdicts, key=lambda verdict: (verdict.outcome != "survived", verdict.path, verdict.line))
    replace_file(path, msgspec.json.format(msgspec.json.encode(ordered), indent=1))


def load(path: Path) -> list[Verdict]:
    """Return the verdicts of earlier runs, none when there were none."""
    return msgspec.json.decode(path.read_bytes(), type=list[Verdict]) if path.exists() else []
