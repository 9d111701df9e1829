"""ZooKeeper as an outsider sees it: its nodes, and the end of another client's session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kazoo.client import KazooClient

from memq_localstack.servers import Server

FAREWELLS_MAX = 20
_SECRET = 0xB3415C00  # ZooKeeperServer.superSecret: with it, passwords are a function of the session's number


@contextmanager
def outsider(server: Server) -> Iterator[KazooClient]:
    """Connect next to the brokers."""
    client = KazooClient(server.address)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def expire(server: Server, path: str) -> None:
    """End the session that an ephemeral node goes with, and wait until ZooKeeper has removed that node.

    ZooKeeper ends a session when another client with its number and password says farewell. On a busy machine that
    client may lose its connection before its farewell arrives, and it does not notice: it is tried again.
    """
    with outsider(server) as client:
        number = _session_of(client, path)
        for _ in range(FAREWELLS_MAX):
            double = KazooClient(server.address, client_id=(number, _password(number)))
            double.start()
            double.stop()
            double.close()
            client.sync(path)
            if _session_of(client, path) != number:
                return
    raise AssertionError(f"session {number:x} of {path} lives after {FAREWELLS_MAX} farewells")


def _session_of(client: KazooClient, path: str) -> int:
    """Return the number of the session that an ephemeral node goes with, 0 without such a node."""
    node = client.exists(path)
    return int(node.ephemeralOwner) if node is not None else 0


def count_nodes(server: Server, path: str) -> int:
    """Return how many nodes there are below a path, itself included."""

    def count(client: KazooClient, node: str) -> int:
        return 1 + sum(count(client, f"{node}/{child}") for child in client.get_children(node))

    with outsider(server) as client:
        return count(client, path)


def _password(number: int) -> bytes:
    """Return what `new java.util.Random(number ^ secret).nextBytes(16)` does, which is what ZooKeeper gives out."""
    mask = (1 << 48) - 1
    seed = (number ^ _SECRET ^ 0x5DEECE66D) & mask
    words = []
    for _ in range(4):
        seed = (seed * 0x5DEECE66D + 0xB) & mask
        words.append((seed >> 16).to_bytes(4, "little"))
    return b"".join(words)
