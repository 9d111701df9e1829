"""A broker's own counters and answers: times by bucket, and which of the requested topics exist."""

from __future__ import annotations

from memq.broker.metrics import LATENCY_BOUNDS_S, Histogram
from memq.protocol.frames import Api, encode_frame
from memq.protocol.messages import Metadata, MetadataRequest, decode_message, encode_message
from tests.brokers import BareClient, run, running_broker


def test_times_are_summed_and_counted_in_the_bucket_that_ends_with_them() -> None:
    found = Histogram()
    for seconds in (0.001, 0.0011, 0.5, 31.0):
        found.observe(seconds)
    assert found.sum_s == 0.001 + 0.0011 + 0.5 + 31.0
    buckets = dict(found.buckets())
    assert list(buckets) == [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.25"], buckets["0.5"]) == (1, 2, 2, 3)
    assert (buckets["30.0"], buckets["+Inf"]) == (3, 4)


def test_metadata_names_the_topics_that_do_not_exist() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            await client.topic("clicks")
            ask = MetadataRequest(topics=["nothing", "clicks", "neither"])
            client.write(encode_frame(Api.METADATA, 0, 9, encode_message(ask)))
            found = decode_message((await client.frame()).body, Metadata)
            assert [each.topic.name for each in found.topics] == ["clicks"]
            assert found.missing == ["nothing", "neither"]
            await client.close()

    run(work())
