"""Requests to services: one is answered here, or forwarded to the broker that has the service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec

from memq.broker.api import Call
from memq.broker.service_partitions.hosts import Made, ServiceHosts, ServiceKind
from memq.broker.services import BROKER_PROGRAM
from memq.errors import LogLostError, NotReadyError, RetryableError
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.link import REQUEST_TIMEOUT_S, Link
from memq.protocol.wire_types import ServiceQuestion
from memq.topic import Topic

Item = TypeVar("Item")
ASK_S = 20.0  # time-out of a question to all service partitions; clients wait 30 s for the answer
HOME_S = 8.0  # time-out for one broker: if it hangs, others may have its partitions soon


async def find_service(hosts: ServiceHosts, kind: ServiceKind[Made], name: str, call: Call[Any]) -> Made | Link:
    """Return the service that has a name, or a link to the broker that has it.

    Raises: as `ServiceHosts.service_or_link`; so a request that a broker forwarded is not forwarded again.
    """
    return await hosts.service_or_link(kind, name, forwarded=call.connection.program == BROKER_PROGRAM)


async def forward(link: Link, ask: Any, *, timeout_s: float = REQUEST_TIMEOUT_S) -> AdminAnswer:
    """Return the answer of another broker to an administrative request."""
    return await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=timeout_s)


async def forward_with_blocks(link: Link, ask: Any, blocks: bytes = b"") -> tuple[AdminAnswer, memoryview]:
    """Return the answer of another broker to a request with blocks, and the blocks behind it."""
    return await link.request_with_blocks(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, blocks=blocks)


async def ask_all_services(
    hosts: ServiceHosts,
    kind: ServiceKind[Made],
    call: Call[Any],
    items_here: Callable[[Made], Awaitable[Sequence[Item]]],
    items_of: Callable[[AdminAnswer], Sequence[Item]],
    *,
    create: bool = False,
) -> tuple[list[Item], list[int] | None]:
    """Return the items of all services of a kind; for another broker, only those of the services here.

    While a service partition moves, a broker that is asked for it may not have it. So an answer counts for the
    partitions that it covers. The others are asked for again, until each was counted once. The second result are the
    covered partitions for a broker that names some, else None. Without `create`, a cluster without service partitions
    has no items.

    Raises: NotReadyError when a partition has no answer in ASK_S; LogLostError; as `ServiceHosts.service_topic`.
    """
    ask: ServiceQuestion = call.ask
    topic, question = await hosts.service_topic(create=create), _Question(hosts, kind, items_here, items_of)
    partitions = [] if topic is None else [part.partition for part in topic.partitions]
    if call.connection.program == BROKER_PROGRAM:
        named = ask.service_partitions
        wanted = partitions if named is None else [each for each in partitions if each in named]
        found, covered = await question.ask_here(topic, wanted) if topic is not None else ([], [])
        return found, None if named is None else covered
    return await question.ask_everywhere(topic, partitions, ask) if topic is not None else [], None


class _Question(Generic[Made, Item]):
    """A question to all services of a kind.

    `items_here` asks a service of this broker. `items_of` takes the items from the answer of another broker.
    """

    def __init__(
        self,
        hosts: ServiceHosts,
        kind: ServiceKind[Made],
        items_here: Callable[[Made], Awaitable[Sequence[Item]]],
        items_of: Callable[[AdminAnswer], Sequence[Item]],
    ) -> None:
        self._hosts = hosts
        self._kind = kind
        self._items_here = items_here
        self._items_of = items_of
        self._cause: RetryableError | None = None  # why the last try has no answer

    async def ask_here(self, topic: Topic, partitions: Sequence[int]) -> tuple[list[Item], list[int]]:
        """Return the items of those of these service partitions that are here, and which these are."""
        found, covered = list[Item](), list[int]()
        for partition in partitions:
            home = await self._hosts.service_in(self._kind, topic, partition)
            if not isinstance(home, str):
                found += await self._items_here(home)
                covered.append(partition)
        return found, covered

    async def ask_everywhere(self, topic: Topic, partitions: Sequence[int], ask: ServiceQuestion) -> list[Item]:
        """Return the items of all these service partitions, each counted once. Raises: as `ask_all_services`."""
        found, missing, tries = list[Item](), list(partitions), 0
        try:
            async with asyncio.timeout(ASK_S):
                while missing:
                    if tries:
                        await self._hosts.look_again(tries)
                    tries += 1
                    for home, named in (await self._homes(topic, missing)).items():
                        with self._noting():
                            items, covered = await self._ask_home(home, named, ask)
                            found += items
                            missing = [each for each in missing if each not in covered]
        except TimeoutError as error:
            text = f"service partitions {missing} have not answered in {ASK_S:g} s"
            raise NotReadyError(f"{text}: {self._cause or 'they move'}") from self._cause or error
        return found

    async def _homes(self, topic: Topic, partitions: Sequence[int]) -> dict[Made | str, list[int]]:
        """Return the partitions of each home: a service of this broker, or the address of another one."""
        homes: dict[Made | str, list[int]] = {}
        for partition in partitions:
            with self._noting():
                home = await self._hosts.service_in(self._kind, topic, partition)
                homes.setdefault(home, []).append(partition)
        return homes

    async def _ask_home(
        self, home: Made | str, named: Sequence[int], ask: ServiceQuestion
    ) -> tuple[Sequence[Item], Sequence[int]]:
        """Return the items of the named partitions, and those of them that are covered."""
        if not isinstance(home, str):
            return await self._items_here(home), named
        wanted = msgspec.structs.replace(ask, service_partitions=list(named))
        answer = await forward(await self._hosts.link(home), wanted, timeout_s=HOME_S)
        covered = named if answer.covered is None else answer.covered  # a broker of an earlier release names none
        return self._items_of(answer), covered

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note an error that passes: the partitions are asked for again."""
        try:
            yield
        except LogLostError:
            raise  # it stays closed until a restore
        except RetryableError as error:
            self._cause = error
