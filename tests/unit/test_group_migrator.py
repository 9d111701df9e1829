"""Requests about groups wait for one check of the queue together, and share its error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from memq.broker.api.group_migration import GroupMigrator
from memq.errors import InvalidRequestError, QueueError
from memq.governor import BrokerEntry
from memq.notification import FormerGroup
from tests.skipping_loop import now_s, run_skipping, skip, skipping_runtime


class Parts:
    """A queue whose names of groups take 10 s, and fail with `errors` first; and a coordinator with brokers."""

    def __init__(self, *, alone: bool = False) -> None:
        self.imported: list[FormerGroup] = []
        self.found: list[str] = []
        self.errors: list[QueueError] = []
        self.asked = 0
        self.entries = [BrokerEntry(id="a", session="s", address="a:1", state_logs=True)]
        services: Any = SimpleNamespace(
            queue=SimpleNamespace(former=self), coordinator=self, runtime=skipping_runtime(), events=self
        )
        self.migrator = GroupMigrator(services, alone=alone)

    def info(self, event: str, text: str) -> None:
        """See `EventLog.info`."""

    async def read(self, name: str) -> FormerGroup:
        return FormerGroup(name, 3, ("m",), {})

    async def remove(self, name: str) -> None:
        self.found.remove(name)

    async def import_group(self, former: FormerGroup) -> None:
        self.imported.append(former)

    async def find(self, _group: str) -> Any:
        return self

    async def names(self) -> list[str]:
        self.asked += 1
        await skip(10)
        if self.errors:
            raise self.errors.pop(0)
        return self.found

    async def brokers(self) -> list[BrokerEntry]:
        return self.entries

    async def check(self) -> str:
        """Return the error of a check, "" for none."""
        try:
            await self.migrator.check(self.find)
        except (QueueError, InvalidRequestError) as error:
            return str(error)
        return ""

    async def checks(self, count: int, after_s: float = 0.0) -> list[tuple[str, float]]:
        """Return the errors of checks that begin at the same time, and when each was known."""
        await skip(after_s)

        async def one() -> tuple[str, float]:
            return await self.check(), now_s()

        return await asyncio.gather(*(one() for _ in range(count)))


def test_requests_that_wait_for_a_queue_that_fails_get_its_error_at_once() -> None:
    """One after another, heartbeats would wait for the time-outs of all before them, and groups lose their members."""

    async def work() -> None:
        parts = Parts()
        parts.errors = [QueueError("no answer"), QueueError("still none")]
        early, late = await asyncio.gather(parts.checks(5), parts.checks(5, after_s=4))
        assert early == late == [("no answer", 10.0)] * 5
        assert await parts.checks(3) == [("still none", 20.0)] * 3
        assert await parts.checks(3) == [("", 40.0)] * 3, "the names are read twice"
        asked = parts.asked
        assert await parts.checks(3) == [("", 40.0)] * 3
        assert parts.asked == asked == 4

    run_skipping(work())


def test_a_broker_that_is_alone_moves_the_groups_itself() -> None:
    async def work() -> None:
        parts = Parts(alone=True)
        parts.found = ["billing", "report"]
        assert await parts.check() == ""
        assert [(each.group, each.generation) for each in parts.imported] == [("billing", 3), ("report", 3)]
        assert parts.found == []

    run_skipping(work())


def test_a_check_whose_caller_gives_up_passes_no_group() -> None:
    async def work() -> None:
        parts = Parts()
        parts.found = ["report"]
        first = asyncio.create_task(parts.check())
        await skip(15)
        waiting = asyncio.create_task(parts.checks(2))
        await skip(1)
        first.cancel()
        (text, at_s), other = await waiting
        assert "first 'report'" in text
        assert ((text, at_s), parts.asked) == (other, 4)

    run_skipping(work())


@pytest.mark.parametrize("kind", ["groups", "brokers"])
def test_requests_are_refused_while_an_earlier_release_has_groups_or_a_broker(kind: str) -> None:
    async def work() -> None:
        parts = Parts()
        if kind == "groups":
            parts.found, text = ["report"], "the queue has 1 groups of an earlier release, first 'report'"
        else:
            parts.entries.append(BrokerEntry(id="b", session="t", address="b:1"))
            text = "broker 'b' is of an earlier release, and takes members into groups in the queue"
        assert await parts.checks(2) == [(text, 20.0)] * 2
        parts.found, parts.entries[1:] = [], []
        assert await parts.check() == ""

    run_skipping(work())
