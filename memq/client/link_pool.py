"""The connections of one client, one for each broker, and the streams that share them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, repeat

from memq.errors import (
    ClosedError,
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    TimedOutError,
    UnreachableError,
)
from memq.limits import STREAMS_PER_CONNECTION_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, ReportSuspicion
from memq.protocol.frames import Api, Frame
from memq.protocol.link import Link, LinkOwner, broker_name, connect_link
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, format_address, parse_address
from memq.runtime.runtime import Runtime
from memq.runtime.waits import Waits

CONNECT_TIMEOUT_MS = 3_000  # the default for the first connection: a broker that starts is up in a second
DEAD_S = 5.0  # how long a broker that did not answer is asked last
BROKERS_MAX = 1_000  # that are remembered
REPORT_S = 1.0  # between two reports of one suspicion, and the time-out of each
_REACH_AGAIN_S = 0.1
_REACH_LOGGED_S = 1.0  # from then on a client that looks for its first broker says so
_UNANSWERED_S = 3.0  # from then on a client that waits for any broker says so


def bootstrap_addresses(brokers: str | Sequence[str] | None) -> list[Address]:
    """Return the start addresses: `brokers` (one, a list, or comma-separated), else MEMQ_BROKERS.

    Raises: InvalidSettingError when there is none, and for what is no address; TypeError.
    """
    if brokers is None:
        brokers = os.environ.get("MEMQ_BROKERS", "")
    texts = brokers.split(",") if isinstance(brokers, str) else brokers
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"brokers must be 'HOST:PORT' or a sequence of these, not {ascii(brokers)[:60]}")
    try:
        addresses = [parse_address(text) for text in texts if text.strip()]
    except UnreachableError as error:
        raise InvalidSettingError(str(error), hint=error.hint) from error
    if not addresses:
        raise InvalidSettingError("no broker is named", hint="give HOST:PORT of one, or set MEMQ_BROKERS")
    return addresses


class Session:
    """A link and the owners of its streams.

    Frames go to the owner of their stream, the rest to all of them.
    """

    def __init__(self, pool: LinkPool) -> None:
        self.link: Link
        self.asked = False  # a sign of life is awaited
        self.answered_s = -1e9  # when the last one came
        self._pool = pool
        self._streams: dict[int, LinkOwner] = {}
        self._stream = 0

    def bind(self, owner: LinkOwner) -> int:
        """Give `owner` a stream of this connection. Raises: InvalidRequestError when all are taken."""
        if len(self._streams) >= STREAMS_PER_CONNECTION_MAX:
            raise InvalidRequestError(f"{STREAMS_PER_CONNECTION_MAX} streams of a connection are open")
        while True:
            self._stream = self._stream % STREAMS_PER_CONNECTION_MAX + 1
            if self._stream not in self._streams:
                self._streams[self._stream] = owner
                return self._stream

    def unbind(self, stream: int) -> None:
        """Give a stream back; what still comes for it is dropped."""
        self._streams.pop(stream, None)

    def stream_frame(self, frame: Frame) -> None:
        """See `LinkOwner.stream_frame`."""
        owner = self._streams.get(frame.stream)
        if owner is not None:
            owner.stream_frame(frame)

    def draining(self) -> None:
        """See `LinkOwner.draining`."""
        for owner in list(self._streams.values()):
            owner.draining()

    def writable(self) -> None:
        """See `LinkOwner.writable`.

        Each stream continues until the socket is full again, so the first one rotates.
        """
        owners = list(self._streams.items())
        for stream, owner in owners:
            if self.link.congested:
                return
            if stream in self._streams:
                self._streams[stream] = self._streams.pop(stream)
                owner.writable()

    def lost(self, error: MemqError) -> None:
        """See `LinkOwner.lost`."""
        self._pool.forget(self)
        streams, self._streams = self._streams, {}
        for owner in streams.values():
            owner.lost(error)


class LinkPool:
    """One connection for each broker, made on demand.

    It belongs to one client, the `owner` in messages, and lives on one event loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        bootstrap: Sequence[Address],
        *,
        client_id: str = "",
        zone: str = "",
        owner: str = "client",
    ) -> None:
        self._runtime = runtime
        self._client_id = client_id
        self._zone = zone
        self._owner = owner
        self._bootstrap = tuple(bootstrap)
        self._known: dict[Address, str] = dict.fromkeys(bootstrap, "")  # with their zones, as far as they are known
        self._dead_until_s: dict[Address, float] = {}  # who did not answer is asked last until then
        self._sessions: dict[Address, Session] = {}
        self._connecting: dict[Address, asyncio.Task[Session | MemqError]] = {}
        self._reported_s: dict[Address, float] = {}  # when each broker of the cluster was reported last
        self._reports: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self.audit_ms = 0  # as the broker that was connected last has it: see `Link`
        self.reached = False  # whether a broker ever answered: one that does not answer now may be restarting
        self._events = events = EventLog(runtime.clock)
        self.waits = Waits(runtime.clock, events)  # the answers that this client awaits, of brokers and stores
        self._unanswered = events.outage("client.no-broker", "client.broker-back", _UNANSWERED_S)

    def separate(self) -> LinkPool:
        """Return another pool to the same brokers, with connections of its own."""
        return LinkPool(
            self._runtime, tuple(self._known), client_id=self._client_id, zone=self._zone, owner=self._owner
        )

    def learn(self, addresses: Sequence[Address], zones: Sequence[str]) -> None:
        """Keep the addresses of live brokers, with zones, in addition to start addresses and those in use."""
        kept = {address: self._known.get(address, "") for address in (*self._bootstrap, *self._sessions)}
        self._known = kept | dict(zip(addresses[:BROKERS_MAX], chain(zones, repeat("")), strict=False))
        self._reported_s = {each: self._reported_s.get(each, -1e9) for each in addresses[:BROKERS_MAX]}

    def sessions(self) -> list[Session]:
        """Return the sessions that are open."""
        return [session for session in self._sessions.values() if session.link.open]

    def candidates(self) -> list[Address]:
        """Return all known brokers in order: those of the client's zone, then connected ones, then others.

        A broker that did not answer a moment ago comes last for a while. Otherwise the order is random.
        """
        known = list(self._known)
        self._runtime.random.shuffle(known)
        return sorted(
            known, key=lambda each: (self._is_dead(each), not self._is_near(each), each not in self._sessions)
        )

    def nearer(self, session: Session) -> Session | None:
        """Return an open session in the client's zone, when `session` is not; without one, begin to make it."""
        if not self._zone or self._is_near(session.link.address):
            return None
        for address in self.candidates():
            if not self._is_near(address) or self._is_dead(address):
                return None
            open_session = self._sessions.get(address)
            if open_session is not None and open_session.link.open:
                return open_session
            self._connection(address)  # in the background
            return None
        return None

    def is_preferred(self, address: Address) -> bool:
        """Whether a broker is in the client's zone, if it has one, and did not fail to answer a moment ago."""
        return self._is_near(address) and not self._is_dead(address)

    def _is_near(self, address: Address) -> bool:
        return not self._zone or self._known.get(address) == self._zone

    def _is_dead(self, address: Address) -> bool:
        return self._dead_until_s.get(address, 0.0) > self._runtime.clock.monotonic()

    async def reach(self, timeout_s: float) -> None:
        """Connect to any broker unless one is connected, retrying for `timeout_s`: one may be starting.

        What all clients do before their first question, and an admin before each; a broker that does not answer at
        all has its share of the time only. Raises: UnreachableError naming each that was tried, and why; ClosedError.
        """
        if self.sessions():
            return
        tried = ", ".join(map(format_address, list(self._known)[:5]))
        text = f"no broker answers yet; trying {tried} for {timeout_s:g} s"
        warn = self._events.warning
        timer = asyncio.get_running_loop().call_later(_REACH_LOGGED_S, warn, "client.no-broker", text)
        try:
            await self._reach(timeout_s)
        finally:
            timer.cancel()

    async def _reach(self, timeout_s: float) -> None:
        clock = self._runtime.clock
        deadline_s = clock.monotonic() + timeout_s
        said: dict[Address, tuple[str, str]] = {}  # the last error of each address, and its hint
        while not self.sessions():
            failures: list[str] = []
            own_hint = ""  # of a fault on this side
            foreign = True  # every address is that of another server: to wait changes nothing
            addresses = self.candidates()
            for number, address in enumerate(addresses):
                share_s = (deadline_s - clock.monotonic()) / (len(addresses) - number)
                try:
                    async with asyncio.timeout(min(share_s, timeout_s / len(addresses))):
                        await self.session(address)  # one that is given up here continues, and is met in the next round
                except (UnreachableError, TimedOutError) as error:
                    failures.append(str(error))
                    is_foreign = isinstance(error, UnreachableError) and error.foreign
                    said[address] = str(error), "" if error.hint == type(error).default_hint else error.hint
                    own_hint = said[address][1] or own_hint
                    foreign = foreign and is_foreign
                except TimeoutError:  # perhaps since only a moment was left
                    before, hint = said.get(address, ("", ""))
                    silent = f"{format_address(address)} does not answer"
                    failures.append(f"{silent}, and before: {before}" if before else silent)
                    own_hint, foreign = hint or own_hint, False
                else:
                    return
            if foreign or clock.monotonic() + _REACH_AGAIN_S >= deadline_s:
                hint = own_hint or "check the address, and that a broker runs there"
                unreached = UnreachableError(f"no broker answers: {'; '.join(failures[:5])}", hint=hint)
                unreached.foreign = foreign
                raise unreached
            await asyncio.sleep(_REACH_AGAIN_S)

    async def session(self, address: Address) -> Session:
        """Return the session with a broker, connecting when there is none.

        Concurrent callers share one attempt.

        Raises: UnreachableError, TimedOutError, UnsupportedVersionError, ClosedError.
        """
        session = self._sessions.get(address)
        if session is not None and session.link.open:
            return session
        if self._closed:
            raise ClosedError(f"the {self._owner} is closed")
        attempt = self._connection(address)
        await asyncio.wait((attempt,))  # it continues if this caller is cancelled
        if attempt.cancelled():
            raise ClosedError(f"the {self._owner} was closed while it connected to {format_address(address)}")
        result = attempt.result()
        if isinstance(result, MemqError):
            raise result
        return result

    def _connection(self, address: Address) -> asyncio.Task[Session | MemqError]:
        """Return the attempt to connect that is under way, or begin one."""
        task = self._connecting.get(address)
        if task is None:
            task = self._connecting[address] = asyncio.get_running_loop().create_task(self._connect(address))
        return task

    def forget(self, session: Session) -> None:
        """Drop a session whose connection is gone."""
        if self._sessions.get(session.link.address) is session:
            del self._sessions[session.link.address]

    async def close(self) -> None:
        """Close all connections, those that are being made as well."""
        self._closed = True
        tasks = [*self._connecting.values(), *self._reports]
        self._connecting = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in list(self._sessions.values()):
            session.link.close()
        self._sessions.clear()

    async def _connect(self, address: Address) -> Session | MemqError:
        """Connect; an error is returned, not raised: the callers may all have gone by then."""
        session = Session(self)
        try:
            with self.waits.on(broker_name(address), "connection"):
                session.link = await connect_link(
                    self._runtime, session, address, client_id=self._client_id, waits=self.waits
                )
        except MemqError as error:
            self._dead_until_s[address] = self._runtime.clock.monotonic() + DEAD_S
            # The first contact has a time limit, and an error; what has not answered at all is named by the waits.
            if self.reached and not self.sessions() and not isinstance(error, TimedOutError):
                self._unanswered.failed(f"no broker answers: {error}; trying again")
            if isinstance(error, UnreachableError) and error.refused:
                self._suspect(address)
            return error
        finally:
            self._connecting.pop(address, None)
        self._dead_until_s.pop(address, None)
        self._unanswered.passed()
        if not session.link.open:
            return UnreachableError(f"connection to {format_address(address)} is lost")
        self._sessions[address] = session
        self.audit_ms = session.link.audit_ms
        self.reached = True
        return session

    def _suspect(self, address: Address) -> None:
        """Report a broker that refused a connection to a connected broker, at most once per REPORT_S."""
        now_s = self._runtime.clock.monotonic()
        receiver = next((each for each in self.sessions() if each.link.address != address), None)
        if self._closed or receiver is None or now_s - self._reported_s.get(address, now_s) < REPORT_S:
            return
        self._reported_s[address] = now_s
        report = asyncio.get_running_loop().create_task(_report(receiver.link, address))
        self._reports[report] = None
        report.add_done_callback(lambda done: self._reports.pop(done, None))


async def _report(receiver: Link, suspect: Address) -> None:
    """Send a report to one broker. A broker of an earlier release refuses it, which changes nothing."""
    ask = AdminRequest(ask=ReportSuspicion(address=format_address(suspect)))
    with suppress(MemqError):
        await receiver.request(Api.ADMIN, ask, AdminAnswer, timeout_s=REPORT_S)
