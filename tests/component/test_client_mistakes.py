"""Wrong arguments of newcomers to the clients: a clear error at once, and no noise from half-made clients."""

from __future__ import annotations

import asyncio
import gc
import importlib
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import memq
from memq.cli import main
from memq.client.link_pool import bootstrap_addresses
from memq.client.producer.producer import Producer
from memq.errors import (
    ClosedError,
    GenerationFencedError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    NotFoundError,
    TooLargeError,
    UnknownSettingError,
    UnreachableError,
)
from memq.testing import Cluster

HERE = "127.0.0.1:1"
ANY: Any = memq  # without the types that would say the same


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: ANY.Producer("http://here:1"), InvalidSettingError, "bad address 'http://here:1'"),
        (lambda: ANY.Producer("here:port"), InvalidSettingError, "bad port 'port'"),
        (lambda: ANY.Producer(9876), TypeError, "brokers must be 'HOST:PORT' or a sequence of these, not 9876"),
        (lambda: ANY.Producer(HERE, on_ack=5), TypeError, "on_ack must be a function, not int"),
        (
            lambda: ANY.Consumer(HERE, b"clicks"),
            TypeError,
            "topics must be one topic or a sequence of topics, not bytes",
        ),
        (lambda: ANY.Consumer(HERE, "clicks", start=5), TypeError, "start must be 'beginning', 'end', a datetime"),
        (lambda: ANY.Consumer(HERE, "clicks", start=None), TypeError, "start must be 'beginning', 'end', a datetime"),
        (lambda: ANY.Consumer(HERE, "clicks", end=[5]), TypeError, "end must be 'beginning'"),
        (lambda: ANY.Consumer(HERE, "clicks", on_assigned=5), TypeError, "on_assigned must be a function, not int"),
        (lambda: ANY.Consumer(HERE, "clicks", on_revoked=5), TypeError, "on_revoked must be a function, not int"),
        (lambda: ANY.Consumer(HERE, "clicks", on_lost=5), TypeError, "on_lost must be a function, not int"),
        (lambda: ANY.aio.Consumer(HERE, "clicks", on_assigned=5), TypeError, "on_assigned must be a function, not int"),
        (lambda: ANY.aio.Consumer(HERE, "clicks", on_revoked=5), TypeError, "on_revoked must be a function, not int"),
        (lambda: ANY.Consumer(HERE, None), TypeError, "topics must be one topic or a sequence of topics, not NoneType"),
        (lambda: ANY.Consumer(HERE, "clicks", start={"clicks": memq.Position(0, 1)}), TypeError, "by (topic, part"),
        (lambda: ANY.Consumer(HERE, "clicks", start=ANY.Position("0", 1)), TypeError, "start is a Position of some"),
        (
            lambda: ANY.Consumer(HERE, "clicks", runtime=5),
            TypeError,
            "runtime must be a memq.runtime.runtime.Runtime, not int",
        ),
        (
            lambda: ANY.Consumer(HERE, "clicks", tracer_provider=5),
            TypeError,
            "tracer_provider must be a TracerProvider of",
        ),
        (lambda: ANY.Consumer(HERE, "clicks", client_id=0), TypeError, "client_id must be str, not int"),
        (lambda: ANY.read_arrow(HERE, 5), TypeError, "topics must be one topic"),
        (lambda: ANY.Producer(HERE, runtime=5), TypeError, "runtime must be a memq.runtime.runtime.Runtime, not int"),
        (lambda: ANY.Producer(HERE, tracer_provider=5), TypeError, "tracer_provider must be a TracerProvider of"),
        (lambda: ANY.Producer(HERE, acks=[]), InvalidSettingError, "acks = [] is not 0, 1 or 'all'"),
        (lambda: ANY.Producer(HERE, codec=[]), InvalidSettingError, "codec = [] is not one of"),
        (lambda: ANY.Admin(HERE, runtime=5), TypeError, "runtime must be a memq.runtime.runtime.Runtime, not int"),
        (lambda: ANY.aio.Producer(HERE, tracer_provider=5), TypeError, "tracer_provider must be a TracerProvider of"),
        (lambda: ANY.aio.Consumer(HERE, "clicks", on_lost=5), TypeError, "on_lost must be a function, not int"),
        (lambda: ANY.ClientCollector(5), TypeError, "clients must be a mapping of names to clients, not int"),
        (lambda: ANY.ClientCollector({1: 2}), TypeError, "the name of a client must be str, not int"),
        (
            lambda: ANY.ClientCollector({"a": 2}),
            TypeError,
            "client 'a' must be a producer, consumer or listener, not int",
        ),
        (lambda: ANY.Consumer(HERE, "clicks", s3=[1]), TypeError, "s3 must be a mapping of settings, not list"),
        (lambda: ANY.aio.Consumer(HERE, "c", s3={1: 2}), TypeError, "the name of a setting in s3 must be str, not int"),
        (lambda: ANY.Consumer(HERE, "c", s3={"acces_key_id": "x"}), UnknownSettingError, "unknown setting 'acces_key_"),
        (lambda: ANY.Consumer(HERE, "c", s3={"deadline_ms": -1}), InvalidSettingError, "deadline_ms = '-1' from s3=…"),
        (lambda: ANY.Consumer(HERE, "c", s3={"access_key_id": "x"}), InvalidSettingError, "[s3] has one of access_key"),
        (lambda: ANY.Position.parse(5), TypeError, "a position is parsed from text as '0:17:3', not from int"),
        (
            lambda: ANY.Consumer(HERE, "clicks", prefetch_bytes_max="64MiB"),
            InvalidSettingError,
            "= '64MiB' is no number",
        ),
        (lambda: ANY.Producer(HERE, linger_ms="5ms"), InvalidSettingError, "linger_ms = '5ms' is no number"),
        (lambda: ANY.Producer(HERE, linger_ms=-5), InvalidSettingError, "linger_ms = -5 is outside 0 to 60000"),
        (
            lambda: ANY.Admin(HERE, connect_timeout_ms=None),
            InvalidSettingError,
            "connect_timeout_ms = None is no number",
        ),
        (lambda: ANY.Consumer(HERE, "clicks", read="store"), InvalidSettingError, "read = 'store' is not"),
        (lambda: ANY.Consumer(HERE, "clicks", auto_commit="false"), TypeError, "auto_commit must be bool, not str"),
        (
            lambda: ANY.Consumer(HERE, "clicks", start=memq.Position(0, -1)),
            InvalidRequestError,
            "bad position '0:-1:0'",
        ),
        (lambda: ANY.Producer(HERE, name=""), InvalidNameError, "producer name '' is not allowed"),
        (lambda: ANY.Producer(HERE, name=b""), TypeError, "name must be str, not bytes"),
        (lambda: ANY.Producer(HERE, name=[]), TypeError, "name must be str, not list"),
        (
            lambda: ANY.Consumer(HERE, "clicks", start={("click", 0): memq.Position(0, 1)}),
            InvalidRequestError,
            "start has no position of clicks, only of click",
        ),
        (
            lambda: ANY.Consumer(HERE, ["a", "b"], end={("A", 0): memq.Position(0, 1)}),
            InvalidRequestError,
            "end has no position of a, b, only of A",
        ),
        (lambda: ANY.Listener(HERE, "g.retry", "g", print), InvalidRequestError, "is the retry topic of group 'g'"),
        (lambda: ANY.Listener(HERE, "g.dead-letters", "g", print), InvalidRequestError, "has the dead letters of gro"),
        (lambda: ANY.Consumer(HERE, "c", tags=["a", 1]), TypeError, "or a list of texts, not ['a', 1]"),
        (
            lambda: ANY.Producer(HERE, transactional_id="pay", name="n"),
            InvalidSettingError,
            "transactional_id = 'pay' together with name = 'n'",
        ),
        (
            lambda: ANY.Producer(HERE, transactional_id="pay", acks=1),
            InvalidSettingError,
            "transactional_id = 'pay' together with acks = 1",
        ),
        (lambda: Cluster(memory_bytes_max=1), InvalidSettingError, "memory_bytes_max = '1' from Cluster() is not with"),
        (lambda: Cluster(port="x"), InvalidSettingError, "port = 'x' from Cluster() can't be read"),
        (lambda: Cluster(prot=1), UnknownSettingError, "a broker has no setting 'prot'"),
        (lambda: ANY.Producer(HERE, audit="no"), TypeError, "audit must be bool, not str"),
        (lambda: ANY.Producer(""), InvalidSettingError, "no broker is named"),
        (lambda: ANY.Producer(HERE, name=5), TypeError, "name must be str, not int"),
        (lambda: ANY.Producer(HERE, name=0), TypeError, "name must be str, not int"),
    ],
)
def test_a_client_that_is_made_wrongly(make: Callable[[], Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        make()
    gc.collect(1)  # what __del__ of a client without __init__ raises would fail the test, as every warning does


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ({"linger_ms": "5ms"}, "write 5 in place of '5ms'"),
        ({"pending_bytes_max": "64MiB"}, "write 67108864 in place of '64MiB'"),
        ({"pending_bytes_max": "5s"}, "write a number, without a unit"),
        ({"linger_ms": "soon"}, "write a number, without a unit"),
        ({"block_bytes": None}, "write a number, without a unit"),
    ],
)
def test_a_setting_with_a_unit_gets_the_number_that_is_meant(setting: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidSettingError) as refused:
        memq.Producer(HERE, **setting)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    "make", [lambda: ANY.Retry(after="5m"), lambda: ANY.Listener(HERE, "c", "g", print, retry_delays_s=["5m"])]
)
def test_a_delay_with_a_unit_gets_the_seconds_that_are_meant(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidSettingError) as refused:
        make()
    assert refused.value.hint == "write 300 in place of '5m'"


@pytest.mark.parametrize("face", [ANY, ANY.aio], ids=["memq", "memq.aio"])
@pytest.mark.parametrize("client", ["Producer", "Consumer", "Admin"])
def test_a_wrong_signature_names_the_class_that_was_called(face: Any, client: str) -> None:
    topics = {"topics": "clicks"} if client == "Consumer" else {}
    with pytest.raises(TypeError, match=rf"^{client}\(\) got an unexpected keyword argument 'lingerms'"):
        getattr(face, client)(HERE, lingerms=5, **topics)
    with pytest.raises(TypeError, match=rf"^{client}\(\) takes"):
        getattr(face, client)(HERE, "clicks", "report")


@pytest.mark.parametrize("face", [ANY, ANY.aio], ids=["memq", "memq.aio"])
def test_a_missing_argument_is_named(face: Any) -> None:
    with pytest.raises(TypeError, match=r"^Consumer\(\) missing 1 required positional argument: 'topics'"):
        face.Consumer(HERE)


@pytest.mark.parametrize(
    ("timeout", "kind", "said"),
    [(float("nan"), InvalidSettingError, "timeout = nan"), ("5", TypeError, "timeout must be a number of seconds")],
)
def test_a_timeout_is_a_number_of_seconds(timeout: Any, kind: type[Exception], said: str) -> None:
    with Cluster() as cluster, memq.Producer(cluster.address) as producer:
        delivery = producer.send("t", b"v")
        with memq.Consumer(cluster.address, "t") as consumer:
            for wait in (producer.flush, producer.close, delivery.result, delivery.exception, consumer.poll):
                with pytest.raises(kind, match=said):
                    wait(timeout)
            assert delivery.result(math.inf).records == 1
            batch = consumer.poll(math.inf)
            assert batch is not None
            assert batch.values() == [b"v"]
        producer.flush(math.inf)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"topic": b"t"}, TypeError, "topic must be str, not bytes"),
        ({"topic": None}, TypeError, "topic must be str, not NoneType"),
        ({"topic": ["t"]}, TypeError, "topic must be str, not list"),
        ({"topic": memoryview(bytearray(b"t"))}, TypeError, "topic must be str, not memoryview"),
        ({"topic": ["t"], "key": b"k"}, TypeError, "topic must be str, not list"),
        ({"topic": {"t": 1}, "tag": "x"}, TypeError, "topic must be str, not dict"),
        ({"headers": 5}, TypeError, "headers must be pairs or a mapping, not int"),
        ({"partition": 7}, NotFoundError, "no partition 7"),
        ({"tag": b"x"}, TypeError, "tag must be str, not bytes"),
    ],
)
def test_a_record_that_is_sent_wrongly(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with Cluster() as cluster, memq.Producer(cluster.address) as producer:
        with pytest.raises(kind, match=said):
            producer.send(**({"topic": "t", "value": b"v"} | arguments))
        delivery = producer.send("t", b"v")
        assert delivery.result(timeout=10).records == 1
        assert repr(delivery).startswith("<Delivery Ack(topic='t'")


def test_the_text_of_an_ack_names_its_producer_as_trace_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster() as cluster, memq.Producer(cluster.address) as producer:
        ack = producer.send("t", b"v").result(timeout=10)
        assert isinstance(ack.producer_id, int)
        (producer_id,) = re.findall(r"producer_id=(\w+)", str(ack))
        asked = ["--producer", producer_id, "--seq", str(ack.first_sequence), "-b", cluster.address]
        assert main(["trace", "t", *asked]) == 0
        assert f"producer {producer_id.removeprefix('0x')} sequence 0" in capsys.readouterr().out


def test_a_position_in_a_partition_that_is_not_there_is_named_by_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster() as cluster, memq.Producer(cluster.address) as producer:
        producer.send("t", b"v").result(timeout=10)
        assert main(["trace", "t", "9:1:0", "-b", cluster.address]) == 3
    assert "topic 't' has no partition 9 (it has 1, from 0 on)" in capsys.readouterr().err


def test_a_batch_of_another_consumer_is_not_committed_and_the_error_says_so() -> None:
    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            producer.send("t", b"v").result(timeout=10)
        with memq.Consumer(cluster.address, "t", group="first") as first:
            batch = first.poll(10)
        assert batch is not None
        with memq.Consumer(cluster.address, "t", group="second", start="end") as second:
            assert second.poll(0.2) is None
            with pytest.raises(GenerationFencedError, match="or by another consumer"):
                second.commit(batch)


def test_a_record_for_a_topic_of_memq_itself_is_refused() -> None:
    """A record that looks like a report of a client would be one to the auditor."""
    with Cluster(audit=True) as cluster, memq.Producer(cluster.address) as producer:
        for send in (
            lambda: producer.send("_memq_audit", b"{}"),
            lambda: producer.send_many("_memq_audit", [b"{}"]),
        ):
            with pytest.raises(InvalidNameError, match="'_memq_audit' starts with the reserved prefix '_memq'"):
                send()
        assert producer.send("t", b"v").result(timeout=10).records == 1, "it sends to other topics"


@pytest.mark.parametrize("topic", [["t"], {"t": 1}])
def test_many_records_and_resume_points_need_the_name_of_a_topic(topic: Any) -> None:
    with Cluster() as cluster, memq.Producer(cluster.address) as producer:
        for ask in (lambda: producer.send_many(topic, [b"v"]), lambda: producer.resume_points(topic)):
            with pytest.raises(TypeError, match="topic must be str, not "):
                ask()


def test_a_record_that_is_sent_wrongly_by_asyncio() -> None:
    async def scenario(address: str) -> None:
        async with memq.aio.Producer(address) as producer:
            await (await producer.send("t", b"v"))
            for arguments in ({}, {"key": b"k"}, {"tag": "x"}):
                with pytest.raises(TypeError, match="topic must be str, not list"):
                    await producer.send(["t"], b"v", **arguments)  # type: ignore[arg-type]  # as a newcomer would

    with Cluster() as cluster:
        asyncio.run(scenario(cluster.address))


def test_an_empty_tag_is_none() -> None:
    """No text of a filter can name an empty tag, and a group would lack the records of none."""

    async def by_asyncio(address: str) -> None:
        async with memq.aio.Producer(address) as producer:
            await producer.send("t", b"v", tag="")
            await producer.send_many("t", [b"v"], tag="")

    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            producer.send("t", b"v", tag="")
            producer.send("t", b"v", key=b"k", tag="")
            producer.send_many("t", [b"v"], tag="")
        asyncio.run(by_asyncio(cluster.address))
        assert [record.tag for record in cluster.records("t")] == [None] * 5


def test_a_refused_record_does_not_hold_up_the_next_one() -> None:
    with Cluster() as cluster, memq.Producer(cluster.address) as producer:
        with pytest.raises(MemqError):
            producer.send("t", b"v", tag="x" * 70_000)
        assert producer.send("t", b"v").result(timeout=10).records == 1


def test_a_position_belongs_to_its_partition() -> None:
    with Cluster() as cluster:
        cluster.create_topic("t", partitions=2)
        with memq.Consumer(cluster.address, "t", end="end") as consumer:
            assert list(consumer) == []
            with pytest.raises(InvalidRequestError, match="position 1:0:0 belongs to partition 1, not to 0"):
                consumer.seek("t", 0, memq.Position.parse("1:0:0"))
            with pytest.raises(TypeError, match="partition must be int, not str"):
                consumer.pause("t", "0")  # type: ignore[arg-type]  # as a newcomer would
            with pytest.raises(TypeError, match="batch must be one that this consumer returned, not int"):
                consumer.commit(5)  # type: ignore[arg-type]  # the same


@pytest.mark.parametrize(
    ("ask", "kind", "said"),
    [
        (lambda admin: admin.create_topic("t", settings={"retention_ms": None}), TypeError, "not NoneType"),
        (lambda admin: admin.create_topic("t", settings={5: 1}), TypeError, "name of a topic setting must be str"),
        (lambda admin: admin.alter_topic("t", settings={"retention_ms": 0.5}), TypeError, "not float"),
        (lambda admin: admin.alter_topic("t", settings={"retention_ms": 1 << 70}), InvalidSettingError, "beyond 2^63"),
        (lambda admin: admin.alter_topic(None, settings={}), TypeError, "topic must be str"),
        (lambda admin: admin.delete_topic(None), TypeError, "topic must be str"),
        (lambda admin: admin.group(5), TypeError, "group must be str"),
        (lambda admin: admin.delete_group(5), TypeError, "group must be str"),
        (lambda admin: admin.create_topic("t", settings=[1]), TypeError, "settings must be a mapping of names to"),
        (lambda admin: admin.create_topic("t", exist_ok="no"), TypeError, "exist_ok must be bool, not str"),
        (lambda admin: admin.ends(5), TypeError, "topics must be a sequence of memq.topic.Topic, not int"),
        (lambda admin: admin.topics(internal="no"), TypeError, "internal must be bool, not str"),
        (lambda admin: admin.groups(internal=1), TypeError, "internal must be bool, not int"),
        (
            lambda admin: admin.reset_group("g", "t", {("T", 0): memq.Position(0, 1)}),
            InvalidRequestError,
            "to has no position of t, only of T",
        ),
        (lambda admin: admin.reset_group("g", 5, "end"), TypeError, "topic must be str, not int"),
        (lambda admin: admin.ends(["t"]), TypeError, "topic must be a memq.topic.Topic, as `topics` returns them"),
        (lambda admin: admin.end_totals("t"), TypeError, "topic must be a memq.topic.Topic, as `topics` returns them"),
        (lambda admin: admin.reset_group("a b", "t", "end"), InvalidNameError, "a b"),
        (lambda admin: admin.drain_broker("a b"), InvalidNameError, "a b"),
        (lambda admin: admin.reset_group("g", "t", "end", dry_run="no"), TypeError, "dry_run must be bool"),
    ],
)
def test_wrong_admin_requests_are_refused_before_they_are_sent(
    ask: Callable[[Any], object], kind: type[Exception], said: str
) -> None:
    with memq.Admin(HERE) as admin, pytest.raises(kind, match=re.escape(said)):
        ask(admin)


def test_partitions_are_numbers() -> None:
    with Cluster() as cluster, memq.Admin(cluster.address) as admin:
        topic = admin.create_topic("t", partitions=2)
        with pytest.raises(TypeError, match="partitions are a sequence of int, not int"):
            admin.end_totals(topic, 5)  # type: ignore[arg-type]  # as a newcomer would
        with pytest.raises(TypeError, match="partition must be int, not str"):
            admin.end_totals(topic, "0")  # type: ignore[arg-type]  # as a newcomer would
        assert list(admin.end_totals(topic, (each for each in (1,)))) == [1]


def test_a_consumer_may_start_from_positions_of_more_topics() -> None:
    with Cluster() as cluster:
        cluster.create_topic("t")
        with memq.Producer(cluster.address) as producer:
            for value in (b"a", b"b"):
                producer.send("t", value).result(timeout=10)
        first, second = cluster.records("t")
        start = {("t", 0): second.position, ("other", 0): first.position}
        with memq.Consumer(cluster.address, "t", start=start, end="end") as consumer:
            assert [record.value for batch in consumer for record in batch] == [b"b"]


@pytest.mark.parametrize(
    ("setting", "said", "hint"),
    [
        ({"retention_ms": "7d"}, "retention_ms = '7d' is not a whole number of milliseconds", "604800000 for 7 days"),
        ({"batch_bytes_max": "1MiB"}, "batch_bytes_max = '1MiB' is not a whole number of bytes", "without a unit"),
        ({"ring_slots": True}, "ring_slots = True is not a whole number", "digits only"),
        ({"seal_when_idle": "perhaps"}, "seal_when_idle = 'perhaps' is not true or false", ""),
    ],
)
def test_a_topic_setting_of_another_type_is_named(setting: dict[str, Any], said: str, hint: str) -> None:
    with Cluster() as cluster, memq.Admin(cluster.address) as admin:
        with pytest.raises(InvalidSettingError, match=f"(?m)setting {said}$") as refused:
            admin.create_topic("t", settings=setting)
        assert hint in refused.value.hint
        assert admin.create_topic("t", settings={"ring_slots": "8"}).settings.ring_slots == 8


def test_partitions_are_a_number() -> None:
    with Cluster() as cluster, memq.Admin(cluster.address) as admin:
        with pytest.raises(TypeError, match="partitions must be int, not str"):
            admin.create_topic("t", partitions="4")  # type: ignore[arg-type]  # as a newcomer would
        with pytest.raises(NotFoundError, match="topic 'nope' does not exist"):
            admin.delete_topic("nope")


def test_the_hint_of_an_error_is_in_its_traceback() -> None:
    shown = "".join(traceback.format_exception_only(NotFoundError("topic 't' does not exist")))
    assert shown.endswith(f"NotFoundError: topic 't' does not exist\nhint: {NotFoundError.default_hint}\n")


def test_a_closed_client_is_named() -> None:
    """An admin client named a connection to a broker that the caller never asked for."""
    admin = memq.Admin(HERE)
    admin.close()
    for ask in (admin.topics, admin.brokers, lambda: admin.create_topic("t"), lambda: admin.group("g")):
        with pytest.raises(ClosedError, match=r"^the admin client is closed"):
            ask()
    consumer = memq.Consumer(HERE, "clicks", group="g")
    consumer.close()
    for call in (consumer.poll, consumer.lag, consumer.committed):
        with pytest.raises(ClosedError, match=r"^the consumer is closed"):
            call()


def test_addresses() -> None:
    assert bootstrap_addresses("a:1, b,[::1]:2") == [("a", 1), ("b", 9876), ("::1", 2)]
    assert bootstrap_addresses(["a:1", "b"]) == [("a", 1), ("b", 9876)]


def test_a_table_of_records_has_an_end() -> None:
    """With None the call read for ever."""
    with pytest.raises(TypeError, match=r"^end must be .* not NoneType"):
        memq.read_arrow(HERE, "clicks", end=None)  # type: ignore[arg-type]  # as a newcomer would


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "memq.format.blocks.arrow", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'memq\[arrow\]'"):
        importlib.import_module("memq.format.blocks.arrow")


def test_without_pyspark_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    for name in [each for each in sys.modules if each.startswith("pyspark.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("memq.spark.source", "pyspark_memq"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'memq\[spark\]'") as caught:
        importlib.import_module("pyspark_memq")
    assert (caught.value.name or "").startswith("pyspark"), "callers tell by it which library is missing"


def test_names_of_the_package_are_listed_once() -> None:
    assert memq.Producer is Producer
    assert len(dir(memq)) == len(dict.fromkeys(dir(memq)))


def test_an_admin_waits_for_a_broker_that_comes_up() -> None:
    with Cluster() as cluster:
        address = cluster.address
        cluster.stop_broker()
        with memq.Admin(address) as admin, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(admin.topics)
            cluster.start_broker()
            assert asked.result() == []


@pytest.mark.parametrize("flushes", [True, False])
def test_a_producer_of_aio_that_is_not_closed_warns_that_records_may_be_lost(
    flushes: bool, recwarn: pytest.WarningsRecorder
) -> None:
    async def send(cluster: Cluster) -> None:
        producer = memq.aio.Producer(cluster.address)
        await producer.send("clicks", b"0")
        await producer.flush()
        if not flushes:
            cluster.stop_broker()  # else it may ack the records while the loop ends
        for value in (b"1", b"2", b"3"):
            await producer.send("clicks", value)
        if flushes:
            await producer.flush()

    with Cluster() as cluster:
        asyncio.run(send(cluster))
        gc.collect()
    warned = [str(each.message) for each in recwarn if each.category is RuntimeWarning]
    assert len(warned) == (0 if flushes else 1)
    assert all(re.search("[123] records? without an ack may be lost; use it as `async with`", each) for each in warned)


def test_many_records_of_which_one_is_too_large_are_not_sent_to_any_partition() -> None:
    """The records of the partitions before it were sent: a retry without it doubled them."""
    values, keys = [b"%d" % number for number in range(6)], [b"key %d" % number for number in range(6)]
    with Cluster() as cluster, memq.Admin(cluster.address) as admin, memq.Producer(cluster.address) as producer:
        admin.create_topic("clicks", partitions=2, settings={"record_bytes_max": 100})
        for key in keys:
            with pytest.raises(TooLargeError, match=r"record values\[6\] of 205 bytes"):
                producer.send_many("clicks", [*values, b"x" * 200], keys=[*keys, key])
        producer.send_many("clicks", values, keys=keys)
        assert sorted(record.value or b"" for record in cluster.records("clicks")) == values


def test_a_second_thread_that_reads_a_consumer_is_refused() -> None:
    """The iterator raised a bare ValueError; two threads in `poll` shared the batches without a word."""
    with Cluster() as cluster, memq.Admin(cluster.address) as admin, ThreadPoolExecutor(1) as pool:
        admin.create_topic("t")
        entered = threading.Event()
        with memq.Consumer(cluster.address, "t", group="g", on_assigned=lambda _: entered.set()) as consumer:
            batches = iter(consumer)
            first = pool.submit(next, batches)
            assert entered.wait(60)
            for read in (lambda: next(batches), consumer.poll):
                with pytest.raises(InvalidRequestError, match="another thread polls this consumer") as refused:
                    read()
                assert "make a consumer in each thread, with the same group" in refused.value.hint
            with memq.Producer(cluster.address) as producer:
                producer.send("t", b"v")
            assert first.result(60).values() == [b"v"], "the first thread reads on"
            assert consumer.poll(0) is None, "and any thread may read after it"


def test_a_second_task_that_reads_a_consumer_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with memq.aio.Consumer(cluster.address, "t") as consumer, memq.aio.Producer(cluster.address) as producer:
            batches = aiter(consumer)
            first = asyncio.create_task(consumer.poll())
            await asyncio.wait((first,), timeout=0)
            for read in (lambda: anext(batches), consumer.poll):
                with pytest.raises(InvalidRequestError, match="another task polls this consumer") as refused:
                    await read()
                assert "make a consumer in each task" in refused.value.hint
            await producer.send("t", b"v")
            batch = await first
            assert batch is not None
            assert batch.values() == [b"v"]
            assert await consumer.poll(0) is None

    with Cluster() as cluster:
        cluster.create_topic("t")
        asyncio.run(scenario(cluster))


def test_an_iteration_continues_after_an_error() -> None:
    """A second `next` ended the iteration, as if all was read."""
    consumer = memq.Consumer(HERE, "t", connect_timeout_ms=1)
    batches = iter(consumer)
    for _ in range(2):
        with pytest.raises(UnreachableError):
            next(batches)
    consumer.close()
