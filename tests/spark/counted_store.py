"""A broker with objects in an S3 server of the test, which records requests and bytes.

It speaks TLS by an authority of its own, which only the settings file names.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memq.broker.broker import Broker
from memq.format.object import BlockEntry, open_object
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from tests.s3_faults import FaultyS3, faulty_s3, place_of
from tests.tls import server_context

START_S = 60.0
_RANGE = re.compile(r"bytes=(\d+)-(\d+)\Z")


@dataclass
class CountedStore:
    """The running pair. `config` is the settings file with the keys and the authority of the store."""

    address: str
    server: FaultyS3
    config: Path

    def blocks(self) -> list[BlockEntry]:
        """Return the index entries of all blocks that are stored."""
        return [block for stored in self.server.objects.values() for block in open_object(stored.body).blocks]

    def fetched(self) -> tuple[int, int]:
        """Return how many GETs came since the last time, and how many bytes they were answered with."""
        asked, self.server.asked = self.server.asked, []
        gets = [each for each in asked if each.method == "GET"]
        return len(gets), sum(self._bytes_of(each.headers.get("range", ""), each.key) for each in gets)

    def _bytes_of(self, wanted: str, key: str) -> int:
        size = len(self.server.objects[key].body)
        found = _RANGE.match(wanted)
        if found is None:
            return size
        return max(0, min(int(found[2]) + 1, size) - int(found[1]))


@contextmanager
def counted_store(folder: Path) -> Iterator[CountedStore]:
    """Run both on a thread until the block ends."""
    config = folder / "keys.toml"
    tls, authority = server_context(folder, "127.0.0.1")
    keys = 'access_key_id = "memq"\nsecret_access_key = "memq-secret"'
    loop = asyncio.new_event_loop()
    ready, running = threading.Event(), []

    async def run(ended: asyncio.Event) -> None:
        async with faulty_s3(tls) as server:
            trusted = f'trusted_endpoints = "{server.endpoint}"'
            config.write_text(f'[s3]\n{keys}\nca_file = "{authority}"\nhedge_permille = 0\n{trusted}\n')
            runtime, store = Runtime(), place_of(server, ca_file=str(authority)).open("f")
            coordinator = MemoryCoordinator(MemoryCluster())
            settings = BrokerSettings(port=0, audit=False)  # reports are objects, too, and all are counted
            broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), coordinator)
            await broker.start()
            try:
                running.append(CountedStore(broker.address, server, config))
                ready.set()
                await ended.wait()
            finally:
                await broker.close()
                await store.close()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(ended),), name="counted store")
    thread.start()
    try:
        assert ready.wait(START_S), "the broker did not start"
        yield running[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
