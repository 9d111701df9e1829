"""State logs with their real shell on virtual time: brokers in processes, over a queue and a store that fail and lie.

Each broker claims an epoch, opens the log, serves claims of slots and fresh reads, and opens again when it is fenced.
The world pauses and kills brokers. Calls fail before or after their effect, come late or twice, or hang. The queue
shows early ends, empty pages and damaged entries; the store loses, delays and damages its answers.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from memq.errors import EpochFencedError, MemqError, MovedError, OutcomeUnknownError, QueueError, StoreError
from memq.format.state_log.entry import decode_state_entry
from memq.notification import FROM_THE_LOG, Entries, Entry, Publication, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.simulation.ports.calls import Caller
from memq.simulation.ports.faults import CallFaults
from memq.simulation.ports.wrong_answers import WrongAnswerRates, WrongAnswers
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import World
from memq.state_log.state_log import StateLog, StateLogSettings
from memq.storage_handlers import Buffer
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition
from tests.model.state_log import MACHINE, BrokenPromiseError, Client, Reference, Slots, machines

LOG = ReadPartition("_memq_state", "ab" * 16, 0)
BROKERS = 3
CLIENTS = 12
SLOTS = 5
SECONDS = 20.0
SETTINGS = StateLogSettings("memq", "b", answer_s=1.0, snapshot_s=0.7, key_valid_s=3.0, drain_s=1.0)
FAULTS = CallFaults(
    latency_s_max=0.03,
    before_rate=0.03,
    after_rate=0.04,
    late_rate=0.03,
    hang_rate=0.01,
    stall_rate=0.04,
    late_s_max=2.0,
    stall_s_max=2.0,
    hang_s=5.0,
)


class CheckedQueue(MemoryQueue):
    """The queue itself; each entry is also taken by the reference."""

    def __init__(self, node: SimNode, reference: Reference, *, refuses_epochs: bool) -> None:
        super().__init__(node.clock, "epoch" if refuses_epochs else "age")
        self._reference = reference

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        offset = await super().publish(publication)
        self._reference.land(decode_state_entry(publication.body))
        return offset


class FaultyQueue(MemoryQueue):
    """The queue as one broker sees it."""

    def __init__(self, caller: Caller, queue: MemoryQueue, draw: random.Random) -> None:
        super().__init__(caller.node.clock)
        self._caller = caller
        self._queue = queue
        self._draw = draw
        self._shown_end = 0

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`. An entry may land twice."""

        async def land() -> int:
            offset = await self._queue.publish(publication)
            if self._draw.random() < 0.04:
                world = self._caller.node.world
                world.schedule(self._draw.random() * 2, lambda: self._again(publication))
            return offset

        lies = ("denied", "not-found", "denied-landed", "refused-landed")
        offset = await self._caller.call("publish", land, lies=lies)
        self._shown_end = max(self._shown_end, offset + 1)
        return offset

    def _again(self, publication: Publication) -> None:
        with suppress(EpochFencedError):
            self._caller.service.loop.run_through(self._queue.publish(publication))

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`. An answer may be empty, end early, or have a damaged entry."""
        chance = self._draw.random()
        if bytes_max != FROM_THE_LOG and chance < 0.1:
            bytes_max = 1

        async def happen() -> Entries:
            return await self._queue.read(partition, offset, bytes_max)

        found = await self._caller.call("read", happen, lies=("denied", "not-found"))
        if 0.1 < chance < 0.15:
            return Entries((), offset)
        if found and 0.15 < chance < 0.18:
            damaged = bytearray(found[0].body)
            damaged[self._draw.randrange(len(damaged))] ^= 1
            return Entries([Entry(found[0].offset, 0, bytes(damaged)), *found[1:]], found.next)
        return found

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`. A replica that lags shows an early end, but none below one that was shown."""
        lags = self._draw.random() < 0.5

        async def happen() -> Span:
            return await self._queue.span(partition)

        span = await self._caller.call("span", happen, lies=("denied",))
        if lags:
            span = Span(span.begin, max(span.begin, min(span.end, self._shown_end)))
        self._shown_end = max(self._shown_end, span.end)
        return span

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""
        await self._caller.call("trim", lambda: self._queue.trim(partition, before), lies=("denied", "denied-landed"))


class FaultyStore(MemoryHandler):
    """The store as one broker sees it."""

    def __init__(self, caller: Caller, store: MemoryHandler, draw: random.Random) -> None:
        super().__init__(caller.node.clock)
        self._caller = caller
        self._store = store
        self._draw = draw

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """See `ObjectWriter.put`."""
        copied = [bytes(buffer) for buffer in buffers]
        await self._caller.call("put", lambda: self._store.put(key, copied, checksum), lies=("denied", "denied-landed"))

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `ObjectReader.get`. An answer may be "not found", damaged or short."""
        data = await self._caller.call("get", lambda: self._store.get(key), lies=("denied", "not-found"))
        chance = self._draw.random()
        if chance < 0.04:
            return data[: self._draw.randrange(len(data))]
        if chance < 0.08:
            changed = bytearray(data)
            changed[self._draw.randrange(len(data))] ^= 1
            return bytes(changed)
        return data

    async def delete(self, key: str) -> None:
        """See `ObjectWriter.delete`."""
        await self._caller.call("delete", lambda: self._store.delete(key))


class StateLogCluster:
    """One run: brokers, queue, store, and clients that the brokers themselves play."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.draw = self.world.random("cluster")
        self.service = self.world.add_node("service", offset_ms=0)
        self.reference = Reference()
        self.queue = CheckedQueue(self.service, self.reference, refuses_epochs=self.draw.random() < 0.5)
        self.store = MemoryHandler(self.service.clock)
        self.clients = [Client(self.draw.randrange(SLOTS)) for _ in range(CLIENTS)]
        self.waiting: dict[int, SimNode] = {}  # by client
        self.won: set[int] = set()
        self.epochs = 0
        self.met: Counter[str] = Counter()
        self.service.loop.run_through(self.queue.create([LOG], 30_000))

    # ---- a broker ----------------------------------------------------------------------------

    async def main(self, node: SimNode) -> None:
        """Open the log again and again, and serve it."""
        while True:
            if not self.epochs or self.draw.random() < 0.9:
                self.epochs += 1
            lost: asyncio.Future[MemqError] = asyncio.get_running_loop().create_future()
            log = self.log_of(node, lost)
            try:
                await log.open(self.epochs)
            except MemqError as error:
                self.met[f"opening: {type(error).__name__}"] += 1
                self.epochs = max(self.epochs, log.highest_epoch)
            else:
                self.met["owns"] += 1
                await self.serve(node, log, lost)
            await asyncio.sleep(node.random.random() * 4)

    def log_of(self, node: SimNode, lost: asyncio.Future[MemqError]) -> StateLog:
        """Return a state log of a broker, on faulty ports."""
        lies = WrongAnswerRates(("denied", "not-found", "denied-landed", "refused-landed"), rate=0.03)
        wrong = WrongAnswers(self.world.random("lies"), lies)
        queue = Caller(node, self.service, "queue", FAULTS, QueueError, wrong)
        store = Caller(node, self.service, "store", FAULTS, StoreError, wrong)
        return StateLog(
            FaultyQueue(queue, self.queue, self.world.random("queue lies")),
            FaultyStore(store, self.store, self.world.random("store lies")),
            Runtime(clock=node.clock, random=node.random, host=node.name, pid=node.index),
            EventLog(node.clock),
            LOG,
            SETTINGS,
            machines,
            lost.set_result,
        )

    async def serve(self, node: SimNode, log: StateLog, lost: asyncio.Future[MemqError]) -> None:
        """Serve clients until the epoch is lost, or for a while."""
        until = node.clock.monotonic() + node.random.expovariate(1 / 6)
        work: set[asyncio.Task[None]] = set()
        while not lost.done() and node.clock.monotonic() < until:
            for action in (self.claim, self.ask):
                if node.random.random() < 0.5:
                    work.add(asyncio.create_task(action(node, log)))
            await asyncio.sleep(node.random.expovariate(1 / 0.15))
        if lost.done():
            self.met[f"lost: {type(lost.result()).__name__}"] += 1
        await log.close()
        await asyncio.gather(*work)

    async def claim(self, node: SimNode, log: StateLog) -> None:
        """One claim of a client that waits for no live broker."""
        free = [
            number
            for number, client in enumerate(self.clients)
            if client.answer is None and not (number in self.waiting and self.waiting[number].alive)
        ]
        if not free:
            return
        number = node.random.choice(free)
        client = self.clients[number]
        client.sent += 1
        self.waiting[number] = node
        try:
            answer = await log.propose(MACHINE, bytes((client.slot, number)))
        except MovedError:
            self.met["told void"] += 1
            if client.sent == 1 and number in self.reference.counted:
                raise BrokenPromiseError(
                    f"client {number} was told that its claim does not count, and it does"
                ) from None
        except OutcomeUnknownError:
            self.met["told unknown"] += 1
        except MemqError as error:
            self.met[f"refused: {type(error).__name__}"] += 1
            client.sent -= 1
        else:
            self.met["told counts"] += 1
            client.answer = bool(answer)
            self.won.add(client.slot)
            if (self.reference.slots.taken.get(client.slot) == number) != answer:
                raise BrokenPromiseError(f"client {number} was told {answer}, the log says otherwise")
        del self.waiting[number]
        self.check(log)

    async def ask(self, node: SimNode, log: StateLog) -> None:
        """A fresh read shows what any client knew before."""
        known = frozenset(self.won)
        try:
            await log.fresh()
            slots = log.machine(MACHINE)
        except MemqError:
            return
        self.met["reads"] += 1
        assert isinstance(slots, Slots), slots
        if not known <= set(slots.taken):
            raise BrokenPromiseError("stale read: a slot is free, though a claim of it was answered before")
        self.check(log)

    def check(self, log: StateLog) -> None:
        """Compare an owner's state with the fold of the log."""
        if not log.is_owner:
            return
        with suppress(MemqError):
            state = log.counted()
            if self.reference.known[state.offset] != (state.epoch, state.number, state.machines[MACHINE]):
                raise BrokenPromiseError(f"the state below {state.offset} differs from the log")

    # ---- the world ---------------------------------------------------------------------------

    def disturb(self) -> None:
        """Pause or kill a broker, from time to time."""
        name = f"b{self.draw.randrange(BROKERS)}"
        node = self.world.nodes[name]
        if self.draw.random() < 0.3:
            node.kill()
            self.world.schedule(self.draw.random() * 2, lambda: self.revive(name))
        else:
            node.pause(self.draw.random() * 4)
        self.world.schedule(self.draw.expovariate(1 / 2.0), self.disturb)

    def revive(self, name: str) -> None:
        """Start a process again."""
        if not self.world.nodes[name].alive:
            self.world.spawn(name, self.main)

    async def rest(self, node: SimNode) -> None:
        """When all is quiet, the next opener has the state of the log, and serves it."""
        lost: asyncio.Future[MemqError] = asyncio.get_running_loop().create_future()
        runtime = Runtime(clock=node.clock, random=node.random, host="end", pid=0)
        log = StateLog(self.queue, self.store, runtime, EventLog(node.clock), LOG, SETTINGS, machines, lost.set_result)
        await log.open(self.epochs + 1)
        self.check(log)
        answer = await log.propose(MACHINE, bytes((SLOTS, CLIENTS)))
        assert answer is True, "a free slot is given to the first claim"
        self.check(log)
        await log.close()

    def run(self) -> None:
        """Run. Raises: SimulationError for a broken promise, or an error of the product."""
        with self.world:
            for number in range(BROKERS):
                self.world.spawn(f"b{number}", self.main)
            self.world.schedule(1.0, self.disturb)
            self.world.run(SECONDS)
            for node in list(self.world.nodes.values()):
                if node is not self.service:
                    node.kill()
            self.world.spawn("end", self.rest, offset_ms=0)
            self.world.run(30.0, done=lambda: not self.world.nodes["end"].alive)
            assert not self.world.nodes["end"].alive, "the last opener did not end"


def run(seed: int) -> Counter[str]:
    """Run one seed; return the counts of what happened."""
    cluster = StateLogCluster(seed)
    cluster.run()
    begin = cluster.queue.logs[LOG].begin
    cluster.met["trimmed"] += bool(begin)
    cluster.met["entries"] += len(cluster.reference.known) - 1
    return cluster.met
