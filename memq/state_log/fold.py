"""The fold of a state log: which entries count (S1), and the state that they make. Pure.

In order of offset: an `opened` counts when its epoch is above all before it. Another entry counts when its epoch is
the one of the last `opened` that counts, and its number is the next one of that epoch. All other entries are void, for
every reader and for ever: late entries of a former owner, copies, entries after a hole. This is the opposite of rule 6
of the data partitions, where late pointers are never dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple

from memq.errors import UnsupportedFormatError
from memq.format.state_log.entry import OpenedState, StateDecisions, StateEntry, StateSnapshot
from memq.format.state_log.snapshot import SavedState
from memq.state_log import Answer, SlicedMachine, SlicedOpening, StateMachine


class Judgement(Enum):
    """COUNTS; VOID: late, or a copy; GAP: void, and the log lacks an entry before it.

    Owners publish an entry only when the one before it counts. So a gap is no ordinary void entry: the queue has lost
    an entry, or the reader has missed one.
    """

    COUNTS = auto()
    VOID = auto()
    GAP = auto()


class Met(NamedTuple):
    """The judgement of an entry, and the answers of its decisions, in order."""

    judgement: Judgement
    answers: tuple[Answer, ...] = ()


class StateFold:
    """The state of a log below `offset`. After an error the fold is not used any more.

    `epoch` and `nonce` are those of the last `opened` that counts, `number` is the next number of that epoch, and
    `snapshot` is the last one whose entry counts. `last` is the entry at `offset` - 1, void or not.
    """

    def __init__(self, machines: Mapping[str, StateMachine]) -> None:
        self.machines = machines
        self.offset = 0
        self.epoch = 0
        self.nonce = 0
        self.number = 0
        self.snapshot: StateSnapshot | None = None
        self.last: StateEntry | None = None

    def restore(self, saved: SavedState) -> None:
        """Continue from a snapshot. Raises: UnsupportedFormatError; as `StateMachine.restore`."""
        for _ in self.begin_restore(saved):
            pass

    def begin_restore(self, saved: SavedState) -> Iterator[None]:
        """Return the steps of the same; the fold is not used before their end."""
        self._check_known(saved.machines)
        for name, state in saved.machines.items():
            machine = self.machines[name]
            if isinstance(machine, SlicedOpening):
                yield from machine.begin_restore(state)
            else:
                machine.restore(state)
        self.offset, self.epoch, self.number = saved.offset, saved.epoch, saved.number

    def save(self) -> SavedState:
        """Return the state that counts below `offset`, with epoch and next number (S7)."""
        return next(each for each in self.begin_save() if each is not None)

    def begin_save(self) -> Iterator[SavedState | None]:
        """Return the steps of the same, of this moment; the last one is the state, the others are None."""
        place = (self.offset, self.epoch, self.number)
        return _steps(place, {name: _begun(machine) for name, machine in self.machines.items()})

    def meet(self, offset: int, entry: StateEntry) -> Met:
        """Take the entry at `offset`, which is the next one of the log.

        Raises: UnsupportedFormatError for an unknown machine (S8); as `StateMachine.apply`.
        """
        assert offset == self.offset, f"offset {offset} does not follow on {self.offset}"
        self.offset += 1
        self.last = entry
        judgement = self._judge(entry)
        if judgement is not Judgement.COUNTS:
            return Met(judgement)
        content = entry.content
        if isinstance(content, OpenedState):
            self.epoch, self.nonce, self.number = entry.epoch, content.nonce, 0
            return Met(judgement)
        self.number += 1
        if isinstance(content, StateDecisions):
            self._check_known(decision.machine for decision in content.decisions)
            return Met(judgement, tuple(self.machines[name].apply(body) for name, body in content.decisions))
        self.snapshot = content
        return Met(judgement)

    def _judge(self, entry: StateEntry) -> Judgement:
        if isinstance(entry.content, OpenedState):
            return Judgement.COUNTS if entry.epoch > self.epoch else Judgement.VOID
        expected = (self.epoch, self.number)
        if (entry.epoch, entry.number) == expected:
            return Judgement.COUNTS
        return Judgement.GAP if (entry.epoch, entry.number) > expected else Judgement.VOID

    def _check_known(self, names: Iterable[str]) -> None:
        unknown = sorted(set(names) - set(self.machines))
        if unknown:
            raise UnsupportedFormatError(f"the state log has decisions of unknown machines: {unknown[:8]}")


def _begun(machine: StateMachine) -> Iterator[bytes]:
    return machine.begin_snapshot() if isinstance(machine, SlicedMachine) else iter((machine.snapshot(),))


def _steps(place: tuple[int, int, int], machines: Mapping[str, Iterator[bytes]]) -> Iterator[SavedState | None]:
    states: dict[str, bytes] = {}
    for name, pieces in machines.items():
        found: list[bytes] = []
        for piece in pieces:
            if found:
                yield None
            found.append(piece)
        state = b"".join(found)
        if state:
            states[name] = state
    yield SavedState(*place, states)
