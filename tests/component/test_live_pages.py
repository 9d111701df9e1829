"""The live audit and faulty reports: pages that repeat or fail, report partitions and topics that come late."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memq.audit.live import service
from memq.audit.live.group_reports import GroupReports, Page
from memq.audit.live.service import live_audit
from memq.audit.live.storage.database import Database
from memq.audit.live.storage.store import AuditStore
from memq.client.admin import AsyncAdmin
from memq.errors import UnreachableError
from memq.runtime.runtime import Runtime
from memq.testing import Cluster
from memq.topic import Topic, is_internal
from tests.component.live_reports import KEEP_MS, RECORDS, all_of, consume, produce, until, with_database

TOPICS = AsyncAdmin.topics


def halting(ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a method that is asked again and again, and fails every second time."""
    asked = itertools.count()

    async def call(*arguments: Any, **options: Any) -> Any:
        if next(asked) % 2:
            raise UnreachableError("not this time")
        return await ask(*arguments, **options)

    return call


class OneByOne(GroupReports):
    """Reports whose homes are assigned one by one: that of the first page, and with its next page the others."""

    _first = -1
    _pages = 0

    async def poll(self, timeout_s: float) -> Page | None:
        page = await super().poll(timeout_s)
        if page is not None:
            self._first, self._pages = page.home if self._first < 0 else self._first, self._pages + 1
        return page

    def assigned(self) -> list[int]:
        return [home for home in super().assigned() if home == self._first or self._pages > 1]


class Again(GroupReports):
    """Reports that come again, page by page: as of a home that was lost for a moment and begins where it committed."""

    _pages: list[Page]
    _left = 0

    async def poll(self, timeout_s: float) -> Page | None:
        self._pages = getattr(self, "_pages", [])
        if self._left:
            self._left -= 1
            return self._pages[-self._left - 1]
        page = await super().poll(timeout_s)
        if page is not None:
            self._pages.append(page)
            self._left = len(self._pages)
        return page


class Torn(list[tuple[str, bytes]]):
    """The reports of a page, which fails once behind each of them."""

    _failed = 0

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        for number, report in enumerate(list.__iter__(self), 1):
            yield report
            if number > self._failed:
                self._failed = number
                raise UnreachableError("a report names a topic that can't be asked for")


class InPieces(GroupReports):
    """Pages with all reports that a home has, which fail in their middle, once behind each report."""

    _next: Page | None = None

    async def poll(self, timeout_s: float) -> Page | None:
        page, self._next = self._next or await super().poll(timeout_s), None
        while page is not None and self._next is None:
            more = await super().poll(0.5)
            if more is None or more.home != page.home:
                self._next = more
                break
            page = Page(page.home, [*page.reports, *more.reports], more.next)
        return None if page is None else dataclasses.replace(page, reports=Torn(page.reports))


async def internal_topics(admin: AsyncAdmin, *, internal: bool = False) -> list[Topic]:
    """Return topics as a broker that has heard of none but memq's own."""
    return [each for each in await TOPICS(admin, internal=True) if internal and is_internal(each.name)]


@pytest.mark.parametrize(
    "trouble",
    [
        "pages come again",
        "pages are torn",
        "one home after the other",
        "topics are not named",
        "no topic is listed",
        "homes are not had",
    ],
)
def test_no_report_is_passed_over_or_counted_twice_in_trouble(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that was read and not taken would be missing for ever: its minutes would be unknown."""
    if trouble == "pages come again":
        monkeypatch.setattr(service, "GroupReports", Again)
    elif trouble == "pages are torn":
        monkeypatch.setattr(service, "GroupReports", InPieces)
    elif trouble == "one home after the other":
        monkeypatch.setattr(service, "GroupReports", OneByOne)
    elif trouble == "topics are not named":
        monkeypatch.setattr(AsyncAdmin, "topics", halting(AsyncAdmin.topics))
    elif trouble == "no topic is listed":
        monkeypatch.setattr(AsyncAdmin, "topics", internal_topics)
    else:
        monkeypatch.setattr(AuditStore, "take_home", halting(AuditStore.take_home))
    cluster = Cluster(audit=True, audit_interval_ms=100, audit_partitions=2)

    async def work(database: Database) -> None:
        async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
            summary = await until([audit], database, all_of(RECORDS))
        assert (summary.row.word(), summary.row.word("g")) == ("ok", "ok")
        assert summary.row.side("g")["fetched"] == RECORDS

    with cluster:
        produce(cluster)
        assert consume(cluster) == RECORDS
        with_database(f"sqlite:{tmp_path / 'audit.sqlite'}", work)
