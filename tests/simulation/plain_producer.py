"""A minimal producer: one partition, one connection, resends from the oldest block.

It keeps the rules of docs/ownership.md for producers and nothing else, so it finds faults of the broker that the
product's own producer might hide, and continues when that one is at fault.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from memq.errors import IdentityConflictError, MemqError, TimedOutError, TooOldError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.protocol.frames import WRITE_PREFIX, AckLevel, Api, Frame
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import Metadata, MetadataRequest, Nack, Open, decode_message, error_of
from memq.runtime.network import Address, parse_address
from memq.runtime.runtime import Runtime
from memq.topic import Topic
from tests.simulation.wishes import facets_of

STREAM = 1
BLOCKS_MAX = 8
ANSWER_S = 5.0  # without any answer for so long it begins again


class Outcomes(Protocol):
    """Receives the outcomes of records."""

    def ack(self, value: bytes) -> None:
        """The record is acked with `all`."""
        ...

    def give_up(self, value: bytes) -> None:
        """The outcome of the record is unknown."""
        ...


@dataclass(slots=True)
class Block:
    """One sealed block and when it was first sent (monotonic s; negative: never)."""

    first: int
    following: int
    values: list[bytes]
    data: bytes
    sent_s: float = -1.0


class Session:
    """One connection with its one stream; `wrong` is set when it must be given up."""

    def __init__(self, acked: Callable[[int], None], condemned: Callable[[int], None]) -> None:
        self.wrong = asyncio.Event()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = False
        self.heard = False
        self.error: MemqError | None = None
        self.to = ""  # where a redirect or an error sends
        self._acked = acked
        self._condemned = condemned

    def stream_frame(self, frame: Frame) -> None:
        """See `LinkOwner`."""
        self.heard = True
        if frame.api == Api.OPEN:
            self.open = True
            self.opened.set_result(None)
        elif frame.api == Api.ACK:
            if frame.flags == AckLevel.ALL:
                self._acked(frame.argument)
        elif self.open or frame.api == Api.ERROR:  # what is older than the answer to OPEN concerns nobody
            self._refused(frame)

    def _refused(self, frame: Frame) -> None:
        if frame.api in (Api.NACK, Api.ERROR):
            self.error = error_of(decode_message(frame.body, Nack))
            self.to = getattr(self.error, "address", "")
            if isinstance(self.error, (TooOldError, IdentityConflictError)):
                self._condemned(frame.argument)
        self.wrong.set()

    def draining(self) -> None:
        """See `LinkOwner`."""

    def writable(self) -> None:
        """See `LinkOwner`."""

    def lost(self, error: MemqError) -> None:
        """See `LinkOwner`."""
        self.error = error
        self.wrong.set()


class PlainProducer:
    """Sends to one partition with ack=all. `send` waits for room; `flush` until nothing is open."""

    def __init__(
        self,
        runtime: Runtime,
        brokers: list[Address],
        topic: Topic,
        partition: int,
        outcomes: Outcomes,
        producer_id: int = 0,
    ) -> None:
        self.runtime = runtime
        self.topic = topic
        self.partition = partition
        self.producer_id = producer_id or runtime.random.getrandbits(62) + 1
        self.blocks: deque[Block] = deque()
        self._brokers = brokers
        self._outcomes = outcomes
        self._next = 0
        self._scope = scope_of(topic.id_bytes, partition)
        self._changed = asyncio.Event()
        self._session: Session | None = None

    async def send(self, values: list[bytes]) -> None:
        """Seal `values` as one block and queue it; waits while too many blocks are open."""
        while len(self.blocks) >= BLOCKS_MAX:
            await self._wait_change()
        builder = BlockBuilder()
        for value in values:
            facets = facets_of(value)
            builder.append(value, headers=facets.headers, tag=facets.tag)
        sealed = builder.seal(
            producer_id=self.producer_id,
            first_sequence=self._next,
            scope=self._scope,
            now_ms=self.runtime.clock.wall_ms(),
            codec=self.runtime.random.choice(["none", "zstd", "lz4"]),
        )
        self.blocks.append(Block(self._next, self._next + len(values), values, bytes(sealed.data)))
        self._next += len(values)
        self._changed.set()

    async def flush(self) -> None:
        """Wait until each block is acked or given up."""
        while self.blocks:
            await self._wait_change()

    async def run(self) -> None:
        """Send what there is, for ever."""
        address = ""
        while True:
            if not self.blocks:
                await self._wait_change()
                continue
            try:
                address = await self._talk(address)
            except MemqError:
                address = ""
            self._give_up_old()
            await asyncio.sleep(self.runtime.random.uniform(0, 0.2))

    async def _wait_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _talk(self, address: str) -> str:
        """Hold one session until it ends; return where to go next, "" for anywhere."""
        target = parse_address(address) if address else self.runtime.random.choice(self._brokers)
        session = Session(self._acked, self._condemned)
        link = await connect_link(self.runtime, session, target, timeout_s=2.0)
        try:
            owner = await self._owner(link)
            if parse_address(owner) != target:
                return owner
            async with asyncio.timeout(ANSWER_S * 3):
                await self._hold(link, session)
        except TimeoutError:
            return ""
        finally:
            link.abort(TimedOutError("session over"))
        return session.to

    async def _owner(self, link: Link) -> str:
        metadata = await link.request(
            Api.METADATA, MetadataRequest(topics=[self.topic.name]), Metadata, timeout_s=ANSWER_S
        )
        for topic in metadata.topics:
            for owner in topic.owners:
                if owner.partition == self.partition and owner.address:
                    return owner.address
        raise TimedOutError("nobody owns the partition yet")

    async def _hold(self, link: Link, session: Session) -> None:
        """Open the stream, write all blocks in order, and those that come, until something is wrong."""
        self._give_up_old()
        if not self.blocks:
            return
        first = self.blocks[0].first
        link.open_stream(
            STREAM,
            Open(
                topic=self.topic.name,
                topic_id=self.topic.id,
                partition=self.partition,
                producer=f"{self.producer_id:016x}",
                acks=AckLevel.ALL,
                sequence=first,
            ),
        )
        wrong = asyncio.create_task(session.wrong.wait())
        self._session = session
        try:
            opened: list[asyncio.Future[Any]] = [wrong, session.opened]
            await asyncio.wait(opened, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
            written = first
            while session.open and not session.wrong.is_set():
                written = self._write_from(link, written)
                changed = asyncio.create_task(self._wait_change())
                session.heard = False
                await asyncio.wait([wrong, changed], timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                if not (session.heard or changed.done()) or not self.blocks:
                    return
                if self.blocks[0].first > written:
                    return  # a block was given up: the stream must be opened again
        finally:
            self._session = None
            wrong.cancel()

    def _write_from(self, link: Link, sequence: int) -> int:
        for block in self.blocks:
            if block.first >= sequence and not link.congested:
                if block.sent_s < 0:
                    block.sent_s = self.runtime.clock.monotonic()
                prefix = WRITE_PREFIX.pack(len(block.data), Api.WRITE, 0, STREAM, link.clock_ms(block.sent_s))
                link.write(prefix, block.data)
                sequence = block.following
        return sequence

    def _acked(self, following: int) -> None:
        while self.blocks and self.blocks[0].following <= following:
            for value in self.blocks.popleft().values:
                self._outcomes.ack(value)
        self._changed.set()

    def _condemned(self, first: int) -> None:
        for block in self.blocks:
            if block.first == first:
                self._drop(block)
                return

    def _give_up_old(self) -> None:
        horizon = self.runtime.clock.monotonic() - self.topic.settings.delivery_timeout_ms / 1000
        while self.blocks and 0 <= self.blocks[0].sent_s < horizon:
            self._drop(self.blocks[0])

    def _drop(self, block: Block) -> None:
        self.blocks.remove(block)
        for value in block.values:
            self._outcomes.give_up(value)
        self._changed.set()


class Running:
    """Runs coroutines in the background of a block, and cancels them at its end."""

    def __init__(self, mains: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        self._mains = mains
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(main()) for main in self._mains]

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
