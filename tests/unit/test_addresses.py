"""Addresses that users type: each is an address, or an error that quotes it."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import UnreachableError
from memq.runtime.network import SocketNetwork, format_address, parse_address

NO_HOSTS = ["a" * 64, "a..b", ".a", "nul\0", "\u00e4" * 64]
NO_PORTS = ["x", "-1", "65536", "1" * 5_000, "\u00b2", "\u0663", "1_0", " 1", ""]


@pytest.mark.parametrize("port", NO_PORTS)
def test_bad_port_is_quoted_in_the_error(port: str) -> None:
    with pytest.raises(UnreachableError, match="bad port") as caught:
        parse_address(f"host:{port}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["here:1 there:1", "here 9876", "here\tthere:1", "here there"])
def test_an_address_with_a_blank_is_refused(text: str) -> None:
    with pytest.raises(UnreachableError, match="bad address") as caught:
        parse_address(text)
    assert "commas" in caught.value.hint
    assert parse_address(" here:1 ") == ("here", 1), "blanks around an address do not matter"


@pytest.mark.parametrize("text", ["9876", " 80 ", "0"])
def test_a_port_alone_is_no_address(text: str) -> None:
    with pytest.raises(UnreachableError, match="has no host") as caught:
        parse_address(text)
    assert "127.0.0.1:9876" in caught.value.hint
    assert parse_address(":9876") == ("127.0.0.1", 9876)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except UnreachableError:
        return
    assert 0 <= port <= 65_535
    assert parse_address(format_address((host, port)))[1] == port or ":" in host


@pytest.mark.parametrize("host", NO_HOSTS)
def test_a_name_that_no_host_can_have_is_unreachable(host: str) -> None:
    with pytest.raises(UnreachableError, match=r"can't reach .*: no host has such a name"):
        asyncio.run(SocketNetwork().connect(host, 1, asyncio.BufferedProtocol))
    with pytest.raises(UnreachableError, match=r"can't listen on .*: no host has such a name"):
        asyncio.run(SocketNetwork().listen(host, 0, asyncio.BufferedProtocol))


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    with pytest.raises(UnreachableError, match=r"\[::1\]:1: "):
        asyncio.run(SocketNetwork().connect("::1", 1, asyncio.BufferedProtocol))


def test_a_connection_that_comes_while_the_port_is_closed_is_ended() -> None:
    """It stayed open for as long as the process kept the socket, and the client waited for an answer."""

    async def work() -> None:
        listener = await SocketNetwork().listen("127.0.0.1", 0, asyncio.BufferedProtocol)
        with socket.create_connection(listener.address) as client:
            for _ in range(2):  # turns: the second one begins when the socket was accepted
                await asyncio.sleep(0)
            listener.close()
            listener.close()
            client.settimeout(10)
            assert await asyncio.to_thread(client.recv, 1) == b""
            gc.collect()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(listener.address)

    asyncio.run(work())
