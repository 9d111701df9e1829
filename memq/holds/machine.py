"""The held records of one service partition as a state machine (rules H1 to H6). Pure.

docs/delay.md explains the rules. A hold is a block of records that a producer sealed for its target, a write partition.
The block lies in an object below `<cluster>/held/`. A hold is released once or dropped, never both: the first of the
two decisions that counts wins (H2). What one decision releases for one target is a *unit*. Its number r is the next one
of the target here, so the numbers are dense, and none is given twice. The unit stays in the state until the target has
it (H3, H5).

The machine knows what has ended, so that a block that comes again is not held again. `before_ms` of a `HoldDecision`
says what may be forgotten. All times are in the decisions (S3): the fold reads no clock.

Holds that are due late leave the memory: `spilled_holds.py` has those in runs. No decision needs the content of a run.

A staged hold is the part of a transaction for one target that lies in staged objects: its `key` is that of a manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping

import msgspec

from memq.errors import CorruptDataError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.key import is_manifest_key
from memq.holds.decisions import (
    FORMAT,
    STATE_VERSION,
    DoneDecision,
    DropDecision,
    Hold,
    HoldDecision,
    HoldStagedDecision,
    HoldState,
    ReleaseDecision,
    ReleasedUnit,
    SavedHolds,
    Unit,
    decode_decision,
)
from memq.holds.snapshots import ended_in, holds_in, snapshot_pieces, units_in
from memq.holds.spilled_holds import (
    BringDecision,
    MarkDecision,
    MergeDecision,
    RunDecision,
    SpilledHolds,
    SpilledPlace,
)
from memq.state_log import Answer


class UnitCount(msgspec.Struct, frozen=True):
    """The last unit of a target, and how many records all its units have; the same of its settled units.

    `dropped` counts its dropped delayed records.
    """

    released: int
    released_records: int
    settled: int
    settled_records: int
    dropped: int = 0


class HoldMachine:
    """All held records of a service partition. See `memq.state_log.StateMachine`.

    `apply` returns the state of each hold of a decision after it, in order; None for a hold that is not known. A
    dropped hold is HELD if its run is not named any more: find it again. The answer to a release has True for each unit
    that counts. Decisions about runs are answered by whether they count, a mark by its number.

    A hold of a lane with a name has no due time: one decision releases or drops the whole lane. `enter` returns whether
    a lane takes a block now.
    """

    def __init__(self) -> None:
        self.life = 0  # changes with a restore, which may give numbers again: targets know each life by its own id
        self.open: dict[HoldId, Hold] = {}
        self.units: dict[Target, dict[int, ReleasedUnit]] = {}  # not done, by number, in order
        self.numbers: dict[Target, int] = {}  # the last number of each target
        self.totals: dict[Target, int] = {}  # how many records the units of each target have
        self.dropped: dict[Target, int] = {}  # how many delayed records of each target were dropped
        self.objects: dict[str, int] = {}  # how many blocks of each object the state names (H5)
        self.waiting: dict[Target, int] = {}  # holds of each target that have a due time, those in runs included
        self.waiting_count = 0  # of all targets
        self.spilled = SpilledHolds()
        self._released: set[HoldId] = set()  # those in `units`
        self._ended: dict[HoldId, tuple[HoldState, int]] = {}  # with the time of the end, Unix ms; the oldest first
        self.lanes: dict[str, dict[HoldId, None]] = {}  # the open holds of each lane with a name
        self.enter: Callable[[str], bool] = _any_lane
        self._texts: dict[str, str] = {}  # one string for each object, lane and target
        self._targets: dict[Target, Target] = {}

    def apply(self, body: bytes) -> Answer:
        """Apply a decision. Raises: CorruptDataError."""
        decision = decode_decision(body)
        match decision:
            case HoldDecision():
                return self._hold(decision)
            case HoldStagedDecision():
                return self._hold_staged(decision)
            case ReleaseDecision():
                return self._release_all(decision.units)
            case DropDecision():
                return self._drop_all(decision)
            case DoneDecision():
                self._done(decision)
                return None
            case MarkDecision():
                return self.spilled.begin(
                    hold.block.id for hold in self.open.values() if hold.is_due_at(decision.from_ms)
                )
            case RunDecision():
                return self._move(decision)
            case MergeDecision():
                return self.spilled.merge(decision)
            case BringDecision():
                return self._bring(decision)

    def state_of(self, hold: HoldId) -> HoldState | None:
        """Return the state of a hold; None for one that is unknown, was forgotten, or is in a run for long."""
        known = self.state_in_memory(hold)
        return HoldState.HELD if known is None and self.spilled.is_recent(hold) else known

    def state_in_memory(self, hold: HoldId) -> HoldState | None:
        """Return the same without runs."""
        if hold in self.open:
            return HoldState.HELD
        if hold in self._released:
            return HoldState.RELEASED
        return self._ended.get(hold, (None, 0))[0]

    def target_of(self, hold: HoldId) -> Target | None:
        """Return the target of a hold that waits or is on its way; None for others, and for those in runs."""
        if hold in self.open:
            return self.open[hold].target
        if hold not in self._released:
            return None
        return next(unit.unit.target for unit in self._all_units() if any(each.block.id == hold for each in unit.holds))

    def next_number(self, target: Target) -> int:
        """Return the number of the next unit of a target."""
        return self.numbers.get(target, 0) + 1

    def undelivered(self) -> set[Target]:
        """Return the targets of all holds that are not done, those of transactions included."""
        in_lanes = {self.open[hold].target for holds in self.lanes.values() for hold in holds}
        return {*self.waiting, *self.units, *in_lanes}

    def renew(self, life: int) -> None:
        """Begin another life with this older state, and count the units from 1 again (S9)."""
        self.life = life
        for target, units in self.units.items():
            renamed = [msgspec.structs.replace(each.unit, r=r) for r, each in enumerate(units.values(), 1)]
            kept = zip(renamed, units.values(), strict=True)
            self.units[target] = {unit.r: ReleasedUnit(unit, each.holds) for unit, each in kept}
        self.numbers = {target: len(units) for target, units in self.units.items()}
        self.totals = {target: sum(each.records for each in units.values()) for target, units in self.units.items()}
        self._count_units()

    def count_of(self, target: Target) -> UnitCount:
        """Return how many units and records were released for a target, and are known to be in its log."""
        number, total, units = self.numbers.get(target, 0), self.totals.get(target, 0), self.units.get(target, {})
        left = sum(each.records for each in units.values())
        dropped = self.dropped.get(target, 0)
        return UnitCount(number, total, number - len(units), total - left, dropped)

    def _count_units(self) -> None:
        """Set the totals of the units that are not done."""
        for target, units in self.units.items():
            total = self.totals.get(target, 0)
            for each in reversed(units.values()):
                each.total = total
                total -= each.records

    def end_released(
        self, delivered: Container[HoldId], late: Mapping[HoldId, tuple[Target, HeldBlock]], now_ms: int
    ) -> None:
        """End the holds of this older state that their targets have (S9); `late` says where some lie in runs."""
        for hold in [each for each in self.open.values() if each.block.id in delivered]:
            self._close(hold)
            self._unname(hold.key)
            self._ended[hold.block.id] = HoldState.RELEASED, now_ms
        for unit in self._all_units():
            for hold in [each for each in unit.holds if each.block.id in delivered]:
                unit.holds.remove(hold)
                self._unname(hold.key)
                self._released.discard(hold.block.id)
                self._ended[hold.block.id] = HoldState.RELEASED, now_ms
        for id_, (target, block) in late.items():
            if id_ in delivered:
                self.spilled.replace(block)
                self._count(target, -1)
                self._ended[id_] = HoldState.RELEASED, now_ms

    # ---- decisions -------------------------------------------------------------------------------

    def _hold(self, decision: HoldDecision) -> tuple[HoldState | None, ...]:
        self._forget(decision.before_ms)
        self.spilled.forget(decision.before_ms)
        return tuple(self._take(decision.key, lane, block) for lane in decision.lanes for block in lane.blocks)

    def _hold_staged(self, decision: HoldStagedDecision) -> tuple[HoldState | None, ...]:
        self._forget(decision.before_ms)
        answers: list[HoldState | None] = []
        for lane in decision.lanes:
            (block,) = lane.blocks
            answers.append(self._take(decision.key, lane, block))
            replaced = list(self.lanes.get(lane.lane, ())) if answers[-1] is HoldState.HELD else []
            for hold in replaced:
                if hold != block.id and self.open[hold].target == lane.target:
                    self._drop(hold, None, decision.now_ms)
        return tuple(answers)

    def _take(self, key: str, lane: HeldLane, block: HeldBlock) -> HoldState:
        state = self.state_of(block.id)
        if state is None and lane.lane and not self.enter(lane.lane):
            return HoldState.REFUSED
        if state in (None, HoldState.HELD):
            self._open(key, lane, block)
            return HoldState.HELD
        return state

    def _open(self, key: str, lane: HeldLane, block: HeldBlock) -> None:
        known = self.open.get(block.id)
        if known is not None:
            self._close(known)
            self._unname(known.key)
        elif self.spilled.is_recent(block.id):
            self.spilled.replace(block)
            self._count(lane.target, -1)
        self._insert(key, lane, block)
        if not lane.lane:
            self._count(lane.target, 1)

    def _insert(self, key: str, lane: HeldLane, block: HeldBlock) -> None:
        target = self._targets.setdefault(lane.target, lane.target)
        self.open[block.id] = self._named(Hold(block, target, self._shared(lane.lane), self._shared(key)))
        if lane.lane:
            self.lanes.setdefault(lane.lane, {})[block.id] = None

    def _count(self, target: Target, change: int) -> None:
        """Count holds of a target that have a due time."""
        target = self._targets.setdefault(target, target)
        self.waiting_count += change
        self.waiting[target] = self.waiting.get(target, 0) + change
        if not self.waiting[target]:
            del self.waiting[target]

    def _close(self, hold: Hold) -> None:
        """Take a hold out of those that wait."""
        del self.open[hold.block.id]
        if not hold.lane:
            self._count(hold.target, -1)
            self.spilled.left(hold.block)
        else:
            del self.lanes[hold.lane][hold.block.id]
            if not self.lanes[hold.lane]:
                del self.lanes[hold.lane]
                self._texts.pop(hold.lane, None)

    def _release_all(self, units: tuple[Unit, ...]) -> tuple[bool, ...]:
        refused, answers = set[Target](), list[bool]()
        for unit in units:
            answers.append(unit.target not in refused and self._release(unit))
            if not answers[-1]:
                refused.add(unit.target)
        return tuple(answers)

    def _release(self, unit: Unit) -> bool:
        if unit.r != self.next_number(unit.target):  # H2: dense, and never given twice
            return False
        self.numbers[unit.target] = unit.r
        known = [self.open.get(each) for each in dict.fromkeys(unit.holds)]
        holds = [hold for hold in known if hold is not None and hold.target == unit.target]
        for hold in holds:
            self._close(hold)
            self._released.add(hold.block.id)
        released = ReleasedUnit(unit, holds)
        released.total = self.totals[unit.target] = self.totals.get(unit.target, 0) + released.records
        self.units.setdefault(unit.target, {})[unit.r] = released
        return True

    def _drop_all(self, decision: DropDecision) -> tuple[HoldState | None, ...]:
        places = decision.places or (None,) * len(decision.holds)
        return tuple(self._drop(*each, decision.now_ms) for each in zip(decision.holds, places, strict=False))

    def _drop(self, hold: HoldId, place: SpilledPlace | None, now_ms: int) -> HoldState | None:
        known = self.open.get(hold)
        if known is not None:
            self._close(known)
            self._unname(known.key)
            if not known.lane:
                self.dropped[known.target] = self.dropped.get(known.target, 0) + known.block.counted
            self._ended[hold] = HoldState.DROPPED, now_ms
        elif place is not None and hold not in self._released and hold not in self._ended:
            dropped = self.spilled.drop(hold, place)
            if dropped is None:
                return HoldState.HELD
            if dropped:
                self._count(place.target, -1)
                self.dropped[place.target] = self.dropped.get(place.target, 0) + place.records
                self._ended[hold] = HoldState.DROPPED, now_ms
        return self.state_in_memory(hold)

    def _done(self, decision: DoneDecision) -> None:
        for target, r in decision.units:
            units = self.units.get(target, {})
            released = units.pop(r, None)
            if not units:
                self.units.pop(target, None)
            for hold in released.holds if released is not None else ():
                self._unname(hold.key)
                self._released.discard(hold.block.id)
                self._ended[hold.block.id] = HoldState.RELEASED, decision.now_ms

    def _forget(self, before_ms: int) -> None:
        """Forget what ended before `before_ms`, up to the first hold that ended later."""
        while self._ended:
            hold, (_, ended_ms) = next(iter(self._ended.items()))
            if ended_ms >= before_ms:
                return
            del self._ended[hold]

    # ---- lanes -----------------------------------------------------------------------------------

    def by_target(self, lane: str) -> dict[Target, list[Hold]]:
        """Return the open holds of a lane by target: of each producer in the order of its sequences."""
        found: dict[Target, list[Hold]] = {}
        for each in sorted(self.lanes.get(lane, ()), key=lambda hold: (hold.producer, hold.first)):
            hold = self.open[each]
            found.setdefault(hold.target, []).append(hold)
        return found

    def release_lane(self, lane: str) -> None:
        """Release all open holds of a lane: one unit for each target."""
        for target, holds in self.by_target(lane).items():
            self._release(Unit(target, self.next_number(target), tuple(hold.block.id for hold in holds)))

    def is_on_its_way(self, lane: str) -> bool:
        """Whether a lane was released, and some of its units are not done."""
        return any(each.holds and each.holds[0].lane == lane for each in self._all_units())

    def drop_lane(self, lane: str, now_ms: int) -> None:
        """Drop all open holds of a lane."""
        for hold in list(self.lanes.get(lane, ())):
            self._drop(hold, None, now_ms)

    # ---- runs ------------------------------------------------------------------------------------

    def _move(self, decision: RunDecision) -> bool:
        """Let marked holds leave the memory."""
        moved = self.spilled.take(decision)
        for hold in moved:
            self._unname(self.open.pop(hold).key)
        return bool(moved)

    def _bring(self, decision: BringDecision) -> bool:
        """Let holds of a run come back into memory."""
        run = self.spilled.bring(decision)
        for key, lanes in decision.objects if run is not None else ():
            for lane in lanes:
                for block in lane.blocks:
                    if run is not None and block.id not in run.dropped and block.id not in self.open:
                        self._insert(key, lane, block)
        return run is not None

    # ---- objects ---------------------------------------------------------------------------------

    def _named(self, hold: Hold) -> Hold:
        self.objects[hold.key] = self.objects.get(hold.key, 0) + 1
        return hold

    def _unname(self, key: str) -> None:
        self.objects[key] -= 1
        if not self.objects[key]:
            del self.objects[key]
            self._texts.pop(key, None)

    def _shared(self, text: str) -> str:
        return self._texts.setdefault(text, text)

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return the whole state as bytes."""
        return b"".join(self.begin_snapshot())

    def begin_snapshot(self) -> Iterator[bytes]:
        """See `memq.state_log.SlicedMachine`."""
        spilled = None if self.spilled.empty else self.spilled.save()
        numbers, totals, dropped = (list(each.items()) for each in (self.numbers, self.totals, self.dropped))
        saved = SavedHolds(1, self.life, [], [], numbers, [], totals, dropped)
        if spilled is not None:
            saved = msgspec.structs.replace(saved, version=2, spilled=spilled, spilled_counts=self._spilled_counts())
        if any(map(is_manifest_key, self.objects)):
            saved = msgspec.structs.replace(saved, version=STATE_VERSION)
        return snapshot_pieces(saved, list(self.open.values()), list(self._all_units()), list(self._ended.items()))

    def _spilled_counts(self) -> list[tuple[Target, int]]:
        """Return how many holds of each target are in runs."""
        counts = dict(self.waiting)
        for hold in self.open.values():
            if not hold.lane:
                counts[hold.target] -= 1
        return [(target, count) for target, count in counts.items() if count]

    def _all_units(self) -> Iterator[ReleasedUnit]:
        for units in self.units.values():
            yield from units.values()

    def restore(self, state: bytes) -> None:
        """Take the state of a snapshot. Raises: UnsupportedFormatError for a newer one; CorruptDataError."""
        for _ in self.begin_restore(state):
            pass

    def begin_restore(self, state: bytes) -> Iterator[None]:
        """See `memq.state_log.SlicedOpening`."""
        saved = FORMAT.decode_state(state)
        self.life = saved.life
        for found in holds_in(saved):
            if found is None:
                yield
            else:
                self._open(*found)
        for each in units_in(saved):
            if each is None:
                yield
            else:
                self._restore_unit(*each)
        self.numbers, self.totals, self.dropped = dict(saved.numbers), dict(saved.totals), dict(saved.dropped)
        for target, left in self.units.items():  # an earlier release has not counted them
            self.totals.setdefault(target, sum(each.records for each in left.values()))
        self._count_units()
        for end in ended_in(saved):
            if end is None:
                yield
            else:
                self._ended[end[0]] = end[1:]
        for target, count in saved.spilled_counts:
            self._count(target, count)
        if saved.spilled is not None:
            try:
                self.spilled.restore(saved.spilled)
            except ValueError as error:
                raise CorruptDataError(f"snapshot of held records can't be read: {error}") from error

    def _restore_unit(self, unit: Unit, pieces: list[tuple[str, HeldLane]]) -> None:
        holds = [
            self._named(Hold(lane.blocks[0], unit.target, self._shared(lane.lane), self._shared(key)))
            for key, lane in pieces
        ]
        self.units.setdefault(unit.target, {})[unit.r] = ReleasedUnit(unit, holds)
        self._released.update(hold.block.id for hold in holds)


def _any_lane(lane: str) -> bool:
    return True
