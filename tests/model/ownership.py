"""The model of ownership: every step that producer, brokers and queue may take, and what must hold at the end.

A schedule is any order of these steps: pauses, crashes, lost and late answers, and a queue that refuses what it has
taken are orders of steps, too. The rules are those of docs/ownership.md; `Rules` says which of them hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from tests.model.parts import Batch, Block, Broker, Connection, Entry, Flight, Request, Rules

Action = tuple[str, int, int]  # what, broker or place, and more
IN_FLIGHT_MAX = 2  # blocks of the producer
OPEN, STORED, SENT, DONE = "open", "stored", "sent", "done"


class BrokenPromiseError(AssertionError):
    """A promise of memq does not hold."""


class Model:
    """One run: `actions` are the steps that are possible now, `step` takes one."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.now = 0
        self.log: list[Entry] = []
        self.flights: list[Flight] = []
        self.brokers = [Broker() for _ in range(rules.brokers)]
        self.blocks = [Block() for _ in range(rules.blocks)]
        self.connections: list[Connection] = []
        self.current = -1  # the producer's connection
        self.next = 0  # the block that it sends next on it
        self.epoch = self.requests = self.openings = self.publishes = self.crashes = self.foreign = 0
        self._steps: dict[str, Callable[[int, int], None]] = {
            "tick": self._tick,
            "connect": self._connect,
            "send": self._send,
            "hear": self._hear,
            "give up block": self._give_up_block,
            "claim": self._claim,
            "open": self._open,
            "take": self._take,
            "throttle": self._throttle,
            "store": self._store,
            "publish": self._publish,
            "time out": self._time_out,
            "answer": self._answer,
            "read": self._read,
            "read answer": self._read_answer,
            "give up ring": self._give_up_ring,
            "crash": self._crash,
            "land": self._land,
            "refuse landed": self._refuse_landed,
            "drop": self._drop,
            "foreign": self._other,
        }

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps."""
        return list(self._steps)

    def step(self, action: Action) -> None:
        """Take a step. Raises: BrokenPromiseError."""
        self._steps[action[0]](action[1], action[2])

    # ---- which steps are possible ----------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        """Yield the steps that are possible now."""
        rules = self.rules
        if self.now < rules.ticks_max:
            yield "tick", 0, 0
        yield from self._producer_actions()
        for number, broker in enumerate(self.brokers):
            yield from self._broker_actions(number, broker)
        seen: list[tuple[int, int]] = []
        for place, flight in enumerate(self.flights):
            if (flight.broker, flight.connection) not in seen:
                seen.append((flight.broker, flight.connection))
                yield "land", place, 0
                yield "refuse landed", place, 0
                yield "drop", place, 0
        if self.foreign < rules.foreign_max:
            yield "foreign", 0, 0

    def _producer_actions(self) -> Iterator[Action]:
        rules = self.rules
        if len(self.connections) < rules.connections_max:
            for broker in range(rules.brokers):
                yield "connect", broker, 0
        if self.current >= 0:
            connection = self.connections[self.current]
            if connection.open and (connection.ready or not rules.clock_after_hello) and self._may_send():
                yield "send", 0, 0
        for number, connection in enumerate(self.connections):
            if connection.open and connection.down and number == self.current:
                yield "hear", number, 0
        oldest = next((block for block in self.blocks if block.state == "open"), None)
        if oldest is not None and 0 <= oldest.first_sent < self.now - rules.delivery_ticks:
            yield "give up block", 0, 0

    def _broker_actions(self, number: int, broker: Broker) -> Iterator[Action]:
        rules = self.rules
        lost_opening = broker.state == "opening" and not broker.requests
        if self.openings < rules.openings_max and (broker.state == "idle" or lost_opening):
            yield "claim", number, 0
        may_publish = self.publishes < rules.publishes_max
        if broker.state == "claimed" and may_publish:
            yield "open", number, 0
        for place, connection in enumerate(self.connections):
            if connection.broker == number and connection.taken and connection.up:
                yield "take", number, place
                if broker.state == "owner" and connection.up[0][0] == "write":
                    yield "throttle", number, place
        if broker.state == "owner":
            yield from self._owner_actions(number, broker, may_publish=may_publish)
        if broker.reading is not None:
            yield "read answer", number, 0
        if broker.requests:
            yield "time out", number, 0
            if any(request.number == broker.answers[0][0] for request in broker.requests if broker.answers):
                yield "answer", number, 0
        if broker.state != "idle" and self.crashes < rules.crashes_max:
            yield "crash", number, 0

    def _owner_actions(self, number: int, broker: Broker, *, may_publish: bool) -> Iterator[Action]:
        if broker.ring and broker.ring[-1].state == OPEN:
            yield "store", number, 0
        if broker.ring:
            yield "give up ring", number, 0
        in_flight_max = 1 if self.rules.one_in_flight else 2
        if may_publish and not broker.unread and len(broker.requests) < in_flight_max and broker.reading is None:
            head = next((batch for batch in broker.ring if batch.state in (OPEN, STORED)), None)
            if head is not None and head.state == STORED:
                yield "publish", number, 0
        if broker.reading is None:
            yield "read", number, 0

    # ---- time, and what others publish -------------------------------------------------------------

    def _tick(self, _broker: int, _place: int) -> None:
        self.now += 1

    def _other(self, _broker: int, _place: int) -> None:
        self.foreign += 1
        self.log.append(Entry("foreign", time=self.now))

    # ---- the producer ------------------------------------------------------------------------------

    def _connect(self, broker: int, _place: int) -> None:
        if self.current >= 0:
            self.connections[self.current].open = False
        self.connections.append(Connection(broker, [("hello", 0, 0)], zero=self.now))
        self.current = len(self.connections) - 1
        self.next = 0

    def _may_send(self) -> bool:
        open_blocks = [number for number, block in enumerate(self.blocks) if block.state == "open"]
        if not self.rules.oldest_first:
            return bool(open_blocks)
        in_flight = sum(number < self.next for number in open_blocks)
        return in_flight < min(IN_FLIGHT_MAX, len(open_blocks))

    def _send(self, _broker: int, _place: int) -> None:
        left = [number for number, block in enumerate(self.blocks) if block.state == "open"]
        if self.rules.oldest_first:
            left = [number for number in left if number >= self.next]
        else:  # new blocks first, and the others again from the newest on
            left = [number for number in left if self.blocks[number].first_sent < 0] or left[::-1]
        block, connection = self.blocks[left[0]], self.connections[self.current]
        block.first_sent = self.now if block.first_sent < 0 else block.first_sent
        connection.up.append(("write", left[0], block.first_sent - connection.zero))
        self.next = left[0] + 1

    def _hear(self, place: int, _more: int) -> None:
        connection = self.connections[place]
        what, number = connection.down.pop(0)
        if what == "hello":
            connection.ready = True
            connection.zero = self.now if self.rules.clock_after_hello else connection.zero
        elif what == "ack":
            for each in range(number + 1):
                if self.blocks[each].state == "open":
                    self.blocks[each].state = "acked"
                    if not any(each in entry.blocks for entry in self.log):
                        raise BrokenPromiseError(f"block {each} is acked, and not in the queue")
        elif what == "refused" and not self.rules.refusal_closes:
            self.blocks[number].state = "given up"
        else:
            connection.open = False
            self.current = -1 if self.current == place else self.current

    def _give_up_block(self, _broker: int, _place: int) -> None:
        next(block for block in self.blocks if block.state == "open").state = "given up"

    # ---- an opening --------------------------------------------------------------------------------

    def _claim(self, number: int, _place: int) -> None:
        self.epoch += 1
        self.openings += 1
        broker = Broker("claimed", self.epoch, connection=self.brokers[number].connection + 1)
        self.brokers[number] = broker
        if not self.rules.opened:
            self._begin(broker, len(self.log), self.now)

    def _open(self, number: int, _place: int) -> None:
        broker = self.brokers[number]
        broker.state = "opening"
        self._hand_over(number, -1, Entry("opened", broker.epoch, time=self.now))

    def _begin(self, broker: Broker, end: int, time: int) -> None:
        """Read the tail of W up to `end`; the epoch counts when no higher one lies there."""
        before = self.log[:end]
        broker.read_to, broker.proof, broker.unread = end, time, False
        if any(entry.epoch > broker.epoch for entry in before):
            broker.state = "idle"
            return
        broker.state = "owner"
        if self.rules.tail:
            young = [entry for entry in before if entry.time >= time - self.rules.window_ticks]
            broker.queued = {block for entry in young for block in entry.blocks}

    # ---- blocks --------------------------------------------------------------------------------------

    def _take(self, number: int, place: int) -> None:
        broker, connection = self.brokers[number], self.connections[place]
        what, block, age = connection.up.pop(0)
        if what == "hello":
            connection.broker_zero = self.now
            connection.down.append(("hello", 0))
        elif broker.state != "owner":
            self._close(connection, "redirect", block)
        elif self.rules.age and self.now - (connection.broker_zero + age) > self.rules.delivery_ticks:
            if self.rules.refusal_closes:
                self._close(connection, "refused", block)
            else:
                connection.down.append(("refused", block))
        else:
            in_ring = any(block in batch.blocks for batch in broker.ring)
            if not in_ring and block not in broker.queued:
                if not broker.ring or broker.ring[-1].state != OPEN:
                    broker.ring.append(Batch(broker.batches, []))
                    broker.batches += 1
                broker.ring[-1].blocks.append(block)
            if in_ring and not self.rules.late_acks:
                connection.down.append(("ack", block))
            else:
                connection.pending.append(block)
                self._ack(number)

    def _throttle(self, _broker: int, place: int) -> None:
        connection = self.connections[place]
        _what, block, _age = connection.up.pop(0)
        if self.rules.refusal_closes:
            self._close(connection, "redirect", block)

    def _close(self, connection: Connection, why: str, block: int) -> None:
        connection.down.append((why, block))
        connection.taken = False
        connection.up.clear()

    def _ack(self, number: int) -> None:
        """Ack on each stream the prefix of what came on it that the queue holds."""
        queued = self.brokers[number].queued
        for connection in self.connections:
            last = -1
            while connection.broker == number and connection.taken and connection.pending:
                if connection.pending[0] not in queued:
                    break
                last = connection.pending.pop(0)
            if last >= 0:
                connection.down.append(("ack", last))

    # ---- publishing ----------------------------------------------------------------------------------

    def _store(self, number: int, _place: int) -> None:
        self.brokers[number].ring[-1].state = STORED

    def _hand_over(self, number: int, batch: int, entry: Entry) -> None:
        broker = self.brokers[number]
        self.publishes += 1
        self.requests += 1
        broker.requests.append(Request(self.requests, batch, self.now))
        self.flights.append(Flight(number, broker.connection, self.requests, entry))

    def _publish(self, number: int, _place: int) -> None:
        broker = self.brokers[number]
        batch = next(batch for batch in broker.ring if batch.state == STORED)
        batch.state = SENT
        blocks = [block for block in batch.blocks if block not in broker.queued or not self.rules.skip]
        self._hand_over(number, batch.number, Entry("data", broker.epoch, batch.number, tuple(blocks), broker.proof))

    def _land(self, place: int, _more: int) -> None:
        flight = self.flights.pop(place)
        late = self.now - flight.entry.time
        offset = -1
        if not self.rules.refuse or late <= self.rules.stale_ticks:
            offset = len(self.log)
            self.log.append(flight.entry)
        broker = self.brokers[flight.broker]
        if any(request.number == flight.request for request in broker.requests):
            broker.answers.append((flight.request, offset))

    def _refuse_landed(self, place: int, _more: int) -> None:
        broker = self.brokers[self.flights[place].broker]
        answers = len(broker.answers)
        self._land(place, 0)
        if len(broker.answers) > answers:
            broker.answers[-1] = (broker.answers[-1][0], -1)

    def _drop(self, place: int, _more: int) -> None:
        del self.flights[place]

    def _time_out(self, number: int, _place: int) -> None:
        broker = self.brokers[number]
        for request in broker.requests:
            self._try_again(broker, request.batch)
        broker.requests.clear()
        broker.answers.clear()
        broker.connection += 1
        broker.reading = None
        broker.unread = True

    def _try_again(self, broker: Broker, number: int) -> None:
        if not self.rules.whole_ring:
            broker.ring = [batch for batch in broker.ring if batch.number != number or batch.state != SENT]
        for batch in broker.ring:
            if batch.number == number and batch.state == SENT:
                batch.state = STORED

    def _answer(self, number: int, _place: int) -> None:
        broker = self.brokers[number]
        answered, offset = broker.answers.pop(0)
        request = next(request for request in broker.requests if request.number == answered)
        broker.requests.remove(request)
        if offset < 0:
            self._try_again(broker, request.batch)
            broker.unread = True
            return
        moment = request.handed_over if self.rules.proof_at_hand_over else self.now
        if broker.state == "opening":
            self._begin(broker, offset + 1, moment)
            return
        if offset == broker.read_to:
            broker.read_to, broker.proof = offset + 1, moment
        elif self.rules.read_between:
            broker.unread = True
        else:
            broker.proof = moment
        broker.queued.update(self.log[offset].blocks)
        self._done(broker, request.batch)
        self._ack(number)

    def _done(self, broker: Broker, number: int) -> None:
        """Take the batches at the head that are in the queue off the ring."""
        for batch in broker.ring:
            if batch.number == number:
                batch.state = DONE
        while broker.ring and broker.ring[0].state == DONE:
            broker.queued.update(broker.ring.pop(0).blocks)

    # ---- reading on, and the end of an epoch ---------------------------------------------------------

    def _read(self, number: int, _place: int) -> None:
        self.brokers[number].reading = (self.now, len(self.log))

    def _read_answer(self, number: int, _place: int) -> None:
        broker = self.brokers[number]
        assert broker.reading is not None
        handed_over, end = broker.reading
        broker.reading = None
        fenced = False
        for entry in self.log[broker.read_to : end]:
            fenced = fenced or (entry.epoch > broker.epoch and (entry.kind == "opened" or not self.rules.opened))
            broker.queued.update(entry.blocks)
            if entry.kind == "data" and entry.epoch == broker.epoch:
                broker.requests = [request for request in broker.requests if request.batch != entry.batch]
                self._done(broker, entry.batch)
        broker.read_to = max(broker.read_to, end)
        broker.proof = max(broker.proof, handed_over) if self.rules.proof_at_hand_over else self.now
        broker.unread = False
        self._ack(number)
        if fenced:
            self._give_up(number, ends=True)

    def _give_up_ring(self, number: int, _place: int) -> None:
        self._give_up(number, ends=self.rules.end_epoch)

    def _give_up(self, number: int, *, ends: bool) -> None:
        broker = self.brokers[number]
        broker.ring.clear()
        broker.requests.clear()
        broker.answers.clear()
        broker.connection += 1
        broker.reading, broker.unread = None, True
        if ends:
            broker.state = "idle"
        else:  # the numbers of the batches that did not land are used again
            landed = [entry.batch for entry in self.log if entry.kind == "data" and entry.epoch == broker.epoch]
            broker.batches = max(landed, default=-1) + 1
        self._leave(number)

    def _crash(self, number: int, _place: int) -> None:
        self.crashes += 1
        self.brokers[number] = Broker(connection=self.brokers[number].connection + 1)
        self._leave(number)

    def _leave(self, number: int) -> None:
        for connection in self.connections:
            if connection.broker == number and connection.taken:
                self._close(connection, "redirect", 0)

    # ---- what must hold ------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what readers see of the log. Raises: BrokenPromiseError."""
        order: list[int] = []
        contents: dict[tuple[int, int], tuple[int, ...]] = {}
        for entry in self.log:
            order += [block for block in entry.blocks if block not in order]
            if entry.kind == "data":
                before = contents.setdefault((entry.epoch, entry.batch), entry.blocks)
                if not set(entry.blocks) <= set(before) and not set(before) <= set(entry.blocks):
                    raise BrokenPromiseError(f"batch {entry.batch} of epoch {entry.epoch} has two contents")
        for number, block in enumerate(self.blocks):
            if block.state == "acked" and number not in order:
                raise BrokenPromiseError(f"block {number} is acked, and lost")
        acked = [block for block in order if self.blocks[block].state == "acked"]
        if any(first > second for first, second in pairwise(acked)):
            raise BrokenPromiseError(f"acked blocks are delivered in the order {acked}")
        for start in range(1, len(self.log)):
            self._check_resume(start)

    def _check_resume(self, start: int) -> None:
        """Check that a reader which starts there, and looks back by W, delivers nothing a second time."""
        since = self.log[start - 1].time - self.rules.window_ticks
        first = next(place for place, entry in enumerate(self.log[:start]) if entry.time >= since)
        known = {block for entry in self.log[first:start] for block in entry.blocks}
        before = {block for entry in self.log[:start] for block in entry.blocks}
        for entry in self.log[start:]:
            again = (before - known).intersection(entry.blocks)
            if again:
                raise BrokenPromiseError(f"block {again.pop()} is delivered again by a reader that starts at {start}")
            known.update(entry.blocks)
