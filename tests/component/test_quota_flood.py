"""A flood by one principal far over its quota, while another one sends: nobody loses a record."""

from __future__ import annotations

import asyncio
from pathlib import Path

import memq
from memq.broker.broker import Broker
from memq.broker.identity.networks import broker_networks
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import KIB
from memq.notification.memory import MemoryQueue
from memq.permissions import RuleSet
from memq.quotas import QuotaRule
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.brokers import run
from tests.certificates import Certificates

QUOTA_S = 50 * KIB
FLOOD_RECORDS = 150
QUIET_RECORDS = 60
VALUE = bytes(1_000)  # fills a block
CLOCK = SystemClock()


async def latencies_of(address: str, tls: Tls) -> list[float]:
    """Send records one after another; return the latency of each ack in s."""
    found: list[float] = []
    async with memq.aio.Producer(address, linger_ms=0, tls=tls) as producer:
        for _ in range(QUIET_RECORDS):
            sent_s = CLOCK.monotonic()
            await (await producer.send("quiet", VALUE))
            found.append(CLOCK.monotonic() - sent_s)
    return found


async def flood(address: str, tls: Tls) -> float:
    """Send three seconds of the quota at once; return the bytes per second until all are acked."""
    async with memq.aio.Producer(address, linger_ms=0, block_bytes=KIB, codec="none", tls=tls) as producer:
        started_s = CLOCK.monotonic()
        await asyncio.gather(*[await producer.send("flood", VALUE) for _ in range(FLOOD_RECORDS)])
        return FLOOD_RECORDS * len(VALUE) / (CLOCK.monotonic() - started_s)


async def count(address: str, topic: str, tls: Tls) -> int:
    """Return how many records a topic has."""
    got = 0
    async with memq.aio.Consumer(address, topic, end="end", read="broker", tls=tls) as consumer:
        async for batch in consumer:
            got += len(batch.values())
    return got


def test_a_flood_is_held_and_costs_another_principal_no_record(tmp_path: Path) -> None:
    authority = Certificates(tmp_path)
    own = authority.issue("broker-1", "127.0.0.1", again=True)
    files = {"ca_file": own.ca_file, "cert_file": own.cert_file, "key_file": own.key_file, "clients": "required"}
    section = {name: (value, "test") for name, value in files.items()}

    async def work() -> None:
        settings = BrokerSettings(port=0, audit=False, quotas=True, broker_principals="broker-*")
        runtime = Runtime(network=broker_networks(section, EventLog(CLOCK)).data)
        coordinator = MemoryCoordinator(MemoryCluster())
        quotas = (QuotaRule(name="*", bytes_in_s=100 * QUOTA_S), QuotaRule(name="loud", bytes_in_s=QUOTA_S))
        await coordinator.rules.replace(RuleSet(version=1, quotas=quotas))
        broker = Broker(settings, runtime, {"main": MemoryHandler(CLOCK)}, MemoryQueue(CLOCK), coordinator)
        await broker.start()
        await broker.services.permissions.refresh()
        try:
            loud, calm = (authority.issue(name, again=True) for name in ("loud", "calm"))
            alone = await latencies_of(broker.address, calm)
            rate, meanwhile = await asyncio.gather(flood(broker.address, loud), latencies_of(broker.address, calm))
            assert rate < 2 * QUOTA_S, "a burst of one second, and then the quota"
            held = {each.name: each.over["soft"] for each in broker.services.quotas.limiters()}
            assert held["loud"] > 0
            assert held["calm"] == 0
            assert sum(meanwhile) < sum(alone) + 2.0, "it does not wait behind the flood, which takes longer"
            assert await count(broker.address, "quiet", calm) == 2 * QUIET_RECORDS
            assert await count(broker.address, "flood", calm) == FLOOD_RECORDS
        finally:
            await broker.close()

    run(work())
