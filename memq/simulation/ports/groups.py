"""Groups on state logs, as the simulation observes them: in the logs, and in answers to clients.

A state log alone decides what counts. `StateLogs` folds each log as its entries land, and notifies the observer of each
decision that counts. So the rules of groups are checked against the log, and not against the memory of an owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import MemqError
from memq.format.held_object import HoldId
from memq.format.state_log.entry import StateDecisions, StateEntry, decode_state_entry
from memq.groups import Membership
from memq.groups.coordinator import GroupCoordinator
from memq.groups.machine import (
    GROUPS_MACHINE,
    CommitDecision,
    Decision,
    GroupMachine,
    MembersDecision,
    decode_decision,
    unpack_positions,
)
from memq.groups.pieces import PieceDecision, PieceReader
from memq.groups.waiting import AnswerHeartbeat
from memq.holds.decisions import HOLDS_MACHINE, DropDecision, HoldsDecision, HoldState
from memq.holds.decisions import decode_decision as decode_hold_decision
from memq.holds.machine import HoldMachine
from memq.holds.spilled_holds import BringDecision, RunDecision
from memq.queues.decisions import QUEUES_MACHINE
from memq.queues.decisions import decode_decision as decode_queue_decision
from memq.queues.machine import QueueMachine
from memq.queues.runs.spilled import BringBlocksDecision, SpillBlocksDecision, ids_in
from memq.simulation.ports.queue import QueueObserver
from memq.state_log import Answer
from memq.state_log.fold import Judgement, StateFold
from memq.topic import Committed, Position, ReadPartition
from memq.transactions.machine import (
    TRANSACTIONS_MACHINE,
    TransactionDecision,
    TransactionMachine,
)
from memq.transactions.machine import decode_decision as decode_transaction


class StateLogs:
    """The true state of each state log. `observer` returns the present observer; `fail` gets each finding."""

    def __init__(self, observer: Callable[[], QueueObserver], fail: Callable[[str], None]) -> None:
        self._observer = observer
        self._fail = fail
        self._folds: dict[ReadPartition, StateFold] = {}
        self._machines: dict[ReadPartition, GroupMachine] = {}
        self.holds: dict[ReadPartition, HoldMachine] = {}
        self.queues: dict[ReadPartition, QueueMachine] = {}
        self._transactions: list[TransactionMachine] = []
        self.on_transaction: Callable[[TransactionDecision, Answer], None] = lambda decision, answer: None
        self.dropped: set[HoldId] = set()  # by a decision about these holds; the machines forget them
        self.changed: Callable[[ReadPartition], None] = lambda partition: None  # called after each entry
        self.late: dict[HoldId, str] = {}  # holds in runs, with the objects that have them
        self.spilled: dict[int, str] = {}  # blocks of queue items in runs, with the objects that have them
        self.run_decisions: Counter[str] = Counter()  # that count, by kind
        self.pieced = 0  # decisions about members in more than one piece
        self._pieces: dict[tuple[ReadPartition, str], PieceReader] = {}  # of each group, as they landed
        self._parts: dict[tuple[ReadPartition, str], list[MembersDecision]] = {}  # that these completed
        self._run_spans: dict[ReadPartition, dict[str, list[int]]] = {}  # offsets of a run's first and last entry

    def landed(self, partition: ReadPartition, offset: int, body: bytes) -> None:
        """An entry is in the log at `offset`."""
        fold = self._folds.get(partition)
        if fold is None:
            machines = ServiceMachines()
            self._machines[partition], self.holds[partition] = machines.groups, machines.holds
            self.queues[partition] = machines.queues
            self._transactions.append(machines.transactions)
            fold = self._folds[partition] = StateFold(machines.by_name())
        entry, holds = decode_state_entry(body), self.holds[partition]
        marked, queues = {hold: holds.open[hold].key for hold in holds.spilled.marked}, self.queues[partition]
        runs, spilling = self._runs_of(partition), _spilling(entry, queues)
        met = fold.meet(offset, entry)
        spans = self._run_spans.setdefault(partition, {})
        left = self._runs_of(partition)
        spans.update({key: [offset] for key in left - runs})
        for key in runs - left:
            spans[key].append(offset)
        self._note_spilled(queues, spilling)
        if met.judgement is Judgement.COUNTS and isinstance(entry.content, StateDecisions):
            for decision, answer in zip(entry.content.decisions, met.answers, strict=True):
                if decision.machine == GROUPS_MACHINE and answer is None:
                    self._decided(partition, decode_decision(decision.body))
                elif decision.machine == HOLDS_MACHINE:
                    found = decode_hold_decision(decision.body)
                    self._note_late(found, answer, holds, marked)
                    if isinstance(answer, tuple):
                        self._note_dropped(found, answer)
                elif decision.machine == TRANSACTIONS_MACHINE:
                    self.on_transaction(decode_transaction(decision.body), answer)
        elif met.judgement is Judgement.GAP:
            self._fail(f"state log {partition.partition} has a gap before offset {offset}")
        self.changed(partition)

    def _decided(self, log: ReadPartition, decision: Decision) -> None:
        observer, machine = self._observer(), self._machines[log]
        if isinstance(decision, PieceDecision):
            key = log, decision.group
            if decision.number == 0:
                self._pieces[key], self._parts[key] = PieceReader(decision.checksum, decision.count), []
            parts = map(decode_decision, self._pieces[key].take(decision.piece))
            self._parts[key] += [part for part in parts if isinstance(part, MembersDecision)]
            if self._pieces[key].is_whole:
                self.pieced += decision.count > 1
                changed = {name: member for part in self._parts[key] for name, member in part.changed.items()}
                self._decided(log, replace(self._parts[key][0], changed=changed))
        elif isinstance(decision, MembersDecision):
            state = machine.membership(decision.group)
            for name in state.members:
                joined = name in decision.changed and state.members[name].joined > decision.base
                observer.granted(decision.group, name, state.membership(name), joined=joined)
        elif isinstance(decision, CommitDecision):
            stored = unpack_positions(decision.positions)
            written = [(partition, committed.position) for partition, committed in stored.items()]
            observer.stored_by(decision.group, decision.member, decision.generation, decision.number, written)
            for partition, position in written:
                observer.committed(decision.group, partition, position)

    def _note_dropped(self, decision: HoldsDecision, answers: tuple[object, ...]) -> None:
        if isinstance(decision, DropDecision):
            found = zip(decision.holds, answers, strict=True)
            dropped = {hold for hold, state in found if state is HoldState.DROPPED}
            self.dropped |= dropped
            for hold in dropped:
                self.late.pop(hold, None)

    def _note_late(
        self, decision: HoldsDecision, answer: object, holds: HoldMachine, marked: dict[HoldId, str]
    ) -> None:
        """Note the holds that are in runs now; `marked` were marked before this entry."""
        if answer is True:
            self.run_decisions[type(decision).__name__] += 1
        if isinstance(decision, RunDecision) and answer is True:
            # Others were dropped or released by an earlier decision of the same entry.
            self.late |= {hold: key for hold, key in marked.items() if holds.state_in_memory(hold) is None}
        elif isinstance(decision, BringDecision):
            for _, lanes in decision.objects:
                for block in (block for lane in lanes for block in lane.blocks):
                    if block.id in holds.open:
                        self.late.pop(block.id, None)

    def _runs_of(self, partition: ReadPartition) -> set[str]:
        return {*self.holds[partition].spilled.runs, *self.queues[partition].spilled.runs}

    def _note_spilled(self, queues: QueueMachine, spilling: dict[int, str]) -> None:
        """Note the blocks of queue items that are in runs now, of those that this entry names."""
        for id_, key in spilling.items():
            if queues.spilled.run_of(id_) is not None:
                self.run_decisions["SpillBlocksDecision"] += id_ not in self.spilled
                self.spilled[id_] = key
            elif self.spilled.pop(id_, None) is not None:
                self.run_decisions["BringBlocksDecision"] += 1

    def deleted(self, key: str) -> None:
        """An object was deleted: it may be no part of a last snapshot (S7), and have no held block (H5)."""
        if self.names(key):
            self._fail(f"'{key}' was deleted, and a state log names it")
        for partition, fold in self._folds.items():
            if fold.snapshot is not None and key.startswith(f"{fold.snapshot.key}/"):
                self._fail(f"'{key}' was deleted, and the last snapshot of state log {partition.partition} needs it")
            begun, *ended = self._run_spans[partition].get(key, [0, 0])
            if fold.snapshot is not None and ended and begun < fold.snapshot.offset <= ended[0]:
                self._fail(f"'{key}' was deleted, and the last snapshot of state log {partition.partition} names it")

    def named_topics(self) -> set[str]:
        """Return the ids of the topics in which groups and pop groups have positions."""
        groups = (stored for machine in self._machines.values() for stored in machine.groups.values())
        pops = (pop for queues in self.queues.values() for pop in queues.pops.groups.values())
        return {partition.topic_id for stored in groups for partition in stored.positions} | {
            pop.topic_id for pop in pops
        }

    def names(self, key: str) -> bool:
        """Whether the state of a log names an object of held blocks or queue items, or a run."""
        named = any(key in holds.objects or key in holds.spilled.runs for holds in self.holds.values())
        queued = any(key in queues.objects or key in queues.spilled.runs for queues in self.queues.values())
        return named or queued or key in self.late.values() or key in self.spilled.values()

    def waiting(self) -> set[HoldId]:
        """Return the delayed records that are neither released nor dropped."""
        in_memory = (hold for holds in self.holds.values() for hold in holds.open.values())
        return {*(hold.block.id for hold in in_memory if not hold.lane), *self.late}

    def state_of(self, hold: HoldId) -> HoldState | None:
        """Return the state of a hold; None if no log knows it."""
        states = (holds.state_of(hold) for holds in self.holds.values())
        return next((state for state in states if state is not None), None)

    def is_prepared(self, lane: str) -> bool:
        """Whether a transaction is prepared and undecided."""
        return any(lane in machine.prepared for machine in self._transactions)

    def position(self, group: str, partition: ReadPartition) -> Position | None:
        """Return the position of a group that is stored now; None without one."""
        groups = (machine.groups.get(group) for machine in self._machines.values())
        found = (stored.positions.get(partition) for stored in groups if stored is not None)
        return next((committed.position for committed in found if committed is not None), None)

    def is_member(self, group: str, member: str) -> bool:
        """Whether a log has a member in a group now."""
        return any(member in machine.membership(group).members for machine in self._machines.values())


def _spilling(entry: StateEntry, queues: QueueMachine) -> dict[int, str]:
    """Return the blocks that an entry moves into runs, or back, with the objects that have them."""
    found: dict[int, str] = {}
    decisions = entry.content.decisions if isinstance(entry.content, StateDecisions) else ()
    for each in decisions:
        decision = decode_queue_decision(each.body) if each.machine == QUEUES_MACHINE else None
        if isinstance(decision, SpillBlocksDecision):
            found |= {id_: queues.blocks[id_].key for id_ in ids_in(decision.ids) if id_ in queues.blocks}
        elif isinstance(decision, BringBlocksDecision):
            found |= {block.block.id.producer: block.key for block in decision.blocks}
    return found


class ObservedGroups(GroupCoordinator):
    """Notifies the observer of commits that members ask for, and of positions that they get."""

    logs: StateLogs
    observer: Callable[[], QueueObserver]

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `GroupCoordinator.join`."""
        return self._observed(group, await super().join(group, member, partitions, session_timeout_ms))

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """See `GroupCoordinator.heartbeat`."""
        return self._observed(group, await super().heartbeat(group, member, generation, released))

    def keep_heartbeat(self, group: str, member: str, generation: int, wait_ms: int, answer: AnswerHeartbeat) -> bool:
        """See `GroupCoordinator.keep_heartbeat`."""

        def observed(found: Membership | MemqError | None) -> None:
            answer(self._observed(group, found) if isinstance(found, Membership) else found)

        return super().keep_heartbeat(group, member, generation, wait_ms, observed)

    def _observed(self, group: str, membership: Membership) -> Membership:
        """Notify the observer of the positions that the log has: no others may come with partitions (G3)."""
        for partition in membership.positions:
            self.observer().fetched(group, partition, self.logs.position(group, partition))
        return membership

    async def commit(
        self, group: str, member: str, generation: int, positions: Mapping[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `GroupCoordinator.commit`."""
        if self.logs.is_member(group, member):
            written = [(partition, committed.position) for partition, committed in positions.items()]
            self.observer().asked(group, member, generation, number, written)
        await super().commit(group, member, generation, positions, number)

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """See `GroupCoordinator.committed`."""
        found = await super().committed(group, partitions)
        for partition in partitions:
            stored = found.get(partition)
            self.observer().fetched(group, partition, None if stored is None else stored.position)
        return found
