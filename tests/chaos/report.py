"""The page of a chaos run: faults, broken promises, and the pause of writes after each kill."""

from __future__ import annotations

import bisect
import collections
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.journal import lines_of

KILL_WINDOW_MS = 30_000  # in which a pause of acks is put down to a kill


def write_report(
    folder: Path,
    seed: int,
    seconds: float,
    kinds: Mapping[str, int],
    findings: Sequence[str],
    moments: Sequence[tuple[float, str]],
    loads: Sequence[float],
) -> None:
    """Write `report.md` into the folder of the run; `kinds` says how often each kind of fault struck."""
    counts = json.loads((folder / "verdict.json").read_text())["counts"] if (folder / "verdict.json").exists() else {}
    load = f"{min(loads, default=0.0):.0f} to {max(loads, default=0.0):.0f}"
    lines = [
        f"# Chaos run, seed {seed}, {seconds / 60:.1f} minutes",
        "",
        f"{len(findings)} findings." if findings else "No finding.",
        "",
        *(f"- {text}" for text in findings),
        "",
        "| counted | number |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(counts.items())),
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(kinds.items())),
        "",
        pause_line(folder, moments),
        "",
        "For the table of docs/test-results.md:",
        "",
        f"| {seed} | {seconds / 60:g} | {load} | {sum(kinds.values())} | {counts.get('records acked', 0):,} |",
        "",
    ]
    (folder / "report.md").write_text("\n".join(lines))


def pause_line(folder: Path, moments: Sequence[tuple[float, str]]) -> str:
    """Return how long the slowest partition had no ack after each SIGKILL of a broker."""
    acks: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for path in folder.glob("all-*.journal"):
        for words in lines_of(path):
            if words[0] == "A":
                acks[words[1], words[2]].append(int(words[6]))
    for times in acks.values():
        times.sort()
    pauses = sorted(
        max(pause_after(times, int(at_s * 1000)) for times in acks.values())
        for at_s, text in moments
        if text.startswith("broker-kill") and acks
    )
    if not pauses:
        return "No broker was killed."
    p50, p99 = pauses[len(pauses) // 2], pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]
    return (
        f"Acks on all partitions after the SIGKILL of a broker, other faults among them: p50 {p50 / 1000:.1f} s,"
        f" p99 {p99 / 1000:.1f} s, {len(pauses)} kills."
    )


def pause_after(times: Sequence[int], at_ms: int) -> int:
    """Return the longest time without an ack that begins before, or within the window after, a moment."""
    first = bisect.bisect_left(times, at_ms)
    last = bisect.bisect_right(times, at_ms + KILL_WINDOW_MS)
    near = times[max(0, first - 1) : last + 1]
    return max((after - before for before, after in itertools.pairwise(near)), default=KILL_WINDOW_MS)
