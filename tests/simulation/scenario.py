"""One whole run: a cluster drawn from the seed runs under faults, heals, settles, and is checked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from memq.client.admin import AsyncAdmin
from memq.client.producer.delivery import Ack, AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.client.producer.settings import AcksLike
from memq.compaction.reader import CompactedLogReader, ManifestFiles
from memq.errors import MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.chaos import Chaos
from memq.simulation.cluster import CLUSTER, PORT
from memq.simulation.ports.cloud import Doors
from memq.simulation.ports.faults import LEVELS
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import World
from memq.topic import is_state_topic
from tests.producer_cores import RecordingCore, noted_cores
from tests.simulation.audit_rules import AuditRules, object_reader
from tests.simulation.auditor import LIVE_AUDITOR
from tests.simulation.auditor_life import AuditorLife
from tests.simulation.bounded_reads import BOUNDED_READER, BoundedReads
from tests.simulation.checked_cluster import CheckedCluster
from tests.simulation.compactor import COMPACTOR, run_compactor
from tests.simulation.consumers import run_consumer
from tests.simulation.delay_life import DelayLife
from tests.simulation.delay_rules import DelayRules
from tests.simulation.direct_life import Checkpoint, DirectLife
from tests.simulation.failing_partition_rules import POLL_S as OTHERS_POLL_S
from tests.simulation.failing_partition_rules import OthersGoOn
from tests.simulation.idle_life import IDLE, IdleLife
from tests.simulation.listener_life import LISTENED, MEMBERS, ListenerLife
from tests.simulation.live_rules import LiveRules
from tests.simulation.log_truth import WATCHER, LogTruth, run_watcher
from tests.simulation.log_watch import LogWatch, remembered_pointers
from tests.simulation.lost_log_rules import LostLogRules
from tests.simulation.moment_audits import AUDIT_COMMAND, MomentAudits
from tests.simulation.named_producer import NamedLife
from tests.simulation.named_rules import NamedRules, no_holes
from tests.simulation.operator_life import OperatorLife
from tests.simulation.plain_producer import PlainProducer, Running
from tests.simulation.plan import Plan
from tests.simulation.pop_life import GROUPS, POPPERS, PopLife
from tests.simulation.queue_life import QUEUES, WORKERS, QueueLife
from tests.simulation.reader import Delivered
from tests.simulation.reduced_constants import PARTS, scaled
from tests.simulation.restore_rules import RestoreRules
from tests.simulation.rules_life import ROUNDS, WARD, RulesLife
from tests.simulation.run_report import Report
from tests.simulation.sealed_life import SEALED, SealedLife
from tests.simulation.sent_acks import SentAcks, noted_acks, noted_staged_acks
from tests.simulation.shard_answers import FoldedShards
from tests.simulation.staged_rules import StagedRules
from tests.simulation.staged_writer import StagedLife
from tests.simulation.staging_door import StagingDoors
from tests.simulation.state_restore_rules import StateRestoreRules
from tests.simulation.topic_churn import TopicChurn
from tests.simulation.transaction_life import TransactionLife
from tests.simulation.transaction_rules import TransactionRules
from tests.simulation.wishes import draw_marks, facets_of

SIZES = (0, 0, 10, 10, 300, 300, 3_000)  # bytes of a value next to its name
CALM_ACK_S = 4.5  # opening the partition, and a back-off of up to 2 s after that; what hangs waits 5 s and more
# Behind the batches of a full ring a record waits longer where each of them waits for a shared object.
LEVEL_OF: dict[str, AcksLike] = {"product": "all", "one": 1, "none": 0}
AUDIT_S = 10.0
REPORT_S = 3.0  # the longest time until a report lands in a healed world
SWEEP_ROUNDS = 6  # under way, finds, two while what was found waits for its confirmation, deletes; one to spare
SWEEP_ROUND_S_MAX = 300.0  # thin margins make a pass read all logs and lists for every few objects
SWEEP_POLL_S = 1.0
FORGET_S = 120.0  # for a round that begins again whenever a log is opened
COMPACTION_SWEEP_S = 15.0  # what the manifests of one partition take that retention makes while the sweep is at work
KEYS = 8  # of a producer that sends by keys
POLL_S = 0.02  # interval between checks whether the run has ended
LIVES: dict[str, tuple[type[TopicChurn], int]] = {  # processes with topics of their own, and how many of one life
    "churn": (TopicChurn, 4),
    "seal": (SealedLife, SEALED),
    "listen": (ListenerLife, LISTENED),
    "idle": (IdleLife, IDLE),
    "queue": (QueueLife, QUEUES),
    "pop": (PopLife, GROUPS),
    "rules": (RulesLife, ROUNDS),
}
STARTED = (*MEMBERS, *WORKERS, *POPPERS, WARD)  # by the process of their topic or queue
LEARN_RATE = 0.1  # how often it asks for the map of its topic: else it does once a minute


class Scenario:
    """Runs one plan in one world."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.cluster = CheckedCluster(world, plan.faults, plan.shape)
        self.checker = self.cluster.checker
        self.checker.commits.goes_back = plan.wanders
        if plan.faults == LEVELS["calm"]():
            shape, settings = plan.shape, plan.shape.settings
            ring_s = shape.shared_age_ms / 1000 * settings.ring_slots / settings.uploads_in_flight_max
            self.checker.ack_s_max = CALM_ACK_S + (ring_s if settings.shared_objects else 0)
            self.checker.throttles = lambda: sum(each.throttled_blocks for each in self.cluster.counters)
        self.checker.cut_live = plan.faults.chaos.log_cut_live_rate > 0
        holes = self.checker.lost_numbers if self.checker.cut_live else no_holes
        self.names = NamedRules(self.checker.logs, world.fail, lambda: self.checker.cuts, holes)
        self.batches = StagedRules(self.checker, world.fail)
        self.checker.groups.wishes = self.checker.reports.wishes = plan.wishes or {}
        self.bounded = BoundedReads(self.cluster)
        states, calm = self.cluster.cloud.state_logs, plan.faults == LEVELS["calm"]()
        error_ms = plan.shape.clock_error_ms
        self.delays = DelayRules(states, world.fail, lambda: world.now, error_ms, calm=calm)
        self.transactions = TransactionRules(states, world.fail, self.checker.logs, staged=PARTS in plan.constants)
        self.staging = StagingDoors()
        for checker in (self.checker, self.cluster.transient):
            checker.on_delivered, checker.is_held = self._landed, states.names
        self.done: dict[str, bool] = {f"producer-{number}": False for number in range(len(plan.producers))}
        self.groups = dict.fromkeys(plan.consumers)
        self.consumers = [f"consumer-{number}" for number in range(len(plan.consumers))]
        self._live_faults: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self.shards = FoldedShards(self.cluster)
        self.audits = MomentAudits(object_reader(self.cluster.objects), plan.audits_later_ms, world.fail, self.shards)
        self.others = OthersGoOn(
            self.cluster.cloud.failing_partition, self.checker, self.groups, lambda: world.now, world.fail
        )
        self.chaos = Chaos(self.cluster, plan.faults.chaos, self.restart)
        self.auditor = AuditorLife(world, plan, self.cluster, lambda: self.chaos.running) if plan.audited else None

    def run(self) -> Report:
        """Run to the end and return what came out.

        Raises: SimulationError.
        """
        world = self.world
        self.cluster.start()
        if self.plan.faults.is_only_a_part_sick():
            self._start_watcher()
        self._start_processes()
        self.chaos.start()
        if self.plan.faults.is_only_a_part_sick():
            self._look_at_others()
        world.run(self.plan.active_s, done=self._all_done, poll_s=POLL_S)
        self.chaos.end()
        if WATCHER in self.world.nodes:
            self.world.nodes[WATCHER].kill()
        for name in self.cluster.brokers:
            self.restart(name)
        world.run(self.plan.end_s, done=self._all_done, poll_s=POLL_S)
        self._check_life()
        self._wait_for_reports()
        for name in (*self.consumers, AUDIT_COMMAND, BOUNDED_READER):  # the checks need none of them
            if name in self.world.nodes:
                self.world.nodes[name].kill()
        self.checker.finish(world.random("finish").randrange)
        self.cluster.transient.finish(world.random("finish transient").randrange)
        self.names.finish()
        self.batches.finish()
        self._check_sweep()
        self._check_forgotten_topics()
        self._check_audit()
        logs_are_cut = self.plan.faults.chaos.log_cut_every_s > 0
        if (self.plan.shape.compaction or logs_are_cut) and "staged" not in self.plan.producers:
            self._check_restore()
        self._check_restored_groups()
        self._check_lost_log()
        self.checker.check_lag(self.plan.shape.settings, world.random("lag").randrange)
        if self.auditor is not None:
            self._live_faults |= self.auditor.check_faults()
        world.collect()
        world.check()
        return self._report()

    def _look_at_others(self) -> None:
        """Look now and then until the world is healed."""
        if self.chaos.running:
            self.others.look()
            self.world.schedule(OTHERS_POLL_S, self._look_at_others)

    def _all_done(self) -> bool:
        """Say whether all producers have ended, all groups have read to the end, and nothing acked is missing."""
        if not all(self.done.values()) or not all(map(self.checker.groups.is_drained, self.groups)):
            return False
        return not (self.checker.missing() or self.delays.missing() or self.transactions.missing())

    def _check_life(self) -> None:
        """In a healed world everybody gets an answer, and every group reads to the end."""
        waiting = [name for name, done in self.done.items() if not done]
        waiting += [group for group in self.groups if not self.checker.groups.is_drained(group)]
        if waiting:
            self.world.fail(
                f"{', '.join(waiting)} did not come to an end within {self.plan.end_s:g} s in a healed world"
            )
        if missing := self.delays.missing() or self.transactions.missing():
            self.world.fail(f"{len(missing)} held records do not come, the first is {missing[0][:40]!r}")

    def _landed(self, found: Delivered) -> None:
        self.delays.landed(found)
        self.transactions.landed(found)

    def _wait_for_reports(self) -> None:
        """Give the last reports of those that live their time, where clients report."""
        interval_ms = self.plan.shape.audit_interval_ms
        if interval_ms:
            self.world.run(2 * interval_ms / 1000 + REPORT_S)

    def _check_sweep(self) -> None:
        """Give the sweep its time, and check that it left nothing behind."""
        shape = self.plan.shape
        if shape.housekeeping_s:
            if shape.compaction:
                self.world.nodes[COMPACTOR].kill()
            # The clocks of the two passes are off, and so was the compactor's by which originals have their age.
            errors_ms = shape.clock_error_ms * (4 if shape.compaction else 2)
            sweep_s = (shape.sweep_age_ms + shape.sweep_confirm_ms + errors_ms) / 1000
            sweep_s += COMPACTION_SWEEP_S * shape.partitions if shape.compaction else 0.0
            since_s = self.world.now
            self.cluster.left_objects(since_s)  # notes the objects that sweeps keep now
            self.world.run(sweep_s)
            enough = {name: count + SWEEP_ROUNDS for name, count in self.cluster.rounds.items()}

            def done() -> bool:
                ended = any(self.cluster.rounds[name] >= count for name, count in enough.items())
                return ended or not self.cluster.left_objects(since_s)

            self.world.run(SWEEP_ROUNDS * SWEEP_ROUND_S_MAX, done=done, poll_s=SWEEP_POLL_S)
            left = self.cluster.left_objects(since_s)
            if left:
                self.world.fail(f"{len(left)} objects are left that no pointer names, the first is '{left[0]}'")

    def _check_audit(self) -> None:
        """Audit the remaining log, and compare the result with the known truth."""
        cluster, cloud = self.cluster, self.cluster.cloud
        queue = CompactedLogReader(cloud.queue, ManifestFiles(CLUSTER, cloud.handler), cloud.node.clock)
        rules = AuditRules(cluster.topic, queue, cluster.objects, self.checker.logs, self.world.fail, self.shards)
        work = cloud.node.loop.create_task(rules.check(self.world.now, self.world.random("audit")))
        self.world.run(AUDIT_S, done=work.done)
        assert work.done(), "the audit does not end"
        work.result()
        self.audits.finish(rules.sequences())
        if self.auditor is not None:
            self.auditor.wait()
        if self.plan.shape.audit_interval_ms:
            live = LiveRules(cluster.topic, self.checker.reports.history, cluster.objects, self.world.fail, self.shards)
            live.check(self.world.random("live audit"))
            self._live_faults = live.injected
            if self.auditor is not None:
                self.auditor.check(live)

    def _start_processes(self) -> None:
        """Start all processes of the plan but the brokers."""
        for name in self.done:
            self._start_producer(name)
        for name in self.consumers:
            self._start_consumer(name)
        if self.plan.shape.compaction:
            self._start_compactor()
        if self.plan.audits:
            self._start_audit_command()
        if self.plan.wishes:
            self._start_bounded_reader()
        if self.auditor is not None:
            self.auditor.start()

    def _check_restore(self) -> None:
        """Lose all pointers, and restore them, those in compacted parts, too: each record exists once."""
        cluster = self.cluster
        checker, objects = self.checker, cluster.objects

        def repeats(value: bytes) -> bool:
            return checker.records[value].repeats  # a row of a task that may run again

        rules = RestoreRules(CLUSTER, cluster.topic, objects, checker.logs, self.world.fail, repeats)
        node = cluster.cloud.node
        work = node.loop.create_task(rules.check(node.clock, self.world.random("restore")))
        self.world.run(AUDIT_S, done=work.done)
        assert work.done(), "the restore does not end"
        work.result()

    def _check_forgotten_topics(self) -> None:
        """Give the owners of groups their time, and check that no group has a position in a deleted topic."""
        cloud = self.cluster.cloud

        def left() -> set[str]:
            return {each for each in cloud.state_logs.named_topics() if cloud.cluster.registry.deleted(each)}

        self.world.run(FORGET_S, done=lambda: not left(), poll_s=1.0)
        if left():
            self.world.fail(f"groups have positions in {len(left())} deleted topics, the first is {min(left())}")

    def _check_restored_groups(self) -> None:
        """Lose the queue, and restore it with the groups: each continues at the position of the last snapshot."""
        cluster, node = self.cluster, self.cluster.cloud.node
        states = [topic for topic in cluster.cloud.cluster.registry.topics() if is_state_topic(topic.name)]
        if not states or self.plan.shape.compaction or self.plan.faults.chaos.log_cut_every_s > 0:
            return
        parts = (cluster.topic, states[0], cluster.objects, self.checker.logs, self.world.fail)
        rules = StateRestoreRules(CLUSTER, *parts, cluster.cloud.state_logs.waiting(), self.delays.cancelled_holds())
        work = node.loop.create_task(rules.check(node.clock, self.world.random("restored groups")))
        self.world.run(AUDIT_S, done=work.done)
        assert work.done(), "the restore of groups does not end"
        work.result()

    def _check_lost_log(self) -> None:
        """Let the queue lose a log, and sweep: no object is deleted that the log named."""
        cluster, node = self.cluster, self.cluster.cloud.node
        rules = LostLogRules(CLUSTER, cluster.topic, cluster.objects, self.checker.logs, self.world.fail)
        work = node.loop.create_task(rules.check(node.clock, self.world.random("lost log")))
        self.world.run(AUDIT_S, done=work.done)
        assert work.done(), "the sweep does not end"
        work.result()

    def _report(self) -> Report:
        checker = self.checker
        return Report(
            seed=self.world.seed,
            trace_hash=self.world.trace.hash(),
            seconds=self.world.now,
            steps=self.world.steps,
            acked=checker.acked,
            given_up=checker.given_up,
            pointers=sum(len(log.entries) for log in checker.logs.values()),
            counts=checker.counts()
            | {
                "forwarded": sum(each.forwarded_blocks for each in self.cluster.counters),
                "replayed": sum(each.replayed_blocks for each in self.cluster.counters),
            }
            | self.audits.counts
            | ({"delayed": len(self.delays.records)} if self.delays.records else {})
            | ({"bounded": self.bounded.done, "left out": self.bounded.left_out} if self.plan.wishes else {}),
            met=self.cluster.cloud.met() | self.chaos.met,
            live_faults=self._live_faults,
        )

    # ---- processes -----------------------------------------------------------------------------

    def restart(self, name: str) -> None:
        """Start a dead process again."""
        if self.world.nodes[name].alive:
            return
        if name in self.cluster.brokers:
            self.cluster.start_broker(name)
        elif name.startswith("consumer"):
            self._start_consumer(name)
        elif name == COMPACTOR:
            self._start_compactor()
        elif name == AUDIT_COMMAND:
            self._start_audit_command()
        elif name == BOUNDED_READER:
            self._start_bounded_reader()
        elif name == LIVE_AUDITOR and self.auditor is not None:
            self.auditor.start()
        elif name not in STARTED and not self.done[name]:
            self._start_producer(name)

    def _start_consumer(self, name: str) -> None:
        group = self.plan.consumers[int(name.rpartition("-")[2])]
        self._lives[name] = self._lives.get(name, 0) + 1

        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            wish = (self.plan.wishes or {}).get(group)
            await run_consumer(node, runtime, self.cluster, group, wanders=self.plan.wanders, wish=wish)

        self.cluster.spawn(name, main)

    def _start_compactor(self) -> None:
        async def main(node: SimNode, runtime: Runtime, doors: Doors) -> None:
            await run_compactor(node, runtime, self.cluster, doors)

        self.cluster.spawn(COMPACTOR, main)

    def _start_audit_command(self) -> None:
        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            brokers = ",".join(f"{host}:{PORT}" for host, _port in self.cluster.addresses())
            await self.audits.run(node, runtime, brokers, self.cluster.topic.name)

        self.cluster.spawn(AUDIT_COMMAND, main)

    def _start_bounded_reader(self) -> None:
        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await self.bounded.run(node, runtime)

        self.cluster.spawn(BOUNDED_READER, main)

    def _start_watcher(self) -> None:
        cluster, failing = self.cluster, self.cluster.cloud.failing_partition
        truth = cluster.truth = LogTruth(
            cluster.read_partitions, self.checker.logs, failing, lambda: self.world.now, self.world.fail
        )
        self.checker.on_committed = truth.committed

        async def main(_node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await run_watcher(runtime, [f"{host}:{PORT}" for host, _port in cluster.addresses()], cluster.topic, truth)

        cluster.spawn(WATCHER, main)

    def _start_producer(self, name: str) -> None:
        kind = self.plan.producers[int(name.rpartition("-")[2])]
        main = {
            "plain": self._plain_main,
            "clone": self._plain_main,
            "named": self._named_main,
            "staged": self._staged_main,
            "direct": self._direct_main,
            "operator": self._operator_main,
            "delay": self._delay_main,
            "transaction": self._transaction_main,
        }.get(kind, partial(self._topics_main, kind=kind) if kind in LIVES else self._product_main)
        self._lives[name] = self._lives.get(name, 0) + 1
        self.cluster.spawn(name, main)

    def _values(self, node: SimNode, partition: int, *, keyed: bool = False) -> list[bytes]:
        """Make the records of one block, of a partition or of a key; a new life of a producer is a new stream."""
        stream = f"{node.name}.{self._lives[node.name]}"
        values: list[bytes] = []
        count = node.random.randint(1, self.plan.block_records_max)
        for mark in draw_marks(node.random, count) if self.plan.wishes else [b""] * count:
            number = self._sent[stream] = self._sent.get(stream, 0) + 1
            words = f"{stream} {partition} {number} ".encode() + mark
            value = words + node.random.randbytes(node.random.choice(SIZES))
            self.checker.sent(stream, partition, number, value, keyed=keyed)
            values.append(value)
        return values

    def _blocks_left(self, name: str) -> int:
        """Return how many blocks the process sends in this life: all lives together send about the plan's number."""
        return max(10, self.plan.blocks // self._lives[name])

    async def _rest(self, name: str, blocks_left: int) -> None:
        """Rest in the middle of the first life, when the plan wants that."""
        if self.plan.rest_s and self._lives[name] == 1 and blocks_left == self.plan.blocks // 2:
            await asyncio.sleep(self.plan.rest_s)

    async def _plain_main(self, node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        cluster = self.cluster
        clone = self.plan.producers[int(node.name.rpartition("-")[2])] == "clone"  # all of them have one identity
        producers = [
            PlainProducer(runtime, cluster.addresses(), cluster.topic, number, self.checker, number + 1 if clone else 0)
            for number in range(self.plan.shape.partitions)
        ]
        async with Running([producer.run for producer in producers]):
            for left in range(self._blocks_left(node.name), 0, -1):
                await self._rest(node.name, left)
                partition = node.random.randrange(len(producers))
                await producers[partition].send(self._values(node, partition))
                await asyncio.sleep(node.random.uniform(0, self.plan.pace_s_max))
            for producer in producers:
                await producer.flush()
        self.done[node.name] = True

    async def _named_main(self, node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        made, lives = partial(self._producer, node, runtime), self._lives[node.name]
        life = NamedLife(self.plan, node, self.checker, self.names, lambda name: made(name=name), lives)
        await life.run(self._blocks_left(node.name))
        self.done[node.name] = True

    async def _staged_main(self, node: SimNode, runtime: Runtime, doors: Doors) -> None:
        brokers = [f"{host}:{PORT}" for host, _port in self.cluster.addresses()]
        life = StagedLife(self.plan, node, runtime, brokers, doors.store, self.batches)
        await life.run(self.plan.blocks // 5)
        self.done[node.name] = True

    def _kill(self, node: SimNode) -> None:
        node.kill()
        self.chaos.restart_later(node.name)

    async def _direct_main(self, node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        checkpoint = self._checkpoints.setdefault(node.name, Checkpoint())
        brokers = [f"{host}:{PORT}" for host, _port in self.cluster.addresses()]
        life = DirectLife(self.plan, node, runtime, brokers, self.checker, checkpoint, partial(self._kill, node))
        await life.run(self.plan.blocks // 5)
        self.done[node.name] = True

    async def _topics_main(self, node: SimNode, runtime: Runtime, _doors: Doors, kind: str) -> None:
        life, topics = LIVES[kind]
        await life(node, runtime, self.cluster, self._lives[node.name]).run(topics)
        self.done[node.name] = True

    async def _operator_main(self, node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        await OperatorLife(node, runtime, self.cluster).run()
        self.done[node.name] = True

    async def _delay_main(self, node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        producer, admin = self._producer(node, runtime), AsyncAdmin(self.cluster.address_text(), runtime=runtime)
        life = DelayLife(self.plan, node, producer, admin, self.checker, self.delays, self._lives[node.name])
        await life.run(self._blocks_left(node.name))
        self.done[node.name] = True

    async def _transaction_main(self, node: SimNode, runtime: Runtime, doors: Doors) -> None:
        self.staging.of[id(runtime)] = doors.store
        make, kill = partial(self._producer, node, runtime), partial(self._kill, node)
        parts = (self.cluster.address_text(), runtime, make, kill, self._lives[node.name])
        await TransactionLife(self.plan, node, *parts, self.checker, self.transactions).run()
        self.done[node.name] = True

    def _producer(
        self, node: SimNode, runtime: Runtime, *, acks: AcksLike = "all", name: str | None = None, **settings: Any
    ) -> AsyncProducer:
        return AsyncProducer(
            [f"{host}:{PORT}" for host, _port in self.cluster.addresses()],
            acks=acks,
            linger_ms=node.random.choice([0, 5, 100]),
            delivery_timeout_ms=self.plan.shape.settings.delivery_timeout_ms,
            codec=node.random.choice(["none", "zstd", "lz4"]),
            name=name,
            runtime=runtime,
            **settings,
        )

    async def _product_main(self, node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        kind = self.plan.producers[int(node.name.rpartition("-")[2])]
        producer, core = self._producer(node, runtime, acks=LEVEL_OF[kind]), RecordingCore.last
        keyed, topic = self.plan.keyed and kind == "product", self.plan.shape.topic
        pending: dict[AsyncDelivery, list[bytes]] = {}
        watchers: list[asyncio.Task[None]] = []
        for left in range(self._blocks_left(node.name), 0, -1):
            await self._rest(node.name, left)
            number = node.random.randrange(KEYS if keyed else self.plan.shape.partitions)
            if keyed and node.random.random() < LEARN_RATE:
                watchers.append(asyncio.create_task(core.refresh(topic)))
            for value in self._values(node, number, keyed=keyed):
                tag, headers = facets_of(value)
                try:
                    if keyed:
                        key = b"key-%d" % number
                        delivery = await producer.send(topic, value, key=key, headers=headers or None, tag=tag)
                    else:
                        delivery = await producer.send(topic, value, partition=number, headers=headers or None, tag=tag)
                except MemqError:
                    self.checker.give_up(value)
                    continue
                if delivery not in pending:
                    pending[delivery] = []
                    watchers.append(asyncio.create_task(self._watch(delivery, pending, kind)))
                pending[delivery].append(value)
            await asyncio.sleep(node.random.uniform(0, self.plan.pace_s_max))
        await asyncio.gather(*watchers)
        with contextlib.suppress(MemqError):  # what failed was counted by its delivery
            await producer.close()
        self.done[node.name] = True

    def _acked(self, kind: str, value: bytes, ack: Ack) -> None:
        """Note that a record is acked, by the kind of its producer."""
        if kind == "one":
            self.checker.ack_held(value)
        elif kind == "none":
            self.checker.left(value)
        else:
            self.checker.ack(value, ack)

    async def _watch(self, delivery: AsyncDelivery, pending: dict[AsyncDelivery, list[bytes]], kind: str) -> None:
        try:
            ack = await delivery
        except MemqError:
            for value in pending.pop(delivery):
                self.checker.give_up(value)
        else:
            for value in pending.pop(delivery):
                self._acked(kind, value, ack)


def run_plan(plan: Plan, *, echo: Callable[[str], None] | None = None) -> Report:
    """Run a plan in a world of its own. Raises: SimulationError."""
    with scaled(plan.constants), World(plan.seed, echo=echo) as world, remembered_pointers(), noted_cores():
        clones, calm = not {"clone", "direct"}.isdisjoint(plan.producers), plan.faults == LEVELS["calm"]()
        watch = LogWatch(world, clones=clones, calm=calm)
        logger = logging.getLogger("memq")
        logger.addHandler(watch)
        scenario = Scenario(world, plan)
        cluster, monitor = scenario.cluster, scenario.cluster.cloud.monitor
        acks = SentAcks(cluster.topic.id, cluster.checker, cluster.transient, monitor, scenario.batches)
        try:
            with noted_acks(acks.note), noted_staged_acks(acks.note_staged), scenario.staging.used():
                return scenario.run()
        finally:
            logger.removeHandler(watch)
