"""The contract of the coordinator through a proxy that spoils each kind of ZooKeeper operation.

Whatever is cut, late or falsified on the way: the result is the right answer or an error of memq. `make check` has one
life of a coordinator with each kind of operation, at a phase that goes round, and with each false error; `make soak`
has the product of kinds, phases and scenarios of the contract suite.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import cycle, product
from pathlib import Path

import pytest
from msgspec.structs import replace

from memq.errors import FencedError, VersionConflictError
from memq.governor import Assignment, Coordinator, Load
from memq.governor.zookeeper import mirror
from memq.topic import equal_slots
from memq_localstack.servers import Server
from tests.contract import test_coordinator
from tests.contract.coordinators import HANG_S, broker, open_zookeeper, path_of, topic
from tests.integration.retrying_coordinator import RetryingCoordinator, pause
from tests.integration.zookeeper_proxy import FINAL, PASSING, TRANSPORT, Fault, Op, Phase, ZookeeperProxy
from tests.soak import SOAKING

TIMES = 2
OWN = broker("b1", "s1")
ENDING = (Phase.LATE, Phase.EXPIRED_BEFORE, Phase.EXPIRED_AFTER)  # ephemeral nodes may go meanwhile
SAMPLE = [*zip(Op, cycle(TRANSPORT), strict=False), (Op.EVENT, Phase.BEFORE), (Op.GET_DATA, Phase.STALE)]
ALL = [(op, phase) for op, phase in product(Op, TRANSPORT) if op is not Op.EVENT or phase in (Phase.BEFORE, Phase.LATE)]
OTHERS = [each for each in ALL if each not in SAMPLE] if SOAKING else [(Op.MULTI_SET_DATA, Phase.SHORT)]
CODES = [*PASSING.items(), *FINAL.items()]
DENIABLE = [op for op in Op if op not in (Op.CONNECT, Op.PING, Op.CLOSE, Op.EVENT)]
FALSE = list(product(DENIABLE, (Phase.FALSE, Phase.FALSE_DONE), CODES))
SCENARIOS = [
    getattr(test_coordinator, name).scenario
    for name in dir(test_coordinator)
    if hasattr(getattr(test_coordinator, name), "scenario")
]
STEADY = [
    each
    for each in SCENARIOS
    if not {"brokers", "governs", "leaves", "loads", "session"} & set(each.__name__.split("_"))
]


@pytest.fixture(scope="module")
def proxy(zookeeper: Server) -> Iterator[ZookeeperProxy]:
    found = ZookeeperProxy(int(zookeeper.address.rpartition(":")[2]))
    yield found
    found.close()


@pytest.fixture(autouse=True)
def often_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "REFRESH_S", 1.0)  # rarely enough for pings between them


async def life(one: Coordinator, other: Coordinator, proxy: ZookeeperProxy) -> None:
    """Do all that a broker does with its coordinator; `other` goes to ZooKeeper without a fault."""
    first = topic("clicks", 1, partitions=2)
    await one.create_topic(first)
    assert await other.current_topic("clicks") == first
    assert await one.current_topic("clicks") == first
    assert not await one.deleted(first.id)
    await one.register(OWN)
    await shows(one.brokers, [OWN])
    await governed(one)
    loads = [Load(topic_id=first.id, partition=0, bytes_s=7)]
    await reported(one, loads)
    owned = await claimed(one, 1)
    assert await other.assignment(first.id, 1) == owned
    free = await other.assignment(first.id, 0)
    await shows(one.assignments, [free, owned])  # from now on only an event, or a refresh, shows a change
    foreign = await other.set_assignment(replace(free, broker="b2", session="s2", epoch=3))
    await shows(one.assignments, [foreign, owned])
    wider = await one.alter_topic(replace(first, partitions=equal_slots(3), map_version=2))
    assert await other.current_topic("clicks") == wider
    second = topic("views", 2, partitions=1)
    await one.create_topic(second)
    assert not await one.deleted(second.id)
    await one.delete_topic(second)
    assert await one.deleted(second.id)
    assert await other.deleted(second.id)
    assert not await one.deleted(first.id)
    await shows(one.topics, [wider])
    await shows(lambda: idle(one, proxy), True)
    await one.unregister(OWN)
    await shows(other.brokers, [])
    free = replace(owned, broker="", session="", version=owned.version + 1)
    await shows(other.assignments, [foreign, free, Assignment(topic_id=first.id, partition=2)])
    await shows(one.assignments, [foreign, free, Assignment(topic_id=first.id, partition=2)])


async def shows(read: Callable[[], Awaitable[object]], expected: object) -> None:
    """Wait until a read shows this: what was read may be stale."""
    while True:
        found = await read()
        if (list(found) if isinstance(found, tuple | list) else found) == expected:
            return
        await pause()


async def governed(coordinator: Coordinator) -> None:
    """Set an assignment as the governor; the term ends with a session."""
    while True:
        if term := await coordinator.govern(OWN):
            (current, *_) = [each for each in await coordinator.assignments() if each.partition == 0]
            try:
                await coordinator.set_assignment(replace(current, broker="b1"), term=term)
            except (VersionConflictError, FencedError):
                pass
            else:
                return
        await pause()


async def claimed(coordinator: Coordinator, partition: int) -> Assignment:
    """Set an assignment as an owner."""
    current = await coordinator.assignment(topic().id, partition)
    return await coordinator.set_assignment(replace(current, broker="b1", session="s1", epoch=current.epoch + 1))


async def reported(coordinator: Coordinator, loads: list[Load]) -> None:
    """Report until it shows: reports go with a session."""
    while list(await coordinator.loads()) != loads:
        await coordinator.report(OWN, loads)


async def idle(coordinator: Coordinator, proxy: ZookeeperProxy) -> bool:
    await coordinator.governor()
    return proxy.seen[Op.PING] > 0


def over(
    proxy: ZookeeperProxy, zookeeper: Server, path: str, fault: Fault, scenario: Callable[..., Awaitable[None]]
) -> None:
    async def run() -> None:
        behind = open_zookeeper(proxy.address, path, session_timeout_ms="2s", connect_timeout_ms="30s")
        sound = open_zookeeper(zookeeper.address, path, session_timeout_ms="10s")
        try:
            async with asyncio.timeout(HANG_S):
                if scenario is life:
                    await life(RetryingCoordinator(behind, lambda: fault.met), sound, proxy)
                else:
                    await scenario(RetryingCoordinator(behind, lambda: fault.met))
        finally:
            async with asyncio.timeout(HANG_S):
                await behind.close()
                await sound.close()

    proxy.arm(fault)
    try:
        asyncio.run(run())
    finally:
        proxy.arm(None)


def spoiled(proxy: ZookeeperProxy, zookeeper: Server, folder: Path, fault: Fault) -> None:
    over(proxy, zookeeper, path_of(folder), fault, life)
    assert fault.met, f"no {fault.op.name} was met"


def name(each: object) -> str | None:
    """Return how a parameter is called in the name of a test."""
    if isinstance(each, tuple):
        return str(each[0])
    return each.name.lower() if isinstance(each, Op | Phase) else None


def times_of(op: Op, phase: Phase) -> int:
    """Return how often operations meet a fault: events of watches are lost for the whole life."""
    return 1_000 if (op, phase) == (Op.EVENT, Phase.BEFORE) else TIMES


@pytest.mark.parametrize(("op", "phase"), SAMPLE, ids=name)
def test_a_life_with_a_spoiled_operation(
    proxy: ZookeeperProxy, zookeeper: Server, tmp_path: Path, op: Op, phase: Phase
) -> None:
    spoiled(proxy, zookeeper, tmp_path, Fault(op, phase, times_of(op, phase)))


def test_a_false_no_node_is_no_proof_of_a_deletion(proxy: ZookeeperProxy, zookeeper: Server, tmp_path: Path) -> None:
    async def scenario(one: Coordinator) -> None:
        await one.create_topic(topic())
        for skip in range(4):
            fault = Fault(Op.GET_DATA, Phase.FALSE, TIMES, FINAL["no-node"], skip)
            proxy.arm(fault)
            assert not await one.deleted(topic().id)

    over(proxy, zookeeper, path_of(tmp_path), Fault(Op.GET_DATA, Phase.FALSE, 0), scenario)


@pytest.mark.soak
@pytest.mark.parametrize(("op", "phase"), OTHERS, ids=name)
def test_a_life_with_each_operation_spoiled_in_each_phase(
    proxy: ZookeeperProxy, zookeeper: Server, tmp_path: Path, op: Op, phase: Phase
) -> None:
    spoiled(proxy, zookeeper, tmp_path, Fault(op, phase, times_of(op, phase)))


@pytest.mark.parametrize(("op", "phase", "code"), FALSE[:: 1 if SOAKING else 13], ids=name)
def test_a_life_with_a_false_error(
    proxy: ZookeeperProxy, zookeeper: Server, tmp_path: Path, op: Op, phase: Phase, code: tuple[str, int]
) -> None:
    spoiled(proxy, zookeeper, tmp_path, Fault(op, phase, TIMES, code[1]))


@pytest.mark.soak
@pytest.mark.parametrize(("op", "phase"), ALL if SOAKING else [(Op.MULTI_CREATE, Phase.AFTER)], ids=name)
@pytest.mark.parametrize("scenario", STEADY[:: 1 if SOAKING else 4], ids=lambda scenario: scenario.__name__)
def test_the_contract_with_each_operation_spoiled(
    proxy: ZookeeperProxy,
    zookeeper: Server,
    tmp_path: Path,
    op: Op,
    phase: Phase,
    scenario: Callable[[Coordinator], Awaitable[None]],
) -> None:
    over(proxy, zookeeper, path_of(tmp_path), Fault(op, phase, times_of(op, phase)), scenario)
