"""Assigns partitions to brokers: strategies that give each a live owner with few moves. Pure.

What a live broker has, it keeps, also under a new session: it opens again by itself. The partitions of dead brokers and
of nobody go where there is room; those of a draining broker move away; then, with `balanced`, the busiest broker gives
to the idlest what makes the busiest one less busy, as long as that is worth the moves: a broker that is all but idle
has nothing to gain, so one that joins or comes back gets what is new or heavy, and no move for its own sake.

A broker that would be over its capacity gets partitions all the same when nobody else has room: it is said, and nothing
is left without an owner. While all brokers drain, what they have stays where it is.

A move of an open partition keeps the session of its old owner in the assignment. That one drains, says `closed`, and
gives the session back; only then the new owner opens. Epochs stay as they are: owners raise them.
Applying a plan leaves nothing to plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from memq.governor import Assignment, BrokerEntry
from memq.governor.planning import AssignmentChange, AssignmentPlan, ClusterView, Strategy

IDLE_BYTES_S = 1_000  # what a partition counts for next to its traffic, so that idle ones are spread by number
GAIN_MIN = 0.1  # moves must take a tenth off a broker, all together: less is not worth the drains and openings
BUSY_MIN = 0.05  # the share of its capacity below which nothing is moved off a broker: it gains nothing
WORTH_MIN = 0.5  # a move must lower the higher one of both brokers by half of what it moves
ROUNDS_MAX = 10
CAPACITY_BYTES_S = 100_000_000  # of a broker when no broker of the cluster says its own

Place = tuple[str, int]


def balanced(view: ClusterView) -> AssignmentPlan:
    """Place what has no owner, empty draining brokers, and even out the load by traffic against capacity."""
    if _is_settled(view):
        return AssignmentPlan()
    board = _Board(view)
    board.place_homeless()
    board.empty_draining()
    board.even_out()
    return board.plan()


def _is_settled(view: ClusterView) -> bool:
    """Whether no plan would change anything: no partition is unplaced, no broker busier than others.

    That is what most rounds find, and of 10,000 partitions the board takes ten times as long.
    """
    weights = {broker.id: 0 for broker in view.brokers if not broker.draining}
    owners: dict[Place, str] = {}
    for entry in view.assignments:
        if entry.broker not in weights:
            return False
        weights[entry.broker] += IDLE_BYTES_S
        owners[entry.topic_id, entry.partition] = entry.broker
    for load in view.loads:
        owner = owners.get((load.topic_id, load.partition))
        if owner is not None:
            weights[owner] += max(load.bytes_s, 0)
    capacities = _capacities(view)
    used = [weight / capacities[broker] for broker, weight in weights.items()] or [0.0]
    return max(used) <= 1 and (max(used) < BUSY_MIN or max(used) - min(used) <= GAIN_MIN * max(used))


def _capacities(view: ClusterView) -> dict[str, float]:
    """Return the capacity of each broker in bytes/s; if it states none, the usual one of the others."""
    said = sorted(broker.capacity_bytes_s for broker in view.brokers if broker.capacity_bytes_s > 0)
    usual = said[len(said) // 2] if said else CAPACITY_BYTES_S
    return {
        broker.id: float(broker.capacity_bytes_s if broker.capacity_bytes_s > 0 else usual) for broker in view.brokers
    }


def sticky(view: ClusterView) -> AssignmentPlan:
    """Place what has no owner and empty draining brokers; nothing moves for the sake of balance."""
    board = _Board(view)
    board.place_homeless()
    board.empty_draining()
    return board.plan()


STRATEGIES: dict[str, Strategy] = {"balanced": balanced, "sticky": sticky}


@dataclass(slots=True)
class _Piece:
    """One partition on the board: where it is, where it shall be, and what it weighs, in bytes per s."""

    place: Place
    before: Assignment
    broker: str
    weight: int
    reason: str = ""


@dataclass(slots=True)
class _Seat:
    """A broker that may be given partitions."""

    entry: BrokerEntry
    capacity: float
    weight: int = 0
    pieces: list[tuple[int, Place]] = field(default_factory=list)  # what it has, lightest first

    @property
    def used(self) -> float:
        """The share of its capacity that is used; over 1 it is overloaded."""
        return self.weight / self.capacity


class _Board:
    def __init__(self, view: ClusterView) -> None:
        known = {(topic.id, part.partition) for topic in view.topics for part in topic.partitions}
        traffic = {(load.topic_id, load.partition): max(load.bytes_s, 0) for load in view.loads}
        places = {(entry.topic_id, entry.partition): entry for entry in view.assignments}
        self.live = {broker.id: broker for broker in sorted(view.brokers, key=lambda broker: broker.id)}
        self.sessions = {broker.session: None for broker in self.live.values()}
        self.pieces = [
            _Piece(place, places[place], places[place].broker, IDLE_BYTES_S + traffic.get(place, 0))
            for place in sorted(places)
            if place in known
        ]
        capacities = _capacities(view)
        self.seats = {
            broker.id: _Seat(broker, capacities[broker.id]) for broker in self.live.values() if not broker.draining
        }
        self.zones: dict[tuple[str, str], int] = {}  # how many partitions of a topic each zone has
        self.by_place = {piece.place: piece for piece in self.pieces}
        for piece in self.pieces:
            self._sit(piece)

    # ---- the three steps ---------------------------------------------------------------------------

    def place_homeless(self) -> None:
        """Give partitions without a live owner to brokers with room; the heaviest first, which fit worst."""
        homeless = [piece for piece in self.pieces if piece.broker not in self.live]
        for piece in sorted(homeless, key=lambda piece: (-piece.weight, piece.place)):
            self._move(piece, self._best(piece), f"'{piece.broker}' is gone" if piece.broker else "it has no owner")

    def empty_draining(self) -> None:
        """Move what draining brokers have to others, where there are any."""
        leaving = [piece for piece in self.pieces if piece.broker in self.live and piece.broker not in self.seats]
        for piece in sorted(leaving if self.seats else [], key=lambda piece: (-piece.weight, piece.place)):
            self._move(piece, self._best(piece), f"'{piece.broker}' is draining")

    def even_out(self) -> None:
        """Move from the busiest brokers to the idlest, until that is even or brings too little."""
        for _ in range(ROUNDS_MAX):
            if not self._even_round():
                return

    def _even_round(self) -> bool:
        """Move while it helps, take back what relieves its broker by too little.

        Return whether anything is left.
        """
        before = {name: seat.weight for name, seat in self.seats.items()}
        moved: dict[str, list[_Piece]] = {}
        for _ in range(len(self.pieces)):
            step = self._next_step()
            if step is None:
                break
            busy, idle, piece = step
            moved.setdefault(busy.entry.id, []).append(piece)
            text = f"'{busy.entry.id}' is at {busy.used:.2%}, '{idle.entry.id}' at {idle.used:.2%}"
            self._move(piece, idle.entry.id, text)
        kept = False
        for source, pieces in moved.items():
            if sum(piece.weight for piece in pieces) >= GAIN_MIN * before[source]:
                kept = True
                continue
            for piece in pieces:
                self._move(piece, source, "")
        return kept

    def _next_step(self) -> tuple[_Seat, _Seat, _Piece] | None:
        """Return the busiest broker that has something to give, who gets it, and what; None when all is even."""
        order = sorted(self.seats.values(), key=lambda seat: (seat.used, seat.entry.id))
        for busy in reversed(order):
            if busy.used < BUSY_MIN or busy.used - order[0].used <= GAIN_MIN * busy.used:
                return None
            piece = self._best_piece(busy, order[0])
            if piece is not None:
                return busy, order[0], piece
        return None

    def plan(self) -> AssignmentPlan:
        """Return what differs from the view, the homeless first, and what the operator should know."""
        changes = [change for piece in self.pieces if (change := self._change(piece)) is not None]
        changes.sort(key=lambda change: change.before in self.live)
        return AssignmentPlan(tuple(changes), tuple(self._notes()))

    # ---- inside ------------------------------------------------------------------------------------

    def _best(self, piece: _Piece) -> str:
        """Return the broker that shall have a partition; "" for none.

        Within capacity before over it; in the zone with the fewest partitions of the topic; then the least used.
        """

        def rank(seat: _Seat) -> tuple[bool, int, float, str]:
            used = (seat.weight + piece.weight) / seat.capacity
            here = self.zones.get((piece.place[0], seat.entry.zone), 0)
            return used > 1, here, used, seat.entry.id

        return min(self.seats.values(), key=rank).entry.id if self.seats else ""

    def _best_piece(self, busy: _Seat, idle: _Seat) -> _Piece | None:
        """Return the partition whose move leaves both least used; None when no move is worth it.

        That is the one nearest to the weight that would make both equal: lighter ones leave the busy broker busier,
        heavier ones the idle one, each the more the farther they are.
        """
        even = (busy.weight * idle.capacity - idle.weight * busy.capacity) / (busy.capacity + idle.capacity)
        middle = bisect_left(busy.pieces, (even, ("", 0)))
        found: list[tuple[float, Place]] = []
        for side in (range(middle - 1, -1, -1), range(middle, len(busy.pieces))):
            for number in side:
                weight, place = busy.pieces[number]
                after = max((busy.weight - weight) / busy.capacity, (idle.weight + weight) / idle.capacity)
                if busy.used - after < WORTH_MIN * weight / busy.capacity:
                    break
                piece = self.by_place[place]
                relieves = busy.used > 1 and (idle.weight + weight) / idle.capacity <= 1  # as in `_best`: before zones
                if not self._in_flight(piece) and (relieves or not self._crowds(piece, busy, idle)):
                    found.append((after, place))
                    break
        return self.by_place[min(found)[1]] if found else None

    def _in_flight(self, piece: _Piece) -> bool:
        """Whether a partition is moving from an owner that still has it: it is not sent elsewhere."""
        holder = piece.before.session
        return holder in self.sessions and self.live.get(piece.broker, _NOBODY).session != holder

    def _crowds(self, piece: _Piece, busy: _Seat, idle: _Seat) -> bool:
        """Whether a move would leave the topic's partitions less evenly spread over the zones."""
        one, other = busy.entry.zone, idle.entry.zone
        topic = piece.place[0]
        return one != other and self.zones.get((topic, other), 0) >= self.zones.get((topic, one), 0)

    def _move(self, piece: _Piece, broker: str, reason: str) -> None:
        self._rise(piece)
        piece.broker, piece.reason = broker, reason
        self._sit(piece)

    def _sit(self, piece: _Piece) -> None:
        seat = self.seats.get(piece.broker)
        if seat is not None:
            seat.weight += piece.weight
            insort(seat.pieces, (piece.weight, piece.place))
            key = (piece.place[0], seat.entry.zone)
            self.zones[key] = self.zones.get(key, 0) + 1

    def _rise(self, piece: _Piece) -> None:
        seat = self.seats.get(piece.broker)
        if seat is not None:
            seat.weight -= piece.weight
            del seat.pieces[bisect_left(seat.pieces, (piece.weight, piece.place))]
            self.zones[piece.place[0], seat.entry.zone] -= 1

    def _change(self, piece: _Piece) -> AssignmentChange | None:
        before = piece.before
        if piece.broker == before.broker:
            return None
        session = before.session if before.session in self.sessions else ""
        after = msgspec.structs.replace(before, broker=piece.broker, session=session)
        return AssignmentChange(after, before.broker, piece.reason)

    def _notes(self) -> Iterable[str]:
        homeless = sum(1 for piece in self.pieces if not piece.broker)
        if homeless:
            yield f"{homeless} partitions have no owner: no broker takes any; start one that does not drain"
        for seat in self.seats.values():
            if seat.used > 1 and seat.entry.capacity_bytes_s > 0:
                said = f"{seat.weight} bytes/s of {seat.entry.capacity_bytes_s} bytes/s"
                yield f"broker '{seat.entry.id}' is over its capacity: {said}"


_NOBODY = BrokerEntry(id="", session="", address="")
