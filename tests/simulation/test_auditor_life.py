"""The end of a run with an auditor: it is judged once each broker answers, and the log has what brokers held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memq.client.producer.producer import AsyncProducer
from memq.runtime.runtime import Runtime
from memq.simulation.cluster import ClusterShape
from memq.simulation.ports.cloud import Doors
from memq.simulation.ports.faults import LEVELS
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import World
from tests.simulation.auditor import LIVE_AUDITOR
from tests.simulation.auditor_life import AuditorLife
from tests.simulation.checked_cluster import CheckedCluster
from tests.simulation.live_replay import LATER_MS
from tests.simulation.plan import Plan

AWAY_S = 40.0  # longer than the auditor's time to judge
SICK_S = 20.0
CUT_S = 40.0
RECORDS = 5


@contextmanager
def audited_cluster() -> Iterator[tuple[CheckedCluster, AuditorLife]]:
    with World(1) as world:
        plan = Plan(1, LEVELS["calm"](), ClusterShape(audit_interval_ms=1_000), audited=True)
        cluster = CheckedCluster(world, plan.faults, plan.shape)
        cluster.start()
        auditor = AuditorLife(world, plan, cluster, lambda: False)
        auditor.start()
        world.run(30.0, done=cluster.is_at_rest)
        assert cluster.is_at_rest()
        yield cluster, auditor


def send(cluster: CheckedCluster, name: str) -> None:
    """Send records that a broker acks, and then holds: their objects can't be stored."""

    async def main(_node: SimNode, runtime: Runtime, _doors: Doors) -> None:
        async with AsyncProducer(cluster.address_text(), acks=1, runtime=runtime) as producer:
            for number in range(1, RECORDS + 1):
                value = f"{name} 0 {number} ".encode()
                cluster.checker.sent(name, 0, number, value)
                await producer.send(cluster.topic.name, value)

    cluster.cloud.failing_partition.fail_until(0, cluster.world.now + SICK_S, service="store", hangs=False)
    node = cluster.spawn(name, main)
    cluster.world.run(SICK_S, done=lambda: not node.alive)


def records_in_log(cluster: CheckedCluster) -> int:
    entries = cluster.checker.logs[cluster.read_partitions[0]].entries
    return sum(entry.pointer.records for entry in entries)


def held_for_next_owner(cluster: CheckedCluster) -> int:
    return sum(len(broker.partitions.forwarder) for broker in cluster.live.values())


def test_the_auditor_is_judged_when_a_broker_that_left_answers_again() -> None:
    with audited_cluster() as (cluster, auditor):
        world, name = cluster.world, cluster.brokers[0]

        def start_again() -> None:
            cluster.start_broker(name)

        world.nodes[name].at_death(lambda: world.schedule(AWAY_S, start_again))
        cluster.stop_broker(name)
        world.run(1.0)
        offset_ms = world.nodes[LIVE_AUDITOR].clock.offset_ms
        auditor.wait()
        assert world.nodes[LIVE_AUDITOR].clock.offset_ms == offset_ms + LATER_MS
        assert world.now > AWAY_S
        assert cluster.is_at_rest()


def test_the_auditor_is_judged_when_the_log_has_what_a_ring_held() -> None:
    with audited_cluster() as (cluster, auditor):
        send(cluster, "sender")
        assert not cluster.is_at_rest()
        assert records_in_log(cluster) == 0
        auditor.wait()
        assert records_in_log(cluster) == RECORDS


def test_brokers_rest_when_the_log_has_what_one_of_them_held_for_the_next_owner() -> None:
    with audited_cluster() as (cluster, _auditor):
        world = cluster.world
        send(cluster, "sender")
        one, other = cluster.brokers
        cluster.switch.cut(one, other, CUT_S)
        cluster.move(0, seize=True)
        world.run(2.0)  # until clients learn that
        send(cluster, "late-sender")
        world.run(CUT_S, done=lambda: held_for_next_owner(cluster) > 0)
        cluster.cloud.failing_partition.until_s = 0.0
        world.run(CUT_S, done=lambda: records_in_log(cluster) == RECORDS)
        assert held_for_next_owner(cluster) > 0, "only the next owner has published"
        world.run(2 * CUT_S, done=cluster.is_at_rest)
        assert cluster.is_at_rest()
        assert records_in_log(cluster) == 2 * RECORDS


def test_a_broker_that_is_stopping_does_not_rest() -> None:
    with audited_cluster() as (cluster, _auditor):
        name = cluster.brokers[0]
        cluster.stop_broker(name)
        cluster.world.run(0.01)
        assert not cluster.is_at_rest(), "it refuses connections soon"
        cluster.world.run(60.0, done=lambda: not cluster.world.nodes[name].alive)
        cluster.start_broker(name)
        assert not cluster.is_at_rest(), "it does not answer yet"
        cluster.world.run(30.0, done=cluster.is_at_rest)
        assert cluster.is_at_rest()
