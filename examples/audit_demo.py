"""The live audit on real input: flights go through `memq dev`, three faults are injected, and the audit names each.

Run it with `make audit-demo`. It starts `memq dev` with its auditor on a fresh folder and sends the flight records.
When the auditor has seen all of them in the queue, one pointer is removed, one block is damaged on disk, and one block
is published twice. A consumer group continues to read. The auditor must name the lost, damaged and doubled records, and
no others.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from demo import TOPIC, broker, send
from faults import Fault, inject_faults
from flights import RECORDS, flights
from folders import claim, clear

import memq
from memq.audit.finding import Finding
from memq.audit.live.storage.database import SqliteDatabase
from memq.audit.live.view import AuditView

GROUP = "demo"
WAIT_S = 120.0
ASK_S = 0.1
INTERVAL_MS = 500  # of reports


def main() -> int:
    """Run the demo; the exit code is 0 when every fault is named, and no sound record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("memq-audit-demo"), help="data folder, emptied first")
    parser.add_argument("--records", type=int, default=RECORDS, help="send only so many")
    options = parser.parse_args()
    with claim(options.data):
        return run(options.data, options.records)


def run(data: Path, records: int) -> int:
    """Run it in a folder, and return the exit code."""
    clear(data)
    print("reading the flight records …", flush=True)
    lines = [item for item, _ in zip(flights(), range(records), strict=False)]
    with broker(data, "--audit-interval-ms", str(INTERVAL_MS)) as address:
        send(address, lines, sum(len(line) for _, line in lines))
        asyncio.run(until(data, lambda view: all_queued(view, len(lines))))
        print(f"the auditor has seen all {len(lines):,} records sent, acked and queued: {TOPIC} is ok", flush=True)
        with memq.Admin(address) as admin:
            faults = inject_faults(data, admin.topic(TOPIC).topic)
        for fault in faults:
            print(f"injected, {fault}", flush=True)
        receive(address)
        started = time.perf_counter()
        found = asyncio.run(until(data, lambda view: all_named(view, faults)))
        print(f"named by the auditor {time.perf_counter() - started:.1f} s after the group had read and committed all:")
        for finding in found:
            print(f"  {time.strftime('%Y-%m-%dT%H:%MZ', time.gmtime(finding.minute * 60))} {finding}")
        return 0 if sound(found, faults) else 1


def receive(address: str) -> None:
    """Read the topic with a consumer group that passes over damage, from disk, not from the broker's memory."""
    with memq.Consumer(address, [TOPIC], group=GROUP, end="end", on_damaged="skip", read="direct") as consumer:
        count = sum(len(batch.values()) for batch in consumer)
        consumer.commit()
    print(f"the group '{GROUP}' has read {count:,} records, and committed", flush=True)


async def until(data: Path, ask: Callable[[AuditView], Awaitable[list[Finding] | None]]) -> list[Finding]:
    """Ask the auditor's state again and again until there is an answer."""
    state = SqliteDatabase(data / "audit.sqlite")
    view, found = AuditView(state), None
    try:
        async with asyncio.timeout(WAIT_S):
            while found is None:
                await asyncio.sleep(ASK_S)
                found = await ask(view)
        return found
    finally:
        await state.close()


async def all_queued(view: AuditView, records: int) -> list[Finding] | None:
    """Return nothing found once all records are sent, acked and queued by what the auditor knows."""
    for summary in await view.topics(0, 1 << 40):
        side = summary.row.side("")
        if summary.topic == TOPIC and side["sent"] == side["acked"] == side["committed"] == records:
            return await view.findings(TOPIC)
    return None


async def all_named(view: AuditView, faults: list[Fault]) -> list[Finding] | None:
    """Return the findings once there is one for each fault."""
    found = await view.findings(TOPIC)
    return found if all(any(is_of(finding, fault) for finding in found) for fault in faults) else None


def is_of(finding: Finding, fault: Fault) -> bool:
    """Whether a finding names exactly the records of an fault."""
    named = (finding.kind.value, finding.partition, finding.producer, finding.ranges)
    return named == (fault.what, fault.partition, fault.producer, ((fault.first, fault.next),))


def sound(found: list[Finding], faults: list[Fault]) -> bool:
    """Whether every finding is of an fault; the block that comes twice is doubled in the queue and for the group."""
    strange = [finding for finding in found if not any(is_of(finding, fault) for fault in faults)]
    for finding in strange:
        print(f"FALSE: {finding}")
    return not strange


if __name__ == "__main__":
    sys.exit(main())
