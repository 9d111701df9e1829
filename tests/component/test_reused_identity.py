"""Reused identities of named producers, imports and staged batches: no other content is ever lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memq.broker.broker import Broker
from memq.broker.partition.ownership import NamedProducers
from memq.client.arguments import runtime_of
from memq.client.bulk.block_cutter import Cut, Cutter
from memq.client.bulk.direct_writer import FixedIdentityWriter
from memq.client.bulk.staged_writer import StagedWriter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.link_pool import bootstrap_addresses
from memq.client.producer.fields import RecordFields
from memq.client.producer.producer import AsyncProducer
from memq.errors import IdentityConflictError, StoreError
from memq.format.key import manifest_key
from memq.format.pointer import NamedProducer
from memq.storage_handlers import Buffer
from memq.topic import TopicSettings
from tests.brokers import run, running_broker, until
from tests.component.staged_rig import WRITER, Rig, rigged
from tests.producer_cores import RecordingCore, note_cores


async def values_of(broker: Broker) -> list[bytes]:
    async with AsyncConsumer(broker.address, ["clicks"], start="beginning", end="end") as consumer:
        return [record.value or b"" async for batch in consumer for record in batch]


# ---- an import -----------------------------------------------------------------------------------


def cut_of(first: int, values: list[bytes]) -> Cut:
    cutter = Cutter("clicks", 0)
    for number, value in enumerate(values):
        fields = RecordFields(value, None, None, 1_000 + number, None)
        cutter.add(first + number, fields, fields.size)
    cut = cutter.end()
    assert cut is not None
    return cut


async def copy(broker: Broker, *cuts: Cut) -> None:
    copier = FixedIdentityWriter(bootstrap_addresses(broker.address), runtime_of(None), 0x77)
    try:
        for cut in cuts:
            await copier.put(cut)
        await copier.drain()
        await copier.close()
    finally:
        await copier.abandon()


def test_an_import_from_a_log_that_was_cut_and_grew_again_fails_and_loses_nothing_in_silence() -> None:
    """After an election of a replica that lagged, Kafka gives offsets to other records than before."""

    async def work() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            await copy(broker, cut_of(10, [b"a", b"b"]), cut_of(12, [b"c"]))
            await copy(broker, cut_of(10, [b"a", b"b"]), cut_of(12, [b"c"]))  # as a run that was killed is repeated
            with pytest.raises(IdentityConflictError, match="sequences 12 to 12 of producer 0000000000000077"):
                await copy(broker, cut_of(10, [b"a", b"b"]), cut_of(12, [b"x"]))
            assert await values_of(broker) == [b"a", b"b", b"c"]

    run(work())


# ---- a named producer ------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["same", "next"])
def test_a_name_that_is_set_back_is_refused(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that believes in a position of its own, as after a restore of its machine, sends below the log's."""
    note_cores(monkeypatch)

    async def work() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            async with AsyncProducer(broker.address, name="job") as first:
                for number in range(3):
                    await (await first.send("clicks", b"%d" % number))
            if owner == "next":
                processor = broker.partitions.processors[topic.id, 0]
                processor.fence(IdentityConflictError("in a test"))
                await until(lambda: processor.own is not None and processor.own.epoch == 2)
                await processor.ready()
            async with AsyncProducer(broker.address, name="job") as second:
                assert await second.resume_points("clicks") == {0: 3}
                route = RecordingCore.last.buffer.route("clicks")
                assert route is not None
                route.buffers[0].first_sequence = route.buffers[0].next_sequence = 0
                delivery = await second.send("clicks", b"other")
                with pytest.raises(IdentityConflictError):
                    await delivery
            assert await values_of(broker) == [b"0", b"1", b"2"]

    run(work())


def test_a_clock_that_goes_back_takes_no_instance_and_no_sequence_back() -> None:
    names = NamedProducers()
    names.learn(NamedProducer(producer=7, epoch=2, last_sequence=10), 9_000)
    names.learn(NamedProducer(producer=7, epoch=1, last_sequence=4), 1_000)
    known = names.get(7)
    assert known is not None
    assert (known.epoch, known.last_sequence, known.last_seen_ms) == (2, 10, 9_000)
    names.learn(NamedProducer(producer=7, epoch=3, last_sequence=10), 500)  # the next instance, at an older queue time
    known = names.get(7)
    assert known is not None
    assert (known.epoch, known.last_sequence, known.last_seen_ms) == (3, 10, 9_000)


def test_a_job_that_repeats_a_batch_whose_manifest_was_swept_is_refused() -> None:
    """Nobody can compare its rows any more. The commit returned, and other rows were gone without a word."""

    async def work(rig: Rig) -> None:
        await rig.commits.commit(1, await rig.staged([b"a"]), rig.store)
        await rig.store.delete(manifest_key("memq", WRITER, 1))
        for _ in range(2):  # the second one finds the manifest of the first
            with pytest.raises(IdentityConflictError, match=f"batch 1 of writer '{WRITER}' was committed before, by a"):
                await rig.commits.commit(1, await rig.staged([b"b"]), rig.store)
        assert await rig.commits.finish_last(rig.store) is None, "what was refused holds up no later batch"
        await rig.commits.commit(2, await rig.staged([b"b"]), rig.store)
        assert await rig.records() == [b"a", b"b"]

    run(rigged(work, partitions=1))


def test_a_record_whose_object_was_not_put_is_staged_all_the_same() -> None:
    """Whoever added it again, as the kind of the error seems to say, would have it twice."""

    async def work(rig: Rig) -> None:
        writer = StagedWriter(rig.commits.cluster, {"clicks": rig.topic}, rig.store, WRITER, object_bytes=2)
        put = rig.store.put

        async def away(key: str, buffers: Sequence[Buffer], checksum: int) -> None:
            raise StoreError("away")

        rig.store.put = away  # type: ignore[method-assign]
        await writer.add("clicks", b"1")
        with pytest.raises(StoreError):
            await writer.add("clicks", b"2")
        with pytest.raises(StoreError):
            await writer.finish()
        rig.store.put = put  # type: ignore[method-assign]
        await writer.add("clicks", b"3")
        await rig.commits.commit(1, await writer.finish(), rig.store)
        assert await rig.records() == [b"1", b"2", b"3"]

    run(rigged(work, partitions=1))
