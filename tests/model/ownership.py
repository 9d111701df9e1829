"""The model of ownership: every step that producers, brokers and queue may take.

A schedule is any order of these steps: pauses, crashes, lost and late answers, and a queue that refuses what it has
taken are orders of steps, too. The rules are those of docs/ownership.md; `Rules` says which of them hold. The steps
that are possible at a moment are in `tests.model.possible_steps`, what must hold at the end in `tests.model.promises`.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.model import possible_steps, promises
from tests.model.parts import (
    Batch,
    Beginning,
    Block,
    Broker,
    Cast,
    Client,
    Connection,
    Entry,
    Flight,
    Forwarder,
    Name,
    Producer,
    Request,
    Rules,
)
from tests.model.possible_steps import OPEN, STORED, Action

SENT, DONE = "sent", "done"
SPOOLS = 0  # the broker that keeps on disk what it acks with 1
OPENED, STATED = -1, -2  # in the place of a batch's number: an opening, and `opened` once more


class Model:
    """One run: `actions` are the steps that are possible now, `step` takes one."""

    def __init__(self, rules: Rules, cast: Cast) -> None:
        self.rules = rules
        self.now = 0
        self.log: list[Entry] = []
        self.flights: list[Flight] = []
        self.brokers = [Broker() for _ in range(rules.brokers)]
        self.producers = [Producer(role=role) for role in cast]
        self.forwarders = [Forwarder() for _ in range(rules.brokers)]
        self.clients: list[Client] = [*self.producers, *self.forwarders]
        self.connections: list[Connection] = []
        self.epoch = self.requests = self.openings = self.publishes = self.crashes = self.foreign = 0
        for producer in self.producers:
            if not producer.role.instance:
                producer.begin(0)
        self._steps: dict[str, Callable[[int, int], None]] = {
            "tick": self._tick,
            "connect": self._connect,
            "reconnect": self._connect,
            "send": self._send,
            "hear": self._hear,
            "give up block": self._give_up_block,
            "look": self._look,
            "claim": self._claim,
            "open": self._open,
            "take": self._take,
            "throttle": self._throttle,
            "store": self._store,
            "publish": self._publish,
            "state": self._state,
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

    def actions(self) -> list[Action]:
        """Return the steps that are possible now."""
        return possible_steps.actions(self)

    def step(self, action: Action) -> None:
        """Take a step. Raises: BrokenPromiseError."""
        self._steps[action[0]](action[1], action[2])

    def check(self) -> None:
        """Check what readers see of the log, and what brokers have. Raises: BrokenPromiseError."""
        promises.check(self)

    def blocks(self) -> list[Block]:
        """Return the blocks of all producers."""
        return [block for producer in self.producers for block in producer.blocks]

    # ---- time, and what others publish -------------------------------------------------------------

    def _tick(self, _number: int, _place: int) -> None:
        self.now += 1

    def _other(self, _number: int, _place: int) -> None:
        self.foreign += 1
        self.log.append(Entry("foreign", time=self.now))

    # ---- the clients: producers, and brokers that forward --------------------------------------------

    def _connect(self, broker: int, number: int) -> None:
        client = self.clients[number]
        begins = isinstance(client, Producer) and client.role.instance > 0
        connection = Connection(broker, client, self.now, ready=not (self.rules.clock_after_hello or begins))
        connection.up.append(("hello", None, 0))
        client.connection = connection
        client.connects += 1
        self.connections.append(connection)
        if isinstance(client, Producer):
            client.next = 0
        if isinstance(client, Forwarder):
            client.absent = None

    def _send(self, number: int, _place: int) -> None:
        client = self.clients[number]
        assert client.connection is not None
        if isinstance(client, Forwarder):
            assert client.absent is not None
            stamp = client.absent if self.rules.stamp_at_read else self.now
            for block in client.held:
                client.connection.up.append(("write", block, stamp - client.connection.zero))
            client.absent = None
            client.held = client.held if self.rules.hold_until_shown else []
        elif isinstance(client, Producer):
            block = self._next_of(client)
            block.first_sent = self.now if block.first_sent < 0 else block.first_sent
            client.connection.up.append(("write", block, block.first_sent - client.connection.zero))
            client.next = client.blocks.index(block) + 1

    def _next_of(self, producer: Producer) -> Block:
        left = producer.open_blocks()
        if self.rules.oldest_first:
            return next(block for block in left if producer.blocks.index(block) >= producer.next)
        new = [block for block in left if block.first_sent < 0]  # new blocks first, and others again from the newest on
        return new[0] if new else left[-1]

    def _hear(self, number: int, _place: int) -> None:
        client = self.clients[number]
        connection = client.connection
        assert connection is not None
        what, block, first = connection.down.pop(0)
        if what == "hello":
            connection.zero = self.now if self.rules.clock_after_hello else connection.zero
            if isinstance(client, Producer) and client.role.instance:
                connection.up.append(("begin", None, 0))
            else:
                connection.ready = True
        elif what == "ack" and block is not None:
            if isinstance(client, Producer):  # for a forwarder an answer is no proof: it reads the queue
                self._acked(client, block)
        elif isinstance(client, Producer) and what == "begun":
            connection.ready = True
            if not client.blocks:
                client.begin(first)
        elif what == "refused" and block is not None and not self.rules.refusal_closes:
            block.state = "given up"
        else:
            client.connection = None
            if isinstance(client, Producer) and what == "fenced":
                client.fenced = True
            if isinstance(client, Forwarder) and what == "refused" and not self.rules.again_when_refused:
                client.held = [held for held in client.held if held is not block]

    def _acked(self, producer: Producer, last: Block) -> None:
        """All blocks of a producer up to one are acked."""
        for block in producer.open_blocks():
            if block.sequence <= last.sequence:
                block.state = "acked"
                promises.check_ack(self, producer, block)

    def _give_up_block(self, number: int, _place: int) -> None:
        self.producers[number].open_blocks()[0].state = "given up"

    def _look(self, number: int, _place: int) -> None:
        """Read the queue to its end, and let go of what it holds."""
        forwarder = self.forwarders[number]
        queued = {block.key for entry in self.log for block in entry.blocks}
        forwarder.held = [block for block in forwarder.held if block.key not in queued]
        forwarder.absent = self.now

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
        self._hand_over(number, OPENED, Entry("opened", broker.epoch, time=self.now))

    def _begin(self, broker: Broker, end: int, time: int) -> None:
        """Read the tail of W up to `end`, and of names all; the epoch counts when no higher one lies there."""
        before = self.log[:end]
        broker.read_to, broker.proof, broker.unread = end, time, False
        if any(entry.epoch > broker.epoch for entry in before):
            broker.state = "idle"
            return
        broker.state, broker.owned = "owner", self.now
        for entry in before if self.rules.tail else ():
            if entry.time >= time - self.rules.window_ticks:
                broker.meet(entry)
            elif self.rules.names:
                broker.meet_names(entry)

    # ---- blocks --------------------------------------------------------------------------------------

    def _take(self, number: int, place: int) -> None:
        broker, connection = self.brokers[number], self.connections[place]
        what, block, age = connection.up.pop(0)
        if what == "hello":
            connection.broker_zero = self.now
            connection.down.append(("hello", None, 0))
        elif broker.state != "owner":
            self._close(connection, "redirect", block)
        elif block is None:
            self._take_instance(broker, connection)
        elif self.rules.age and self.now - (connection.broker_zero + age) > self.rules.delivery_ticks:
            if self.rules.refusal_closes:
                self._close(connection, "refused", block)
            else:
                connection.down.append(("refused", block, 0))
        else:
            self._append(number, connection, block)

    def _append(self, number: int, connection: Connection, block: Block) -> None:
        broker, client = self.brokers[number], connection.client
        in_ring = any(block.key == other.key for batch in broker.ring for other in batch.blocks)
        if not in_ring and block.key not in broker.queued:
            if not broker.ring or broker.ring[-1].state != OPEN:
                broker.ring.append(Batch(broker.batches, []))
                broker.batches += 1
            broker.ring[-1].blocks.append(block)
        if isinstance(client, Producer) and client.role.acks_one:
            if not in_ring or self.rules.hold_copies:
                broker.promised.add(block)
            block.acked_by[number] = True
            connection.down.append(("ack", block, 0))
        elif in_ring and not self.rules.late_acks:
            connection.down.append(("ack", block, 0))
        else:
            connection.pending.append(block)
            self._ack(number)

    def _throttle(self, _number: int, place: int) -> None:
        connection = self.connections[place]
        _what, block, _age = connection.up.pop(0)
        if self.rules.refusal_closes:
            self._close(connection, "redirect", block)

    def _close(self, connection: Connection, why: str, block: Block | None = None) -> None:
        connection.down.append((why, block, 0))
        connection.taken = False
        connection.up.clear()

    def _ack(self, number: int) -> None:
        """Ack on each stream the prefix of what came on it that the queue holds."""
        queued = self.brokers[number].queued
        for connection in self.connections:
            last = None
            while connection.pending and connection.broker == number and connection.taken:
                if connection.pending[0].key not in queued:
                    break
                last = connection.pending.pop(0)
            if last is not None:
                connection.down.append(("ack", last, 0))

    # ---- instances of a name -------------------------------------------------------------------------

    def _take_instance(self, broker: Broker, connection: Connection) -> None:
        """Let an instance continue, or begin: from then on older ones are fenced here."""
        producer = connection.client
        assert isinstance(producer, Producer)
        role = producer.role
        known = broker.names.get(role.source, Name(role.source))
        if role.instance < known.instance and self.rules.fence:
            self._close(connection, "fenced")
        elif role.instance == known.instance and producer.blocks and not broker.holds_older(role):
            connection.down.append(("begun", None, 0))
        elif self.rules.alone and known.instance and self.now <= broker.owned + self.rules.stale_ticks:
            self._close(connection, "redirect")  # it comes again
        else:
            broker.learn(Name(role.source, role.instance))
            broker.beginning = Beginning(connection, role)
            here = [other for other in self.connections if other.broker == connection.broker and other.taken]
            for other in here if self.rules.fence else ():
                of_name = isinstance(other.client, Producer) and other.client.role.source == role.source
                if of_name and other is not connection:
                    self._close(other, "redirect")

    def _state(self, number: int, _place: int) -> None:
        """Publish `opened` once more: it says which instance begins, and from where."""
        broker = self.brokers[number]
        assert broker.beginning is not None
        name = broker.names[broker.beginning.role.source]
        if self.rules.stated:
            self._hand_over(number, STATED, Entry("opened", broker.epoch, time=broker.proof, name=name))
        else:
            broker.beginning.offset = 0
            self._begun(broker)

    def _begun(self, broker: Broker) -> None:
        """Answer an instance when the queue is read up to what says that it begins."""
        beginning = broker.beginning
        if beginning is not None and beginning.offset >= 0 and not broker.unread:
            broker.beginning = None
            name = broker.names[beginning.role.source]
            if name.instance > beginning.role.instance and self.rules.fence:
                self._close(beginning.connection, "fenced")
            elif beginning.connection.taken:
                beginning.connection.down.append(("begun", None, name.next))

    # ---- publishing ----------------------------------------------------------------------------------

    def _store(self, number: int, _place: int) -> None:
        self.brokers[number].ring[-1].state = STORED

    def _hand_over(self, number: int, batch: int, entry: Entry) -> None:
        broker = self.brokers[number]
        broker.handed_over = self.now
        self.publishes += 1
        self.requests += 1
        broker.requests.append(Request(self.requests, batch, self.now))
        self.flights.append(Flight(number, broker.connection, self.requests, entry))

    def _publish(self, number: int, _place: int) -> None:
        broker = self.brokers[number]
        batch = next(batch for batch in broker.ring if batch.state == STORED)
        batch.state = SENT
        blocks = [block for block in batch.blocks if block.key not in broker.queued or not self.rules.skip]
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
        broker.meet(self.log[offset])
        self._done(broker, request.batch)
        self._ack(number)
        if request.batch == STATED and broker.beginning is not None:
            broker.beginning.offset = offset
        self._begun(broker)

    def _done(self, broker: Broker, number: int) -> None:
        """Take the batches at the head that are in the queue off the ring."""
        for batch in broker.ring:
            if batch.number == number:
                batch.state = DONE
        while broker.ring and broker.ring[0].state == DONE:
            broker.queued.update(block.key for block in broker.ring.pop(0).blocks)

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
            broker.meet(entry)
            if entry.kind == "data" and entry.epoch == broker.epoch:
                broker.requests = [request for request in broker.requests if request.batch != entry.batch]
                self._done(broker, entry.batch)
        broker.read_to = max(broker.read_to, end)
        broker.proof = max(broker.proof, handed_over) if self.rules.proof_at_hand_over else self.now
        broker.unread = False
        self._ack(number)
        if fenced:
            self._give_up(number, ends=True)
        self._begun(broker)

    def _give_up_ring(self, number: int, _place: int) -> None:
        self._give_up(number, ends=self.rules.end_epoch)

    def _give_up(self, number: int, *, ends: bool) -> None:
        broker = self.brokers[number]
        if self.rules.hold:
            self._hold(number, broker.handed_over)
        broker.ring.clear()
        broker.beginning = None
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

    def _hold(self, number: int, last_publish: int) -> None:
        """Keep what the ring has that was acked with 1; producers send the rest again."""
        broker, forwarder = self.brokers[number], self.forwarders[number]
        for block in (block for batch in broker.ring for block in batch.blocks):
            if block in broker.promised and block.key not in broker.queued and block not in forwarder.held:
                forwarder.held.append(block)
        forwarder.absent = None
        if forwarder.held:
            forwarder.settled = max(forwarder.settled, last_publish + self.rules.stale_ticks)

    def _crash(self, number: int, _place: int) -> None:
        """End a process. Its next one finds what was acked with 1 where it has a spool, and the rest is lost."""
        self.crashes += 1
        forwarder = self.forwarders[number]
        forwarder.connection = None
        if number == SPOOLS:
            self._hold(number, self.now)
        else:
            forwarder.held = []
            for block in self.blocks():
                block.acked_by.update(dict.fromkeys(block.acked_by.keys() & {number}, False))
        self.brokers[number] = Broker(connection=self.brokers[number].connection + 1)
        self._leave(number)

    def _leave(self, number: int) -> None:
        for connection in self.connections:
            if connection.broker == number and connection.taken:
                self._close(connection, "redirect")
