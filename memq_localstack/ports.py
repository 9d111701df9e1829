"""Finds free ports for servers that can't bind port 0: below the range of ports that the system assigns.

The system may assign a port of that range to a connection between our check and the server's bind, or while a killed
server is down. It does not assign a port below. If two launchers draw the same number at the same time, one bind fails,
and that launcher draws again (see `memq_localstack.servers`).
"""

from __future__ import annotations

import random
import socket

from memq_localstack import LocalstackError

HOST = "127.0.0.1"
FIRST, LAST = 20_000, 31_999  # Linux gives out 32768 and up, macOS and Windows 49152 and up
TRIES_MAX = 1_000
ANSWER_TIMEOUT_S = 1.0


def is_free(port: int) -> bool:
    """Whether a server could listen on that port of the loopback address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what lingers in TIME_WAIT is free
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def answers(port: int) -> bool:
    """Whether somebody takes connections on that port of the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        return probe.connect_ex((HOST, port)) == 0


def free_ports(count: int) -> list[int]:
    """Return that many different ports on which nobody listens."""
    draw = random.SystemRandom()
    found: list[int] = []
    for _ in range(TRIES_MAX):
        if len(found) == count:
            return found
        port = draw.randint(FIRST, LAST)
        if port not in found and is_free(port):
            found.append(port)
    raise LocalstackError(f"found no {count} free ports in {FIRST}-{LAST} in {TRIES_MAX} tries", hint="choose them")
