"""Programs of a user in a simulated cluster: started, killed, paused, cut off, and started again."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from types import TracebackType
from typing import Any, Literal, Self

from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import Record
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import ClosedError, InvalidRequestError
from memq.runtime.runtime import Runtime
from memq.simulation.chaos import Chaos
from memq.simulation.cluster import SETTINGS, ClusterShape, SimCluster
from memq.simulation.ports.cloud import Doors
from memq.simulation.ports.faults import LEVELS
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import World
from memq.topic import check_resource_name, parse_settings

Level = Literal["calm", "breezy", "stormy", "sleepy"]
BROKERS_MAX = 10
PARTITIONS_MAX = 64
POLL_S = 0.05  # virtual time between two calls of `done`


@dataclass(frozen=True, slots=True)
class Process:
    """One life of a program. Clients that it makes use the simulated network and clock.

    `life` is 1 at first, and one more each time that the program is started again. A program may use `random`; any
    other source of randomness or time makes two runs of one seed differ.
    """

    name: str
    life: int
    brokers: str
    runtime: Runtime
    random: random.Random

    def producer(self, **settings: Any) -> AsyncProducer:
        """Return a `memq.aio.Producer` with these settings, connected to the brokers of the simulation."""
        return AsyncProducer(self.brokers, runtime=self.runtime, **settings)

    def consumer(self, topics: str | Sequence[str], **settings: Any) -> AsyncConsumer:
        """Return a `memq.aio.Consumer` of these topics."""
        return AsyncConsumer(self.brokers, topics, runtime=self.runtime, **settings)

    def admin(self) -> AsyncAdmin:
        """Return a `memq.aio.Admin`."""
        return AsyncAdmin(self.brokers, runtime=self.runtime)

    def now_s(self) -> float:
        """Return the monotonic clock of the process, in virtual seconds; it starts anywhere."""
        return self.runtime.clock.monotonic()


Program = Callable[[Process], Coroutine[Any, Any, None]]


class Simulation:
    """A cluster of brokers and the programs of a test, on virtual time. Use it as a context manager.

    Faults are drawn from `seed`: kills, pauses, broken links, failed and late calls of store, queue and coordinator.
    The same seed and the same programs give the same run. Programs are coroutines without threads and real sockets;
    `asyncio.sleep`, tasks, events and timeouts take virtual time. Store, queue and coordinator are in memory.

    Args:
        seed: decides everything that is drawn.
        level: "calm" has short delays alone, "breezy" some faults, "stormy" many at once, "sleepy" long pauses.
        brokers: number of brokers, 1 to 10.
        topic: name of the topic that exists at the start. `Process.admin` can make more.
        partitions: its partitions, 1 to 64.
        settings: its settings. Times are shorter than in a real cluster unless they are given.

    Raises: InvalidRequestError for a level, number, name or setting that is not possible.
    """

    _active = False  # only one at a time: it owns the running loop of the thread

    def __init__(
        self,
        seed: int,
        *,
        level: Level = "breezy",
        brokers: int = 3,
        topic: str = "events",
        partitions: int = 4,
        settings: Mapping[str, int | bool | str] | None = None,
    ) -> None:
        if level not in LEVELS:
            raise InvalidRequestError(f"no level '{level}'", hint=f"levels are {', '.join(LEVELS)}")
        for name, value, most in (("brokers", brokers, BROKERS_MAX), ("partitions", partitions, PARTITIONS_MAX)):
            if not 1 <= value <= most:
                raise InvalidRequestError(f"{name} is {value}, allowed are 1 to {most}")
        check_resource_name(topic)
        self.seed = seed
        self._faults = LEVELS[level]()
        chosen = parse_settings(dict(settings or {}), SETTINGS)
        self._shape = ClusterShape(brokers=brokers, topic=topic, partitions=partitions, settings=chosen)
        self._world = World(seed)
        self._programs: dict[str, Program] = {}
        self._lives: dict[str, int] = {}
        self._ended: dict[str, None] = {}
        self._readers = 0
        self._entered = False

    def __enter__(self) -> Self:
        if Simulation._active or asyncio._get_running_loop() is not None:
            raise InvalidRequestError(
                "a simulation runs inside another one, or inside an event loop",
                hint="enter it in a function that is no coroutine, one at a time",
            )
        self._world.__enter__()
        try:
            self._cluster = SimCluster(self._world, self._faults, self._shape)
            self._chaos = Chaos(self._cluster, self._faults.chaos, self._restart)
            self._cluster.start()
            self._chaos.start()
        except BaseException as error:
            self._world.__exit__(type(error), error, error.__traceback__)
            raise
        self._entered = Simulation._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered = Simulation._active = False
        self._world.__exit__(kind, error, traceback)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._world.now

    @property
    def brokers(self) -> Sequence[str]:
        """Names of the brokers, for `kill`, `pause` and `isolate`."""
        self._check_entered()
        return tuple(self._cluster.brokers)

    # ---- programs --------------------------------------------------------------------------------

    def start(self, name: str, program: Program) -> None:
        """Start a program as a process. It ends when the program returns; after a kill it is started again.

        An exception of the program ends the run: `run` raises SimulationError with the exception as its cause.

        Raises: InvalidRequestError when a process has this name.
        """
        self._check_entered()
        if name in self._programs or name in self._world.nodes:
            raise InvalidRequestError(f"a process is named '{name}'", hint="give each process a name of its own")
        self._programs[name] = program
        self._spawn(name)

    def _spawn(self, name: str) -> None:
        program = self._programs[name]
        life = self._lives[name] = self._lives.get(name, 0) + 1

        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            started: object = program(Process(name, life, self._cluster.address_text(), runtime, node.random))
            if not isawaitable(started):
                raise TypeError(f"program '{name}' is no coroutine function: define it with 'async def'")
            await started
            self._ended[name] = None

        self._cluster.spawn(name, main)

    def _restart(self, name: str) -> None:
        if self._world.nodes[name].alive or name in self._ended:
            return
        if name in self._cluster.brokers:
            self._cluster.start_broker(name)
        elif name in self._programs:
            self._spawn(name)

    # ---- time ------------------------------------------------------------------------------------

    def run(self, seconds: float, *, done: Callable[[], bool] | None = None) -> None:
        """Run for so many virtual seconds, or until `done()`.

        Raises: SimulationError with the seed and the virtual time when a program or a broker failed.
        """
        self._check_entered()
        check_seconds(seconds)
        self._world.run(seconds, done=done, poll_s=POLL_S)

    def heal(self) -> None:
        """End all faults, and start all processes that are dead. Nothing fails from now on."""
        self._check_entered()
        self._chaos.end()
        for name in (*self._cluster.brokers, *self._programs):
            self._restart(name)

    def finish(self, seconds: float = 300.0) -> None:
        """Heal, and run until all programs have returned.

        Raises: SimulationError when one still runs after so many virtual seconds, or as `run`.
        """
        self.heal()
        self.run(seconds, done=lambda: len(self._ended) == len(self._programs))
        left = [name for name in self._programs if name not in self._ended]
        if left:
            self._world.fail(f"after {seconds:g} s without faults, still running: {', '.join(left)}")
            self._world.check()

    def records(self, topic: str | None = None) -> list[Record]:
        """Heal, and return all records of a topic (the first one when None), by partition, each in its order.

        Raises: SimulationError when they can't be read within 300 virtual seconds.
        """
        self.heal()
        self._readers += 1
        name, wanted = f"memq-records-{self._readers}", topic or self._cluster.topic.name
        found: list[Record] = []

        async def read(process: Process) -> None:
            async with process.consumer(wanted, start="beginning", end="end", audit=False) as consumer:
                async for batch in consumer:
                    found.extend(batch)

        self.start(name, read)
        self.run(300.0, done=lambda: name in self._ended)
        if name not in self._ended:
            self._world.fail(f"the records of '{wanted}' were not read within 300 s")
            self._world.check()
        return sorted(found, key=lambda record: (record.partition, record.offset))

    # ---- chosen faults -----------------------------------------------------------------------------

    def kill(self, name: str, *, down_s: float = 1.0) -> None:
        """Kill a broker or a process, as SIGKILL does. It is started again `down_s` virtual seconds later.

        Raises: InvalidRequestError when nothing has this name.
        """
        check_seconds(down_s)
        self._node(name).kill()
        self._world.schedule(down_s, lambda: self._restart(name))

    def pause(self, name: str, seconds: float) -> None:
        """Stop a broker or a process for so many virtual seconds, as SIGSTOP does. Raises: as `kill`."""
        check_seconds(seconds)
        self._node(name).pause(seconds)

    def isolate(self, name: str, seconds: float) -> None:
        """Cut a broker or a process off from all others, and from the services. Raises: as `kill`."""
        check_seconds(seconds)
        self._node(name)
        self._cluster.switch.isolate(name, seconds)
        if name in self._cluster.doors:  # a process has no doors before its first step
            self._cluster.doors[name].block(seconds)

    def _node(self, name: str) -> SimNode:
        self._check_entered()
        if name not in self._programs and name not in self._cluster.brokers:
            known = ", ".join((*self._cluster.brokers, *self._programs))
            raise InvalidRequestError(f"no process is named '{name}'", hint=f"there are {known}")
        return self._world.nodes[name]

    def _check_entered(self) -> None:
        if not self._entered:
            raise ClosedError("the simulation is not entered", hint="use it as `with Simulation(seed) as simulation:`")


def check_seconds(seconds: float) -> None:
    """Check a duration. Raises: InvalidRequestError for one that is negative, or no number."""
    if not 0 <= seconds < math.inf:
        raise InvalidRequestError(f"{seconds} is no duration in seconds", hint="give 0 or more virtual seconds")
