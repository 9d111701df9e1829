"""Requests of a group member go to the owner of its group, over a connection of their own.

The answers name the owner. Any broker forwards requests to it, but lets no heartbeat wait. The connection carries no
fetched data: large answers on a slow link delay no heartbeat.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from memq.client.link_pool import LinkPool
from memq.errors import DrainingError, MemqError, TimedOutError, UnreachableError
from memq.notification.remote import Ask
from memq.protocol.frames import Api
from memq.protocol.group_messages import HeartbeatRequest, MembershipAnswer
from memq.protocol.link import Link
from memq.runtime.clock import Clock
from memq.runtime.network import Address, format_address, parse_address

Answer = TypeVar("Answer", bound=msgspec.Struct)
CONNECT_S = 3.0  # an owner that can't be reached in this time is asked through other brokers
AVOIDED_S = 5.0  # for so long
REQUEST_S = 10.0  # time-out of joins and commits: an owner that hangs is left
HEARTBEAT_S = 5.0  # time-out of a heartbeat in addition to its wait, or the wait once more: an owner that hangs is left


class GroupOwner:
    """Asks the owner of one group, once an answer has named it; else any broker. See `Ask`."""

    def __init__(self, pool: LinkPool, any_broker: Ask, clock: Clock) -> None:
        self._pool = pool.separate()
        self._any_broker = any_broker
        self._clock = clock
        self._owner: Address | None = None
        self._avoided: tuple[Address, float] | None = None  # and until when

    async def __call__(self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        """Ask once more elsewhere if the owner is gone. The request must be one that may be made twice.

        Raises: what the broker named; UnreachableError when none can be reached; TimedOutError.
        """
        link = await self._link()
        if link is not None:
            try:
                within_s = min(timeout_s, _within_s(message))
                return self._learned(await link.request(api, message, answer, timeout_s=within_s))
            except TimedOutError as error:
                self._avoid(link.address)
                link.abort(UnreachableError(f"connection to {format_address(link.address)} was given up: {error}"))
                raise
            except (UnreachableError, DrainingError):
                self._avoid(link.address)
        within_s = min(timeout_s, CONNECT_S + (HEARTBEAT_S if isinstance(message, HeartbeatRequest) else REQUEST_S))
        return self._learned(await self._any_broker(api, message, answer, timeout_s=within_s))

    async def close(self) -> None:
        """Close the connection."""
        await self._pool.close()

    async def _link(self) -> Link | None:
        """Return a link to the owner; None if it is not known, or can't be reached now."""
        owner = self._owner
        if owner is None:
            return None
        try:
            async with asyncio.timeout(CONNECT_S):
                return (await self._pool.session(owner)).link
        except (MemqError, TimeoutError):
            self._avoid(owner)
            return None

    def _learned(self, answer: Answer) -> Answer:
        """Keep the owner that an answer names."""
        if isinstance(answer, MembershipAnswer) and answer.owner:
            try:
                owner = parse_address(answer.owner)
            except UnreachableError:
                return answer  # any broker forwards the requests
            if self._avoided is None or self._avoided[0] != owner or self._avoided[1] <= self._clock.monotonic():
                self._owner = owner
        return answer

    def _avoid(self, owner: Address) -> None:
        self._owner, self._avoided = None, (owner, self._clock.monotonic() + AVOIDED_S)


def _within_s(message: msgspec.Struct) -> float:
    """Return how long the owner may take for a request."""
    if not isinstance(message, HeartbeatRequest):
        return REQUEST_S
    wait_s = message.wait_ms / 1_000
    return wait_s + max(HEARTBEAT_S, wait_s)
