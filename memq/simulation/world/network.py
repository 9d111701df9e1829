"""The simulated network: hosts, links, listeners, and the switch that carries bytes between them.

A host is a node's name; `127.0.0.1`, `0.0.0.0` and similar addresses mean the node itself. Links have a direction. A
blocked link keeps bytes, as TCP's retransmission does, and delivers them late, in order. Or its connections die, at
both ends at different times. A killed process resets its peers, sends FIN, or is silent, as a host without power.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from memq.errors import UnreachableError
from memq.runtime.network import Address, BoundPort, ProtocolFactory
from memq.simulation.world.node import SimNode
from memq.simulation.world.transport import READ_BYTES_MAX, End, Pipe, SimTransport
from memq.simulation.world.world import World

LOCAL = ("", "127.0.0.1", "localhost", "0.0.0.0", "::", "::1")
SILENCE_S_MIN, SILENCE_S_MAX = 20.0, 120.0  # time after which a kernel gives up a silent peer


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Faults of links between the drawn cuts: latency, and how bytes are cut into pieces."""

    latency_s_min: float = 0.0001
    latency_s_max: float = 0.001
    spike_rate: float = 0.0
    spike_s_max: float = 0.5
    tiny_piece_rate: float = 0.02  # 1 to 3 bytes
    small_piece_rate: float = 0.10  # 1 to 200 bytes
    spurious_buffer_rate: float = 0.05  # get_buffer without buffer_updated, as from uvloop when no bytes came
    flip_rate: float = 0.0  # share of the pieces in which one bit arrives changed
    window_bytes_min: int = 16 << 10
    window_bytes_max: int = 1 << 20


@dataclass(slots=True)
class HostLink:
    """One direction between two hosts."""

    blocked_until: float = 0.0


@dataclass(slots=True)
class SimListener:
    """A bound port of a node."""

    switch: Switch
    node: SimNode
    address: Address
    factory: ProtocolFactory

    def close(self) -> None:
        """See `memq.runtime.network.BoundPort`."""
        if self.switch.listeners.get(self.address) is self:
            del self.switch.listeners[self.address]


class SimNetwork:
    """One node's network: see `memq.runtime.network.Network`."""

    def __init__(self, switch: Switch, node: SimNode) -> None:
        self._switch = switch
        self._node = node

    @property
    def encrypted(self) -> bool:
        """See `memq.runtime.network.Network`."""
        return False

    def token(self) -> str:
        """See `memq.runtime.network.Network`."""
        return ""

    def login(self) -> None:
        """See `memq.runtime.network.Network`."""
        return

    async def listen(self, host: str, port: int, factory: ProtocolFactory) -> BoundPort:
        """See `memq.runtime.network.Network`; the address names the node."""
        return self._switch.listen(self._node, port, factory)

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        """See `memq.runtime.network.Network`."""
        future: asyncio.Future[asyncio.BufferedProtocol] = asyncio.get_running_loop().create_future()
        target = (self._node.name if host in LOCAL else host, port)
        self._switch.dial(self._node, target, factory, future)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise UnreachableError(f"{host}:{port} did not answer in {timeout_s:g} s") from error


class Switch:
    """Carries everything. One per world."""

    def __init__(self, world: World, faults: NetworkFaults) -> None:
        self.world = world
        self.faults = faults
        self.certified = False  # whether each node has a certificate with its name
        self.listeners: dict[Address, SimListener] = {}
        self.silent_hosts: dict[str, SimNode] = {}  # hosts that lost power, with the process that died
        self.refusing_until: dict[str, float] = {}  # hosts that refuse new connections, as a firewall may
        self.refused: Callable[[str, Address, float], None] = lambda source, target, now_s: None
        self._links: dict[tuple[str, str], HostLink] = {}
        self._ends: dict[int, SimTransport] = {}
        self._numbers = 0
        self._random = world.random("network")
        self._draw = self._random.random

    # ---- draws -------------------------------------------------------------------------------

    def draw_piece_bytes(self) -> int:
        """Return the maximum size of one piece in bytes."""
        draw = self._draw()
        faults = self.faults
        if draw < faults.tiny_piece_rate:
            return 1 + int(3 * draw / faults.tiny_piece_rate)
        if draw < faults.tiny_piece_rate + faults.small_piece_rate:
            return 1 + int(self._draw() * 200)
        return READ_BYTES_MAX

    def draw_send_delay_s(self) -> float:
        """Return the wait (s) of a written buffer at the sender: mostly one callback, else up to 0.5 ms."""
        draw = self._draw()
        return 0.0 if draw < 0.7 else (draw - 0.7) * 0.5e-3 / 0.3

    def draw_spurious_buffer(self) -> bool:
        """Whether `get_buffer` is called although no bytes come."""
        return self._draw() < self.faults.spurious_buffer_rate

    def _draw_latency_s(self) -> float:
        faults = self.faults
        latency_s = faults.latency_s_min + self._draw() * (faults.latency_s_max - faults.latency_s_min)
        if faults.spike_rate and self._draw() < faults.spike_rate:
            latency_s += self._draw() * faults.spike_s_max
        return latency_s

    # ---- faults ------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> HostLink:
        """Return one direction between two hosts."""
        if (source, target) not in self._links:
            self._links[source, target] = HostLink()
        return self._links[source, target]

    def cut(self, source: str, target: str, seconds: float, *, both: bool = True) -> None:
        """Block a link for `seconds`; each connection on the link survives or dies, as drawn."""
        self.world.trace.event(self.world.now, "cut", source, target, seconds, both)
        until = self.world.now + seconds
        for link in [self.link(source, target), self.link(target, source)] if both else [self.link(source, target)]:
            link.blocked_until = max(link.blocked_until, until)
        for end in list(self._ends.values()):
            if (end.node.name, end.peer.node.name) == (source, target) and self._draw() < 0.5:
                for side in (end, end.peer):
                    self._reset_later(side, self._draw() * (seconds + 5), "connection timed out")

    def heal(self, source: str, target: str) -> None:
        """End the block of a link, in both directions."""
        for link in (self.link(source, target), self.link(target, source)):
            link.blocked_until = 0.0

    def isolate(self, name: str, seconds: float) -> None:
        """Cut a host off from all others."""
        for other in self.world.nodes:
            if other != name:
                self.cut(name, other, seconds)

    def refuse(self, name: str, seconds: float) -> None:
        """Refuse new connections to a host for `seconds`, as a broken proxy may; some connections die as well."""
        self.world.trace.event(self.world.now, "refuse", name, seconds)
        self.refusing_until[name] = self.world.now + seconds
        for end in list(self._ends.values()):
            if end.node.name == name and self._draw() < 0.5:
                for side in (end, end.peer):
                    self._reset_later(side, 0.0, "connection reset by peer")

    def silence(self, node: SimNode) -> None:
        """Kill a node as a loss of power does: its peers get no notice."""
        self.silent_hosts[node.name] = node
        node.kill()

    def _reset_later(self, end: SimTransport, delay_s: float, why: str) -> None:
        self.world.schedule(delay_s, lambda: end.reset(why))

    # ---- connections -------------------------------------------------------------------------

    def listen(self, node: SimNode, port: int, factory: ProtocolFactory) -> SimListener:
        """Bind a port of a node; 0 is any free one."""
        address = (node.name, port or 10_000 + self._next_number())
        if address in self.listeners:
            raise UnreachableError(f"can't listen on {address[0]}:{address[1]}: address already in use")
        listener = SimListener(self, node, address, factory)
        self.listeners[address] = listener
        node.at_death(listener.close)
        return listener

    def dial(
        self, node: SimNode, target: Address, factory: ProtocolFactory, future: asyncio.Future[asyncio.BufferedProtocol]
    ) -> None:
        """Carry a first packet to `target` and the answer back into `future`; a silent target leaves it alone."""

        def arrive() -> None:
            if future.done() or not node.alive:
                return
            blocked_s = self.link(node.name, target[0]).blocked_until - self.world.now
            if blocked_s > 0:
                self.world.schedule(blocked_s + self._draw(), arrive)  # the kernel's own retries
            elif not self._is_silent(target[0]):
                self._answer_dial(node, target, factory, future)

        self.world.schedule(self._draw_latency_s(), arrive)

    def _is_silent(self, host: str) -> bool:
        return host in self.silent_hosts and self.world.nodes[host] is self.silent_hosts[host]

    def _answer_dial(
        self, node: SimNode, target: Address, factory: ProtocolFactory, future: asyncio.Future[asyncio.BufferedProtocol]
    ) -> None:
        listener = self.listeners.get(target)
        if self.refusing_until.get(target[0], 0.0) > self.world.now:
            listener = None
        near = None if listener is None else self._connect(node, listener)

        def finish() -> None:
            if future.done():
                if near is not None:
                    near.abort()
            elif near is None:
                self.refused(node.name, target, self.world.now)
                future.set_exception(_refusal(target))
            else:
                _begin(near, factory, future)

        back = self.link(target[0], node.name)
        blocked_s = max(0.0, back.blocked_until - self.world.now)
        self.world.schedule(blocked_s + self._draw_latency_s(), lambda: _post(node, finish))

    def _connect(self, node: SimNode, listener: SimListener) -> SimTransport:
        """Make both ends; the listener's protocol begins in its own node's time, however late that runs."""
        faults = self.faults
        port = 40_000 + self._next_number()
        near = SimTransport(self, node, self._next_number(), (node.name, port), listener.address)
        far = SimTransport(self, listener.node, self._next_number(), listener.address, (node.name, port))
        near.peer, far.peer = far, near
        near.outward = far.inward = Pipe(self._random.randint(faults.window_bytes_min, faults.window_bytes_max))
        far.outward = near.inward = Pipe(self._random.randint(faults.window_bytes_min, faults.window_bytes_max))
        self._ends[near.number], self._ends[far.number] = near, far
        self.world.trace.event(self.world.now, "connect", node.name, listener.node.name, near.number)
        listener.node.loop.call_soon(lambda: far.begin(listener.factory()))
        return near

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # ---- bytes -------------------------------------------------------------------------------

    def send(self, end: SimTransport, piece: bytes) -> None:
        """Send a piece on its way."""
        if self.faults.flip_rate and self._draw() < self.faults.flip_rate:
            piece = self._flipped(end, piece)
        end.outward.flying_bytes += len(piece)
        self._fly(end, piece)

    def _flipped(self, end: SimTransport, piece: bytes) -> bytes:
        bit = self._random.randrange(8 * len(piece))
        self.world.trace.event(self.world.now, "flip", end.node.name, end.peer.node.name, bit)
        changed = bytearray(piece)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def send_end(self, end: SimTransport, how: End) -> None:
        """Send the end of this direction on its way, after its bytes."""
        self._fly(end, how)

    def _fly(self, end: SimTransport, what: bytes | End) -> None:
        pipe = end.outward
        arrival = max(pipe.last_arrival, self.world.now + self._draw_latency_s())
        pipe.last_arrival = arrival
        pipe.flying.append((arrival, what))
        if len(pipe.flying) == 1:
            self.world.schedule(arrival - self.world.now, lambda: self._arrive(end))

    def _arrive(self, end: SimTransport) -> None:
        pipe = end.outward
        now = self.world.now
        blocked_until = self.link(end.node.name, end.peer.node.name).blocked_until
        if blocked_until <= now:
            while pipe.flying and pipe.flying[0][0] <= now:
                self._land(end, pipe.flying.popleft()[1])
        if pipe.flying:
            when = max(pipe.flying[0][0], blocked_until)
            self.world.schedule(when - now, lambda: self._arrive(end))

    def _land(self, end: SimTransport, what: bytes | End) -> None:
        target = end.peer
        pipe = end.outward
        if isinstance(what, bytes):
            pipe.flying_bytes -= len(what)
        if target.gone:
            self._land_nowhere(end, target, what)
            return
        if isinstance(what, bytes):
            pipe.inbox += what
        else:
            pipe.end = what
            if what is End.RST and self._draw() < 0.5:
                pipe.inbox.clear()  # some kernels discard unread bytes
        target.notify()

    def _land_nowhere(self, end: SimTransport, target: SimTransport, what: bytes | End) -> None:
        """Answer bytes for a closed end by a reset; a host without power does not answer."""
        if isinstance(what, bytes) and not end.gone and not self._is_silent(target.node.name):
            self._reset_later(end, self._draw_latency_s(), "connection reset by peer")
        self.forget_pair(end)

    def delivered(self, end: SimTransport, count: int) -> None:
        """Record that a protocol got bytes."""
        self.world.trace.event(self.world.now, "bytes", end.node.name, end.number, count)

    def node_died(self, end: SimTransport) -> None:
        """End a dead node's connection at its peer: by RST or FIN, or by a time-out if the host is silent."""
        if self._is_silent(end.node.name):
            self._reset_later(end.peer, self._random.uniform(SILENCE_S_MIN, SILENCE_S_MAX), "connection timed out")
        else:
            self.send_end(end, End.RST if self._draw() < 0.5 or end.inward.inbox else End.FIN)
        self.forget_pair(end)

    def forget_pair(self, end: SimTransport) -> None:
        """Forget a connection whose ends are both closed."""
        if end.gone and end.peer.gone:
            self._ends.pop(end.number, None)
            self._ends.pop(end.peer.number, None)


def _refusal(target: Address) -> UnreachableError:
    error = UnreachableError(f"can't reach {target[0]}:{target[1]}: connection refused")
    error.refused = True
    return error


def _post(node: SimNode, action: Callable[[], None]) -> None:
    node.loop.call_soon(action)


def _begin(near: SimTransport, factory: ProtocolFactory, future: asyncio.Future[asyncio.BufferedProtocol]) -> None:
    if near.gone:
        future.set_exception(UnreachableError(f"connection to {near.peer.node.name} was reset"))
        return
    try:
        protocol = factory()
        near.begin(protocol)
    except Exception as error:  # noqa: BLE001  as create_connection: the caller gets it
        near.abort()
        future.set_exception(error)
    else:
        future.set_result(protocol)
