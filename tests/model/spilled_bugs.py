"""The rules of queue items in runs, each left out in the product's code or in the shell: some schedule fails.

`python -m tests.model.spilled_bugs [NAME-PART] [SCHEDULES]` searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.model.lease_bugs import BLOCK, SCHEDULER, bug
from tests.model.search import first_failure, search_each
from tests.model.spilled_leases import run
from tests.simulation.bug import Planted, body, swap
from tests.simulation.planted_bugs import plant

SPILLED = "memq.queues.runs.spilled"
IN_VAIN = "an item in a run is cancelled in vain"
BUGS: dict[str, Planted] = {
    "an item is granted before the first place in runs": bug(
        "ItemScheduler._is_behind", swap("each.place[:2] < (span.due_ms, span.arrival)", "False"), SCHEDULER
    ),
    "an item is granted before a lower priority number in a run": bug(
        "ItemScheduler._is_behind", swap("each.lane.priority < span.priority", "False"), SCHEDULER
    ),
    "an item waits for a block in a run that is not due": bug(
        "ItemScheduler.due_heads", swap("each.due_ms <= now.wall_ms", "True"), SCHEDULER
    ),
    "the first place stays where it was": bug(
        "SpilledBlocks.brought", swap("run.at, run.head = decision.to, decision.head", "run.at = decision.to"), SPILLED
    ),
    "a dead copy is the first place of a run": bug(
        "SpilledBlocks.spill", swap("min(moved.values())", "decision.run.first"), SPILLED
    ),
    "a block is brought twice": bug("SpilledRun.take", swap("self.ids.discard(id_)", "pass"), SPILLED),
    "a bring counts for a run at another place": bug(
        "SpilledBlocks.find", swap("found.at == decision.before", "True"), SPILLED
    ),
    "a run goes with blocks that were not brought": bug("SpilledBlocks.brought", swap("run.ids", "False"), SPILLED),
    "a block that was granted moves": bug("may_move", swap("not block.is_touched", "True")),
    "a block that came again moves with its former object": bug("QueueBlock.touch", body("pass"), BLOCK),
    "a block in a run that comes again is new": bug(
        "QueueMachine._take", swap("self.spilled.run_of(block.id.producer) is not None", "False")
    ),
    "a brought block has another arrival": bug("QueueMachine._bring", swap("each.arrival", "self._arrivals + 1")),
    "a snapshot without runs": bug(
        "QueueMachine.begin_snapshot", swap("[each.saved() for each in self.spilled.runs.values()]", "[]")
    ),
    "a snapshot with blocks that have left their run": bug(
        "SpilledRun.take", swap("self._encoded = None", "pass"), SPILLED
    ),
    "items in runs are not counted by a snapshot": bug(
        "QueueMachine.begin_restore", swap("self._count_new(run.lane.queue, run.items)", "pass")
    ),
}
ALL_BUGS = (IN_VAIN, *BUGS)


@contextmanager
def planted(name: str) -> Iterator[bool]:
    """Plant a bug; yield whether cancels bring blocks first."""
    if name == IN_VAIN:
        yield False
        return
    with plant(BUGS[name]):
        yield True


def first_found(seeds: Iterable[int], picks: bool = True) -> str | None:
    """Return what the first schedule finds that fails; None: all of them hold."""
    return first_failure(seeds, lambda seed: run(seed, picks=picks))


if __name__ == "__main__":
    search_each(ALL_BUGS, planted, first_found)
