"""Planted bugs of compaction and of its maintenance; see `tests.simulation.planted_bugs`."""

from __future__ import annotations

from tests.simulation.bug import Planted, swap

COMPACTION_BUGS = (
    Planted(
        "a manifest ends one too far",
        "memq.compaction.compaction",
        "following",
        swap("parts[-1].next", "parts[-1].next + 1"),
        level="calm",
        seed=3,
        aspects=("cold",),
    ),
    Planted(
        "sweep takes large objects that manifests name",
        "memq.broker.sweep.sweep",
        "Sweep._compaction_keys",
        swap("(*manifest.parts, *left)", "(*manifest.parts[1:], *left)"),
        level="calm",
        seed=4,
        aspects=("cold",),
    ),
    Planted(
        "reader of compacted parts passes over the first pointer",
        "memq.compaction.reader",
        "CompactedLogReader._read_compacted",
        swap(
            "bisect_left(entries, offset, key=lambda each: each.offset)",
            "bisect_left(entries, offset + (offset == part.first), key=lambda each: each.offset)",
        ),
        level="calm",
        seed=3,
        aspects=("cold",),
    ),
)
