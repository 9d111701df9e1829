"""Snapshots of held records in slices: the owner of a state log does other work between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.holds.decisions import FORMAT, Hold, HoldState, ReleasedUnit, SavedHolds, Unit

SLICE_HOLDS = 1_000  # of a snapshot, encoded or read at once: 3 ms
Ended = tuple[HoldId, tuple[HoldState, int]]
Item = TypeVar("Item")
_Ended = tuple[HoldId, HoldState, int]
_Object = tuple[str, list[HeldLane]]
_UnitOnItsWay = tuple[Unit, list[tuple[str, HeldLane]]]
_encode = msgspec.msgpack.Encoder().encode
_OBJECTS: msgspec.msgpack.Decoder[_Object] = msgspec.msgpack.Decoder(_Object)
_UNITS: msgspec.msgpack.Decoder[_UnitOnItsWay] = msgspec.msgpack.Decoder(_UnitOnItsWay)
_ENDS: msgspec.msgpack.Decoder[_Ended] = msgspec.msgpack.Decoder(_Ended)


def snapshot_pieces(
    saved: SavedHolds, open_: list[Hold], units: list[ReleasedUnit], ended: list[Ended]
) -> Iterator[bytes]:
    """Yield empty pieces between the slices of the work, and the whole state at last."""
    by_key: dict[str, dict[tuple[Target, str], list[HeldBlock]]] = {}
    for number, hold in enumerate(open_, 1):
        by_key.setdefault(hold.key, {}).setdefault((hold.target, hold.lane), []).append(hold.block)
        if number % SLICE_HOLDS == 0:
            yield b""
    done = 0
    for key, lanes in by_key.items():
        found = [HeldLane(*place, tuple(blocks)) for place, blocks in lanes.items()]
        saved.objects.append(msgspec.Raw(_encode((key, found))))
        done += sum(len(lane.blocks) for lane in found)
        if done >= SLICE_HOLDS:
            done = 0
            yield b""
    for each in units:
        pieces = [(hold.key, HeldLane(hold.target, hold.lane, (hold.block,))) for hold in each.holds]
        saved.units.append(msgspec.Raw(_encode((each.unit, pieces))))
        done += len(pieces)
        if done >= SLICE_HOLDS:
            done = 0
            yield b""
    for number, (id_, end) in enumerate(ended, 1):
        saved.ended.append(msgspec.Raw(_encode((id_, *end))))
        if number % SLICE_HOLDS == 0:
            yield b""
    yield _encode(saved)


def holds_in(saved: SavedHolds) -> Iterator[tuple[str, HeldLane, HeldBlock] | None]:
    """Yield the open holds of a snapshot, and None between its slices. Raises: CorruptDataError."""
    objects = FORMAT.decode_items(_OBJECTS, saved.objects)
    return _in_slices((key, lane, block) for key, lanes in objects for lane in lanes for block in lane.blocks)


def units_in(saved: SavedHolds) -> Iterator[_UnitOnItsWay | None]:
    """Yield the units of a snapshot, and None between its slices. Raises: CorruptDataError."""
    return _in_slices(FORMAT.decode_items(_UNITS, saved.units), size=lambda unit: len(unit[1]))


def ended_in(saved: SavedHolds) -> Iterator[_Ended | None]:
    """Yield the ended holds of a snapshot, the oldest first, and None between its slices.

    Raises: CorruptDataError.
    """
    return _in_slices(FORMAT.decode_items(_ENDS, saved.ended))


def _in_slices(items: Iterable[Item], size: Callable[[Item], int] = lambda item: 1) -> Iterator[Item | None]:
    """Yield items, and None after about SLICE_HOLDS holds each."""
    done = 0
    for item in items:
        yield item
        done += size(item)
        if done >= SLICE_HOLDS:
            done = 0
            yield None
