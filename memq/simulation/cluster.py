"""A cluster in one world: brokers and clients as nodes, and the sessions that the coordinator ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from memq.broker.broker import Broker
from memq.broker.metrics import Counters
from memq.broker.upkeep.retention import run_upkeep
from memq.compaction.plan import CompactionRule
from memq.errors import MemqError, VersionConflictError
from memq.governor import BrokerEntry
from memq.governor.planning import join, neighbours, split
from memq.governor.registry import RegistryChange
from memq.limits import KIB, MIB
from memq.permissions import RuleSet
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.simulation.ports.cloud import Cloud, Doors
from memq.simulation.ports.disk import HostDisk, SimDisk
from memq.simulation.ports.faults import WorldFaults
from memq.simulation.ports.groups import ObservedGroups
from memq.simulation.ports.wrong_answers import lie_from_memory
from memq.simulation.world.network import SimNetwork, Switch
from memq.simulation.world.node import EPOCH_MS, SimNode
from memq.simulation.world.world import World
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, TopicSettings, equal_slots, read_partitions

CLUSTER = "sim"
PORT = 9876
TOPIC_ID = "5eed" * 8
WRITE_PARTITIONS_MAX = 6  # if they are split and joined
SPOOL_BYTES_MAX = 24 << 10  # so small that segments are soon full, and copied
SPURIOUS_EVERY_S = 10.0  # mean time between notifications of all watchers without a change
BROKER = "broker-"  # first part of the names of brokers
CHECK_INTERVAL_MS, CHECK_TRIES = 2_000, 5  # of questions about prepared transactions
CAPACITY_BYTES_S = 10_000  # so small that the governor moves even idle partitions

SETTINGS = TopicSettings(
    delivery_timeout_ms=10_000,
    stale_publish_ms=2_000,
    dedup_window_ms=54_000,
    batch_age_ms_max=100,
    ring_slots=4,
    uploads_in_flight_max=2,
)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The parts of a cluster and their settings. Times in ms."""

    brokers: int = 2
    topic: str = "t"
    partitions: int = 1
    refuse: Literal["epoch", "age"] = "epoch"
    session_timeout_ms: int = 2_000
    governor_ms: int = 500
    settings: TopicSettings = SETTINGS
    housekeeping_s: float = 0.0  # interval between runs of retention and sweep; 0: never
    sweep_age_ms: int = 3_600_000
    sweep_confirm_ms: int = 86_400_000
    staged_age_ms: int = 7 * 86_400_000
    shared_age_ms: int = 250
    audit_interval_ms: int = 0  # interval between reports of clients; 0: never
    compaction: CompactionRule | None = None  # None: no compaction
    clock_error_ms: int = CLOCK_ERROR_MS  # between two nodes, see `_draw_offset_ms`
    clocks_at_bounds: bool = False  # each clock has the greatest allowed error
    slab_bytes: int = 32 * KIB
    memory_bytes_max: int = 2 * MIB  # of a broker
    prefetch_bytes_max: int = MIB  # of a consumer, at most
    rules: RuleSet | None = None  # of permissions, at the begin; None: brokers check none


class SimCluster:
    """The parts of a cluster, and the actions of a scenario. `switch` and `cloud` may be used directly."""

    def __init__(self, world: World, faults: WorldFaults, shape: ClusterShape) -> None:
        self.world = world
        self.shape = shape
        self.switch = Switch(world, faults.network)
        self.objects: dict[str, bytes] = {}
        self.cloud = Cloud(world, faults, refuse=shape.refuse)
        self.switch.certified = shape.rules is not None
        self.switch.refused = self.cloud.takeovers.refused
        self.doors: dict[str, Doors] = {}
        self.disks: dict[str, HostDisk] = {}
        self.topic = Topic(
            name=shape.topic,
            id=TOPIC_ID,
            created_ms=0,
            settings=shape.settings.check(),
            partitions=equal_slots(shape.partitions),
        )
        self.cloud.monitor.key_valid_s = shape.sweep_age_ms / 2000
        self.read_partitions = [ReadPartition(shape.topic, TOPIC_ID, number) for number in range(shape.partitions)]
        self._passing: list[ReadPartition] = []  # of topics that come and go
        for number in range(WRITE_PARTITIONS_MAX):
            self._watch(ReadPartition(shape.topic, TOPIC_ID, number))
        self.healed = False
        self.brokers = [f"{BROKER}{number}" for number in range(shape.brokers)]
        self.rounds = dict.fromkeys(self.brokers, 0)  # finished runs of retention and sweep, by broker
        self.counters: list[Counters] = []  # of each life of a broker
        self.live: dict[str, Broker] = {}  # the last life of each broker, once it has started
        self._stops: dict[str, asyncio.Event] = {}
        self._seen_s: dict[str, float] = {}
        self._entries: dict[str, BrokerEntry] = {}

    def watch(self, topic: Topic) -> None:
        """Let the monitor of ownership know a topic that comes and goes."""
        for partition in read_partitions(topic):
            self._watch(partition)
            self._passing.append(partition)

    def present_partitions(self) -> list[ReadPartition]:
        """Return the read partitions of all watched topics that have logs now."""
        return [*self.read_partitions, *(each for each in self._passing if each in self.cloud.queue.logs)]

    def _watch(self, partition: ReadPartition) -> None:
        log = self.cloud.monitor.log(partition)
        log.stale_s = self.shape.settings.stale_publish_ms / 1000
        log.window_s = self.shape.settings.dedup_window_ms / 1000

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the topic and start all brokers and the governor."""
        self.cloud.handler.objects = self.objects
        setup = self.cloud.node.loop.create_task(self._make_topic())
        self.world.run(1, done=setup.done)
        for name in self.brokers:
            self.start_broker(name)
        self.world.schedule(0.0, self._govern)

    async def _make_topic(self) -> None:
        self.cloud.cluster.apply(self.cloud.cluster.registry.create_topic(self.topic))
        if self.shape.rules is not None:
            self.cloud.cluster.apply(RegistryChange(rules=self.shape.rules))
        await self.cloud.queue.create(self.read_partitions, self.topic.settings.stale_publish_ms)

    def spawn(self, name: str, main: Callable[[SimNode, Runtime, Doors], Coroutine[Any, Any, None]]) -> SimNode:
        """Start a process with its doors to the cloud."""

        async def start(node: SimNode) -> None:
            doors = self.doors[name] = self.cloud.doors(node)
            await main(node, node.runtime(SimNetwork(self.switch, node)), doors)

        return self.world.spawn(name, start, offset_ms=self._draw_offset_ms())

    def jump(self, node: SimNode) -> None:
        """Set a node's wall clock, as NTP or an operator does."""
        node.clock.offset_ms = self._draw_offset_ms()
        self.world.trace.event(self.world.now, "jump", node.name, node.clock.offset_ms)

    def _draw_offset_ms(self) -> int:
        """Return the offset of a node's wall clock from the queue's clock.

        In "age" mode the queue refuses pointers of a node whose clock is S behind, so its bound is S / 3.
        """
        shape, draw = self.shape, self.world.random("clock")
        half_ms = shape.clock_error_ms // 2
        stale_ms = shape.settings.stale_publish_ms // 3 if shape.refuse == "age" else half_ms
        bounds = -min(half_ms, stale_ms), half_ms * 9 // 10
        return draw.choice(bounds) if shape.clocks_at_bounds else draw.randint(*bounds)

    def start_broker(self, name: str) -> SimNode:
        """Start a broker, for the first time or again."""
        self.live.pop(name, None)
        self._stops[name] = asyncio.Event()
        return self.spawn(name, self._broker_main)

    async def _broker_main(self, node: SimNode, runtime: Runtime, doors: Doors) -> None:
        settings = BrokerSettings(
            host=node.name,
            port=PORT,
            http_port=-1,
            auto_create_topics=False,  # else a producer of a topic that was just deleted would create another one
            broker_id=node.name,
            cluster=CLUSTER,
            memory_bytes_max=self.shape.memory_bytes_max,
            capacity_bytes_s=CAPACITY_BYTES_S,
            sweep_age_ms=self.shape.sweep_age_ms,
            sweep_confirm_ms=self.shape.sweep_confirm_ms,
            staged_age_ms=self.shape.staged_age_ms,
            shared_age_ms_max=self.shape.shared_age_ms,
            spool_bytes_max=SPOOL_BYTES_MAX,
            transaction_check_interval_ms=CHECK_INTERVAL_MS,
            transaction_check_tries=CHECK_TRIES,
            audit=self.shape.audit_interval_ms > 0,
            audit_interval_ms=self.shape.audit_interval_ms,
            audit_partitions=2,
            permissions=self.shape.rules is not None,
            broker_principals=f"{BROKER}*" if self.shape.rules is not None else "",
        )
        stop = self._stops[node.name]
        broker = await self._started(settings, runtime, doors)
        house = asyncio.create_task(self._keep_house(broker), name="house") if self.shape.housekeeping_s else None
        ended = [asyncio.create_task(broker.failed.wait()), asyncio.create_task(stop.wait())]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        if broker.failure is not None:
            raise AssertionError(f"{node.name} failed") from broker.failure
        try:
            await broker.drain()
        except MemqError as error:  # it kept ack=1 blocks of a lost epoch; the checker counts them
            self.world.trace.event(self.world.now, "drain failed", node.name, type(error).__name__)
        if house is not None:
            house.cancel()
            await asyncio.wait([house])
        await broker.close()
        for task in ended:
            task.cancel()

    async def _keep_house(self, broker: Broker) -> None:
        """Run retention and sweep, as the broker's process does every 30 s."""
        while True:
            await asyncio.sleep(self.shape.housekeeping_s)
            await run_upkeep(broker.services, broker.partitions, sweeps=True)
            self.rounds[broker.services.settings.broker_id] += 1

    async def _started(self, settings: BrokerSettings, runtime: Runtime, doors: Doors) -> Broker:
        """Start a broker; one that can't start is closed and replaced, as a process manager does."""
        disk = None
        if self.shape.settings.ack1 == "disk":
            host = self.disks.setdefault(settings.broker_id, HostDisk())
            disk = SimDisk(host, self.cloud.faults.disk, self.world.random("disk"), lambda: self.world.now)
        while True:
            broker = Broker(
                settings,
                runtime,
                {"main": doors.store},
                doors.queue,
                doors.coordinator,
                spool_disk=disk,
                slab_bytes=self.shape.slab_bytes,
            )
            wrong = self.cloud.wrong_answers["memory"]
            lie_from_memory(broker.services.recent_batches, wrong, settings.broker_id, lambda: self.world.now)
            self.counters.append(broker.services.counters)
            broker.hosts.make_coordinator = self._observed_groups
            try:
                await broker.start()
            except MemqError:
                await broker.close()
                await asyncio.sleep(0.5)
            else:
                self.live[settings.broker_id] = broker
                return broker

    def _observed_groups(self, *parts: Any) -> ObservedGroups:
        made = ObservedGroups(*parts)
        made.logs, made.observer = self.cloud.state_logs, lambda: self.cloud.observer
        return made

    def stop_broker(self, name: str) -> None:
        """Let a broker drain, close and exit, as SIGTERM does."""
        if name in self._stops and self.world.nodes[name].alive:
            self.world.trace.event(self.world.now, "stop", name)
            self.world.nodes[name].loop.call_soon(self._stops[name].set)

    def report_suspicion(self, receiver: str, suspect: str) -> None:
        """Report a broker to another one, as clients do after a refused connection, or by mistake."""
        broker = self.live.get(receiver)
        if broker is not None and self.world.nodes[receiver].alive:
            suspicions, address = broker.services.suspicions, f"{suspect}:{PORT}"
            self.world.nodes[receiver].loop.call_soon(lambda: suspicions.report(address))

    def is_at_rest(self) -> bool:
        """Whether all brokers serve, none leaves, and none holds records of the topic for the log."""
        return all(self._is_at_rest(name) for name in self.brokers)

    def _is_at_rest(self, name: str) -> bool:
        broker = self.live.get(name)
        if broker is None or not self.world.nodes[name].alive or self._stops[name].is_set():
            return False
        rings = [each.ring for each in broker.partitions.at_work() if each.topic.id == TOPIC_ID]
        return not any(map(len, rings)) and not len(broker.partitions.forwarder) and not broker.replay.at_work

    def addresses(self) -> list[Address]:
        """Return the addresses of the brokers."""
        return [(name, PORT) for name in self.brokers]

    def address_text(self) -> str:
        """Return the addresses of the brokers as text for clients."""
        return ",".join(f"{host}:{port}" for host, port in self.addresses())

    # ---- sessions, and moves ---------------------------------------------------------------------

    def _govern(self) -> None:
        """End the sessions of brokers that were silent for too long. The governor assigns their partitions.

        Watchers are notified of changes, and sometimes without one. Notified at every tick, they took a fifth of all
        steps.
        """
        self.world.schedule(self.shape.governor_ms / 1000, self._govern)
        cluster = self.cloud.cluster
        for door in self.doors.values():
            entered = door.coordinator.entered  # it may have registered and expired since the last tick
            if entered is not None:
                self._entries[entered.id] = entered
        for name, entry in list(self._entries.items()):
            if self._answers(name):
                self._seen_s[name] = self.world.now
                lives = self.doors[name].coordinator.session == entry.session
                lives = lives and not cluster.registry.was_taken_over(entry)  # the broker itself registers again
                if lives and entry.id not in [known.id for known in cluster.registry.brokers()]:
                    cluster.registry.register(entry)  # its session is back
                    cluster.changed()
            elif self.world.now - self._seen_s.get(name, 0.0) > self.shape.session_timeout_ms / 1000:
                cluster.expire(entry)
        if self.world.random("watches").random() * SPURIOUS_EVERY_S < self.shape.governor_ms / 1000:
            cluster.changed()

    def _answers(self, name: str) -> bool:
        """Whether a broker reaches the coordinator now: it runs, and its door is not blocked."""
        node = self.world.nodes[name]
        blocked_until = self.doors[name].callers[2].blocked_until if name in self.doors else 0.0
        return node.alive and node.paused_until <= self.world.now and blocked_until <= self.world.now

    def move(self, partition: int, *, seize: bool = False) -> None:
        """Move a partition to another live broker, as a planned move; with `seize`, as from a dead owner."""
        registry = self.cloud.cluster.registry
        entry = registry.assignment(TOPIC_ID, partition)
        others = [broker.id for broker in registry.brokers() if broker.id != entry.broker]
        if others:
            target = self.world.random("moves").choice(others)
            self.world.trace.event(self.world.now, "seize" if seize else "move", partition, entry.broker, target)
            task = self.cloud.node.loop.create_task(self._move(partition, target, seize=seize))
            del task  # the loop holds it

    def reshape(self) -> None:
        """Split a write partition, or join two, as the governor does by their traffic."""
        draw = self.world.random("reshapes")
        topic, now_ms = self.current_topic(), EPOCH_MS + int(self.world.now * 1000)
        pairs = list(neighbours(topic))
        wide = [part.partition for part in topic.taking if part.slot_first < part.slot_last]
        if pairs and (len(topic.taking) >= WRITE_PARTITIONS_MAX or not wide or draw.random() < 0.5):
            after = join(topic, *draw.choice(pairs), now_ms)
        else:
            after = split(topic, draw.choice(wide), now_ms)
        self.world.trace.event(self.world.now, "reshape", [part.partition for part in after.taking])
        task = self.cloud.node.loop.create_task(self._alter(after))
        del task  # the loop holds it

    async def _alter(self, topic: Topic) -> None:
        registry = self.cloud.cluster.registry
        with contextlib.suppress(VersionConflictError):  # a broker's governor was faster
            self.cloud.cluster.apply(registry.alter_topic(topic))
        self.topic = self.current_topic()

    def current_topic(self) -> Topic:
        """Return the topic of the cluster as its coordinator has it now, with all write partitions."""
        return next((topic for topic in self.cloud.cluster.registry.topics() if topic.id == TOPIC_ID), self.topic)

    async def _move(self, partition: int, target: str, *, seize: bool) -> None:
        registry = self.cloud.cluster.registry
        entry = registry.assignment(TOPIC_ID, partition)
        session = "" if seize else entry.session
        moved = msgspec.structs.replace(entry, broker=target, session=session)
        self.cloud.cluster.apply(registry.set_assignment(moved))
