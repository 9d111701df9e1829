"""Planted bugs of leased queues: a rule of leases is left out (Q2 to Q5, S4, S7), or one of keys and dead items."""

from __future__ import annotations

from tests.simulation.bug import Planted, body, instead, swap

QUEUES, SAVED = ("queue",), ("queue", "state-log")
BLOCK, KEEPER = "memq.queues.block", "memq.queues.keeper"
KEYS = "memq.queues.keys"
MACHINE, SCHEDULER = "memq.queues.machine", "memq.queues.scheduler"
PUSH = "self._push(block, first, last, status.due_ms)"
LEASED = "status is not None and status.state is ItemState.LEASED"
LATEST = f"{LEASED} and status.grant == lease.grant"
SAVED_ITEMS = "SavedItems(end - begin, status)"
LANDED = "LocalState(max(0, state.busy - 1))"
SECOND_ITEM = """
blocks = self._keys[queue, key].blocks.values() if (queue, key) in self._keys else ()
ready = ((block, number) for block in blocks for number in block.numbers_in(ItemState.READY))
return next(ready, self._keys[queue, key].leased if blocks else None)
"""
UNDECIDED = """
acked = (("acked", sum(len(each.items) for each in acks)),)
found = await _dequeue(home, ask)
"""

QUEUE_BUGS = (
    Planted(
        "Q2: a new owner grants what is leased",
        SCHEDULER,
        "ItemScheduler._add",
        swap("now.steady_s", "-1e9"),
        level="breezy",
        seed=1010,
        aspects=QUEUES,
    ),
    Planted(
        "Q2: an item is granted while its lease runs",
        SCHEDULER,
        "ItemScheduler._first_free",
        swap("is_leased(status, local, now)", "False"),
        level="calm",
        aspects=QUEUES,
    ),
    Planted(
        "Q4: an expired lease acks",
        MACHINE,
        "QueueMachine._changed",
        swap(LATEST, LEASED),
        level="breezy",
        aspects=QUEUES,
    ),
    Planted(
        "S4: an ack is answered before its entry counts",
        KEEPER,
        "QueueKeeper._decide",
        instead(
            "self._propose",
            "from memq.queues.decisions import ItemOutcome, OutcomeRun\n"
            "asyncio.ensure_future(self._propose(decision))\n"
            "outcomes = (OutcomeRun(ItemOutcome.ACKED, sum(map(len, items))),)",
        ),
        level="breezy",
        aspects=QUEUES,
    ),
    Planted(
        "S7: a snapshot of queues without the last acks",
        BLOCK,
        "QueueBlock.saved",
        swap(SAVED_ITEMS, "SavedItems(end - begin, status._replace(state=ItemState.READY))"),
        level="breezy",
        aspects=SAVED,
    ),
    Planted(
        "an item that is given back is lost",
        SCHEDULER,
        "ItemScheduler._settled",
        swap(PUSH, "pass"),
        level="calm",
        aspects=QUEUES,
    ),
    Planted(
        "two items of an ordered key are leased",
        KEYS,
        "OrderedKeys.next_of",
        body(SECOND_ITEM),
        level="calm",
        aspects=QUEUES,
    ),
    Planted(
        "the last item of an ordered key is first",
        KEYS,
        "OrderedKeys.next_of",
        swap("iter(found.blocks.values())", "reversed(found.blocks.values())"),
        level="calm",
        aspects=QUEUES,
    ),
    Planted(
        "a second item under a dedupe key is taken",
        KEYS,
        "DedupeKeys.find",
        body("return None"),
        level="breezy",
        aspects=QUEUES,
    ),
    Planted(
        "S7: dedupe keys are forgotten by a snapshot",
        MACHINE,
        "QueueMachine.begin_snapshot",
        swap("self.firsts.saved()", "[]"),
        level="breezy",
        seed=1045,
        aspects=SAVED,
    ),
    Planted(
        "a duplicate gets an id of its own",
        KEEPER,
        "QueueKeeper._known_as",
        swap("self._machine.firsts.find(dedupe)", "new.id.producer"),
        level="calm",
        aspects=QUEUES,
    ),
    Planted(
        "an ack that asks for items is answered, and not decided",
        "memq.broker.api.queue_requests",
        "_ack_and_dequeue",
        instead("home.ack", UNDECIDED),
        level="calm",
        aspects=QUEUES,
    ),
    Planted(
        "an item that was sent back keeps its attempts",
        BLOCK,
        "QueueBlock.redriven",
        swap("0", "former.attempts"),
        level="calm",
        aspects=QUEUES,
    ),
)
