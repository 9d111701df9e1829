"""Which fault met which work: a table over all runs, which shows gaps of the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memq.simulation.chaos import STATES
from memq.simulation.ports.calls import OTHER, WORKS, Met

COLUMNS = (*dict.fromkeys(WORKS.values()), OTHER)


@dataclass(slots=True)
class Summary:
    """The sums of many runs."""

    runs: int = 0
    acking_runs: int = 0  # those in which something was acked
    virtual_s: float = 0.0
    acked: int = 0
    met: Met = field(default_factory=dict)

    def add(self, seconds: float, acked: int, met: Mapping[tuple[str, str], int]) -> None:
        """Add one run."""
        self.runs += 1
        self.acking_runs += acked > 0
        self.virtual_s += seconds
        self.acked += acked
        for key, count in met.items():
            self.met[key] = self.met.get(key, 0) + count

    def lines(self) -> Iterable[str]:
        """Yield the summary and the table, for people."""
        yield (
            f"{self.virtual_s / 3600:.2f} virtual hours, {self.acked} records acked, "
            f"{self.acking_runs} of {self.runs} runs acked something"
        )
        yield from self._table("call of a service", COLUMNS)
        yield from self._table("event at a broker", STATES)

    def _table(self, title: str, columns: tuple[str, ...]) -> Iterable[str]:
        faults = sorted({fault for fault, met in self.met if met in columns})
        width = max((len(fault) for fault in (title, *faults)), default=0)
        if faults:
            yield f"{title:{width}} " + " ".join(f"{column:>10}" for column in columns)
        for fault in faults:
            counts = (self.met.get((fault, column), 0) for column in columns)
            yield f"{fault:{width}} " + " ".join(f"{count or '-':>10}" for count in counts)
