"""Planted bugs of pop groups: a rule of the reader (Q1), of places or of a group's life is left out."""

from __future__ import annotations

from tests.simulation.bug import Planted, instead, omit, swap

POPS, SAVED = ("pop",), ("pop", "state-log")
GROUPS, KEEPER, MACHINE = "memq.queues.pop.groups", "memq.queues.pop.keeper", "memq.queues.machine"
PARTITION = "memq.broker.service_partitions.pop_partition"
READERS = "memq.broker.service_partitions.pop_readers"

POP_BUGS = (
    Planted(
        "Q1: a read moves the position and takes no blocks",
        MACHINE,
        "QueueMachine._read",
        swap("self._take(decision.place, lane, block)", "True"),
        level="calm",
        aspects=POPS,
    ),
    Planted(
        "Q1: a read moves no position",
        GROUPS,
        "PopGroups.move",
        swap("each is at", "False"),
        level="calm",
        aspects=POPS,
    ),
    Planted(
        "Q1: the rest of a batch for which there was no room is passed over",
        PARTITION,
        "PopPartition._take",
        swap("found.offset == entry.offset", "False"),
        level="calm",
        aspects=POPS,
    ),
    Planted(
        "Q1: each part of a batch moves the group behind the batch",
        KEEPER,
        "PopKeeper.read",
        swap("rest[0].first", "rest[-1].first"),
        level="calm",
        aspects=POPS,
    ),
    Planted(
        "S7: a snapshot without the positions of pop groups",
        MACHINE,
        "QueueMachine.begin_snapshot",
        swap("list(self.pops.groups.values())", "[]"),
        level="breezy",
        aspects=SAVED,
    ),
    Planted(
        "S4: an ack of a record is answered before it counts",
        "memq.queues.keeper",
        "QueueKeeper._decide",
        instead(
            "self._propose",
            "from memq.queues.decisions import ItemOutcome, OutcomeRun\n"
            "asyncio.ensure_future(self._propose(decision))\n"
            "outcomes = (OutcomeRun(ItemOutcome.ACKED, sum(map(len, items))),)",
        ),
        level="breezy",
        aspects=POPS,
    ),
    Planted(
        "the records of a block have the place of the next batch",
        PARTITION,
        "PopPartition._take",
        swap(
            "PopPlace(self._life, self._log.partition, entry.offset, mark)",
            "PopPlace(self._life, self._log.partition, entry.offset + 1, mark)",
        ),
        level="calm",
        aspects=POPS,
    ),
    Planted(
        "a block of a batch is read at the offset in its object",
        PARTITION,
        "PopPartition._entries",
        swap("each.offset - start", "each.offset"),
        level="calm",
        aspects=("pop", "shared"),
    ),
    Planted(
        "a pop group outlives its topic",
        READERS,
        "_GroupReader._replace",
        omit("self._pop.remove"),
        level="calm",
        aspects=POPS,
    ),
    Planted(
        "a pop group begins at the end of its topic",
        "memq.client.queue.pop_admin",
        "AsyncPopAdmin.pop_request",
        swap("point_of(start, topic_partition_of(log))", "point_of('end', topic_partition_of(log))"),
        level="calm",
        aspects=POPS,
    ),
)
