"""Reports of refused connections, checked one by one: pauses, takeovers, the governor's role. On virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from memq.broker.failure_detector import EXIT_CHECKS, EXIT_S, PROBE_S, REPORT_S, REST_S, FailureDetector
from memq.broker.metrics import Counters
from memq.broker.services import Services, Suspicions
from memq.errors import UnreachableError
from memq.governor import BrokerEntry
from memq.governor.governor import Governor
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, ReportSuspicion
from memq.protocol.frames import Api
from memq.protocol.link import Link
from memq.protocol.messages import Hello, decode_message
from memq.runtime.network import ProtocolFactory
from tests.contract.coordinators import topic
from tests.memory_network import MemoryNetwork, Wire
from tests.skipping_loop import LoopClock, now_s, run_skipping, skip, skipping_runtime
from tests.unit.broker_wire import Wire as BrokerEnd

BEGIN_S = 5.0


def member(number: int, **fields: Any) -> BrokerEntry:
    given = {"id": f"b{number}", "session": f"s{number}", "address": f"h{number}:1", "host": f"h{number}", "pid": 7}
    return BrokerEntry(**{**given, **fields})


class Ports(MemoryNetwork):
    """Ports of dead brokers refuse, those in `errors` raise theirs, `silent` ones do not answer, all others accept.

    Those in `ends` are answered by the test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.errors: dict[str, UnreachableError] = {}
        self.asked: list[tuple[str, float]] = []
        self.wires: list[Wire] = []
        self.ends: dict[str, BrokerEnd] = {}

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        self.asked.append((host, now_s()))
        if host in self.silent:
            await skip(timeout_s)
            raise UnreachableError(f"{host} did not answer")
        if host in self.errors:
            raise self.errors[host]
        if host in self.dead:
            error = UnreachableError(f"{host} refuses")
            error.refused = True
            raise error
        protocol = factory()
        if host in self.ends:
            await self.ends[host].connect_to(host, port, lambda: cast("Link", protocol), timeout_s=timeout_s)
            return protocol
        self.wires.append(Wire(protocol, (host, port)))
        protocol.connection_made(self.wires[-1])
        return protocol


class Watch:
    """The detector of broker "b1", which governs unless a test says otherwise; b1 to b3 own a partition each."""

    def __init__(self, *, governs: bool = True, candidate: bool = True) -> None:
        self.ports = Ports()
        self.cluster = MemoryCluster("test", LoopClock())
        self.coordinator = MemoryCoordinator(self.cluster)
        self.lines: list[tuple[str, str]] = []
        self.counters, self.suspicions = Counters(), Suspicions()
        self.acts: list[float] = []
        self.governs = governs
        self.governor = SimpleNamespace(term=0)
        services = SimpleNamespace(
            runtime=replace(skipping_runtime(), network=self.ports, host="h1", pid=1),
            coordinator=self.coordinator,
            events=SimpleNamespace(info=self._info, warning=self._warning),
            counters=self.counters,
            suspicions=self.suspicions,
            settings=SimpleNamespace(broker_id="b1"),
            session="s1",
        )
        governor = cast("Governor", self.governor) if candidate else None
        self.detector = FailureDetector(cast("Services", services), governor, self._act)

    def _info(self, event: str, text: str) -> None:
        self.lines.append(("info", event))

    def _warning(self, event: str, text: str) -> None:
        self.lines.append(("warning", event))

    async def _act(self) -> bool:
        self.acts.append(now_s())
        self.governor.term = await self.coordinator.govern(member(1))
        return True

    async def begin(self) -> None:
        for number in (1, 2, 3):
            await self.coordinator.register(member(number))
        await self.coordinator.create_topic(topic(partitions=3))
        for number, entry in enumerate(await self.coordinator.assignments(), 1):
            await self.coordinator.set_assignment(structs.replace(entry, broker=f"b{number}"))
        former = member(9)
        await self.coordinator.register(former)
        assert await self.coordinator.govern(former) == 1
        await self.coordinator.unregister(former)
        if self.governs:
            self.governor.term = await self.coordinator.govern(member(1))
        await skip(BEGIN_S)

    def report(self, *numbers: int) -> None:
        for number in numbers:
            self.suspicions.report(f"h{number}:1")

    async def members(self) -> list[str]:
        return [each.id for each in await self.coordinator.brokers()]

    def asked_after(self) -> list[tuple[str, float]]:
        """Return which ports were asked, and how long after the begin."""
        return [(host, at_s - BEGIN_S) for host, at_s in self.ports.asked]


def watching(work: Callable[[Watch], Awaitable[None]], **options: bool) -> None:
    async def inside() -> None:
        at = Watch(**options)
        await at.begin()
        running = asyncio.create_task(at.detector.run())
        try:
            await work(at)
            assert not running.done(), "it checks reports without end"
        finally:
            running.cancel()

    run_skipping(inside())


def test_dead_brokers_are_taken_over_one_after_another_without_a_pause() -> None:
    async def work(at: Watch) -> None:
        at.ports.dead |= {"h2", "h3"}
        at.report(2, 3)
        await skip(0)
        assert (await at.members(), at.asked_after()) == (["b1"], [("h2", 0), ("h3", 0)])
        assert (at.counters.suspicions, at.counters.early_takeovers) == (2, 2)
        assert at.acts == [BEGIN_S, BEGIN_S], "the governor assigns the partitions at once"
        assert at.lines == 2 * [("info", "suspicion"), ("warning", "early-takeover")]

    watching(work)


@pytest.mark.parametrize(("answer", "after_s"), [("accepts", 0.0), ("resets", 0.0), ("is silent", PROBE_S)])
def test_after_a_report_that_proves_wrong_the_next_one_waits(answer: str, after_s: float) -> None:
    async def work(at: Watch) -> None:
        if answer == "resets":
            at.ports.errors["h2"] = UnreachableError("a reset")
        elif answer == "is silent":
            at.ports.silent.add("h2")
        at.ports.dead.add("h3")
        at.report(2, 3)
        await skip(after_s + REST_S + 0.1)
        assert at.asked_after() == [("h2", 0), ("h3", after_s + REST_S)]
        assert (await at.members(), at.counters.suspicions) == (["b1", "b2"], 1)
        assert [wire.aborted for wire in at.ports.wires] == ([True] if answer == "accepts" else [])

    watching(work)


def test_a_process_on_the_same_host_has_a_moment_to_end() -> None:
    """Its port refuses shortly before its id is gone."""

    async def work(at: Watch) -> None:
        at.ports.dead |= {"h2", "h3"}
        await at.coordinator.register(member(2, host="h1", pid=os.getpid()))
        at.report(2, 3)
        await skip(EXIT_CHECKS * EXIT_S + REST_S + 0.1)
        assert at.asked_after() == [("h2", 0), ("h3", pytest.approx(EXIT_CHECKS * EXIT_S + REST_S))]
        assert await at.members() == ["b1", "b2"]

    watching(work)


@pytest.mark.parametrize("kind", ["unknown", "itself", "draining", "of an earlier release", "owns nothing"])
def test_a_report_that_needs_no_connection_attempt_delays_no_other(kind: str) -> None:
    async def work(at: Watch) -> None:
        at.ports.dead |= {"h1", "h3", "h4"}
        fields: dict[str, dict[str, Any]] = {"draining": {"draining": True}, "of an earlier release": {"host": ""}}
        if kind != "unknown":
            await at.coordinator.register(member(4, **fields.get(kind, {})))
        if kind in fields:
            entry = (await at.coordinator.assignments())[0]
            await at.coordinator.set_assignment(structs.replace(entry, broker="b4"))
        at.report(1 if kind == "itself" else 4, 3)
        await skip(0)
        assert (at.asked_after(), "b3" in await at.members()) == ([("h3", 0)], False)

    watching(work)


def test_the_last_broker_that_takes_partitions_is_not_asked() -> None:
    async def work(at: Watch) -> None:
        at.ports.dead.add("h2")
        for number in (1, 3):
            await at.coordinator.register(member(number, draining=True))
        at.report(2)
        await skip(0)
        assert (at.asked_after(), await at.members()) == ([], ["b1", "b2", "b3"])

    watching(work)


def test_an_address_is_asked_once_a_second() -> None:
    async def work(at: Watch) -> None:
        at.ports.dead.add("h2")
        for after_s in (0.0, 0.5, 0.5):
            await skip(after_s)
            await at.coordinator.register(member(2))
            entry = (await at.coordinator.assignments())[1]
            await at.coordinator.set_assignment(structs.replace(entry, broker="b2"))
            at.report(2)
            await skip(0)
        assert at.asked_after() == [("h2", 0), ("h2", 1)]

    watching(work)


def test_a_takeover_that_the_coordinator_refuses_is_none_and_the_next_report_waits() -> None:
    """A registration is taken over once a minute."""

    async def work(at: Watch) -> None:
        at.ports.dead |= {"h2", "h3"}
        at.report(2)
        await skip(2)
        await at.coordinator.register(member(2))
        entry = (await at.coordinator.assignments())[1]
        await at.coordinator.set_assignment(structs.replace(entry, broker="b2"))
        at.report(2, 3)
        await skip(0)
        assert (await at.members(), at.counters.early_takeovers, len(at.acts)) == (["b1", "b2", "b3"], 1, 1)
        await skip(REST_S + 0.1)
        assert at.asked_after() == [("h2", 0), ("h2", 2), ("h3", 2 + REST_S)]
        assert (await at.members(), at.counters.suspicions) == (["b1", "b2"], 3)

    watching(work)


@pytest.mark.parametrize("candidate", [True, False])
def test_a_dead_governor_is_taken_over_by_a_broker_that_may_govern(candidate: bool) -> None:
    async def work(at: Watch) -> None:
        assert await at.coordinator.govern(member(3)) == 2
        at.ports.dead.add("h3")
        at.report(3)
        await skip(0)
        assert at.asked_after() == [("h3", 0)]
        assert await at.members() == (["b1", "b2"] if candidate else ["b1", "b2", "b3"])
        assert (await at.coordinator.governor(), at.governor.term) == (("b1", 3) if candidate else ("b3", 0))

    watching(work, governs=False, candidate=candidate)


def test_a_dead_governor_without_a_partition_is_taken_over_too() -> None:
    """Until there is another one, no partition of a dead broker gets an owner."""

    async def work(at: Watch) -> None:
        for number in (4, 5):
            await at.coordinator.register(member(number))
        assert await at.coordinator.govern(member(4)) == 2
        at.ports.dead |= {"h4", "h5"}
        at.report(5, 4)
        await skip(0)
        assert at.asked_after() == [("h4", 0)], "a broker that owns nothing stops nothing"
        assert await at.members() == ["b1", "b2", "b3", "b5"]
        assert await at.coordinator.governor() == "b1"

    watching(work, governs=False)


@pytest.mark.parametrize("candidate", [True, False])
def test_a_report_that_a_dead_governor_can_not_take_ends_its_role_first(candidate: bool) -> None:
    async def work(at: Watch) -> None:
        assert await at.coordinator.govern(member(3)) == 2
        at.ports.dead |= {"h2", "h3"}
        at.report(2)
        await skip(0)
        assert await at.members() == (["b1"] if candidate else ["b1", "b2", "b3"])
        assert (await at.coordinator.governor(), at.governor.term) == (("b1", 3) if candidate else ("b3", 0))
        assert at.counters.early_takeovers == (2 if candidate else 0)

    watching(work, governs=False, candidate=candidate)


def test_a_report_that_the_governor_can_not_take_is_no_reason_to_end_its_role() -> None:
    async def work(at: Watch) -> None:
        assert await at.coordinator.govern(member(3)) == 2
        at.ports.dead.add("h2")
        at.ports.errors["h3"] = UnreachableError("a time-out")
        at.report(2)
        await skip(0)
        assert (await at.members(), await at.coordinator.governor()) == (["b1", "b2", "b3"], "b3")

    watching(work, governs=False)


def test_a_report_is_passed_to_a_live_governor_which_takes_over() -> None:
    async def work(at: Watch) -> None:
        assert await at.coordinator.govern(member(3)) == 2
        at.ports.dead |= {"h2", "h4"}
        end = at.ports.ends["h3"] = BrokerEnd()
        at.report(2, 4)
        await skip(0.5)
        assert end.address == ("h3", 1, REPORT_S)
        hello, asked = end.frames
        assert decode_message(hello.body, Hello).client.startswith("memq-broker/")
        assert decode_message(asked.body, AdminRequest).ask == ReportSuspicion(address="h2:1")
        await at.coordinator.register(member(4))
        entry = (await at.coordinator.assignments())[0]
        await at.coordinator.set_assignment(structs.replace(entry, broker="b4"))
        end.say(Api.ADMIN, asked.argument, AdminAnswer())
        await skip(0)
        assert end.aborts == 1
        assert at.asked_after() == [("h2", 0), ("h3", 0), ("h4", 0.5), ("h3", 0.5)], (
            "a report that is passed needs no pause"
        )
        assert (await at.members(), at.counters.early_takeovers) == (["b1", "b2", "b3", "b4"], 0)

    watching(work, governs=False)


@pytest.mark.parametrize("greets", [True, False])
def test_a_governor_that_does_not_answer_delays_reports_for_a_while(greets: bool) -> None:
    async def work(at: Watch) -> None:
        assert await at.coordinator.govern(member(3)) == 2
        at.ports.dead.add("h2")
        end = at.ports.ends["h3"] = BrokerEnd(silent=not greets)
        at.report(2)
        await skip(REPORT_S - 0.1)
        assert end.aborts == 0
        await skip(0.2)
        assert (end.aborts, at.lines) == (1, [("info", "suspicion"), ("info", "suspicion-unchecked")])
        at.ports.ends["h3"] = BrokerEnd()
        at.report(2)
        await skip(REST_S)
        assert at.asked_after()[2:] == [("h2", REPORT_S + REST_S), ("h3", REPORT_S + REST_S)]
        assert (await at.members(), at.governor.term) == (["b1", "b2", "b3"], 0)

    watching(work, governs=False)


def test_without_a_governor_a_broker_takes_the_role_and_then_the_suspect() -> None:
    async def work(at: Watch) -> None:
        at.ports.dead.add("h2")
        at.report(2)
        await skip(0)
        assert (await at.members(), at.governor.term, len(at.acts)) == (["b1", "b3"], 2, 2)

    watching(work, governs=False)
