"""How a broker follows its coordinator, on virtual time: reads, elections and reports, also after failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from memq.broker.broker import HOUSEKEEPING_S, LOADS_INTERVAL_S, ROUND_PAUSE_S_MAX, Broker
from memq.errors import ClosedError, FencedError, UnreachableError
from memq.governor import Load
from memq.governor.memory import MemoryCoordinator
from memq.governor.planning import ClusterView
from memq.protocol.frames import AckLevel, Api
from memq.protocol.messages import Open
from memq.topic import Topic, TopicSettings
from tests.brokers import block_of, log_lines, write_frame
from tests.component.cluster_rig import Rig
from tests.component.served_brokers import Calls, away, on_memory_network, topic_named
from tests.memory_network import Client, MemoryNetwork
from tests.skipping_loop import now_s, skip


def topics_of(broker: Broker) -> list[str]:
    return [topic.name for topic in broker.partitions.topics()]


# ---- reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("governs", [True, False])
def test_an_idle_broker_reads_its_coordinator_and_governs_every_ten_seconds(governs: bool) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False, governs=governs)
        calls = Calls(broker.services.coordinator, "topics", "govern")
        begin_s = now_s()
        await skip(6 * LOADS_INTERVAL_S + 5)
        assert calls.since("govern", begin_s) == [10, 20, 30, 40, 50, 60] * governs
        assert calls.since("topics", begin_s) == sorted([10, 20, 30, 40, 50, 60] * (1 + governs))

    on_memory_network(work)


def test_a_change_that_no_watch_shows_is_read_within_ten_seconds() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = cluster.made("one", audit=False)
        broker.services.coordinator.watch = lambda callback: lambda: None  # type: ignore[method-assign]  # calls are lost
        await broker.start()
        await skip(1)
        await MemoryCoordinator(cluster.shared).create_topic(topic_named("late", 1))
        await skip(LOADS_INTERVAL_S - 2)
        assert topics_of(broker) == []
        await skip(1.5)
        assert topics_of(broker) == ["late"]

    on_memory_network(work)


def test_a_change_that_comes_while_the_broker_reads_is_read_next() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False)
        await skip(1)
        calls = Calls(broker.services.coordinator, "assignments")
        calls.takes_s["assignments"] = 0.1  # topics are read before them
        other = MemoryCoordinator(cluster.shared)
        await other.create_topic(topic_named("first", 1))
        await skip(0.15)
        await other.create_topic(topic_named("second", 2))
        await skip(3)
        assert topics_of(broker) == ["first", "second"]

    on_memory_network(work)


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.1, 0.4), (0.2, 0.8), (2.0, ROUND_PAUSE_S_MAX)])
def test_a_broker_that_is_notified_all_the_time_pauses_between_two_rounds(took_s: float, pause_s: float) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False, governs=False)
        await skip(1)
        calls = Calls(broker.services.coordinator, "topics")
        calls.takes_s["topics"] = took_s
        for _ in range(300):
            cluster.shared.changed()
            await skip(0.05)
        rounds_s = [later - before for before, later in pairwise(calls.at_s["topics"])]
        assert rounds_s == pytest.approx([took_s + pause_s] * len(rounds_s))
        assert len(rounds_s) > 3

    on_memory_network(work)


@pytest.mark.parametrize(
    ("call", "events"),
    [("topics", ["refresh-failed", "refresh-back"]), ("govern", ["governor-failed", "governor-back"])],
)
def test_a_coordinator_that_is_away_is_asked_every_second_until_it_is_back(
    call: str, events: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False, governs=call == "govern")
        await skip(1)
        calls = Calls(broker.services.coordinator, call)
        calls.fails[call] = away(3)
        begin_s = now_s()
        cluster.shared.changed()
        await skip(8)
        assert calls.since(call, begin_s) == [0, 1, 2, 3]
        assert broker.services.counters.coordinator_failures == 3
        assert broker.failure is None

    assert HOUSEKEEPING_S == 1.0
    with caplog.at_level(logging.INFO, "memq"):
        on_memory_network(work)
    lines = log_lines(caplog, logging.INFO)
    assert [line.partition(":")[0] for line in lines if line.startswith(("refresh-", "governor-"))] == events


def test_only_the_broker_whose_term_it_is_governs() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        one, two = cluster.made("one", audit=False), cluster.made("two", audit=False)
        never = cluster.made("three", audit=False, governs=False)
        assert [one.governs, two.governs, never.governs] == [False] * 3
        for broker in (one, two, never):
            await broker.start()
        assert one.governor is not None
        assert one.governor.term == 1
        assert [one.governs, two.governs, never.governs] == [True, False, False]
        assert await never.govern()
        assert await two.govern()

    on_memory_network(work)


def test_a_topic_of_a_cluster_that_nobody_governs_has_no_owner() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False, governs=False)
        topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
        await skip(60)
        assert cluster.owner(topic).broker == ""
        assert broker.failure is None

    on_memory_network(work)


def test_a_broker_whose_id_is_taken_ends_with_an_event(caplog: pytest.LogCaptureFixture) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        one = await cluster.start("one", audit=False)
        again = await cluster.start("one", audit=False)
        await skip(1)
        assert one.failed.is_set()
        assert isinstance(one.failure, FencedError)
        assert (again.failed.is_set(), again.failure) == (False, None)

    on_memory_network(work)
    assert [line.partition("(")[0] for line in log_lines(caplog, logging.ERROR)] == ["broker-failed: FencedError"]


# ---- loads -------------------------------------------------------------------------------------------


async def produced(client: Client, topic: Topic, first: int, size: int) -> int:
    """Send one block and wait until it is acked; return the next sequence."""
    if first == 0:
        ask = Open(
            topic=topic.name, topic_id=topic.id, partition=0, producer=f"{7:016x}", acks=AckLevel.ALL, sequence=0
        )
        client.ask(Api.OPEN, ask, stream=1)
        await skip(0.1)
        assert [frame.api for frame in client.heard()] == [Api.OPEN]
    client.say(write_frame(block_of(topic, first, [bytes(size)], producer=7)))
    await skip(0.1)
    assert [frame.api for frame in client.heard()] == [Api.ACK]
    return first + 1


def test_loads_are_reported_when_they_change_and_again_when_a_report_failed() -> None:
    reports: list[tuple[int, list[Load]]] = []

    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = cluster.made("one", audit=False)
        calls = Calls(broker.services.coordinator, "report")
        await broker.start()
        begin_s = now_s()
        topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
        client = network.call(broker.address).greet()
        await skip(0.5)
        first = await produced(client, topic, 0, 10)
        await skip(10)  # it is known at 10 s
        for _ in range(3):  # and again at 20, 30 and 40 s
            first = await produced(client, topic, first, 99_000)
            if first == 2:
                calls.fails["report"] = away(1)
            await skip(9.9)
        await skip(30)
        for at, (entry, loads) in zip(calls.since("report", begin_s), calls.given["report"], strict=True):
            assert entry.session == broker.services.session
            reports.append((at, list(loads)))
        assert await broker.services.coordinator.loads() == []

    on_memory_network(work)
    load = [Load(topic_id=reports[1][1][0].topic_id, partition=0, bytes_s=9_900)]
    assert reports == [(0, []), (20, load), (30, load), (50, [])], "at 40 s nothing has changed"


# ---- starts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advertise", "address"),
    [("", "127.0.0.1:4001"), ("near.example:0", "near.example:4001"), ("far:7000", "far:7000")],
)
def test_a_broker_is_entered_with_what_clients_and_governors_need(advertise: str, address: str) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = cluster.made("one", "zone-a", audit=False, advertise=advertise, capacity_bytes_s=7_000_000)
        await broker.start("127.0.0.1:9877")
        (entry,) = await broker.services.coordinator.brokers()
        assert (entry.id, entry.session, entry.address) == ("one", broker.services.session, address)
        assert broker.address == address
        assert (entry.http_address, entry.zone, entry.capacity_bytes_s) == ("127.0.0.1:9877", "zone-a", 7_000_000)
        assert not entry.draining

    on_memory_network(work)


def test_behind_its_start_a_broker_has_its_partitions_and_their_logs() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        topic = topic_named("clicks", 1, 3)
        await MemoryCoordinator(cluster.shared).create_topic(topic)
        broker = await cluster.start("one", audit=False)
        assert broker.partitions.held() == [(topic.id, number) for number in range(3)]
        assert len(cluster.queue.logs) == 3
        assert broker.partitions.processor(topic, 0).partition == 0

    on_memory_network(work)


def test_a_change_that_comes_while_a_start_governs_is_noticed() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = cluster.made("one", audit=False)
        view, other = broker.services.coordinator.loads, MemoryCoordinator(cluster.shared)

        async def slow() -> Sequence[Load]:
            broker.services.coordinator.loads = view  # type: ignore[method-assign]
            await other.create_topic(topic_named("late", 1))  # its view of the topics is older
            return await view()

        broker.services.coordinator.loads = slow  # type: ignore[method-assign]
        await broker.start()
        await skip(1)
        assert cluster.owner(topic_named("late", 1)).broker == "one"

    on_memory_network(work)


@pytest.mark.parametrize("audit", [True, False])
def test_the_topic_of_reports_is_there_behind_a_start_where_clients_report(audit: bool) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=audit)
        assert topics_of(broker) == ["_memq_audit"] * audit
        await skip(60)
        assert topics_of(broker) == ["_memq_audit"] * audit

    on_memory_network(work)


def test_a_start_waits_ten_seconds_for_the_topic_of_reports_which_is_made_later() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = cluster.made("one")
        calls = Calls(broker.services.coordinator, "create_topic")
        calls.takes_s["create_topic"] = 25
        await broker.start()
        assert now_s() == pytest.approx(10, abs=0.1)
        assert broker.partitions.serving
        await skip(20)
        assert topics_of(broker) == ["_memq_audit"]

    on_memory_network(work)


# ---- closes ------------------------------------------------------------------------------------------


def test_behind_its_close_a_broker_asks_for_nothing_and_is_known_to_nobody() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = cluster.made("one", audit=False)
        watched: list[bool] = []
        watch = broker.services.coordinator.watch

        def noted(callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
            end = watch(callback)
            watched.append(True)

            def unwatch() -> None:
                watched.append(False)
                end()

            return unwatch

        broker.services.coordinator.watch = noted  # type: ignore[method-assign]
        await broker.start()
        calls = Calls(broker.services.coordinator, "topics", "govern", "report", "brokers")
        await broker.close()
        assert await MemoryCoordinator(cluster.shared).brokers() == []
        assert watched == [True, False]
        asked = {name: len(at_s) for name, at_s in calls.at_s.items()}
        await skip(60)
        assert {name: len(at_s) for name, at_s in calls.at_s.items()} == asked
        assert broker.failure is None

    on_memory_network(work)


def test_a_close_gives_back_the_memory_of_what_was_published() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False)
        topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
        client = network.call(broker.address).greet()
        await skip(0.5)
        first = await produced(client, topic, 0, 200_000)
        await produced(client, topic, first, 200_000)
        assert broker.services.pool.leased_bytes > broker.intake.slab.size
        await broker.close()
        assert broker.services.pool.leased_bytes == broker.intake.slab.size

    on_memory_network(work)


def test_a_close_while_the_coordinator_is_away_says_so_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False)
        calls = Calls(broker.services.coordinator, "unregister")
        calls.fails["unregister"] = away(1)
        await broker.close()
        assert len(calls.at_s["unregister"]) == 1

    on_memory_network(work)
    assert log_lines(caplog) == ["unregister-failed: it is away"]


def test_a_broker_that_never_started_can_be_closed() -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        await cluster.made("one").close()

    on_memory_network(work)


def test_a_partition_that_moves_away_during_a_close_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """The tasks that would let go of it end before the partitions do."""

    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        one = await cluster.start("one", audit=False)
        two = await cluster.start("two", audit=False)
        topic = await one.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
        await one.partitions.refresh()
        owned = next(number for number in range(2) if one.partitions.owns(topic, number))
        await one.partitions.processor(topic, owned).ready()
        await skip(1)
        moved = msgspec.structs.replace(cluster.owner(topic, owned), broker="two")
        await one.services.coordinator.set_assignment(moved)
        await asyncio.sleep(0)  # it is notified, and has not read yet
        await one.close()
        assert one.failure is None
        assert two.failure is None

    on_memory_network(work)
    assert log_lines(caplog, logging.ERROR) == []


@pytest.mark.parametrize("shared", [True, False])
def test_behind_a_close_nothing_is_stored_any_more(shared: bool) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False)
        settings = TopicSettings(shared_objects=shared)
        topic = await broker.partitions.create("clicks", 1, settings, exist_ok=False)
        client = network.call(broker.address).greet()
        await skip(0.5)
        calls = Calls(cluster.store, "put")
        calls.fails["put"] = away(1_000)
        ask = Open(topic="clicks", topic_id=topic.id, partition=0, producer=f"{7:016x}", acks=AckLevel.ALL, sequence=0)
        client.ask(Api.OPEN, ask, stream=1)
        await skip(0.1)
        client.say(write_frame(block_of(topic, 0, [b"v"], producer=7)))
        await skip(5)
        assert len(calls.at_s["put"]) > 1, "it is tried again and again"
        await broker.close()
        tried = len(calls.at_s["put"])
        await skip(60)
        assert len(calls.at_s["put"]) == tried
        assert broker.services.pool.leased_bytes == broker.intake.slab.size
        with pytest.raises(ClosedError):
            await broker.services.planner.plan(cast(ClusterView, SimpleNamespace(assignments=range(3_000))))

    on_memory_network(work)


# ---- readiness ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("deletes", [True, False])
def test_a_check_asks_store_and_queue_at_once_and_names_the_first_that_fails(deletes: bool) -> None:
    async def work(cluster: Rig, network: MemoryNetwork) -> None:
        broker = await cluster.start("one", audit=False, delete_objects=deletes)
        store, queue = Calls(cluster.store, "check"), Calls(cluster.queue, "check")
        store.takes_s["check"] = queue.takes_s["check"] = 1.0
        begin_s = now_s()
        await broker.check()
        assert now_s() - begin_s == pytest.approx(1.0)
        assert store.given["check"] == [(deletes,)]
        assert len(queue.at_s["check"]) == 1
        for failing in ([store], [queue], [store, queue]):
            for part in failing:
                part.fails["check"] = [UnreachableError("store" if part is store else "queue")]
            with pytest.raises(UnreachableError, match="queue" if failing == [queue] else "store"):
                await broker.check()
            assert not store.fails["check"]
            assert not queue.fails["check"], "both were asked to the end"
        queue.takes_s["check"] = 0.5
        store.fails["check"], queue.fails["check"] = [UnreachableError("store")], [UnreachableError("queue")]
        with pytest.raises(UnreachableError, match="store"):
            await broker.check()

    on_memory_network(work)
