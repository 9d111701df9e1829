"""The simulated network: ordered bytes, cut anywhere; flow control; early reuse; cuts and deaths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from memq.errors import UnreachableError
from memq.simulation.world.network import NetworkFaults, SimNetwork, Switch
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import SimulationError, World
from tests.simulation.toy import PORT, ClientProtocol, echo_client, echo_server

Main = Callable[[SimNode], Coroutine[Any, Any, None]]
ROUGH = NetworkFaults(tiny_piece_rate=0.2, small_piece_rate=0.5, spurious_buffer_rate=0.3, window_bytes_min=100)


def client(switch: Switch, talk: Callable[[ClientProtocol], Coroutine[Any, Any, None]]) -> Main:
    """Return the main of a client that connects to the echo server and talks."""

    async def main(node: SimNode) -> None:
        protocol = await SimNetwork(switch, node).connect("server", PORT, ClientProtocol)
        assert isinstance(protocol, ClientProtocol)
        await talk(protocol)

    return main


@pytest.mark.parametrize("seed", range(5))
def test_bytes_come_whole_and_in_order(seed: int) -> None:
    done: list[str] = []
    with World(seed) as world:
        switch = Switch(world, ROUGH)
        world.spawn("server", echo_server(switch))
        world.run(0.1)
        for number in range(4):
            world.spawn(f"client-{number}", echo_client(switch, "server", 10, done))
        world.run(60, done=lambda: len(done) == 4)
    assert len(done) == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_buffer_that_is_reused_too_early_is_found(seed: int) -> None:
    done: list[str] = []
    with World(seed) as world:
        switch = Switch(world, ROUGH)
        world.spawn("server", echo_server(switch, reuse=True))
        world.run(0.1)
        world.spawn("client", echo_client(switch, "server", 30, done))
        with pytest.raises(SimulationError, match="other bytes"):
            world.run(60, done=lambda: bool(done))


def test_a_reader_that_pauses_stops_the_writer() -> None:
    events: list[str] = []

    class Slow(ClientProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            assert self.transport is not None
            self.transport.pause_reading()

    class Fast(ClientProtocol):
        def pause_writing(self) -> None:
            events.append("pause")

        def resume_writing(self) -> None:
            events.append("resume")

    servers: list[Slow] = []

    def accept() -> Slow:
        servers.append(Slow())
        return servers[-1]

    async def serve(node: SimNode) -> None:
        await SimNetwork(switch, node).listen("", PORT, accept)
        await asyncio.sleep(1000)

    async def write(node: SimNode) -> None:
        protocol = await SimNetwork(switch, node).connect("server", PORT, Fast)
        assert isinstance(protocol, Fast)
        assert protocol.transport is not None
        for _ in range(40):
            protocol.transport.write(bytes(100_000))
        await asyncio.sleep(10)
        assert protocol.transport.get_write_buffer_size() > 2_000_000
        assert events == ["pause"]
        assert servers[0].transport is not None
        assert not servers[0].received
        await asyncio.sleep(1000)

    with World(1) as world:
        switch = Switch(world, NetworkFaults())
        world.spawn("server", serve)
        world.run(0.1)
        world.spawn("client", write)
        world.run(20)
        assert servers[0].transport is not None
        servers[0].transport.resume_reading()
        world.run(20)
    assert len(servers[0].received) == 4_000_000
    assert events == ["pause", "resume"]


def test_eof_close_and_abort_reach_the_peer() -> None:
    ends: list[tuple[str, Exception | None]] = []

    async def close_all(node: SimNode) -> None:
        for how in ("write_eof", "close", "abort"):
            protocol = await SimNetwork(switch, node).connect("server", PORT, ClientProtocol)
            assert isinstance(protocol, ClientProtocol)
            assert protocol.transport is not None
            protocol.transport.write(b"x" * 10)
            await protocol.until(10)
            getattr(protocol.transport, how)()
            ends.append((how, await protocol.lost))

    with World(1) as world:
        switch = Switch(world, NetworkFaults())
        world.spawn("server", echo_server(switch))
        world.run(0.1)
        world.spawn("client", close_all)
        world.run(20)
    assert ends == [("write_eof", None), ("close", None), ("abort", None)]


def test_connecting_is_refused_or_times_out() -> None:
    said: list[str] = []

    async def main(node: SimNode) -> None:
        network = SimNetwork(switch, node)
        for port in (PORT + 1, PORT):
            with pytest.raises(UnreachableError) as caught:
                await network.connect("server", port, ClientProtocol, timeout_s=3)
            said.append(str(caught.value))
            switch.cut("client", "server", 100)

    with World(1) as world:
        switch = Switch(world, NetworkFaults())
        world.spawn("server", echo_server(switch))
        world.run(0.1)
        world.spawn("client", main)
        world.run(20)
    assert said == ["can't reach server:8: connection refused", "server:7 did not answer in 3 s"]


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_link_delays_or_kills_but_never_damages(seed: int) -> None:
    outcome: list[str] = []

    async def talk(protocol: ClientProtocol) -> None:
        loop = asyncio.get_running_loop()
        assert protocol.transport is not None
        protocol.transport.write(b"before")
        await protocol.until(6)
        begin = loop.time()
        switch.cut("client", "server", 5, both=seed % 2 == 0)
        protocol.transport.write(b"after")
        try:
            await protocol.until(11)
            assert loop.time() - begin >= 4.9
            assert protocol.received == b"beforeafter"
            outcome.append("late")
        except UnreachableError:
            outcome.append("lost")

    with World(seed) as world:
        switch = Switch(world, NetworkFaults())
        world.spawn("server", echo_server(switch))
        world.run(0.1)
        world.spawn("client", client(switch, talk))
        world.run(60)
    assert outcome in (["late"], ["lost"])


@pytest.mark.parametrize("how", ["kill", "silence"])
def test_a_dead_server_is_noticed_soon_or_late(how: str) -> None:
    lost: list[float] = []

    async def talk(protocol: ClientProtocol) -> None:
        await protocol.lost
        lost.append(world.now)

    with World(3) as world:
        switch = Switch(world, NetworkFaults())
        server = world.spawn("server", echo_server(switch))
        world.run(0.1)
        world.spawn("client", client(switch, talk))
        world.run(1)
        if how == "kill":
            server.kill()
        else:
            switch.silence(server)
        world.run(200)
    assert len(lost) == 1
    assert (lost[0] < 2) == (how == "kill")


def test_a_new_incarnation_resets_what_the_silent_one_left() -> None:
    lost: list[float] = []

    async def talk(protocol: ClientProtocol) -> None:
        assert protocol.transport is not None
        await asyncio.sleep(5)
        protocol.transport.write(b"anybody there?")
        await protocol.lost
        lost.append(world.now)

    with World(3) as world:
        switch = Switch(world, NetworkFaults())
        server = world.spawn("server", echo_server(switch))
        world.run(0.1)
        world.spawn("client", client(switch, talk))
        world.run(1)
        switch.silence(server)
        world.run(1)
        world.spawn("server", echo_server(switch))
        world.run(10)
    assert len(lost) == 1
    assert lost[0] < 7


def test_a_paused_server_accepts_later() -> None:
    done: list[str] = []
    with World(1) as world:
        switch = Switch(world, NetworkFaults())
        server = world.spawn("server", echo_server(switch))
        world.run(0.1)
        server.pause(5)
        world.spawn("client", echo_client(switch, "server", 3, done))
        world.run(4)
        assert not done
        world.run(4)
    assert done == ["client"]


def test_a_port_is_bound_once_and_freed_by_death() -> None:
    async def main(node: SimNode) -> None:
        network = SimNetwork(switch, node)
        listener = await network.listen("0.0.0.0", 0, ClientProtocol)
        assert listener.address[0] == "server"
        assert listener.address[1] > 0
        await network.listen("0.0.0.0", PORT, ClientProtocol)
        with pytest.raises(UnreachableError, match="in use"):
            await network.listen("0.0.0.0", PORT, ClientProtocol)
        await asyncio.sleep(100)

    with World(1) as world:
        switch = Switch(world, NetworkFaults())
        world.spawn("server", main)
        world.run(1)
        world.nodes["server"].kill()
        world.spawn("server", main)
        world.run(1)
