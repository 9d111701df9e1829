"""The decisions about held records, and the bytes of decisions and state (H1 to H6)."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.held_sequences import due_time_of
from memq.format.key import is_manifest_key
from memq.holds.spilled_holds import BringDecision, MarkDecision, MergeDecision, RunDecision, SavedRuns, SpilledPlace
from memq.state_log.machine_format import MachineFormat

HOLDS_MACHINE = "holds"  # its name in the log
STATE_VERSION = 3  # 1 without runs and staged holds, 2 without staged holds: brokers of earlier releases read these


class HoldState(IntEnum):
    """State of a known hold. REFUSED: the block was not held, because its lane accepts no block."""

    HELD = 1
    RELEASED = 2
    DROPPED = 3
    REFUSED = 4


class HoldDecision(msgspec.Struct, frozen=True, tag="hold"):
    """Hold blocks, which are in object `key`. A hold that exists gets this object in place of its own."""

    key: str
    before_ms: int
    lanes: tuple[HeldLane, ...]


class HoldStagedDecision(msgspec.Struct, frozen=True, tag="hold-staged"):
    """Hold parts of a transaction in the staged objects of manifest `key`, one for each target.

    Each part replaces the other holds of its lane and target, which are dropped at `now_ms`.
    """

    key: str
    before_ms: int
    now_ms: int
    lanes: tuple[HeldLane, ...]


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """The holds that one decision releases for one target. `r` is the number of the unit at this target."""

    target: Target
    r: int
    holds: tuple[HoldId, ...]


class ReleaseDecision(msgspec.Struct, frozen=True, tag="release"):
    """Release units; those of one target in the order of their numbers.

    A unit whose number is not the next one changes nothing, and neither do later units of its target: their records
    would be delivered before its own.
    """

    units: tuple[Unit, ...]


class DropDecision(msgspec.Struct, frozen=True, tag="drop", omit_defaults=True):
    """Drop holds at `now_ms`. `places` has the place of each hold in a run, or None; empty without runs."""

    now_ms: int
    holds: tuple[HoldId, ...]
    places: tuple[SpilledPlace | None, ...] = ()


class DoneDecision(msgspec.Struct, frozen=True, tag="done"):
    """Note that units, by target and number, are in the logs of their targets at `now_ms`."""

    now_ms: int
    units: tuple[tuple[Target, int], ...]


SpillDecision = MarkDecision | RunDecision | MergeDecision | BringDecision
HoldsDecision = HoldDecision | HoldStagedDecision | ReleaseDecision | DropDecision | DoneDecision | SpillDecision


class Hold(msgspec.Struct, gc=False):
    """A hold that is neither released nor dropped: its block, target and lane, and the object that has it."""

    block: HeldBlock
    target: Target
    lane: str
    key: str

    @property
    def is_staged(self) -> bool:
        """Whether the hold is in the staged objects of a manifest."""
        return is_manifest_key(self.key)

    def is_due_at(self, from_ms: int) -> bool:
        """Whether the hold is due at or after `from_ms`, with an id that has the due time (H6)."""
        return not self.lane and self.block.due_ms >= from_ms and due_time_of(self.block.id.first) == self.block.due_ms


class ReleasedUnit(msgspec.Struct):
    """A released unit that its target does not have yet, and its holds without dropped ones.

    `total` counts the records of all units of the target up to this one.
    """

    unit: Unit
    holds: list[Hold]
    total: int = 0

    @property
    def records(self) -> int:
        """Number of records, as `HeldBlock.counted`."""
        return sum(hold.block.counted for hold in self.holds)


class SavedHolds(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a machine in its snapshot.

    The long lists have encoded values, so that a large state is encoded and read in slices.
    """

    version: int
    life: int
    objects: list[msgspec.Raw]  # a key, and the lanes of its holds
    units: list[msgspec.Raw]  # a unit, and for each of its holds a key and a lane
    numbers: list[tuple[Target, int]]
    ended: list[msgspec.Raw]  # a hold, its state, and the time of its end
    totals: list[tuple[Target, int]] = []  # a Struct copies the default
    dropped: list[tuple[Target, int]] = []
    spilled: SavedRuns | None = msgspec.field(default=None, name="far")  # stored snapshots have these names
    spilled_counts: list[tuple[Target, int]] = msgspec.field(default_factory=list, name="far_counts")  # by target


FORMAT: MachineFormat[HoldsDecision, SavedHolds] = MachineFormat(
    HoldsDecision,
    SavedHolds,
    STATE_VERSION,
    decision="decision about held records",
    snapshot="snapshot of held records",
)
encode_decision = FORMAT.encode_decision
decode_decision = FORMAT.decode_decision
