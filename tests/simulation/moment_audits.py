"""Audits at any moment of a run, as `memq audit` makes them: a record called lost never lands later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping
from contextlib import suppress

from memq.audit.checks.object_reads import ReadObject
from memq.audit.collector import audit
from memq.audit.finding import Kind
from memq.audit.opened_topic import opened_topic
from memq.audit.verdict import BALANCES_MAX, Verdict
from memq.errors import MemqError
from memq.format.ranges import RangeSet
from memq.runtime.runtime import Runtime
from memq.simulation.world.node import SimNode
from tests.simulation.audit_rules import missing_held
from tests.simulation.reader import Source
from tests.simulation.shard_answers import ShardAnswers

AUDIT_COMMAND = "audit-command"
EVERY_S_MAX = 2.0
AUDIT_S_MAX = 60.0


class MomentAudits:
    """All audits of one run; `fail` gets what was called lost, and landed.

    They read objects by `read`, and judge as one would `later_ms` from now: no time excuses a record that nobody
    holds. Held records are lost only if owners lost their blocks, as `shards` count.
    """

    def __init__(self, read: ReadObject, later_ms: int, fail: Callable[[str], None], shards: ShardAnswers) -> None:
        self._shards = shards
        self._read = read
        self._later_ms = later_ms
        self.counts = {"audits": 0, **dict.fromkeys((f"audited {kind.value}" for kind in _KINDS), 0)}
        self._lost: dict[Source, RangeSet] = {}
        self._fail = fail

    async def run(self, node: SimNode, runtime: Runtime, brokers: str, topic: str) -> None:
        """Audit again and again; an audit that meets no broker says nothing."""
        while True:
            await asyncio.sleep(node.random.uniform(0, EVERY_S_MAX))
            with suppress(MemqError, TimeoutError):
                async with asyncio.timeout(AUDIT_S_MAX), opened_topic(brokers, topic, runtime) as opened:
                    now_ms = runtime.clock.wall_ms() + self._later_ms
                    parts = (opened.topic, opened.queue, self._read, now_ms)
                    found = await audit(*parts, ask_held=opened.ask_held, ask_released=opened.ask_released)
                self._take(found)

    def _take(self, verdict: Verdict) -> None:
        self.counts["audits"] += 1
        for kind in _KINDS:
            self.counts[f"audited {kind.value}"] += verdict.finding(kind).count > 0
        for kind in (Kind.EARLY, Kind.UNRELEASED):
            for wrong in verdict.finding(kind).findings:
                self._fail(f"an audit says '{kind.value}': {wrong}")
        if len(verdict.balances) < BALANCES_MAX and missing_held(verdict) > self._shards.lost_records:
            self._fail(f"an audit called held records lost: {verdict.finding(Kind.LOST).findings}")
        for balance in verdict.balances:
            lost = self._lost.setdefault((balance.partition, balance.producer), RangeSet())
            for piece in balance.lost:
                lost.add(*piece)

    def finish(self, landed: Mapping[Source, Container[int]]) -> None:
        """Compare what was called lost with all that ever landed, by source."""
        for (partition, producer), ranges in self._lost.items():
            known = landed.get((partition, producer), ())
            for first, next_ in ranges:
                wrong = next((number for number in range(first, next_) if number in known), None)
                if wrong is not None:
                    who = f"producer {producer:016x} in partition {partition}"
                    self._fail(f"an audit called sequence {wrong} of {who} lost, which landed later")


_KINDS = (Kind.LOST, Kind.HELD, Kind.HOLE, Kind.UNKNOWN)
