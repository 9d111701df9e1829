"""Which fault met which work: a table over all runs, so that a hole in what the simulation tries shows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memq.broker.broker import Broker

Met = dict[tuple[str, str], int]  # (fault, work): how often
# The first words of the tasks' names (see `TaskOwner.start`), and the work that they do. What names itself after its
# request comes from a client by way of a broker.
WORKS = {
    "open": "opening",
    "upload": "uploading",
    "shared": "uploading",
    "publish": "publishing",
    "forward": "forwarding",
    "replay": "replaying",
    "follow": "governing",
    "tell": "governing",
    "house": "upkeep",
    "compactor": "upkeep",
    "consumer": "reading",
    "READ": "reading",
    "POLL": "polling",
    "COMMIT": "committing",
    "JOIN": "grouping",
    "HEARTBEAT": "grouping",
}
OTHER = "other"
COLUMNS = (*dict.fromkeys(WORKS.values()), OTHER)
STATES = ("not open", "idle", "open", "sealed", "storing", "stored", "published")  # of a partition at its owner


def work_under_way() -> str:
    """Return the work that the running task does."""
    task = asyncio.current_task()
    return OTHER if task is None else WORKS.get(task.get_name().split(" ")[0].split("-")[0], OTHER)


def states_of(broker: Broker) -> dict[str, None]:
    """Return the states that the partitions and the batches of a broker are in."""
    found: dict[str, None] = {}
    for processor in broker.partitions.at_work():
        ring = processor.ring
        slots = [slot.state.name.lower() for slot in (*ring.batches, *([ring.open] if ring.open else []))]
        found |= dict.fromkeys(slots or (["not open"] if processor.own is None else ["idle"]))
    return found


@dataclass(slots=True)
class Summary:
    """What many runs were, together."""

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
