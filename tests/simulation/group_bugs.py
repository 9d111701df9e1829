"""Planted bugs of groups on state logs."""

from __future__ import annotations

from tests.simulation.bug import Planted, body, each, first, instead, omit, swap

ON_STATE_LOGS = ("state-log",)

GROUP_BUGS = (
    Planted(
        "G2: a state log stores commits of former holders",
        "memq.groups.machine",
        "GroupMachine._commit",
        omit("stored.membership.check_commit"),
        seed=1_449,
        aspects=ON_STATE_LOGS,
    ),
    Planted(
        "S4: a commit is answered before it counts",
        "memq.groups.coordinator",
        "GroupCoordinator.commit",
        instead(
            "self._propose",
            "decision = CommitDecision(group, member, generation, number, pack_positions(portion))\n"
            "asyncio.gather(self._propose(decision), return_exceptions=True)\n",
        ),
        seed=1002,
        aspects=ON_STATE_LOGS,
    ),
    Planted(
        "S7: a snapshot leaves out the pieces of a decision",
        "memq.groups.machine",
        "GroupMachine.snapshot",
        swap("self.gathered.items()", "()"),
        seed=1_450,
        aspects=ON_STATE_LOGS,
    ),
    Planted(
        "S1: pieces that a former owner left behind are part of the next decision",
        "memq.groups.machine",
        "GroupMachine._gather",
        each(
            swap("decision.number == 0", "decision.group not in self.gathered"),
            swap("gathered is None or not gathered.pieces.is_next(decision)", "gathered is None"),
        ),
        seed=1002,
        aspects=ON_STATE_LOGS,
    ),
    Planted(
        "G3: the position that comes with a partition is an old one",
        "memq.groups.coordinator",
        "GroupCoordinator._with_positions",
        swap(
            "{partition: stored.positions[partition] for partition in news if partition in stored.positions}",
            "{partition: self.__dict__.setdefault('_old', {}).setdefault((group, partition), "
            "stored.positions[partition]) for partition in news if partition in stored.positions}",
        ),
        level="breezy",
        seed=1042,
        aspects=("crowd",),
    ),
    Planted(
        "S7: the sweep takes the last snapshot of a state log",
        "memq.broker.sweep.unnamed_snapshots",
        "UnnamedSnapshots._snapshots_in",
        each(
            swap("named is None or key.rpartition('/')[0] in reading.named", "named is None"),
            swap("named.epoch <= place.epoch and named.offset < place.offset", "True"),
        ),
        level="calm",
        aspects=("house", *ON_STATE_LOGS),
    ),
    Planted(
        "positions in deleted topics stay",
        "memq.groups.coordinator",
        "GroupCoordinator.forget",
        omit("self._propose"),
        level="calm",
        aspects=("churn", *ON_STATE_LOGS),
    ),
    Planted(
        "S9: a restore takes positions as they are",
        "memq.broker.restore.state_logs",
        "StateLogRestorer._moved",
        first("return {}"),
        aspects=ON_STATE_LOGS,
    ),
    Planted(
        "S9: a restore puts groups behind the last pointer",
        "memq.broker.restore.position_search",
        "PositionSearch.place",
        omit("self._is_covered"),
        level="calm",
        aspects=ON_STATE_LOGS,
    ),
    Planted(
        "G4: a member delivers until it learns that it is in its group no more",
        "memq.client.consumer.group.session",
        "GroupSession._silent_ms",
        body("return 0.0"),
        level="stormy",
        seed=1_055,
        aspects=("crowd",),
    ),
)
