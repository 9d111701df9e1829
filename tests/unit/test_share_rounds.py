"""A broker's reports of the use of quotas, and the answers of the governor, with a link in memory."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.api import Call
from memq.broker.ingest.quota_book import SAMPLES, QuotaBook, QuotaSubject, ShareKey
from memq.broker.permissions.quota_requests import QuotaRequests
from memq.broker.upkeep import share_rounds
from memq.broker.upkeep.share_rounds import ShareRounds
from memq.errors import MemqError, NotFoundError, NotReadyError
from memq.governor.quota_shares import LEASE_S, REPORT_INTERVAL_S
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.connection import ANONYMOUS
from memq.protocol.quota_messages import DescribeQuota, QuotaAnswer, ShareQuotas
from memq.quotas import QuotaRule
from memq.runtime.logs import EventLog
from tests.access import EVERYTHING
from tests.skipping_loop import run_skipping, skip, skipping_runtime

RATE = 100


class Governor:
    """A cluster of two brokers, seen from broker `b1`: `b2` governs, and answers by the book of another `b2`."""

    def __init__(self) -> None:
        runtime = skipping_runtime()
        self.clock = runtime.clock
        self.book = QuotaBook(self.clock)
        self.book.follow([QuotaRule(name="*", requests_s=RATE)])
        self.governor: str | None = "b2"
        self.brokers = [SimpleNamespace(id=name, address=f"{name}:1") for name in ("b1", "b2")]
        self.asked: list[tuple[str, ShareQuotas]] = []
        self.error: Exception | None = None
        self.hangs = False
        coordinator = SimpleNamespace(brokers=self._brokers, governor=self._governor)
        self.services = SimpleNamespace(
            runtime=runtime,
            quotas=self.book,
            coordinator=coordinator,
            settings=SimpleNamespace(broker_id="b1", quotas=True),
            events=EventLog(self.clock),
        )
        self.of_governor = QuotaRequests(
            cast(
                Any, SimpleNamespace(**vars(self.services) | {"settings": SimpleNamespace(broker_id="b2", quotas=True)})
            )
        )
        self.rounds = ShareRounds(cast(Any, self.services), self._link)

    async def _brokers(self) -> list[Any]:
        return self.brokers

    async def _governor(self) -> str | None:
        return self.governor

    async def _link(self, address: str) -> Any:
        async def request(api: object, ask: AdminRequest, answer: type, timeout_s: float) -> AdminAnswer:
            assert isinstance(ask.ask, ShareQuotas)
            self.asked.append((address, ask.ask))
            if self.hangs:
                await skip(10 * LEASE_S)
            if self.error is not None:
                raise self.error
            found = await self.of_governor.share(Call(cast(Any, None), ANONYMOUS, 0, ask.ask, access=EVERYTHING))
            assert isinstance(found, AdminAnswer)
            return found

        return SimpleNamespace(request=request)

    def use(self, principal: str, requests: int) -> None:
        [limiter] = self.book.limiters_of("principal", principal)
        limiter.take(requests, 0)

    def part(self, principal: str) -> float:
        [limiter] = self.book.limiters_of("principal", principal)
        return limiter.buckets["requests_s"].rate / RATE


def test_the_governor_gives_a_part_that_ends_without_another_answer() -> None:
    async def work() -> None:
        world = Governor()
        running = asyncio.create_task(world.rounds.run())
        for _ in range(20):
            world.use("ann", RATE)
            await skip(REPORT_INTERVAL_S)
        assert world.part("ann") > 0.9, "nobody else uses it"
        [address], sent = {address for address, _ in world.asked}, world.asked[-1][1]
        assert (address, sent.broker) == ("b2:1", "b1")
        assert [(each.name, each.rate) for each in sent.uses] == [("ann", "requests_s")]
        world.error = NotReadyError("it does not govern any more")
        for _ in range(round(2 * LEASE_S)):
            world.use("ann", RATE)
            await skip(REPORT_INTERVAL_S)
        assert world.part("ann") == 0.5
        running.cancel()

    run_skipping(work())


@pytest.mark.parametrize("fault", [NotReadyError("not now"), "silent", "no governor"])
def test_a_round_that_fails_is_logged_and_the_next_one_comes(
    fault: MemqError | str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        world = Governor()
        world.error = fault if isinstance(fault, MemqError) else None
        world.hangs = fault == "silent"
        world.governor = None if fault == "no governor" else "b2"
        running = asyncio.create_task(world.rounds.run())
        for _ in range(6):
            world.use("ann", RATE)
            await skip(REPORT_INTERVAL_S)
        assert "quotas-unshared" in caplog.text
        world.error, world.hangs, world.governor = None, False, "b2"
        before = len(world.asked)
        for _ in range(6):
            world.use("ann", RATE)
            await skip(REPORT_INTERVAL_S)
        assert len(world.asked) > before
        assert "quotas-shared" in caplog.text
        running.cancel()

    caplog.set_level(logging.INFO)
    run_skipping(work())


def test_one_broker_alone_and_one_without_use_ask_nobody() -> None:
    async def work() -> None:
        world = Governor()
        await world.rounds.ask()
        world.use("ann", 1)
        del world.brokers[1]
        await world.rounds.ask()
        assert world.asked == []

    run_skipping(work())


def test_the_most_used_rates_are_reported_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_rounds, "REPORTED_MAX", 2)

    async def work() -> None:
        world = Governor()
        for factor in (0, 10):  # use counts from the first report on
            await world.rounds.ask()
            for number, principal in enumerate(("ann", "bob", "eve"), 1):
                world.use(principal, factor * number)
        await skip(REPORT_INTERVAL_S)
        await world.rounds.ask()
        assert [each.name for each in world.asked[-1][1].uses] == ["eve", "bob"]

    run_skipping(work())


def test_use_counts_for_the_last_samples_and_then_no_more() -> None:
    async def work() -> None:
        world = Governor()
        world.use("ann", 0)
        world.book.sample(2)
        world.use("ann", 50)
        found = list[float]()
        for _ in range(SAMPLES + 2):
            await skip(1)
            use = world.book.sample(2).get(ShareKey(QuotaSubject("principal", "ann"), "requests_s"))
            found.append(round(use.used, 3) if use is not None else -1.0)
        assert found == [
            0.25,
            *(pytest.approx(0.5 / number, abs=0.001) for number in range(3, SAMPLES + 1)),
            0.1,
            -1,
            -1,
        ]

    run_skipping(work())


def test_only_the_broker_that_is_named_shows_its_use_of_a_quota() -> None:
    async def work() -> None:
        world = Governor()
        world.use("ann", 7)
        world.book.connect("ann")
        requests = QuotaRequests(cast(Any, world.services))

        async def shown(broker: str) -> Any:
            ask = DescribeQuota(broker=broker, kind="principal", name="ann")
            return await requests.describe(Call(cast(Any, None), ANONYMOUS, 0, ask, access=EVERYTHING))

        answer = (await shown("b1")).quotas
        assert isinstance(answer, QuotaAnswer)
        assert answer.use is not None
        assert (answer.use.broker, answer.use.connections) == ("b1", 1)
        assert [(each.rate, each.used) for each in answer.use.rates] == [("requests_s", 7)]
        with pytest.raises(NotFoundError):
            await shown("b2")

    run_skipping(work())


def test_only_the_governor_gives_out_parts() -> None:
    """Two brokers that do would give out more than the whole."""

    async def work() -> None:
        world = Governor()
        ask = Call(cast(Any, None), ANONYMOUS, 0, ShareQuotas(broker="b1"), access=EVERYTHING)
        await world.of_governor.share(ask)
        with pytest.raises(NotReadyError, match="'b2' governs, not 'b1'"):
            await QuotaRequests(cast(Any, world.services)).share(ask)

    run_skipping(work())
