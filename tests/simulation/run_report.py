"""The result of one run of the simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from memq.simulation.ports.calls import Met


@dataclass(slots=True)
class Report:
    """The result of a run."""

    seed: int
    trace_hash: str
    seconds: float
    steps: int
    acked: int
    given_up: int
    pointers: int
    counts: dict[str, int] = field(default_factory=dict)
    met: Met = field(default_factory=dict)  # which fault met which work
    live_faults: dict[str, int] = field(default_factory=dict)  # that the live audit was held against, by name
