"""Suspicions: brokers whose ports refuse connections lose their partitions before their sessions end, others do not.

No session ends by itself here: whatever is taken over is taken over by a suspicion.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from memq.aio import Producer
from memq.broker.broker import Broker
from memq.client.link_pool import LinkPool
from memq.errors import UnreachableError
from memq.governor import BrokerEntry
from memq.governor.memory import MemoryCoordinator
from memq.protocol.admin_messages import ReportSuspicion
from memq.runtime.network import ProtocolFactory, parse_address
from memq.runtime.runtime import Runtime
from memq.topic import Topic, TopicSettings
from tests.component.cluster_rig import Rig, rig
from tests.component.served_brokers import Served
from tests.memory_network import Client, MemoryNetwork, Wire
from tests.skipping_loop import now_s, run_skipping, skip, skipping_runtime

PARTITIONS = 6


async def start(cluster: Rig, name: str, *, host: str = "", pid: int = 1, **settings: Any) -> Broker:
    """Start a broker, on a host of its own unless one is given."""
    cluster.runtime = replace(cluster.runtime, host=host or f"host of {name}", pid=pid)
    return await cluster.start(name, audit=False, **settings)


async def kill(broker: Broker) -> None:
    """End a broker without its farewell, as SIGKILL does: its registration and its assignments stay."""

    async def unregister(entry: BrokerEntry) -> None:
        raise UnreachableError("it was killed")

    coordinator = broker.services.coordinator
    assert isinstance(coordinator, MemoryCoordinator)
    coordinator.unregister = unregister  # type: ignore[method-assign, assignment]
    await broker.close()


async def send_to_all(producer: Producer, topic: Topic, value: bytes) -> None:
    sent = [await producer.send(topic.name, value, partition=number) for number in range(PARTITIONS)]
    for delivery in sent:
        await delivery


def members(cluster: Rig) -> list[str]:
    return [each.id for each in cluster.shared.registry.brokers()]


def owners(cluster: Rig, topic: Topic) -> set[str]:
    return {cluster.owner(topic, number).broker for number in range(PARTITIONS)}


# ---- on sockets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [["two"], ["one"], ["one", "two"]], ids=["owner", "governor", "both"])
def test_partitions_of_killed_brokers_are_acked_again_before_any_session_ends(victims: Sequence[str]) -> None:
    async def work() -> None:
        async with rig() as cluster:
            brokers = {name: await start(cluster, name) for name in ("one", "two", "three")}
            topic = await brokers["one"].partitions.create("clicks", PARTITIONS, TopicSettings(), exist_ok=False)
            assert (owners(cluster, topic), cluster.shared.registry.governor()) == (set(brokers), "one")
            async with Producer([each.address for each in brokers.values()], audit=False) as producer:
                await send_to_all(producer, topic, b"before")
                for name in victims:
                    await kill(brokers[name])
                await send_to_all(producer, topic, b"after")
            left = [name for name in ("one", "three", "two") if name not in victims]
            assert (members(cluster), owners(cluster, topic)) == (left, set(left))
            assert cluster.shared.registry.governor() in left
            counted = [brokers[name].services.counters.early_takeovers for name in left]
            assert sum(counted) == len(victims)

    asyncio.run(work())


def test_a_client_reports_a_known_broker_that_refuses_it_over_a_connection_that_it_has() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one, two = [await start(cluster, name, early_takeover=False) for name in ("one", "two")]
            await one.partitions.refresh()
            addresses = [parse_address(broker.address) for broker in (one, two)]
            pool = LinkPool(Runtime(), addresses[:1])
            await pool.session(addresses[0])
            pool.learn(addresses, ["", ""])
            await kill(two)
            with pytest.raises(UnreachableError):
                await pool.session(addresses[1])
            assert await one.services.suspicions.next() == two.address
            await pool.close()

    asyncio.run(work())


def test_only_a_refused_connection_is_marked_so() -> None:
    async def work() -> None:
        network = Runtime().network
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        for name in ("127.0.0.1", "localhost"):  # a name may have several addresses
            with pytest.raises(UnreachableError) as refused:
                await network.connect(name, port, asyncio.BufferedProtocol)
            assert refused.value.refused
        with pytest.raises(UnreachableError) as other:
            await network.connect("no-such-host.invalid", port, asyncio.BufferedProtocol)
        assert not other.value.refused

    asyncio.run(work())


# ---- on virtual time -----------------------------------------------------------------------------


class Ports(MemoryNetwork):
    """Ports that accept, refuse, or do not answer; it notes when each was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, float]] = []
        self.refusing: set[str] = set()
        self.silent: set[str] = set()

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        address = f"{host}:{port}"
        self.asked.append((address, now_s()))
        if address in self.silent:
            await skip(timeout_s)
            raise UnreachableError(f"{address} did not answer")
        if address in self.refusing:
            error = UnreachableError(f"{address}: {errno.ECONNREFUSED}")
            error.refused = True
            raise error
        protocol = factory()
        protocol.connection_made(Wire(protocol, (host, port)))
        return protocol


class Suspected:
    """A governor "one" and two more brokers on virtual time, and a client that reports to the governor."""

    def __init__(self, cluster: Rig, ports: Ports, brokers: Sequence[Broker], topic: Topic) -> None:
        self.cluster, self.ports, self.topic = cluster, ports, topic
        self.one, self.two, self.three = brokers
        self._at = Served(cluster, self.one, ports)
        self._client: Client = self._at.call()

    async def report(self, address: str) -> None:
        await self._at.admin(self._client, ReportSuspicion(address=address))


def suspected(work: Callable[[Suspected], Awaitable[None]], **settings: Any) -> None:
    async def inside() -> None:
        ports = Ports()
        async with rig(replace(skipping_runtime(), network=ports), timeout_s=3_000) as cluster:
            brokers = [await start(cluster, name, **settings) for name in ("one", "two", "three")]
            topic = await brokers[0].partitions.create("clicks", PARTITIONS, TopicSettings(), exist_ok=False)
            await skip(1)
            await work(Suspected(cluster, ports, brokers, topic))

    run_skipping(inside())


def test_reports_of_healthy_brokers_cost_one_connection_attempt_a_second() -> None:
    async def work(at: Suspected) -> None:
        begin_s = now_s()
        for _ in range(100):
            for broker in (at.two, at.three, at.one):
                await at.report(broker.address)
        await at.report("unknown:1")
        await skip(2)
        took_s = now_s() - begin_s
        assert {address for address, _ in at.ports.asked} == {at.two.address, at.three.address}
        assert 2 <= len(at.ports.asked) <= took_s + 1
        assert members(at.cluster) == ["one", "three", "two"]
        assert at.one.services.counters.early_takeovers == 0

    suspected(work)


def test_a_silent_port_is_no_suspicion() -> None:
    async def work(at: Suspected) -> None:
        at.ports.silent.add(at.two.address)
        await at.report(at.two.address)
        await skip(10)
        assert [address for address, _ in at.ports.asked] == [at.two.address]
        assert members(at.cluster) == ["one", "three", "two"]

    suspected(work)


def test_a_live_broker_whose_port_refuses_returns_and_is_taken_over_again_after_a_minute() -> None:
    async def work(at: Suspected) -> None:
        at.ports.refusing.add(at.two.address)
        await at.report(at.two.address)
        await skip(0.5)
        assert (members(at.cluster), owners(at.cluster, at.topic)) == (["one", "three"], {"one", "three"})
        await skip(6)
        assert members(at.cluster) == ["one", "three", "two"]
        entry = at.cluster.owner(at.topic)
        at.cluster.shared.apply(
            at.cluster.shared.registry.set_assignment(structs.replace(entry, broker="two", session=""))
        )
        for _ in range(20):
            await at.report(at.two.address)
            await skip(2)
        assert members(at.cluster) == ["one", "three", "two"], "its last takeover was less than a minute ago"
        await skip(15)
        await at.report(at.two.address)
        await skip(0.5)
        assert (members(at.cluster), at.one.services.counters.early_takeovers) == (["one", "three"], 2)

    suspected(work)


@pytest.mark.parametrize("runs", [True, False])
def test_on_the_same_host_the_process_must_be_gone_as_well(runs: bool) -> None:
    async def work(at: Suspected) -> None:
        at.ports.refusing.add(at.two.address)
        await at.report(at.two.address)
        await skip(1)
        assert [address for address, _ in at.ports.asked] == [at.two.address]
        assert members(at.cluster) == (["one", "three", "two"] if runs else ["one", "three"])

    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    suspected(work, host="here", pid=os.getpid() if runs else process.pid)


def test_a_broker_that_owns_nothing_or_drains_is_not_asked() -> None:
    async def work(at: Suspected) -> None:
        at.ports.refusing |= {at.two.address, at.three.address}
        await at.two.hand_over()
        await at.report(at.two.address)
        await skip(5)
        assert not at.ports.asked
        assert members(at.cluster) == ["one", "three", "two"]

    suspected(work)


def test_early_takeover_can_be_switched_off() -> None:
    async def work(at: Suspected) -> None:
        at.ports.refusing.add(at.two.address)
        await at.report(at.two.address)
        await skip(5)
        assert (at.ports.asked, members(at.cluster)) == ([], ["one", "three", "two"])

    suspected(work, early_takeover=False)
