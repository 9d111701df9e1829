"""A tag in 5 of 100 batches, on a broker process and an S3 server that counts: records, bytes, and the live audit."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, get_args

import memq
from memq.audit.finding import Finding
from memq.audit.minutes import MinuteRow
from tests.processes import BrokerProcess
from tests.s3_faults import FaultyS3, faulty_s3
from tests.s3_servers import BUCKET
from tests.spark.audited import audit_until

TOPIC = "filtered"
BATCHES, RECORDS, VALUE_BYTES = 100, 20, 200
WANTED = [number for number in range(BATCHES * RECORDS) if number // RECORDS % 20 == 3]
SHARE_MAX = 0.15
KEYS: dict[str, object] = {"access_key_id": "memq", "secret_access_key": "memq-secret", "hedge_permille": 0}
Way = Literal["direct", "broker"]
_RANGE = re.compile(r"bytes=(\d+)-(\d+)\Z")


def fetched_bytes(server: FaultyS3) -> int:
    """Return how many bytes of the topic's objects were requested since the last call."""
    asked, server.asked = server.asked, []
    size = 0
    for each in asked:
        if each.method == "GET" and f"/topics/{TOPIC}/" in each.key:
            found = _RANGE.match(each.headers.get("range", ""))
            size += int(found[2]) + 1 - int(found[1]) if found else len(server.objects[each.key].body)
    return size


@asynccontextmanager
async def broker_on(server: FaultyS3, folder: Path) -> AsyncIterator[BrokerProcess]:
    """Run a broker process whose clients report to the audit."""
    config = folder / "memq.toml"
    config.write_text(
        f"""
        store = "s3://{BUCKET}/objects?endpoint={server.endpoint}&region=us-east-1"
        queue = "sqlite:{folder}/queue.sqlite"
        coordinator = "standalone:{folder}/topics.sqlite"
        memory_bytes_max = "64MiB"
        audit = true
        audit_interval_ms = 100
        [s3]
        access_key_id = "memq"
        secret_access_key = "memq-secret"
        hedge_permille = 0
        """
    )
    broker = BrokerProcess(config, "b1")
    try:
        await asyncio.to_thread(broker.start)
        yield broker
    finally:
        await asyncio.to_thread(broker.close)


async def fill(address: str) -> None:
    async with memq.aio.Producer(address, codec="none", linger_ms=60_000) as producer:
        for number in range(BATCHES * RECORDS):
            tag = "T" if number // RECORDS % 20 == 3 else "x"
            await producer.send(TOPIC, b"%d".ljust(VALUE_BYTES) % number, tag=tag)
            if number % RECORDS == RECORDS - 1:
                await producer.flush(60)


async def read(address: str, way: Way, tags: str, group: str | None = None) -> list[int]:
    async with memq.aio.Consumer(
        address, TOPIC, group=group, end="end", tags=tags, read=way, s3=KEYS if way == "direct" else None
    ) as consumer:
        return [int(value or b"") async for batch in consumer for value in batch.values()]


def test_a_tag_in_5_of_100_batches_costs_15_percent_of_the_bytes_and_the_audit_is_ok(tmp_path: Path) -> None:
    ways: tuple[Way, ...] = get_args(Way)

    async def scenario() -> None:
        async with faulty_s3() as server:
            async with broker_on(server, tmp_path) as broker:
                await fill(broker.address)
            stored = sum(len(each.body) for key, each in server.objects.items() if f"/topics/{TOPIC}/" in key)
            assert stored > BATCHES * RECORDS * VALUE_BYTES
            async with broker_on(server, tmp_path) as broker:  # the memory of this one has no batch
                fetched_bytes(server)
                for way in ways:
                    assert await read(broker.address, way, "T", group=way) == WANTED
                    share = fetched_bytes(server) / stored
                    print(f"{way}: {share:.1%} of {stored} bytes")
                    assert 0 < share <= SHARE_MAX
                    assert await read(broker.address, way, "*") == [*range(BATCHES * RECORDS)]
                    assert fetched_bytes(server) > BATCHES * RECORDS * VALUE_BYTES, "all batches come from the store"
                await asyncio.to_thread(audit_until, broker, tmp_path, TOPIC, is_known)

    def is_known(row: MinuteRow, findings: list[Finding]) -> bool:
        assert findings == [], "not even for a while"
        known = len(WANTED), BATCHES * RECORDS - len(WANTED)
        sides = {way: row.side(way) for way in ways}
        return all(
            (side["processed"], side["passed"]) == known and row.word(way) == "ok" for way, side in sides.items()
        )

    asyncio.run(scenario())
