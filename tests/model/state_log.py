"""A model of a state log in which the real owner, fold and opening run: random schedules, each step checked.

Several brokers may believe that they own the log. Each may pause, crash and open again. A publish may come late, twice,
never, or land although its broker gets an error. Trims and deletions of snapshots come late, and a queue that lags
shows an early end. The service is a machine that gives slots to the first request that claims them. After each step,
`Reference` has the state by an independent fold of the untrimmed log.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum, auto

from memq.errors import EpochFencedError, LogLostError
from memq.format.state_log.entry import (
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    decode_state_entry,
    encode_state_entry,
)
from memq.format.state_log.snapshot import SavedState
from memq.notification import Entry
from memq.state_log import opening
from memq.state_log.opening import LogScan
from memq.state_log.owner import ProposalFate, PublishStep, ReadStep, SnapshotPace, StateOwner

BROKERS = 3
CLIENTS = 6
SLOTS = 3
OPENINGS_MAX = 10
CRASHES_MAX = 4
SCANS_MAX = 5
MACHINE = "slots"
WEIGHTS = {
    "network": 12,
    "late": 3,
    "open": 2,
    "crash": 0.1,
    "hear": 8,
    "time out": 1,
    "load": 6,
    "read": 8,
    "act": 8,
    "claim": 4,
    "ask": 3,
    "snapshot": 3,
}
QUEUE_ACTIONS = ("network", "late")
FAVOURS = (0.3, 1, 1, 1, 3)  # drawn for each kind of step, so that schedules differ more than by luck


class BrokenPromiseError(AssertionError):
    """A schedule broke a promise of the state log."""


class Slots:
    """The machine: the first request for a slot gets it. Not idempotent: it also keeps all that it applied."""

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}
        self.applied: list[int] = []

    def apply(self, body: bytes) -> bool:
        """Return whether the request has the slot now."""
        slot, request = body
        self.applied.append(request)
        return self.taken.setdefault(slot, request) == request

    def snapshot(self) -> bytes:
        """See `StateMachine.snapshot`."""
        return json.dumps([sorted(self.taken.items()), self.applied]).encode()

    def restore(self, state: bytes) -> None:
        """See `StateMachine.restore`."""
        taken, self.applied = json.loads(state)
        self.taken = dict(taken)


def machines() -> dict[str, Slots]:
    """Return the machines of the log, empty."""
    return {MACHINE: Slots()}


Known = tuple[int, int, bytes]  # epoch, next number, state


class Reference:
    """The rules of S1 once more, in plain words; `known` has the state below each offset."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.epoch = self.number = 0
        self.known: list[Known] = [(0, 0, self.slots.snapshot())]
        self.counted: set[int] = set()  # requests

    def land(self, entry: StateEntry) -> None:
        """Take the next entry of the log."""
        if isinstance(entry.content, OpenedState):
            if entry.epoch > self.epoch:
                self.epoch, self.number = entry.epoch, 0
        elif entry.epoch == self.epoch and entry.number == self.number:
            self.number += 1
            if isinstance(entry.content, StateDecisions):
                for _, body in entry.content.decisions:
                    self.slots.apply(body)
                    self.counted.add(body[1])
        self.known.append((self.epoch, self.number, self.slots.snapshot()))


@dataclass(slots=True)
class Flight:
    """A publish on its way; answers of a connection that was given up reach no broker."""

    broker: int
    connection: int
    number: int
    body: bytes


class Mode(Enum):
    """Of a broker."""

    DOWN = auto()
    PUBLISHES_OPENED = auto()
    LOADS = auto()
    OWNS = auto()


@dataclass(slots=True)
class Broker:
    """One broker: between two openings it forgets everything but its connections."""

    index: int
    connection: int = 0
    mode: Mode = Mode.DOWN
    epoch: int = 0
    nonce: int = 0
    opened_at: int = 0
    load_end: int = 0
    in_flight: int = 0  # number of the publish that it waits for
    answers: list[tuple[int, int | None]] = field(default_factory=list)  # number of a publish; offset, None: an error
    scan: LogScan | None = None
    scans: int = 0
    owner: StateOwner | None = None
    reading: ReadStep | None = None
    shown_end: int = 0
    storing: SavedState | None = None
    claims: dict[int, int] = field(default_factory=dict)  # client by ticket
    reads: dict[int, frozenset[int]] = field(default_factory=dict)  # slots known as taken by then, by ticket


@dataclass(slots=True)
class Client:
    """A client claims one slot until it gets an answer."""

    slot: int
    sent: int = 0
    answer: bool | None = None
    failed: bool = False  # it was once told that its claim does not count
    waits: bool = False


class StateLogModel:
    """One schedule; `steps` has what happened, for a reader of a failure."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.weights = {action: weight * draw.choice(FAVOURS) for action, weight in WEIGHTS.items()}
        self.log: list[bytes] = []
        self.begin = 0
        self.flights: list[Flight] = []
        self.store: dict[str, SavedState] = {}
        self.late: list[tuple[str, int | str]] = []  # trims and deletions on their way
        self.brokers = [Broker(index) for index in range(BROKERS)]
        self.clients = [Client(draw.randrange(SLOTS)) for _ in range(CLIENTS)]
        self.reference = Reference()
        self.won: set[int] = set()  # slots that a client knows as taken
        self.epochs = self.numbers = self.openings = self.crashes = 0
        self.now_s = 0.0
        self.refuses_epochs = draw.random() < 0.3  # as SQLite does
        self.highest_published = 0
        self.steps: list[str] = []
        self.met: set[str] = set()  # kinds of events, to show that schedules reach them

    def note(self, kind: str, text: str = "") -> None:
        """Note an event."""
        self.met.add(kind)
        self.steps.append(f"{kind} {text}")

    # ---- the queue ---------------------------------------------------------------------------

    def send(self, broker: Broker, body: bytes) -> None:
        """Hand a publish over to the network."""
        self.numbers += 1
        broker.in_flight = self.numbers
        self.flights.append(Flight(broker.index, broker.connection, self.numbers, body))

    def network(self) -> None:
        """Let the first publish of some connection arrive, or get lost, or land and come again later."""
        chosen = self.draw.choice(self.flights)
        flight = next(
            each for each in self.flights if (each.broker, each.connection) == (chosen.broker, chosen.connection)
        )
        chance = self.draw.randrange(12)
        if chance != 1:
            self.flights.remove(flight)
        if chance == 0:
            self.note("lost", f"of b{flight.broker}")
            return
        entry = decode_state_entry(flight.body)
        broker = self.brokers[flight.broker]
        waits = broker.in_flight == flight.number and broker.connection == flight.connection
        if self.refuses_epochs and entry.epoch < self.highest_published:
            self.note("refused", f"of b{flight.broker}")
            if waits:
                broker.answers.append((flight.number, None))
            return
        self.highest_published = max(self.highest_published, entry.epoch)
        self.log.append(flight.body)
        self.reference.land(entry)
        self._check_failed()
        self.note("lands twice" if chance == 1 else "lands", f"@{len(self.log) - 1} {entry}")
        if waits and chance == 2:
            self.note("refused but landed")
            broker.answers.append((flight.number, None))
        elif waits and chance != 3:
            broker.answers.append((flight.number, len(self.log) - 1))

    def entries(self, offset: int, end: int) -> list[Entry]:
        """Return what a read shows from `offset` on."""
        return [Entry(at, 0, self.log[at]) for at in range(max(offset, self.begin), end)]

    def arrive_late(self) -> None:
        """Let a trim or a deletion take effect."""
        kind, what = self.late.pop(self.draw.randrange(len(self.late)))
        if isinstance(what, int):
            if what > self.begin:
                self.note("trims", f"to {what}")
            self.begin = max(self.begin, what)
        elif self.store.pop(what, None) is not None:
            self.note("deletes", what)
        assert kind in ("trim", "delete"), kind

    # ---- opening -----------------------------------------------------------------------------

    def open(self, broker: Broker) -> None:
        """Claim an epoch and publish `opened`; at times the coordinator was set back, and gives an old epoch."""
        self.openings += 1
        if not self.epochs or self.draw.random() < 0.9:
            self.epochs += 1
        else:
            self.note("epoch again")
        self.restart(broker)
        broker.mode, broker.epoch, broker.nonce = Mode.PUBLISHES_OPENED, self.epochs, self.draw.getrandbits(32)
        self.note("opens", f"b{broker.index} e{broker.epoch}")
        self.send(broker, encode_state_entry(StateEntry(broker.epoch, 0, OpenedState(broker.nonce, ""))))

    def restart(self, broker: Broker) -> None:
        """Forget all that a process knows."""
        for client in broker.claims.values():
            self.clients[client].waits = False
        fresh = Broker(broker.index, broker.connection + 1)
        for each in fields(Broker):
            setattr(broker, each.name, getattr(fresh, each.name))

    def load(self, broker: Broker) -> None:
        """Read some entries of the log, up to its end; then fold it. A queue that lags ends it at the own `opened`."""
        if broker.scan is None:
            broker.scan = LogScan(self.begin)
            broker.load_end = self.draw.choice((broker.opened_at + 1, len(self.log)))
        for entry in self.entries(broker.scan.end, broker.load_end)[: self.draw.randint(1, 6)]:
            broker.scan.add(entry, decode_state_entry(entry.body))
        if max(self.begin, broker.scan.end) >= broker.load_end:
            self.fold(broker, broker.scan)

    def fold(self, broker: Broker, scan: LogScan) -> None:
        """Become the owner, scan again, or give up: see `StateLog._load`."""
        try:
            if scan.snapshot is not None and scan.snapshot.key not in self.store:
                raise LogLostError(f"snapshot '{scan.snapshot.key}' is gone")
            saved = self.store[scan.snapshot.key] if scan.snapshot is not None else None
            fold = scan.fold(machines, saved)
            opening.check_opened(fold, broker.epoch, broker.nonce)
        except EpochFencedError:
            self.note("opening fenced", f"b{broker.index}")
            self.restart(broker)
        except LogLostError as error:
            self.note("scans again", f"b{broker.index}: {error}")
            broker.scan, broker.scans = None, broker.scans + 1
            if scan.highest_epoch > broker.epoch:
                self.restart(broker)
            elif broker.scans == SCANS_MAX and broker.load_end == len(self.log):
                raise BrokenPromiseError(f"the state is lost: {error}") from error
        else:
            if saved is not None:
                self.note("opens from a snapshot")
            self.note("owns", f"b{broker.index} e{broker.epoch} from {fold.offset}")
            broker.mode = Mode.OWNS
            broker.owner = StateOwner(fold, SnapshotPace(1e9, scan.uncovered_bytes(), self.now_s))
            broker.scan = None
            self._check(broker)

    # ---- the owner ---------------------------------------------------------------------------

    def act(self, broker: Broker, owner: StateOwner) -> None:
        """Begin the next step."""
        step = owner.next_step(self.now_s)
        if isinstance(step, PublishStep):
            self.note("publishes", f"b{broker.index} {decode_state_entry(step.body)}")
            self.send(broker, step.body)
        elif step is not None:
            broker.reading, broker.shown_end = step, self.draw.choice((len(self.log), len(self.log) - 2))

    def hear(self, broker: Broker) -> None:
        """Take an answer of the queue to a publish."""
        number, offset = broker.answers.pop(0)
        if number != broker.in_flight:
            return
        broker.in_flight = 0
        if broker.mode is Mode.PUBLISHES_OPENED:
            if offset is None:
                self.restart(broker)
            else:
                broker.mode, broker.opened_at = Mode.LOADS, offset
        elif broker.owner is not None and offset is None:
            broker.owner.failed()
        elif broker.owner is not None and offset is not None:
            if offset != broker.owner.fold.offset:
                self.note("offset jumps")
            broker.owner.published(offset, self.now_s)

    def time_out(self, broker: Broker) -> None:
        """Give up a publish or a read, and its connection."""
        broker.connection += 1
        broker.answers.clear()
        if broker.mode is Mode.PUBLISHES_OPENED:
            self.restart(broker)
        elif broker.owner is not None and (broker.in_flight or broker.reading is not None):
            self.note("times out", f"b{broker.index}")
            broker.in_flight, broker.reading = 0, None
            broker.owner.failed()

    def read(self, broker: Broker, owner: StateOwner) -> None:
        """Answer a read: the queue may show an early end, but none before one that it has shown."""
        step = broker.reading
        if step is None:
            return
        broker.reading = None
        end = max(step.end, broker.shown_end)
        found = self.entries(step.offset, end)
        for entry in found:
            owner.meet(entry.offset, decode_state_entry(entry.body), self.now_s)
        owner.read(found[-1].offset + 1 if found else step.offset)

    def snapshot(self, broker: Broker, owner: StateOwner) -> None:
        """Take a snapshot, store it, then let an entry name it."""
        if broker.storing is not None:
            saved, broker.storing = broker.storing, None
            key = f"{owner.epoch}-{saved.offset}"
            if self.store.setdefault(key, saved) != saved:
                raise BrokenPromiseError(f"two snapshots have the key {key}")
            self.note("stores", key)
            owner.name(StateSnapshot(saved.offset, saved.number, saved.epoch, 1, 0, 1, key), self.now_s + 500)
        elif not owner.naming:
            broker.storing = next(each for each in owner.save() if each is not None)

    def settle(self, broker: Broker) -> None:
        """Pass outcomes on, and the trims after a snapshot; then compare the state with the log."""
        owner = broker.owner
        if owner is None:
            return
        for ticket, fate, answer in owner.take_settled():
            if ticket in broker.claims:
                self._tell(broker.claims.pop(ticket), fate, answer)
            elif ticket in broker.reads:
                known = broker.reads.pop(ticket)
                slots = owner.fold.machines[MACHINE]
                assert isinstance(slots, Slots), slots
                if fate is ProposalFate.COUNTS and not known <= set(slots.taken):
                    raise BrokenPromiseError("stale read: a slot is free, though a claim of it was answered before")
        for trim in owner.take_trims():
            self.late.append(("trim", trim.before))
            if trim.replaced is not None:
                self.late.append(("delete", trim.replaced.key))
        if owner.has_ended():
            self.note("ends", f"b{broker.index}: {owner.end_cause}")
            self.restart(broker)
        else:
            self._check(broker)

    def _check(self, broker: Broker) -> None:
        """Compare an owner's state with the fold of the log."""
        assert broker.owner is not None, "no owner"
        fold = broker.owner.fold
        if self.reference.known[fold.offset] != (fold.epoch, fold.number, fold.machines[MACHINE].snapshot()):
            raise BrokenPromiseError(f"the state of b{broker.index} below {fold.offset} differs from the log")

    # ---- clients -----------------------------------------------------------------------------

    def claim(self, broker: Broker, owner: StateOwner) -> None:
        """A client sends its claim, for the first time or again."""
        number = self.draw.randrange(CLIENTS)
        client = self.clients[number]
        if client.answer is not None or client.sent > 3 or client.waits:
            return
        client.sent += 1
        client.waits = True
        self.note("claims", f"client {number} slot {client.slot} at b{broker.index}")
        broker.claims[owner.propose(StateDecision(MACHINE, bytes((client.slot, number))))] = number

    def _tell(self, number: int, fate: ProposalFate, answer: object) -> None:
        """A client gets the outcome of its claim."""
        client = self.clients[number]
        client.waits = False
        self.note(f"told {fate.name.lower()}", f"client {number}: {answer}")
        if fate is ProposalFate.UNKNOWN:
            return
        if fate is ProposalFate.VOID:
            client.failed = client.sent == 1
            self._check_failed()
            return
        client.answer = bool(answer)
        self.won.add(client.slot)
        if (self.reference.slots.taken.get(client.slot) == number) != client.answer:
            raise BrokenPromiseError(f"client {number} was told {answer}, the log says otherwise")
        if number not in self.reference.counted:
            raise BrokenPromiseError(f"client {number} was told {answer}, and its claim does not count")

    def ask(self, broker: Broker, owner: StateOwner) -> None:
        """A client reads: what any client knows by now must be there."""
        self.note("reads", f"b{broker.index} {sorted(self.won)}")
        broker.reads[owner.propose(None)] = frozenset(self.won)

    # ---- one step ----------------------------------------------------------------------------

    def step(self, paused: frozenset[int]) -> None:
        """Do one random step that is possible; a paused broker does nothing, number BROKERS is the queue."""
        self.now_s += self.draw.random() * 20
        choices = [
            (action, broker)
            for action, weight in self.weights.items()
            for broker in (self.brokers if action not in QUEUE_ACTIONS else self.brokers[:1])
            if (BROKERS if action in QUEUE_ACTIONS else broker.index) not in paused and self._can(action, broker)
        ]
        if not choices:
            return
        action, broker = self.draw.choices(choices, [self.weights[action] for action, _ in choices])[0]
        self._do(action, broker)
        self.settle(broker)

    def _can(self, action: str, broker: Broker) -> bool:
        """Whether an action is possible."""
        owner = broker.owner
        if action == "network":
            return bool(self.flights)
        if action == "late":
            return bool(self.late)
        if action == "open":
            return broker.mode is Mode.DOWN and self.openings < OPENINGS_MAX
        if action == "crash":
            return broker.mode is not Mode.DOWN and self.crashes < CRASHES_MAX
        if action == "hear":
            return bool(broker.answers)
        if action == "time out":
            return bool(broker.in_flight) or broker.reading is not None
        if action == "load":
            return broker.mode is Mode.LOADS
        if owner is None:
            return False
        if action == "read":
            return broker.reading is not None
        if action == "act":
            return not broker.in_flight and broker.reading is None
        return action != "snapshot" or not owner.naming

    def _do(self, action: str, broker: Broker) -> None:
        """Do an action."""
        owner = broker.owner
        if action == "network":
            self.network()
        elif action == "late":
            self.arrive_late()
        elif action == "open":
            self.open(broker)
        elif action == "crash":
            self.crashes += 1
            self.note("crashes", f"b{broker.index}")
            self.restart(broker)
        elif action == "hear":
            self.hear(broker)
        elif action == "time out":
            self.time_out(broker)
        elif action == "load":
            self.load(broker)
        elif owner is not None:
            owners: dict[str, Callable[[Broker, StateOwner], None]] = {
                "read": self.read,
                "act": self.act,
                "claim": self.claim,
                "ask": self.ask,
                "snapshot": self.snapshot,
            }
            owners[action](broker, owner)

    def _check_failed(self) -> None:
        """A claim that was answered as not done must never count, unless it was sent again."""
        for number, client in enumerate(self.clients):
            if client.failed and client.sent == 1 and number in self.reference.counted:
                raise BrokenPromiseError(f"client {number} was told that its claim does not count, and it does")

    def rest(self) -> None:
        """At the end the next opener finds the state of the log."""
        scan = LogScan(self.begin)
        for entry in self.entries(self.begin, len(self.log)):
            scan.add(entry, decode_state_entry(entry.body))
        if scan.snapshot is not None and scan.snapshot.key not in self.store:
            raise BrokenPromiseError(f"the last snapshot, '{scan.snapshot.key}', is gone")
        try:
            fold = scan.fold(machines, self.store[scan.snapshot.key] if scan.snapshot is not None else None)
        except LogLostError as error:
            raise BrokenPromiseError(f"the state is lost: {error}") from error
        if self.reference.known[-1] != (fold.epoch, fold.number, fold.machines[MACHINE].snapshot()):
            raise BrokenPromiseError("the state of the next opener differs from the log")


def run(seed: int) -> StateLogModel:
    """Run one schedule. Raises: BrokenPromiseError, or the AssertionError of a machine, with the steps as a note."""
    draw = random.Random(seed)
    model = StateLogModel(draw)
    paused: set[int] = set()
    pause_rate = 1 / draw.randint(10, 70)
    try:
        for _ in range(draw.randint(100, 300)):
            if draw.random() < pause_rate:
                who = draw.randrange(BROKERS + 1)
                paused ^= {who} if who in paused or draw.random() < 0.5 else set()
            model.step(frozenset(paused))
        model.rest()
    except AssertionError as error:
        error.add_note(f"seed {seed}\n" + "\n".join(model.steps))
        raise
    return model
