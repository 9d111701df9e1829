"""Events of a run: processes die or pause, links break, partitions move, clocks jump, services fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from memq.broker.broker import Broker
from memq.notification import Entry
from memq.simulation.cluster import SimCluster
from memq.simulation.ports.calls import Met
from memq.simulation.ports.disk import SICKNESSES
from memq.simulation.ports.faults import ChaosFaults, calm
from memq.simulation.ports.store import SICK_SHARE
from memq.simulation.ports.wrong_answers import WrongAnswers
from memq.simulation.world.node import EPOCH_MS, SimNode

LOG_CUT_ENTRIES_MAX = 12  # entries that a log loses at once
OPERATOR_S_MAX = 20.0  # from a cut of a log under running brokers to their restart
DRAIN_S_MAX = 60.0  # then an operator kills a broker that drains
STATES = ("not open", "idle", "open", "sealed", "storing", "stored", "published")  # of a partition at its owner


def states_of(broker: Broker) -> dict[str, None]:
    """Return the states that the partitions and the batches of a broker are in."""
    found: dict[str, None] = {}
    for processor in broker.partitions.at_work():
        ring = processor.ring
        slots = [slot.state.name.lower() for slot in (*ring.batches, *([ring.open] if ring.open else []))]
        found |= dict.fromkeys(slots or (["not open"] if processor.own is None else ["idle"]))
    return found


class Chaos:
    """Draws events until `end`, which heals the world. `restart` starts the process of a host again."""

    def __init__(self, cluster: SimCluster, faults: ChaosFaults, restart: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._faults = faults
        self._restart = restart
        self._random = cluster.world.random("chaos")
        self.running = True
        self.met: Met = {}

    def start(self) -> None:
        """Schedule the first event of each kind; the kinds are independent."""
        faults = self._faults
        self._repeat(faults.kill_every_s, self._kill)
        self._repeat(faults.pause_every_s, self._pause)
        self._repeat(faults.link_cut_every_s, self._cut_link)
        self._repeat(faults.stop_every_s, self._stop)
        self._repeat(faults.move_every_s, self._move)
        self._repeat(faults.seize_every_s, self._seize)
        self._repeat(faults.jump_every_s, self._jump)
        self._repeat(faults.reshape_every_s, self._cluster.reshape)
        self._repeat(faults.sick_every_s, self._sicken)
        self._repeat(faults.log_cut_every_s, self._cut_log)
        self._repeat(faults.disk_every_s, self._sicken_disk)
        self._repeat(faults.part_every_s, self._sicken_part)
        self._repeat(faults.refuse_every_s, self._refuse)
        self._repeat(faults.suspicion_every_s, self._report_suspicion)
        for wrong in self._cluster.cloud.wrong_answers.values():
            self._repeat(wrong.lies.every_s, partial(self._lie, wrong))

    def end(self) -> None:
        """Stop all events, heal links and doors, resume paused processes, and make all calls succeed."""
        self.running = False
        self._cluster.healed = True
        faults = calm()
        for node in self._world.nodes.values():
            node.resume()
        names = list(self._world.nodes)
        for name in names:
            for other in names:
                self._cluster.switch.heal(name, other)
        self._cluster.switch.refusing_until.clear()
        for doors in self._cluster.doors.values():
            for caller in doors.callers:
                caller.blocked_until = 0.0
        self._cluster.cloud.sickness.until_s = 0.0
        self._cluster.cloud.failing_partition.until_s = 0.0
        for disk in self._cluster.disks.values():
            disk.sick_until_s = 0.0
        for wrong in self._cluster.cloud.wrong_answers.values():
            wrong.end()
        self._cluster.cloud.change_faults(faults)
        self._cluster.switch.faults = faults.network

    def _repeat(self, every_s: float, event: Callable[[], None]) -> None:
        if not every_s:
            return

        def happen() -> None:
            if self.running:
                event()
                self._world.schedule(self._random.expovariate(1 / every_s), happen)

        self._world.schedule(self._random.expovariate(1 / every_s), happen)

    def _pick(self) -> SimNode | None:
        """Return a live process, mostly a broker; never the cloud."""
        brokers = [node for node in self._world.nodes.values() if node.alive and node.name in self._cluster.brokers]
        others = [
            node
            for node in self._world.nodes.values()
            if node.alive and node is not self._cluster.cloud.node and node.name not in self._cluster.brokers
        ]
        group = brokers if brokers and (not others or self._random.random() < 0.7) else others
        return self._random.choice(group) if group else None

    def _kill(self) -> None:
        node = self._pick()
        if node is None:
            return
        self._meet("kill", node.name)
        if self._random.random() < 0.25:
            self._cluster.switch.silence(node)
        else:
            node.kill()
        self.restart_later(node.name)

    def restart_later(self, name: str) -> None:
        """Start a dead process again after a drawn time."""
        delay_s = self._random.uniform(0.05, self._faults.down_s_max)
        self._world.schedule(delay_s, lambda: self._restart(name))

    def _pause(self) -> None:
        node = self._pick()
        if node is not None:
            self._meet("pause", node.name)
            node.pause(self._random.uniform(0.01, self._faults.pause_s_max))

    def _cut_link(self) -> None:
        node = self._pick()
        if node is None:
            return
        self._meet("link cut", node.name)
        seconds = self._random.uniform(0.05, self._faults.link_cut_s_max)
        kind = self._random.randrange(4)
        others = [name for name in self._world.nodes if name not in (node.name, self._cluster.cloud.node.name)]
        if kind == 0 and others:
            self._cluster.switch.cut(node.name, self._random.choice(others), seconds)
        elif kind == 1 and others:
            self._cluster.switch.cut(node.name, self._random.choice(others), seconds, both=False)
        elif kind == 2:
            self._cluster.switch.isolate(node.name, seconds)
        elif node.name in self._cluster.doors:
            doors = self._cluster.doors[node.name]
            doors.block(seconds, only=self._random.choice([None, 0, 1, 2]))

    def _stop(self) -> None:
        name = self._random.choice(self._cluster.brokers)
        node = self._world.nodes[name]
        if node.alive:
            self._meet("stop", name)
            node.at_death(lambda: self.restart_later(name))
            self._cluster.stop_broker(name)

    def _move(self) -> None:
        self._cluster.move(self._random.randrange(self._cluster.shape.partitions))

    def _seize(self) -> None:
        for name in self._cluster.brokers:
            self._meet("seize", name)
        self._cluster.move(self._random.randrange(self._cluster.shape.partitions), seize=True)

    def _jump(self) -> None:
        node = self._pick()
        if node is not None:
            self._cluster.jump(node)

    def _sicken(self) -> None:
        sickness = self._cluster.cloud.sickness
        if sickness.until_s > self._world.now:
            return
        sickness.until_s = self._world.now + self._faults.sick_s_max * self._random.uniform(0.5, 1)
        sickness.remainder = self._random.randrange(SICK_SHARE)

    def _sicken_disk(self) -> None:
        name = self._random.choice(self._cluster.brokers)
        disk, kind = self._cluster.disks.get(name), self._random.choice(SICKNESSES)
        if disk is not None and disk.sick_until_s <= self._world.now:
            self._meet(f"disk {kind}", name)
            disk.fail_until(kind, self._world.now + self._faults.disk_s_max * self._random.uniform(0.1, 1.0))

    def _sicken_part(self) -> None:
        failing, now_s = self._cluster.cloud.failing_partition, self._world.now
        if failing.until_s > now_s:
            return
        number, hangs = self._random.randrange(self._cluster.shape.partitions), self._random.random() < 0.5
        service = self._random.choice(["queue", "store"])
        kind = f"part of the {service} {'hangs' if hangs else 'fails'}"
        self._world.trace.event(now_s, kind, number)
        for name in self._cluster.brokers:
            self._meet(kind, name)
        until_s = now_s + self._faults.part_s_max * self._random.uniform(0.1, 1.0)
        failing.fail_until(number, until_s, service=service, hangs=hangs)

    def _cut_log(self) -> None:
        """Cut a log. All brokers are killed, or an operator restarts them later."""
        partition = self._random.choice(self._cluster.present_partitions())
        log = self._cluster.cloud.queue.log(partition)
        lost = min(self._random.randint(1, LOG_CUT_ENTRIES_MAX), self._young_entries(log.entries), len(log.entries) - 1)
        if lost <= 0:  # an owner does not open an empty log whose objects are there
            return
        self._world.trace.event(self._world.now, "log cut", partition.partition, log.end - lost)
        lives = [self._world.nodes[name] for name in self._cluster.brokers if self._world.nodes[name].alive]
        live = self._random.random() < self._faults.log_cut_live_rate
        for node in lives:
            self._meet("log cut live" if live else "log cut", node.name)
            if live:
                node.at_death(partial(self.restart_later, node.name))
                self._world.schedule(self._random.uniform(1.0, OPERATOR_S_MAX), partial(self._end_life, node))
            else:
                node.kill()
                self.restart_later(node.name)
        self._cluster.cloud.cut_log(partition, log.end - lost)

    def _young_entries(self, entries: Sequence[Entry]) -> int:
        """Return how many of the newest entries of a log are young enough for a cut."""
        age_ms = self._faults.log_cut_age_ms_max
        if not age_ms:
            return len(entries)
        least_ms = EPOCH_MS + self._world.now * 1000 - age_ms
        return sum(1 for _ in takewhile(lambda entry: entry.time_ms >= least_ms, reversed(entries)))

    def _end_life(self, node: SimNode) -> None:
        """Restart a broker that has not been restarted since a cut, as an operator does after `log-lost`."""
        if not node.alive:
            return
        if self._random.random() < 0.5:
            self._cluster.stop_broker(node.name)
            self._world.schedule(DRAIN_S_MAX, node.kill)
        else:
            node.kill()

    def _refuse(self) -> None:
        name = self._random.choice(self._cluster.brokers)
        self._meet("refuse", name)
        self._cluster.switch.refuse(name, self._random.uniform(0.1, self._faults.refuse_s_max))

    def _report_suspicion(self) -> None:
        receiver, suspect = self._random.choice(self._cluster.brokers), self._random.choice(self._cluster.brokers)
        self._cluster.report_suspicion(receiver, suspect)

    def _lie(self, wrong: WrongAnswers) -> None:
        nodes = [node.name for node in self._world.nodes.values() if node is not self._cluster.cloud.node]
        wrong.begin_episode(self._world.now, nodes)

    def _meet(self, event: str, name: str) -> None:
        """Record the states of a broker's partitions and batches when an event happens."""
        broker = self._cluster.live.get(name)
        for state in states_of(broker) if broker is not None else ():
            self.met[event, state] = self.met.get((event, state), 0) + 1
