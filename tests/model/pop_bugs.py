"""The rules of pop groups, each left out in the product's code or in the reader: some schedule of the model fails.

`python -m tests.model.pop_bugs [NAME-PART] [SCHEDULES]` searches; without a bug of that name, all rules hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.model.lease_bugs import bug
from tests.model.pops import PopRules, run
from tests.model.search import first_failure, search_each
from tests.simulation.bug import Planted, swap
from tests.simulation.planted_bugs import plant

POP = "memq.queues.pop.groups"
READER_BUGS: dict[str, PopRules] = {
    "Q1: the reader does not know the blocks before its position": PopRules(look_back=False),
    "Q1: the reader keeps what it judged for a read that failed": PopRules(again_from_the_state=False),
    "Q2: a grant of a record is handed out before it counts": PopRules(grant_when_it_counts=False),
    "S4: an ack of a record is answered before it counts": PopRules(ack_when_it_counts=False),
}
BUGS: dict[str, Planted] = {
    "Q1: a read moves no position": bug("PopGroups.move", swap("each is at", "False"), POP),
    "Q1: a read moves the position and takes no blocks": bug("QueueMachine._read", swap("decision.lanes", "()")),
    "S7: a snapshot without the positions of pop groups": bug(
        "QueueMachine.begin_snapshot", swap("list(self.pops.groups.values())", "[]")
    ),
    "Q4: the end of a record counts for another grant": bug(
        "QueueMachine._end_pops", swap("status.grant != lease.grant", "False")
    ),
    "an item of a record that retention took comes again": bug(
        "QueueMachine._end_pops", swap("self._put(block, begin, end, block.over(status, state), status)", "None")
    ),
}
ALL_BUGS = (*READER_BUGS, *BUGS)


@contextmanager
def planted(name: str) -> Iterator[PopRules | None]:
    """Plant a bug; yield the rules of the reader, if the bug is there."""
    if name in READER_BUGS:
        yield READER_BUGS[name]
        return
    with plant(BUGS[name]):
        yield None


def first_found(seeds: Iterable[int], rules: PopRules | None = None) -> str | None:
    """Return what the first schedule finds that fails; None: all of them hold."""
    return first_failure(seeds, lambda seed: run(seed, rules or PopRules()))


if __name__ == "__main__":
    search_each(ALL_BUGS, planted, first_found)
