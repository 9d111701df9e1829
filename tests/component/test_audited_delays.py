"""The audits of a topic with delayed and transactional records: clean, and `memq trace` shows each of them."""

from __future__ import annotations

import asyncio

from click.testing import CliRunner, Result

from memq.audit.collector import audit
from memq.audit.finding import Kind, Outcome
from memq.audit.opened_topic import opened_topic
from memq.audit.verdict import Verdict
from memq.cli.store.trace import trace
from memq.client.producer.delivery import Ack
from memq.client.producer.producer import AsyncProducer
from memq.errors import NotFoundError
from memq.format.held_sequences import due_time_of, is_transactional
from memq.runtime.runtime import Runtime
from tests.brokers import run
from tests.component.test_delay import delaying, read


async def audited(address: str, *, asks: bool = True) -> Verdict:
    async with opened_topic(address, "clicks") as opened:
        ask = opened.ask_released if asks else None
        parts = (opened.topic, opened.queue, opened.read, Runtime().clock.wall_ms())
        return await audit(*parts, ask_held=opened.ask_held, ask_released=ask)


async def traced(address: str, ack: Ack, *options: str) -> Result:
    names = ("--producer", f"{ack.producer_id:016x}", "--seq", str(ack.first_sequence))
    return await asyncio.to_thread(CliRunner().invoke, trace, ["clicks", "-b", address, *names, *options])


def test_a_topic_with_delayed_and_transactional_records_is_clean_and_each_can_be_traced() -> None:
    async def work() -> None:
        async with delaying() as (_, brokers, _topic):
            address = brokers[0].address
            async with AsyncProducer(address) as producer:
                delayed = [await producer.send("clicks", b"%d" % number, deliver_after=0.3) for number in range(20)]
                cancelled = await producer.send("clicks", b"cancelled", deliver_after=50)
                waiting = await (await producer.send("clicks", b"waiting", deliver_after=50))
                await producer.cancel(cancelled)
                await (await producer.send("clicks", b"plain"))
                acks = [await each for each in delayed]
            async with AsyncProducer(address, transactional_id="pay") as payer:
                async with payer.transaction() as transaction:
                    for number in range(10):
                        await transaction.send("clicks", b"t", partition=number % 2)
                async with payer.transaction() as rolled_back:
                    await rolled_back.send("clicks", b"never")
                    await rolled_back.abort()
            assert len(await read(brokers, 31)) == 31
            found = await audited(address)
            while found.finding(Kind.HELD).count:  # its shard does not know yet that the log has it
                found = await audited(address)
            assert (found.outcome, found.findings) == (Outcome.CLEAN, ())
            coverage = found.coverage
            assert (coverage.records, coverage.held, coverage.waiting, coverage.producers) == (31, 30, 1, 1)
            assert found.to_json()["coverage"]["held"] == 30
            assert (await audited(address, asks=False)).outcome is Outcome.INCOMPLETE
            there = await traced(address, acks[0])
            assert there.exit_code == 0, there.output
            assert "held:     delayed until " in there.output
            shown = await traced(address, acks[0], "--json")
            assert f'"due_ms":{due_time_of(acks[0].first_sequence)}' in shown.output
            gone = await cancelled
            for ack, text in (
                (waiting, "and a service partition holds it until then"),
                (gone, "and it was cancelled"),
                (gone._replace(producer_id=7), "and the log does not have it before that"),
            ):
                absent = await traced(address, ack)
                assert isinstance(absent.exception, NotFoundError)
                assert "delayed until" in absent.exception.hint
                assert text in absent.exception.hint
            assert not is_transactional(waiting.first_sequence)

    run(work())
