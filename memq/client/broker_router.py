"""Requests that any broker answers: sent over one connection, and over the next when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from memq.client.consumer.fetch.fetcher import ReadRange
from memq.client.link_pool import LinkPool, Session
from memq.errors import DrainingError, MemqError, TimedOutError, UnreachableError
from memq.format.blocks.header import Buffer
from memq.format.pointer import Pointer
from memq.limits import READ_BYTES_MAX
from memq.protocol.frames import Api
from memq.protocol.link import Link
from memq.protocol.messages import ReadRequest
from memq.runtime.network import Address, format_address

Answer = TypeVar("Answer", bound=msgspec.Struct)


class BrokerRouter:
    """Asks one broker of the pool, in the client's zone if one is there.

    When it is gone, or is silent, the others.
    """

    def __init__(self, pool: LinkPool, holders: Callable[[Pointer], Sequence[Address]] = lambda pointer: ()) -> None:
        """`holders` names the brokers that may hold a batch in memory, the likeliest first."""
        self._pool = pool
        self._holders = holders
        self._session: Session | None = None
        self._refused: Address | None = None  # the broker that has just refused a request

    async def __call__(self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        """Ask until a broker answers. The request must be one that may be made twice.

        Raises: what the broker named; UnreachableError when none can be reached; TimedOutError.
        """
        return (await self.with_blocks(api, message, answer, timeout_s=timeout_s))[0]

    async def with_blocks(
        self,
        api: Api,
        message: msgspec.Struct,
        answer: type[Answer],
        *,
        timeout_s: float,
        blocks: bytes = b"",
        tries: int = 2,
    ) -> tuple[Answer, memoryview]:
        """Ask as above, with `blocks` behind the request; return the answer, and the blocks behind it.

        A connection that looked open may be dead. Then the next one is fresh, so there are two `tries`. A caller to
        whom a lost answer matters takes one: the first request may have counted. Raises: as above.
        """
        failures: list[str] = []
        for _ in range(tries):
            link = await self.link(self._refused)
            self._refused = None
            try:
                return await link.request_with_blocks(api, message, answer, blocks=blocks, timeout_s=timeout_s)
            except (UnreachableError, DrainingError) as error:
                self.give_up(link, error)
                failures.append(str(error))
                self._refused = link.address if link.open else None
            except TimedOutError as error:
                self.give_up(link, error)
                raise
        raise UnreachableError(f"no broker answers {api.name}: {'; '.join(failures)}")

    async def once(self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        """Ask one broker, once: for requests that must not be made twice unknowingly. Raises: as above."""
        return await (await self.link()).request(api, message, answer, timeout_s=timeout_s)

    async def read(
        self, store: str, key: str, offset: int, length: int, near: Pointer | None = None
    ) -> bytes | bytearray:
        """Return a range of an object through a broker, in pieces of READ_BYTES_MAX.

        It asks for the object of batch `near` where it can, and takes the bytes from a broker's memory. Without `near`
        the broker reads the store.

        Raises: NotFoundError, CorruptDataError when the object is shorter, StoreError; UnreachableError, TimedOutError.
        """
        parts: list[bytes | bytearray] = []
        for at in range(offset, offset + length, READ_BYTES_MAX):
            size = min(READ_BYTES_MAX, offset + length - at)
            link = await self._holder(near) or await self.link()
            try:
                request = ReadRequest(store=store, key=key, offset=at, length=size, stored=near is None)
                parts.append(await link.read(request))
            except (UnreachableError, DrainingError, TimedOutError) as error:
                self.give_up(link, error)
                raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def near(self, pointer: Pointer) -> ReadRange:
        """Return `read` for the objects of one batch: its broker has it in memory for a while."""

        async def read(store: str, key: str, offset: int, length: int) -> Buffer:
            return await self.read(store, key, offset, length, pointer)

        return read

    async def _holder(self, near: Pointer | None) -> Link | None:
        """Return a link to a broker that may hold a batch, in this zone and recently responsive; or None."""
        for address in self._holders(near) if near is not None else ():
            if not self._pool.is_preferred(address):
                continue
            try:
                return (await self._pool.session(address)).link
            except MemqError:  # any broker can read the object
                continue
        return None

    async def link(self, refused: Address | None = None) -> Link:
        """Return the link in use, or another one; `refused` is the broker to ask only if no other answers.

        Raises: UnreachableError.
        """
        if self._session is not None and self._session.link.open:
            self._session = self._pool.nearer(self._session) or self._session
            return self._session.link
        failures: list[str] = []
        for address in sorted(self._pool.candidates(), key=lambda each: each == refused):
            try:
                self._session = await self._pool.session(address)
            except (UnreachableError, TimedOutError) as error:
                failures.append(f"{format_address(address)}: {error}")
            else:
                return self._session.link
        raise UnreachableError(f"no broker can be reached: {'; '.join(failures[:5])}")

    def give_up(self, link: Link, error: MemqError) -> None:
        """Use another connection next; a silent one is dropped, so that the pool does not offer it first."""
        if isinstance(error, TimedOutError):
            # Others wait on this connection, too: it was their connection that failed, not this request.
            link.abort(UnreachableError(f"connection to {format_address(link.address)} was given up: {error}"))
        if self._session is not None and self._session.link is link:
            self._session = None
