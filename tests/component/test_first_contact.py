"""The first connection of a client is refused soon, with address and cause; known brokers are waited for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest

import memq
from memq.audit.opened_topic import opened_topic
from memq.client.link_pool import CONNECT_TIMEOUT_MS, LinkPool
from memq.errors import InvalidSettingError, UnreachableError
from memq.runtime.network import Address, Network, ProtocolFactory, SocketNetwork, parse_address
from memq.runtime.runtime import Runtime
from memq.testing import Cluster
from tests.skipping_loop import now_s, run_skipping, skipping_runtime

pytestmark = pytest.mark.thorough
NOBODY = "127.0.0.1:1"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def send(brokers: str, connect_timeout_ms: int) -> None:
    with memq.Producer(brokers, connect_timeout_ms=connect_timeout_ms) as producer:
        producer.send("clicks", b"v").result(timeout=20)


def receive(brokers: str, connect_timeout_ms: int) -> None:
    with memq.Consumer(brokers, "clicks", connect_timeout_ms=connect_timeout_ms):
        pass


def ask(brokers: str, connect_timeout_ms: int) -> None:
    with memq.Admin(brokers, connect_timeout_ms=connect_timeout_ms) as admin:
        admin.topics()


async def send_aio(brokers: str, connect_timeout_ms: int) -> None:
    async with memq.aio.Producer(brokers, connect_timeout_ms=connect_timeout_ms) as producer:
        await (await producer.send("clicks", b"v"))


async def receive_aio(brokers: str, connect_timeout_ms: int) -> None:
    async with memq.aio.Consumer(brokers, "clicks", connect_timeout_ms=connect_timeout_ms):
        pass


def enqueue(brokers: str, connect_timeout_ms: int) -> None:
    with memq.Queue(brokers, connect_timeout_ms=connect_timeout_ms) as queue:
        queue.enqueue("jobs", b"v")


def work(brokers: str, connect_timeout_ms: int, processes: int = 0) -> None:
    with memq.Worker(
        print, "jobs", brokers=brokers, processes=processes, connect_timeout_ms=connect_timeout_ms
    ) as worker:
        worker.start()


CLIENTS: list[Callable[[str, int], None]] = [
    send,
    receive,
    ask,
    lambda brokers, timeout_ms: asyncio.run(send_aio(brokers, timeout_ms)),
    lambda brokers, timeout_ms: asyncio.run(receive_aio(brokers, timeout_ms)),
    enqueue,
    work,
]
NAMES = ["producer", "consumer", "admin", "aio-p", "aio-c", "queue", "worker"]
each_client = pytest.mark.parametrize("client", CLIENTS, ids=NAMES)


@each_client
def test_a_wrong_address_is_said_with_its_cause(client: Callable[[str, int], None]) -> None:
    with pytest.raises(UnreachableError) as caught:
        client(f"{NOBODY},127.0.0.1:2", 2_000)  # the refusal comes at once
    text = str(caught.value)
    assert text.startswith("no broker answers: ")
    for address in (NOBODY, "127.0.0.1:2"):
        assert f"can't reach {address}: Connection refused" in text
    assert caught.value.hint == "check the address, and that a broker runs there"


def test_processes_of_a_worker_do_not_begin_without_a_broker() -> None:
    with pytest.raises(UnreachableError, match=f"can't reach {NOBODY}: Connection refused"):
        work(NOBODY, 200, processes=2)


@each_client
def test_the_timeout_of_the_first_connection_is_checked(client: Callable[[str, int], None]) -> None:
    for wrong in (0, -1, True, "3s", None):
        bad: Any = wrong
        with pytest.raises(InvalidSettingError, match=r"connect_timeout_ms = .* is (outside 1 to|no number)"):
            client(NOBODY, bad)


@each_client
def test_one_of_several_addresses_is_enough(client: Callable[[str, int], None], cluster: Cluster) -> None:
    cluster.create_topic("clicks")
    client(f"{NOBODY},{cluster.address}", 20_000)


@each_client
def test_address_without_a_broker_is_named_and_skipped(client: Callable[[str, int], None], cluster: Cluster) -> None:
    cluster.create_topic("clicks")
    with ExitStack() as stack:
        web = [stack.enter_context(web_server()) for _ in range(5)]  # the order is random: one of them comes first
        client(",".join([*web, cluster.address]), 20_000)


@each_client
def test_a_port_of_http_is_named_at_once(client: Callable[[str, int], None]) -> None:
    """A server of HTTP waits for the empty line at the end of a request's head: the client waited for its answer."""
    asked: list[bytes] = []
    with web_server(asked) as address, web_server(asked) as other:
        with pytest.raises(
            UnreachableError, match=f"{address} does not speak memq's protocol: its answer is HTTP"
        ) as e:
            client(f"{address},{other}", 20_000)
        assert "memq ready: HOST:PORT" in e.value.hint
        assert len(asked) == 2, "to try again changes nothing"


@pytest.mark.parametrize(
    "call", [lambda queue: queue.enqueue("jobs", b"v"), lambda queue: queue.dequeue("jobs", wait=60)]
)
def test_a_queue_at_a_port_of_http_fails_at_once(call: Callable[[memq.Queue], object]) -> None:
    asked: list[bytes] = []
    with web_server(asked) as address, memq.Queue(address) as queue:
        with pytest.raises(UnreachableError, match=f"{address} does not speak memq's protocol: its answer is HTTP"):
            call(queue)
        assert len(asked) == 1, "to try again changes nothing"


@each_client
def test_a_port_of_http_does_not_end_the_wait_for_a_broker(client: Callable[[str, int], None]) -> None:
    asked: list[bytes] = []
    with web_server(asked) as address, pytest.raises(UnreachableError, match=f"can't reach {NOBODY}"):
        client(f"{address},{NOBODY}", 500)
    assert len(asked) > 1


@contextmanager
def web_server(asked: list[bytes] | None = None) -> Iterator[str]:
    """A server that refuses each whole head of a request, as one of HTTP does; it adds them to `asked`."""

    class Refuse(BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                head += self.request.recv(1 << 16) or b"\r\n\r\n"
            if asked is not None:
                asked.append(head)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Refuse) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Silent(SocketNetwork):
    """The network, in which one address never answers."""

    def __init__(self, silent: Address) -> None:
        super().__init__()
        self.silent = silent
        self.asked = 0

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        if (host, port) == self.silent:
            self.asked += 1
            await asyncio.get_running_loop().create_future()
        return await super().connect(host, port, factory, timeout_s=timeout_s)


def test_an_address_that_never_answers_does_not_take_the_others_time(cluster: Cluster) -> None:
    async def scenario() -> None:
        silent = ("10.255.255.1", 9)
        network: Network = Silent(silent)
        alone = LinkPool(Runtime(network=network), [silent])
        with pytest.raises(UnreachableError, match=r"10\.255\.255\.1:9 does not answer"):
            await alone.reach(0.05)
        await alone.close()
        for _ in range(4):  # whichever comes first
            both = LinkPool(Runtime(network=network), [silent, parse_address(cluster.address)])
            await both.reach(1.0)
            assert both.reached
            await both.close()

    asyncio.run(scenario())


def test_an_audit_gives_up_the_first_connection_as_soon_as_the_clients_do() -> None:
    """`memq audit`, `verify` and `trace` waited for 10 s without a word, and named a server, not a broker."""

    async def scenario() -> None:
        network = Refusing()
        network.until_s = math.inf
        with pytest.raises(UnreachableError, match=f"no broker answers: {NOBODY} restarts") as refused:
            async with opened_topic(NOBODY, "clicks", replace(skipping_runtime(), network=network)):
                pass
        assert refused.value.hint == "check the address, and that a broker runs there"
        assert now_s() <= CONNECT_TIMEOUT_MS / 1000

    run_skipping(scenario())


class Refusing(SocketNetwork):
    """The network, which refuses every connection until a time of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.until_s = 0.0
        self.refused = 0

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        if asyncio.get_running_loop().time() < self.until_s:
            self.refused += 1
            raise UnreachableError(f"{host}:{port} restarts")
        return await super().connect(host, port, factory, timeout_s=timeout_s)


def test_a_broker_that_restarts_is_waited_for_by_who_was_connected_once(cluster: Cluster) -> None:
    connect_timeout_ms = 1_000

    async def scenario() -> None:
        network = Refusing()
        runtime = Runtime(network=network)
        async with memq.aio.Producer(
            cluster.address, connect_timeout_ms=connect_timeout_ms, runtime=runtime
        ) as producer:
            await (await producer.send("clicks", b"before"))
            async with memq.aio.Consumer(
                cluster.address, "clicks", connect_timeout_ms=connect_timeout_ms, runtime=runtime
            ) as consumer:
                batch = await consumer.poll(20)
                assert batch is not None
                assert list(batch.values()) == [b"before"]
                network.until_s = asyncio.get_running_loop().time() + 1.3 * connect_timeout_ms / 1000
                await asyncio.to_thread(cluster.stop_broker)
                await asyncio.to_thread(cluster.start_broker)
                known, new = await asyncio.gather(producer.send("clicks", b"after"), producer.send("new", b"v"))
                assert [(await known).records, (await new).records] == [1, 1]
                assert network.refused
                batch = await consumer.poll(20)
                assert batch is not None
                assert list(batch.values()) == [b"after"]

    asyncio.run(scenario())
