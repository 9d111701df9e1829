"""Links between processes and real servers."""

from __future__ import annotations

import gc
import socket

from memq_localstack.ports import HOST
from tests.chaos.links import HANG_S, Links


def test_a_link_that_still_connects_leaves_nothing_open() -> None:
    with socket.create_server((HOST, 0), backlog=0) as full:
        queued = [socket.socket() for _ in range(3)]
        for each in queued:  # a server that accepts nothing: the next connection is neither made nor refused
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        links = Links(seed=1)
        links.start()
        link = links.add("s3", full.getsockname()[1])
        clients = [socket.create_connection((HOST, link.port), HANG_S) for _ in range(5)]
        while link.connections < len(clients):
            links.turn()
        links.close()
        gc.collect()  # a transport that is left open warns here, and a warning is a failure
        assert [client.recv(1) for client in clients] == [b""] * len(clients)
        for each in (*queued, *clients):
            each.close()
