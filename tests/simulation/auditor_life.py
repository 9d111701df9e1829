"""The live audit in one run: its process and database, the time at its end, and its expected results."""

from __future__ import annotations

from collections.abc import Callable

from memq.format.report import Report
from memq.runtime.runtime import Runtime
from memq.simulation.ports.cloud import Doors
from memq.simulation.ports.faults import LEVELS
from memq.simulation.world.node import EPOCH_MS, SimNode
from memq.simulation.world.world import World
from tests.simulation.auditor import LIVE_AUDITOR, AuditDatabase, StoredAudit, run_auditor
from tests.simulation.auditor_faults import STATION, AuditorFaults, send_report
from tests.simulation.auditor_rules import AuditorRules
from tests.simulation.checked_cluster import CheckedCluster
from tests.simulation.live_replay import LATER_MS
from tests.simulation.live_rules import LiveRules
from tests.simulation.plan import Plan

RESTS_S_MAX = 300.0  # a drain hands over for 30 s, then uploads a ring; a call that hung in bad weather lasts 40 s
READS_S_MAX = 120.0
POLL_S = 1.0
JUDGES_S = 12.0  # a log that nobody reports about is read each fifth round
DATABASE_FAULT_RATE = 0.05  # of its transactions, in bad weather


class AuditorLife:
    """The auditor of a run. `weather` says whether the weather lasts: then its database fails now and then."""

    def __init__(self, world: World, plan: Plan, cluster: CheckedCluster, weather: Callable[[], bool]) -> None:
        self._world = world
        self._plan = plan
        self._cluster = cluster
        self._weather = weather
        self._database = AuditDatabase(world.random("audit database"), self._fails)
        lies = "store" in plan.faults.lies
        stored = StoredAudit(self._database)
        checker = cluster.checker
        self._rules = AuditorRules(
            cluster.current_topic, stored, checker.logs, checker.reports.last, world.fail, store_lies=lies
        )
        checker.trims = self._rules.trimmed

    def start(self) -> None:
        """Start its process, which continues with what is stored."""

        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await run_auditor(node, runtime, self._cluster.address_text(), self._database)

        self._cluster.spawn(LIVE_AUDITOR, main)

    def wait(self) -> None:
        """Let the auditor read all, and wait for nothing any more.

        First each broker serves again, and the queue has all that it held: the play assumes both. Of a broker that
        leaves and refuses connections the auditor rightly says that it may hold what is missing.
        """
        self._world.run(RESTS_S_MAX, done=self._cluster.is_at_rest, poll_s=POLL_S)
        if not self._cluster.is_at_rest():
            self._world.fail(f"the brokers do not come to rest within {RESTS_S_MAX:g} s in a healed world")
        node = self._world.nodes[LIVE_AUDITOR]
        if not node.alive:
            self.start()
        self._let_read_all()
        self._world.nodes[LIVE_AUDITOR].clock.offset_ms += LATER_MS
        self._world.run(JUDGES_S)
        self._let_read_all()

    def check(self, live: LiveRules) -> None:
        """Compare what it says with what the audit says that played what landed."""
        self._rules.check(live)

    def check_faults(self) -> dict[str, int]:
        """Do faults to what is left, which it must name, and return them.

        Only brokers run next to it, and no rule holds any more.
        """
        cluster, world = self._cluster, self._world
        for name, node in world.nodes.items():
            if name not in (*cluster.brokers, LIVE_AUDITOR, cluster.cloud.node.name):
                node.kill()
        cluster.leave()
        queue, history = cluster.cloud.queue, cluster.checker.reports.history
        faults = AuditorFaults(cluster.topic, queue, history, cluster.objects, self._rules, self._until, world.fail)
        if faults.batches:
            faults.check_loss(self._report, EPOCH_MS + int(world.now * 1000))
            if not self._plan.shape.housekeeping_s:  # retention would take the batch, whose copy makes the log too old
                faults.check_doubling(world.random("auditor faults"))
        return faults.done

    def _let_read_all(self) -> None:
        if not self._until(self._rules.has_read_all):
            self._world.fail(f"the auditor does not come to the end within {READS_S_MAX:g} s in a healed world")

    def _fails(self) -> bool:
        rate = 0.0 if self._plan.faults == LEVELS["calm"]() else DATABASE_FAULT_RATE
        return self._weather() and self._world.random("audit database").random() < rate

    def _until(self, done: Callable[[], bool]) -> bool:
        self._world.run(READS_S_MAX, done=done, poll_s=POLL_S)
        return done()

    def _report(self, said: Report, home: int) -> None:
        async def main(_node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await send_report(runtime, self._cluster.address_text(), said, home)

        self._cluster.spawn(STATION, main)
