"""ZooKeeper as an outsider sees it: its nodes, and the end of another client's session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kazoo.client import KazooClient

from memq_localstack.servers import Server

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


def expire(server: Server, number: int) -> None:
    """End a session on purpose: ZooKeeper ends it when another client with its number and password says farewell."""
    double = KazooClient(server.address, client_id=(number, _password(number)))
    double.start()
    double.stop()
    double.close()


def owner_of(server: Server, path: str) -> int:
    """Return the number of the session that an ephemeral node goes with."""
    with outsider(server) as client:
        return int(client.exists(path).ephemeralOwner)


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
