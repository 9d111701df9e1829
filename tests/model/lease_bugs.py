"""The rules of queue items, each left out in the product's code or in the shell: some schedule of the model fails.

`python -m tests.model.lease_bugs [NAME-PART] [SCHEDULES]` searches; without a bug of that name, all rules hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.model.leases import Rules, rules_of, run
from tests.model.search import first_failure, search_each
from tests.simulation.bug import Change, Planted, body, swap
from tests.simulation.planted_bugs import plant
from tests.simulation.queue_bugs import LANDED, LATEST, LEASED, PUSH, SAVED_ITEMS, SECOND_ITEM

BLOCK, KEYS = "memq.queues.block", "memq.queues.keys"
MACHINE, SCHEDULER = "memq.queues.machine", "memq.queues.scheduler"


def bug(target: str, change: Change, module: str = MACHINE) -> Planted:
    """Return a bug of one change."""
    return Planted(target, module, target, change)


SHELL_BUGS: dict[str, Rules] = {
    "Q2: a grant is handed out before it counts": Rules(grant_when_it_counts=False),
    "S4: an ack is answered before it counts": Rules(ack_when_it_counts=False),
    "Q3: a worker counts its lease from the answer": Rules(lease_from_the_request=False),
    "Q5: an at-most-once item is handed out before its grant counts": Rules(
        at_most_once=True, grant_when_it_counts=False
    ),
}
BUGS: dict[str, Planted] = {
    "Q2: a new owner does not begin the leases again": bug(
        "ItemScheduler._add",
        swap("now.steady_s", "-1e9"),
        SCHEDULER,
    ),
    "Q4: an item with a decision on its way is granted": bug(
        "ItemScheduler._first_free", swap("local.busy", "False"), SCHEDULER
    ),
    "Q4: the end of a lease is not expected": bug(
        "ItemScheduler._end_lease",
        swap(PUSH, "pass"),
        SCHEDULER,
    ),
    "Q4: a late nack or ack counts for another grant": bug("QueueMachine._changed", swap(LATEST, LEASED)),
    "Q4: an extension makes a lease shorter": bug(
        "QueueMachine._extend", swap("max(status.lease_ms, lease_ms)", "lease_ms")
    ),
    "an item that is given back comes at once": bug("QueueMachine._nack", swap("decision.due_ms", "0")),
    "Q1: a block that has ended is forgotten at once": bug(
        "QueueMachine._take", swap("block.id.producer in self._ended", "False")
    ),
    "S7: a snapshot without the last acks": bug(
        "QueueBlock.saved", swap(SAVED_ITEMS, "SavedItems(end - begin, status._replace(state=ItemState.READY))"), BLOCK
    ),
    "S7: a snapshot without the blocks that have ended": bug(
        "QueueMachine.begin_snapshot", swap("list(self._ended.items())", "[]")
    ),
    "S7: a snapshot without the times of items that were given back": bug(
        "QueueBlock.saved", swap(SAVED_ITEMS, "SavedItems(end - begin, status._replace(due_ms=1))"), BLOCK
    ),
    "Q5: the grant of an at-most-once item is no ack": bug(
        "QueueBlock.granted",
        swap("ItemState.ACKED if not self.terms.lease_ms else ItemState.LEASED", "ItemState.LEASED"),
        BLOCK,
    ),
    "an item has more attempts than it may have": bug(
        "QueueMachine._nack",
        swap("0 < block.terms.attempts_max <= attempts", "False"),
    ),
    "an item that is given back is lost": bug("ItemScheduler._settled", swap(PUSH, "pass"), SCHEDULER),
    "the last priority is first": bug(
        "ItemScheduler._push", swap("block.terms.priority", "9 - block.terms.priority"), SCHEDULER
    ),
    "an item comes before it is due": bug("QueueBlock.untouched", swap("self.block.due_ms", "0"), BLOCK),
    "the end of a life is ignored": bug(
        "QueueBlock.__init__", swap("terms_of(lane)", "terms_of(lane)._replace(expires_ms=0)"), BLOCK
    ),
    "an item whose life is over never ends": bug(
        "ItemScheduler.pass_time",
        swap("self._local.change(id_, first, last, lambda state: state._replace(dies=False))", "pass"),
        SCHEDULER,
    ),
    "a block is trimmed with an item that is not over": bug(
        "QueueMachine._over", swap("not block.left", "block.left < 2")
    ),
    "two items of an ordered key are leased": bug("OrderedKeys.next_of", body(SECOND_ITEM), KEYS),
    "the last item of an ordered key is first": bug(
        "OrderedKeys.next_of", swap("iter(found.blocks.values())", "reversed(found.blocks.values())"), KEYS
    ),
    "an ordered key is forgotten by a snapshot": bug(
        "QueueMachine._insert", swap("made.left > made.dead", "made.left > made.dead and not made.is_touched")
    ),
    "a second item under a dedupe key is taken": bug("DedupeKeys.find", body("return None"), KEYS),
    "the window of a dedupe key never ends": bug(
        "DedupeKeys.find", swap("known.until_ms > dedupe.since_ms", "True"), KEYS
    ),
    "dedupe keys are forgotten by a snapshot": bug("QueueMachine.begin_snapshot", swap("self.firsts.saved()", "[]")),
    "an item that was sent back has its former end": bug(
        "_landed", swap(LANDED, "LocalState(max(0, state.busy - 1), dies=state.dies)"), SCHEDULER
    ),
    "an item that was sent back keeps its attempts": bug("QueueBlock.redriven", swap("0", "former.attempts"), BLOCK),
}
ALL_BUGS = (*SHELL_BUGS, *BUGS)


@contextmanager
def planted(name: str) -> Iterator[Rules | None]:
    """Plant a bug; yield the rules of the shell, if the bug is there."""
    if name in SHELL_BUGS:
        yield SHELL_BUGS[name]
        return
    with plant(BUGS[name]):
        yield None


def first_found(seeds: Iterable[int], rules: Rules | None = None) -> str | None:
    """Return what the first schedule finds that fails; None: all of them hold."""
    return first_failure(seeds, lambda seed: run(seed, rules or rules_of(seed)))


if __name__ == "__main__":
    search_each(ALL_BUGS, planted, first_found)
