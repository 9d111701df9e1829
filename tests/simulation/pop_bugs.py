"""Planted bugs of pop groups: a rule of the reader (Q1), of places, of retention or of a group's life is left out."""

from __future__ import annotations

from tests.simulation.bug import Planted, body, instead, omit, swap

POPS, SAVED, LYING, HOUSE = ("pop",), ("pop", "state-log"), ("pop", "lies"), ("pop", "house")
GROUPS, KEEPER, MACHINE = "memq.queues.pop.groups", "memq.queues.pop.keeper", "memq.queues.machine"
PARTITION = "memq.broker.service_partitions.pop_partition"
READERS = "memq.broker.service_partitions.pop_readers"
PLACES = "memq.broker.service_partitions.topic_places"

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
        "Q1: the reader keeps what it judged for a read that failed",
        READERS,
        "_GroupReader.run",
        omit("self._open.clear"),
        level="breezy",
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
        "Q2: a record is granted while its lease runs",
        "memq.queues.scheduler",
        "ItemScheduler._first_free",
        swap("is_leased(status, local, now)", "False"),
        level="calm",
        aspects=POPS,
    ),
    Planted(
        "Q4: the end of a record counts for another grant",
        MACHINE,
        "QueueMachine._end_pops",
        swap("status.grant != lease.grant", "False"),
        level="calm",
        aspects=HOUSE,
    ),
    Planted(
        "records expire whose pointer is the first one that is left",
        READERS,
        "_GroupReader._check",
        swap("place.offset < before", "place.offset <= before"),
        level="calm",
        aspects=HOUSE,
    ),
    Planted(
        "records stay whose pointer retention took",
        READERS,
        "_GroupReader._round",
        omit("self._check"),
        level="calm",
        aspects=HOUSE,
    ),
    Planted(
        "a batch that one read did not find is passed over",
        PARTITION,
        "PopPartition._check_lost",
        body("return None"),
        level="calm",
        aspects=LYING,
    ),
    Planted(
        "a position names the batch and not the record",
        "memq.client.queue.items",
        "items_of",
        swap("first + number", "number"),
        level="calm",
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
        "a pop group does not read partitions that came later",
        READERS,
        "_GroupReader._round",
        swap("group.position(log.partition) is None", "False"),
        level="calm",
        aspects=("pop", "widen"),
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
