"""Faults of units of held records in the published data of a run. See `live_faults.py`."""

from __future__ import annotations

from memq.format.held_sequences import is_held
from tests.simulation.live_faults import FAULTS, InjectedFault, LiveFaults
from tests.simulation.reader import LogEntry


class UnitFaults(LiveFaults):
    """Does faults to units, too."""

    def unit_lost(self) -> InjectedFault | None:
        """A pointer with units of held records is gone; a later pointer counts them."""
        units = [entry for entry in self._units() if self._is_counted_later(entry)]
        if not units:
            return None
        lost = self._draw.choice(units)
        history = [landed for landed in self._unread(lost.blocks) if landed is not lost]
        return InjectedFault(history, held=records_of(lost))

    def unit_again(self) -> InjectedFault | None:
        """A pointer with units of held records comes again, as a late one may."""
        units = self._units()
        if not units:
            return None
        entry = self._draw.choice(units)
        again = self._behind(entry.pointer, entry.blocks)
        return InjectedFault([*self._history, again], counted=("copies", records_of(entry)))

    def _units(self) -> list[LogEntry]:
        """Return the batches of held records alone, all of whose records lie in them alone."""
        batches = self._batches_with_no_copies()
        return [each for each in batches if all(is_held(block.first) for block in each.blocks)]

    def _is_counted_later(self, entry: LogEntry) -> bool:
        """Whether each shard with a unit in a batch states a later one."""
        later = self._entries[self._entries.index(entry) + 1 :]
        return all(
            any(
                other.producer == unit.producer and other.last_sequence > unit.last_sequence
                for each in later
                if each.pointer.partition == entry.pointer.partition
                for other in each.pointer.named
            )
            for unit in entry.pointer.named
            if unit.is_shard
        )


def records_of(entry: LogEntry) -> int:
    """Return how many records a batch has."""
    return sum(block.following - block.first for block in entry.blocks)


ALL_FAULTS = {**FAULTS, "unit": (UnitFaults.unit_lost, UnitFaults.unit_again)}
