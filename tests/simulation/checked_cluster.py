"""The cluster of a scenario: one checker for the lasting topic, and one for the other topics."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any

from memq.runtime.runtime import Runtime
from memq.simulation.cluster import TOPIC_ID, ClusterShape, SimCluster
from memq.simulation.ports.cloud import Doors
from memq.simulation.ports.faults import WorldFaults
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import World
from memq.topic import Topic
from tests.simulation.checker import Checker
from tests.simulation.log_truth import LogTruth
from tests.simulation.observers import Observers
from tests.simulation.retention_rules import RetentionRules
from tests.simulation.retry_rules import RetryRules


class CheckedCluster(SimCluster):
    """A simulated cluster and its two checkers: `checker` of the lasting topic, `transient` of all others."""

    def __init__(self, world: World, faults: WorldFaults, shape: ClusterShape) -> None:
        super().__init__(world, faults, shape)
        self.truth: LogTruth | None = None  # what clients learn of logs is compared with it
        self.checker, self.transient = self._new_checker(), self._new_checker()
        self.checker.on_disk = shape.settings.ack1 == "disk"
        self._observers = Observers(TOPIC_ID, self.checker, self.transient, self._exists, world.fail)
        self.cloud.observer = self._observers

    def _new_checker(self) -> Checker:
        world, shape = self.world, self.shape
        window_ms = shape.settings.dedup_window_ms
        checker = Checker(self.objects, window_ms, world.fail, lambda: world.now, refuse=shape.refuse)
        if shape.housekeeping_s:
            checker.retention = RetentionRules(shape.settings, shape.clock_error_ms)
        return checker

    def _exists(self, topic_id: str) -> bool:
        return any(topic.id == topic_id for topic in self.cloud.cluster.registry.topics())

    def watch(self, topic: Topic) -> None:
        """Let the monitor of ownership, and the rules of reports and retention, know a topic that comes and goes."""
        self.checker.reports.transient[topic.id] = None
        if self.transient.retention is not None:
            self.transient.retention.others[topic.id] = topic.settings
        super().watch(topic)

    def listen(self, rules: RetryRules) -> None:
        """Check the listeners of one group from now on, in place of those before."""
        self.transient.on_retry_topic = rules.published
        self._observers.on_listeners = rules.committed

    def keep_alive(
        self,
        name: str,
        main: Callable[[SimNode, Runtime, Doors], Coroutine[Any, Any, None]],
        kill_rate: float,
        draw: Random,
    ) -> None:
        """Start a process that is dead; kill a live one with this probability, not in a healed world."""
        node = self.world.nodes.get(name)
        if node is None or not node.alive:
            self.spawn(name, main)
        elif not self.healed and draw.random() < kill_rate:
            node.kill()

    def end(self, names: Iterable[str]) -> None:
        """Kill processes that are alive."""
        for name in names:
            node = self.world.nodes.get(name)
            if node is not None and node.alive:
                node.kill()

    def leave(self) -> None:
        """Check nothing any more: from now on the run does faults to what is there."""
        self._observers.leave()
        for partition in self.cloud.queue.logs:
            self.cloud.monitor.drops(partition)

    def left_objects(self, since_s: float) -> list[str]:
        """Return the objects that a sweep should have taken, of all topics."""
        of_others = dict.fromkeys(self.transient.left_objects(since_s))
        return [key for key in self.checker.left_objects(since_s) if key in of_others]
