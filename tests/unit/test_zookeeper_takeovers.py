"""Early takeovers on a ZooKeeper in memory: the contract, and changes by others between a reading and its change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from memq.governor import BrokerEntry, MarkedCoordinator
from memq.governor.zookeeper import layout
from memq.governor.zookeeper import session as session_module
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.layout import Government
from tests.contract import test_takeover
from tests.contract.test_takeover import NOW_MS, suspect
from tests.unit.zookeeper_fakes import run
from tests.zookeeper_in_memory import MemoryZookeeper, settled

Scenario = Callable[[MarkedCoordinator], Awaitable[None]]
CONTRACT = {name: each.scenario for name, each in vars(test_takeover).items() if hasattr(each, "scenario")}
ONE, TWO, THREE = (suspect(f"b{number}", f"s{number}") for number in (1, 2, 3))


@pytest.fixture(name="server")
def server_in_memory(monkeypatch: pytest.MonkeyPatch) -> MemoryZookeeper:
    server = MemoryZookeeper()
    monkeypatch.setattr(session_module, "make_client", server.client)
    return server


@pytest.mark.parametrize("scenario", CONTRACT.values(), ids=CONTRACT)
def test_the_contract(scenario: Scenario, server: MemoryZookeeper) -> None:
    run(scenario, server.coordinator())


def of_three(server: MemoryZookeeper, scenario: Callable[..., Awaitable[None]]) -> None:
    """Run a scenario with the coordinators of three members; the first one governs in term 1."""

    async def work(*coordinators: ZookeeperCoordinator) -> None:
        for coordinator, broker in zip(coordinators, (ONE, TWO, THREE), strict=True):
            await coordinator.register(broker)
        assert await coordinators[0].govern(ONE) == 1
        await scenario(*coordinators)

    run(work, *(server.coordinator() for _ in range(3)))


async def members(coordinator: ZookeeperCoordinator) -> list[BrokerEntry]:
    return list(await coordinator.brokers())


# ---- the governor's role -------------------------------------------------------------------------


def begin_term_of_three(server: MemoryZookeeper, term: int = 2) -> None:
    """Let the third member begin a term, as its coordinator does."""
    node = layout.encode(Government(id=THREE.id, session=THREE.session, term=term))
    made = ("create", "/memq/governor", node, -1, server.clients[2].number)
    done = server.apply([("delete", "/memq/governor", b"", -1, 0), made, ("set", "/memq/term", b"", term - 1, 0)])
    assert done == [True, True, True]


def test_a_governor_that_began_its_term_meanwhile_is_not_replaced(server: MemoryZookeeper) -> None:
    """Its node has version 0, as the node that it replaced, so only the term shows the difference."""

    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        assert await two.take_over(ONE, term=0, now_ms=NOW_MS)
        server.before_get["/memq/term"] = lambda: begin_term_of_three(server)
        assert await two.govern(TWO) == 0
        assert (await one.governor(), await two.governor(), await three.govern(THREE)) == ("b3", "b3", 2)

    of_three(server, scenario)


def test_of_two_brokers_that_replace_a_governor_the_faster_one_governs(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        assert await two.take_over(ONE, term=0, now_ms=NOW_MS)
        server.before_commit = lambda: begin_term_of_three(server)
        assert await two.govern(TWO) == 0
        assert (await two.governor(), await three.govern(THREE)) == ("b3", 2)

    of_three(server, scenario)


def test_the_role_of_a_governor_that_ends_while_it_is_replaced_is_free(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        assert await two.take_over(ONE, term=0, now_ms=NOW_MS)
        server.before_commit = lambda: server.end(server.clients[0].number)
        assert await two.govern(TWO) == 0
        assert await two.govern(TWO) == 2

    of_three(server, scenario)


def test_of_two_brokers_that_find_no_governor_the_faster_one_governs(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        server.end(server.clients[0].number)
        assert not await three.take_over(TWO, term=0, now_ms=NOW_MS), "it does not govern"
        node = layout.encode(Government(id=THREE.id, session=THREE.session, term=2))
        made = ("create", "/memq/governor", node, -1, server.clients[2].number)
        server.before_commit = lambda: server.apply([made, ("set", "/memq/term", b"", 1, 0)])
        assert await two.govern(TWO) == 0
        assert (await two.governor(), await members(two)) == ("b3", [TWO, THREE])

    of_three(server, scenario)


def test_a_member_that_was_taken_over_does_not_govern_and_one_that_is_unknown_neither(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        for each in (TWO, ONE):
            assert await three.take_over(each, term=0 if each is ONE else 1, now_ms=NOW_MS)
        assert await two.govern(TWO) == 0
        assert await three.govern(suspect("b4", "s4")) == 0
        assert await three.govern(replace(THREE, session="s5")) == 0
        assert await three.govern(THREE) == 2

    of_three(server, scenario)


# ---- takeovers -----------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[MemoryZookeeper], object]] = {
    "a term": lambda server: server.apply([("set", "/memq/term", b"", -1, 0)]),
    "the registration": lambda server: server.apply([("set", "/memq/brokers/b2", layout.encode(TWO), -1, 0)]),
    "its end": lambda server: server.apply([("delete", "/memq/brokers/b2", b"", -1, 0)]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_registration_or_term_that_changed_after_its_reading_is_not_taken_over(
    change: str, server: MemoryZookeeper
) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        server.before_commit = lambda: CHANGES[change](server)
        assert not await one.take_over(TWO, term=1, now_ms=NOW_MS)
        left = [ONE, THREE] if change == "its end" else [ONE, TWO, THREE]
        assert await members(one) == await members(three) == left

    of_three(server, scenario)


def test_a_governor_of_an_ended_term_takes_nothing_over_without_its_term_either(server: MemoryZookeeper) -> None:
    """A report on the former governor must not end the role of the present one."""

    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        assert await two.take_over(ONE, term=0, now_ms=NOW_MS)
        assert await three.govern(THREE) == 2
        await one.register(ONE)
        assert not await two.take_over(ONE, term=0, now_ms=NOW_MS + 600_000)
        assert (await two.governor(), await members(two)) == ("b3", [ONE, TWO, THREE])

    of_three(server, scenario)


def test_a_broker_knows_its_own_takeovers_and_terms_without_an_event(server: MemoryZookeeper) -> None:
    """The event of a change may be lost with the connection."""

    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        noticed: list[str] = []

        async def notice() -> None:
            noticed.append(await two.governor())

        two.watch(notice)
        await settled()
        assert (await members(two), await two.governor(), noticed) == ([ONE, TWO, THREE], "b1", [])
        server.deaf = True
        assert await two.take_over(ONE, term=0, now_ms=NOW_MS)
        assert await members(two) == [TWO, THREE]
        while noticed != [""]:
            await settled()
        assert await two.govern(TWO) == 2
        assert await two.governor() == "b2"
        while noticed != ["", "b2"]:
            await settled()

    of_three(server, scenario)


def test_a_takeover_at_the_same_time_is_not_overwritten(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        before = server.nodes["/memq/takeovers"]
        assert await one.take_over(THREE, term=1, now_ms=NOW_MS)
        (data, _, _) = server.nodes["/memq/takeovers"]
        server.apply([("set", "/memq/takeovers", before[0], -1, 0)])
        server.before_commit = lambda: server.apply([("set", "/memq/takeovers", data, -1, 0)])
        assert not await one.take_over(TWO, term=1, now_ms=NOW_MS)
        assert await members(one) == await members(two) == [ONE, TWO]

    of_three(server, scenario)


def test_a_return_is_noted_while_others_are_taken_over(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator, three: ZookeeperCoordinator) -> None:
        assert await one.take_over(TWO, term=1, now_ms=NOW_MS)
        (alone, _, _) = server.nodes["/memq/takeovers"]
        assert await one.take_over(THREE, term=1, now_ms=NOW_MS)
        (both, _, _) = server.nodes["/memq/takeovers"]
        server.apply([("set", "/memq/takeovers", alone, -1, 0)])

        def before_the_note() -> None:
            server.before_commit = lambda: server.apply([("set", "/memq/takeovers", both, -1, 0)])

        server.before_commit = before_the_note
        await two.register(TWO)
        assert await members(one) == await members(two) == [ONE, TWO], "the third one has not returned"

    of_three(server, scenario)
