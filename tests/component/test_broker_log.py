"""The broker's log: stable events at a bounded rate, addresses in the usual form."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from memq.broker.spool import forwarding
from memq.broker.spool.forwarding import block_list
from memq.runtime.logs import LINES_MAX
from memq.runtime.network import peer_text
from tests.brokers import TIMEOUT_S, BareClient, running_broker


def test_refused_connections_are_logged_by_address_within_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(TIMEOUT_S), running_broker() as broker:
            for _ in range(LINES_MAX + 5):
                client = await BareClient.connect(broker, hello=False)
                client.write(b"GET / HTTP/1.1\r\n\r\n")
                assert await client.reader.read()
                await client.close()

    with caplog.at_level(logging.INFO, "memq"):
        asyncio.run(scenario())
    refused = [record for record in caplog.records if vars(record).get("event") == "connection-refused"]
    assert len(refused) == LINES_MAX
    assert all(re.match(r"connection-refused: 127\.0\.0\.1:\d+: ", record.getMessage()) for record in refused)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (("127.0.0.1", 56682), "127.0.0.1:56682"),
        (("::1", 56682, 0, 0), "[::1]:56682"),
        ("peer", "peer"),
        (None, "None"),
    ],
)
def test_peers_are_written_as_addresses(name: object, text: str) -> None:
    assert peer_text(name) == text


def test_blocks_that_are_given_up_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_list(["a 1", "b 2"]) == "a 1; b 2"
    monkeypatch.setattr(forwarding, "LISTED_BLOCKS_MAX", 2)
    assert block_list(["a", "b", "c", "d"]) == "a; b; and 2 more"
