"""A question to all service partitions counts each once, also while some move from broker to broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from memq.broker.api import Call
from memq.broker.api.service_lookup import ASK_S, HOME_S, ask_all_services
from memq.broker.services import BROKER_PROGRAM
from memq.errors import (
    InvalidRequestError,
    LogLostError,
    MemqError,
    MovedError,
    NotReadyError,
    TimedOutError,
    UnreachableError,
)
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.connection import ANONYMOUS
from memq.protocol.frames import Api
from memq.protocol.group_messages import ListGroups
from memq.protocol.link import Link
from memq.topic import STATE_TOPIC, Topic, equal_slots
from tests.access import EVERYTHING
from tests.skipping_loop import now_s, run_skipping, skip

COUNT = 4


class Service:
    """The service of one partition; `failures` are raised first."""

    def __init__(self, number: int) -> None:
        self.item = f"group {number}"
        self.failures: list[MemqError] = []
        self.asked = 0

    async def items(self) -> list[str]:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        return [self.item]


class Other(Link):
    """Another broker. It has the services of the partitions in `homes`, and answers only for these."""

    def __init__(self, services: list[Service]) -> None:
        self._services = services
        self.homes: set[int] = set()
        self.failures: list[MemqError] = []
        self.asked: list[list[int] | None] = []
        self.earlier = False  # of an earlier release, which does not know that partitions are named
        self.silent = False

    async def request(self, api: Api, message: msgspec.Struct, answer: Any, **options: Any) -> Any:
        assert (api, answer) == (Api.ADMIN, AdminAnswer)
        assert isinstance(message, AdminRequest)
        assert isinstance(message.ask, ListGroups)
        named = message.ask.service_partitions
        self.asked.append(named)
        if self.failures:
            raise self.failures.pop(0)
        if self.silent:
            await skip(options["timeout_s"])
            raise TimedOutError("silent")
        wanted = range(COUNT) if named is None or self.earlier else named
        covered = [each for each in wanted if each in self.homes]
        groups = [self._services[each].item for each in covered]
        return AdminAnswer(groups=groups, covered=None if self.earlier else covered)


class Hosts:
    """Where the asking broker takes the service partitions to be; `here` are its own. `moves` comes with each look."""

    def __init__(self) -> None:
        self.services = [Service(number) for number in range(COUNT)]
        self.others = {"b:1": Other(self.services), "c:1": Other(self.services)}
        self.homes = ["", "b:1", "b:1", "c:1"]
        self.others["b:1"].homes, self.others["c:1"].homes = {1, 2}, {3}
        self.exists = True
        self.opening: dict[int, MemqError] = {}
        self.moves: list[Callable[[], None]] = []
        self.looks = 0

    async def service_topic(self, *, create: bool) -> Topic | None:
        if not self.exists and not create:
            return None
        return Topic(name=STATE_TOPIC, id="ef" * 16, created_ms=0, partitions=equal_slots(COUNT))

    async def service_in(self, kind: object, topic: Topic, partition: int) -> Service | str:
        assert (kind, topic.name) == ("kind", STATE_TOPIC)
        if partition in self.opening:
            raise self.opening[partition]
        return self.homes[partition] or self.services[partition]

    async def link(self, address: str) -> Other:
        return self.others[address]

    async def look_again(self, tries: int) -> None:
        self.looks += 1
        assert tries == self.looks
        await skip(0.5)
        if self.moves:
            self.moves.pop(0)()

    def move(self, partition: int, address: str, *, known: bool = True) -> None:
        """Move a partition; the asking broker learns of it if it is `known`."""
        for other in self.others.values():
            other.homes.discard(partition)
        if address:
            self.others[address].homes.add(partition)
        if known:
            self.homes[partition] = address

    async def ask(
        self, *named: int, program: str = "a client", create: bool = False
    ) -> tuple[list[str], list[int] | None]:
        self.looks = 0
        ask = ListGroups(service_partitions=list(named) or None)
        call = Call(cast(Any, SimpleNamespace(program=program)), ANONYMOUS, 0, ask, access=EVERYTHING)
        found, covered = await ask_all_services(
            cast(Any, self), cast(Any, "kind"), call, Service.items, lambda answer: answer.groups, create=create
        )
        return sorted(found), covered


ALL = [f"group {number}" for number in range(COUNT)]


def asking(work: Callable[[Hosts], Awaitable[None]]) -> None:
    async def run() -> None:
        await work(Hosts())

    run_skipping(run())


def test_an_asker_names_the_partitions_that_it_expects_of_each_broker() -> None:
    async def work(hosts: Hosts) -> None:
        assert await hosts.ask() == (ALL, None)
        assert (hosts.others["b:1"].asked, hosts.others["c:1"].asked) == ([[1, 2]], [[3]])
        assert (hosts.services[0].asked, hosts.looks) == (1, 0)

    asking(work)


def test_an_asker_asks_again_for_a_partition_that_a_broker_does_not_have_any_more() -> None:
    """The broker was given up by the partition just before, and answers for the other one alone."""

    async def work(hosts: Hosts) -> None:
        hosts.move(2, "c:1", known=False)
        hosts.moves = [lambda: None, lambda: hosts.move(2, "c:1")]
        assert await hosts.ask() == (ALL, None)
        assert hosts.others["b:1"].asked == [[1, 2], [2]], "no partition is counted twice"
        assert hosts.others["c:1"].asked == [[3], [2]]
        assert (hosts.services[0].asked, hosts.looks) == (1, 2)

    asking(work)


def test_an_asker_counts_a_partition_once_that_two_brokers_have_one_after_the_other() -> None:
    async def work(hosts: Hosts) -> None:
        hosts.move(1, "c:1", known=False)
        hosts.others["b:1"].homes.add(1)  # its owner until the answer
        assert await hosts.ask() == (ALL, None)
        assert hosts.others["c:1"].asked == [[3]]

    asking(work)


def test_an_asker_takes_over_a_partition_and_answers_for_it() -> None:
    async def work(hosts: Hosts) -> None:
        hosts.move(1, "", known=False)
        hosts.moves = [lambda: hosts.move(1, "")]
        assert await hosts.ask() == (ALL, None)
        assert (hosts.services[1].asked, hosts.others["b:1"].asked) == (1, [[1, 2]])

    asking(work)


@pytest.mark.parametrize("error", [MovedError("moved"), NotReadyError("opens"), UnreachableError("gone")])
def test_an_asker_asks_again_after_an_error_that_passes(error: MemqError) -> None:
    async def work(hosts: Hosts) -> None:
        hosts.others["b:1"].failures = [error]
        hosts.services[0].failures = [error]
        hosts.opening[3] = error
        hosts.moves = [hosts.opening.clear]
        assert await hosts.ask() == (ALL, None)
        assert (hosts.services[0].asked, hosts.others["b:1"].asked) == (2, [[1, 2]] * 2)
        assert hosts.others["c:1"].asked == [[3]]

    asking(work)


@pytest.mark.parametrize("error", [LogLostError("lost"), InvalidRequestError("wrong")])
def test_an_asker_passes_on_an_error_that_stays(error: MemqError) -> None:
    async def work(hosts: Hosts) -> None:
        hosts.others["c:1"].failures = [error]
        with pytest.raises(type(error), match=str(error)):
            await hosts.ask()
        hosts.opening[2] = error
        with pytest.raises(type(error), match=str(error)):
            await hosts.ask()
        assert hosts.looks == 0

    asking(work)


def test_an_asker_gives_no_answer_while_a_partition_has_none() -> None:
    async def work(hosts: Hosts) -> None:
        hosts.move(2, "", known=False)  # in no broker
        with pytest.raises(NotReadyError, match=r"service partitions \[2\] have not answered in 20 s: they move"):
            await hosts.ask()
        assert now_s() == pytest.approx(ASK_S)
        hosts.opening[1] = NotReadyError("no owner")
        with pytest.raises(NotReadyError, match=r"\[1, 2\] have not answered in 20 s: no owner") as caught:
            await hosts.ask()
        assert caught.value.__cause__ is hosts.opening[1]

    asking(work)


def test_an_asker_waits_for_a_silent_broker_within_its_time() -> None:
    async def work(hosts: Hosts) -> None:
        hosts.others["c:1"].silent = True
        with pytest.raises(NotReadyError, match=r"\[3\] have not answered in 20 s: silent"):
            await hosts.ask()
        assert now_s() == pytest.approx(ASK_S)
        hosts.moves = [lambda: hosts.move(3, "b:1")]
        assert await hosts.ask() == (ALL, None), "another broker takes over"
        assert now_s() == pytest.approx(ASK_S + HOME_S + 0.5)
        hosts.move(3, "c:1")
        hosts.others["c:1"].silent = False
        hosts.others["c:1"].failures = [TimedOutError("late")]
        assert await hosts.ask() == (ALL, None)

    asking(work)


def test_a_broker_answers_for_the_named_partitions_that_it_has() -> None:
    async def work(hosts: Hosts) -> None:
        hosts.homes = ["", "", "b:1", ""]
        assert await hosts.ask(0, 2, 3, program=BROKER_PROGRAM) == (["group 0", "group 3"], [0, 3])
        assert await hosts.ask(2, 9, program=BROKER_PROGRAM) == ([], [])
        assert hosts.services[1].asked == 0, "another broker is asked for it"
        hosts.opening[3] = NotReadyError("opens")
        with pytest.raises(NotReadyError):
            await hosts.ask(0, 3, program=BROKER_PROGRAM)
        assert await hosts.ask(0, program=BROKER_PROGRAM) == (["group 0"], [0])
        assert [other.asked for other in hosts.others.values()] == [[], []], "no request is forwarded twice"
        assert hosts.looks == 0

    asking(work)


def test_a_broker_that_does_not_know_the_service_partitions_covers_none() -> None:
    async def work(hosts: Hosts) -> None:
        hosts.exists = False
        assert await hosts.ask(0, 1, program=BROKER_PROGRAM) == ([], [])
        assert await hosts.ask() == ([], None), "the cluster has none"
        assert await hosts.ask(create=True) == (ALL, None)

    asking(work)


def test_brokers_of_an_earlier_release_ask_and_answer_without_names() -> None:
    async def work(hosts: Hosts) -> None:
        hosts.homes = ["", "b:1", "b:1", ""]
        assert await hosts.ask(program=BROKER_PROGRAM) == (["group 0", "group 3"], None)
        hosts.others["b:1"].earlier = True
        assert await hosts.ask() == (ALL, None)
        hosts.move(2, "", known=False)
        assert await hosts.ask() == (["group 0", "group 1", "group 3"], None), "as before"

    asking(work)
