"""Planted bugs of delayed records: a rule of holds is left out (H1 to H6)."""

from __future__ import annotations

from tests.simulation.bug import Planted, before, body, instead, omit, swap

DELAYS = ("delay",)
KEEPER, MACHINE, TAKING = "memq.holds.keeper", "memq.holds.machine", "memq.broker.holds.taking"
SPILLED = "memq.holds.spilled_holds"

DELAY_BUGS = (
    Planted(
        "H1: a delayed record is acked before its decision counts",
        KEEPER,
        "HoldKeeper._decide",
        instead(
            "self._propose",
            "asyncio.ensure_future(self._propose(decision))\n"
            "return [HoldState.HELD for lane in lanes for _ in lane.blocks]",
        ),
        level="breezy",
        seed=1022,
        aspects=DELAYS,
    ),
    Planted(
        "H2: a delayed record is released before it is due",
        KEEPER,
        "HoldKeeper._due_units",
        swap(
            "now_ms, room, units = self._now_ms(), DECISION_BYTES, list[Unit]()",
            "now_ms, room, units = self._now_ms() + 60_000, DECISION_BYTES, list[Unit]()",
        ),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "H2: a cancel tells that it dropped what is released",
        MACHINE,
        "HoldMachine._drop",
        swap("self.state_in_memory(hold)", "HoldState.DROPPED"),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "H2: a cancel is answered before its decision counts",
        KEEPER,
        "HoldKeeper.cancel",
        body(
            "states = [self._machine.state_of(each) for each in holds]\n"
            "decision = DropDecision(self._now_ms(), tuple(holds))\n"
            "asyncio.ensure_future(asyncio.gather(self._propose(decision), return_exceptions=True))\n"
            "return [HoldState.DROPPED if state is HoldState.HELD else state for state in states]"
        ),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "H2: a cancelled record is released all the same",
        MACHINE,
        "HoldMachine._drop",
        body("return HoldState.DROPPED"),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "H3: a unit is carried out before its decision counts",
        KEEPER,
        "HoldKeeper.run",
        before(
            "self._propose",
            "for unit in units:\n"
            "    held = [self._machine.open[each] for each in unit.holds if each in self._machine.open]\n"
            "    early = self._parts.append(ReleasedUnit(unit, held))\n"
            "    asyncio.ensure_future(asyncio.gather(early, return_exceptions=True))\n",
        ),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "H3: a unit is done before its target has it",
        KEEPER,
        "HoldKeeper._append",
        body("asyncio.ensure_future(asyncio.gather(self._parts.append(released), return_exceptions=True))"),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "H3: an object that a store does not find for 10 s is dropped",
        TAKING,
        "check_missing",
        body("return"),
        level="breezy",
        seed=1_902,
        aspects=("lies", *DELAYS),
    ),
    Planted(
        "S6: waiting records are counted without a proof",
        KEEPER,
        "HoldKeeper.waiting",
        omit("known_outcome"),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "S6: the answer of a broker that lacks a service partition counts for it",
        "memq.broker.api.service_lookup",
        "_Question._ask_home",
        swap("named if answer.covered is None else answer.covered", "named"),
        level="breezy",
        seed=1_096,
        aspects=DELAYS,
    ),
    Planted(
        "H4: a target takes a unit that its queue has",
        TAKING,
        "is_there",
        swap("unit.number <= own.named.last_unit(unit.shard)", "False"),
        seed=1027,
        aspects=DELAYS,
    ),
    Planted(
        "H4: pointers of units do not name them",
        "memq.broker.partition.batch",
        "named_of",
        swap("slot.units", "()"),
        seed=1027,
        aspects=DELAYS,
    ),
    Planted(
        "H5: the sweep takes the objects of held records",
        "memq.broker.sweep.sweep",
        "Sweep._why_held",
        swap("key not in named", "True"),
        level="calm",
        aspects=("house", *DELAYS),
    ),
    Planted(
        "H6: a cancel of a record in a run is lost",
        SPILLED,
        "SpilledHolds.drop",
        body("return True"),
        level="breezy",
        aspects=DELAYS,
    ),
    Planted(
        "H6: records of a run are brought back late",
        "memq.holds.run_keeper",
        "RunKeeper._bring",
        swap("now_ms + self._pace.near_ms", "now_ms - 30_000"),
        level="calm",
        aspects=DELAYS,
    ),
    Planted(
        "H6: the next owner brings records of a run again",
        SPILLED,
        "SpilledHolds.save",
        swap("(state.run, state.at, list(state.dropped.items()))", "(state.run, (0, 0, 0), [])"),
        level="breezy",
        aspects=("state-log", *DELAYS),
    ),
    Planted(
        "H6: the sweep takes a run that a state names",
        "memq.broker.sweep.unnamed_snapshots",
        "UnnamedSnapshots._runs",
        body("return set()"),
        level="calm",
        aspects=("house", *DELAYS),
    ),
    Planted(
        "S9: a restore lets records wait that are delivered",
        "memq.broker.restore.restored_holds",
        "RestoredHolds._in_logs",
        body("return set()"),
        level="calm",
        aspects=DELAYS,
    ),
    Planted(
        "S9: a cancel is answered before the store has it",
        "memq.holds.cancels",
        "CancelledHolds.store",
        body("return"),
        level="calm",
        aspects=DELAYS,
    ),
    Planted(
        "H6: the sweep takes the objects of records in runs",
        "memq.broker.sweep.unnamed_held",
        "UnnamedHeld._add_late",
        body("pass"),
        level="calm",
        aspects=("house", *DELAYS),
    ),
)
