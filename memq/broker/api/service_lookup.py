"""Requests to services: one is answered here, or forwarded to the broker that has the service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from memq.broker.api import Call
from memq.broker.service_hosts import Made, ServiceHosts, ServiceKind
from memq.broker.services import BROKER_PROGRAM
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.link import Link

Item = TypeVar("Item")


async def find_service(hosts: ServiceHosts, kind: ServiceKind[Made], name: str, call: Call[Any]) -> Made | Link:
    """Return the service that has a name, or a link to the broker that has it.

    Raises: as `ServiceHosts.service_or_link`; so a request that a broker forwarded is not forwarded again.
    """
    return await hosts.service_or_link(kind, name, forwarded=call.connection.program == BROKER_PROGRAM)


async def forward(link: Link, ask: Any) -> AdminAnswer:
    """Return the answer of another broker to an administrative request."""
    return await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer)


async def ask_all_services(
    hosts: ServiceHosts,
    kind: ServiceKind[Made],
    call: Call[Any],
    items_here: Callable[[Made], Awaitable[Sequence[Item]]],
    items_of: Callable[[AdminAnswer], Sequence[Item]],
    *,
    create: bool = False,
) -> list[Item]:
    """Return the items of all services of a kind; for another broker, only those of the services here.

    `create`: as for `ServiceHosts.all_services`.
    """
    found: list[Item] = []
    for home in await hosts.all_services(kind, create=create):
        if not isinstance(home, str):
            found += await items_here(home)
        elif call.connection.program != BROKER_PROGRAM:
            found += items_of(await forward(await hosts.link(home), call.ask))
    return found
