"""Encrypted records from producer to consumer, by each way that delivers them; keys that are missing or destroyed."""

from __future__ import annotations

import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memq
from memq import read_arrow, read_record
from memq.cli import main
from memq.client.producer.producer import Producer
from memq.encryption.keys import environment_keys
from memq.errors import CorruptDataError, InvalidRequestError, InvalidSettingError, KeyMissingError, NotEncryptedError
from memq.format.blocks.builder import SealedBlock
from memq.testing import Cluster
from tests.golden.make import MASTER_KEY
from tests.unit.test_encryption import checked_again

WAIT_S = 20.0
SECRET = b"a canary that no broker sees"


def keys(path: Path | None = None, kind: type[memq.Encryption] = memq.Encryption, **named: bytes) -> memq.Encryption:
    found = named or {"k1": MASTER_KEY}
    text = ",".join(f"{name}:{b64encode(key).decode()}" for name, key in found.items())
    return kind(environment_keys("KEYS", {"KEYS": text}), subjects=path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def fill(cluster: Cluster, topic: str, encryption: memq.Encryption | None, count: int = 6, **fields: Any) -> None:
    with Producer(cluster.address, encryption=encryption, audit=False) as producer:
        for number in range(count):
            producer.send(
                topic, SECRET + b"%d" % number, key=b"k", headers={"n": b"%d" % number}, tag=f"t{number % 2}", **fields
            )


def read(cluster: Cluster, topic: str, encryption: memq.Encryption | None, **options: Any) -> list[memq.Record]:
    with memq.Consumer(cluster.address, topic, encryption=encryption, end="end", audit=False, **options) as consumer:
        return [record for batch in consumer for record in batch]


@pytest.mark.parametrize("way", ["direct", "broker", "auto"])
def test_records_arrive_by_each_way(cluster: Cluster, way: Any) -> None:
    topic = f"ways-{way}"
    fill(cluster, topic, keys())
    found = read(cluster, topic, keys(), read="auto" if way == "direct" else way)
    assert [record.value for record in found] == [SECRET + b"%d" % number for number in range(6)]
    assert [record.headers for record in found] == [(("n", b"%d" % number),) for number in range(6)]
    assert read_record(cluster.address, topic, found[3].position, encryption=keys()) == found[3]


def test_a_table_of_arrow_has_the_records(cluster: Cluster) -> None:
    fill(cluster, "arrow", keys())
    assert read_arrow(cluster.address, "arrow", encryption=keys()).column("value").to_pylist()[5] == SECRET + b"5"


def test_filters_are_exact(cluster: Cluster) -> None:
    fill(cluster, "filters", keys())
    assert len(read(cluster, "filters", keys(), tags="t1")) == 3
    assert [record.value for record in read(cluster, "filters", keys(), where="n = 4")] == [SECRET + b"4"]


def test_new_blocks_that_come_with_their_pointers_are_opened(cluster: Cluster) -> None:
    cluster.create_topic("tail", partitions=1)
    with memq.Consumer(cluster.address, "tail", start="end", encryption=keys(), audit=False) as consumer:
        assert consumer.poll(0.1) is None
        fill(cluster, "tail", keys())
        batch = consumer.poll(WAIT_S)
        assert batch is not None
        assert SECRET in (batch.values()[0] or b"")


@pytest.mark.parametrize("on_damaged", ["fail", "skip", "dead-letter"])
@pytest.mark.parametrize("reader", [None, keys(k2=MASTER_KEY), keys(k1=bytes(32))], ids=["none", "other", "wrong"])
def test_a_missing_key_stops_under_every_policy(
    cluster: Cluster, reader: memq.Encryption | None, on_damaged: Any
) -> None:
    fill(cluster, "missing", keys(), count=1)
    with memq.Consumer(
        cluster.address, "missing", encryption=reader, end="end", on_damaged=on_damaged, audit=False
    ) as consumer:
        for _ in range(2):  # it stays before the block
            with pytest.raises(KeyMissingError, match="k1"):
                consumer.poll(WAIT_S)
        assert consumer.stats().counts.damaged_blocks == 0


@pytest.mark.parametrize("on_damaged", ["fail", "skip"])
def test_a_plain_block_among_encrypted_ones_is_refused(cluster: Cluster, on_damaged: Any) -> None:
    topic = f"forged-{on_damaged}"
    cluster.create_topic(topic, partitions=1)
    fill(cluster, topic, keys(), count=1)
    fill(cluster, topic, None, count=1)  # of a stranger, who has no key
    with memq.Consumer(
        cluster.address, topic, encryption=keys(), on_damaged=on_damaged, end="end", audit=False
    ) as consumer:
        first = consumer.poll(WAIT_S)
        assert first is not None
        assert len(first) == 1
        for _ in range(2):
            with pytest.raises(NotEncryptedError, match="is not encrypted"):
                consumer.poll(WAIT_S)


def test_a_plain_block_that_comes_with_its_pointer_is_refused(cluster: Cluster) -> None:
    cluster.create_topic("forged-tail", partitions=1)
    with memq.Consumer(cluster.address, "forged-tail", start="end", encryption=keys(), audit=False) as consumer:
        assert consumer.poll(0.1) is None
        fill(cluster, "forged-tail", None, count=1)
        with pytest.raises(NotEncryptedError):
            consumer.poll(WAIT_S)


def test_plain_and_encrypted_records_mix(cluster: Cluster) -> None:
    fill(cluster, "mixed", None, count=1)
    fill(cluster, "mixed", keys(), count=1)
    both = {"k1": MASTER_KEY, "k2": bytes(range(1, 33))}
    fill(cluster, "mixed", keys(k2=both["k2"]), count=1)
    pairs = ",".join(f"{name}:{b64encode(key).decode()}" for name, key in both.items())
    reader = memq.Encryption(environment_keys("KEYS", {"KEYS": pairs}), plain_blocks="allow")
    assert len(read(cluster, "mixed", reader)) == 3
    with pytest.raises(InvalidSettingError, match="plain_blocks"):
        memq.Encryption(environment_keys("KEYS", {"KEYS": pairs}), plain_blocks="drop")  # type: ignore[arg-type]


class Misplaced(memq.Encryption):
    """A stranger moves blocks of another partition here, with a right scope and checksum."""

    def seal_block(self, block: SealedBlock, topic_id: str, partition: int) -> SealedBlock:
        return super().seal_block(block, topic_id, partition + 1)


class Changed(memq.Encryption):
    """A stranger changes a byte, and gives the block a right checksum."""

    def seal_block(self, block: SealedBlock, topic_id: str, partition: int) -> SealedBlock:
        sealed = super().seal_block(block, topic_id, partition)
        data = bytes(sealed.data)
        data = checked_again(data[:-20] + bytes((data[-20] ^ 1,)) + data[-19:])
        checksum = int.from_bytes(data[4:8], "little")
        return SealedBlock(sealed.header._replace(checksum=checksum), data, len(data))


@pytest.mark.parametrize("kind", [Misplaced, Changed])
def test_a_moved_or_changed_block_is_damage(cluster: Cluster, kind: type[memq.Encryption]) -> None:
    topic = f"damage-{kind.__name__}"
    cluster.create_topic(topic, partitions=1)
    fill(cluster, topic, keys(kind=kind), count=2)
    fill(cluster, topic, keys(), count=1)
    with pytest.raises(CorruptDataError, match="tag does not fit"):
        read(cluster, topic, keys())
    assert len(read(cluster, topic, keys(), on_damaged="skip")) == 1
    assert len(read(cluster, topic, keys(), on_damaged="dead-letter")) == 1
    with pytest.raises(KeyMissingError):  # letters of a consumer with keys are encrypted
        read(cluster, f"{topic}.dlq", None)
    assert len(read(cluster, f"{topic}.dlq", keys())) == 1


def test_delayed_records_are_encrypted(cluster: Cluster) -> None:
    fill(cluster, "later", keys(), count=1, deliver_after=0.2)
    with memq.Consumer(cluster.address, "later", encryption=keys(), audit=False) as consumer:
        batch = consumer.poll(WAIT_S)
        assert batch is not None
        assert batch.values() == [SECRET + b"0"]


def test_transactions_are_encrypted(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create_topic("paid", partitions=1)
    writer = keys(tmp_path / "subjects")
    with (
        Producer(cluster.address, encryption=writer, transactional_id="pay", audit=False) as producer,
        producer.transaction(visible=True) as transaction,
    ):
        transaction.send("paid", SECRET)
        transaction.send("paid", SECRET, subject="ada")
    with pytest.raises(KeyMissingError):
        read(cluster, "paid", None)
    assert [record.value for record in read(cluster, "paid", writer)] == [SECRET, SECRET]
    writer.subjects.forget("ada")
    assert [record.value for record in read(cluster, "paid", writer)] == [SECRET, None]


def test_the_broker_and_the_store_see_no_content(cluster: Cluster) -> None:
    fill(cluster, "canary", keys(), count=3)
    found = read(cluster, "canary", keys())
    stored = [body for key, body in cluster.store.objects.items() if "/canary/" in key]
    assert stored
    assert not any(SECRET in bytes(body) or b"t0" in bytes(body) for body in stored)
    with pytest.raises(KeyMissingError):
        read_record(cluster.address, "canary", found[0].position)


# ---- subjects --------------------------------------------------------------------------------


def test_a_forgotten_subject_is_forgotten_by_every_reader(cluster: Cluster, tmp_path: Path) -> None:
    writer = keys(tmp_path / "subjects")
    with Producer(cluster.address, encryption=writer, audit=False) as producer:
        producer.send("people", b"about Ada", key=b"k", headers={"name": b"Ada"}, subject="ada")
        producer.send("people", b"about Bob", key=b"k", subject="bob")
        producer.send("people", b"about none", key=b"k")
    reader = keys(tmp_path / "subjects")
    before = read(cluster, "people", reader)
    assert [record.value for record in before] == [b"about Ada", b"about Bob", b"about none"]
    assert before[0].headers[0] == ("name", b"Ada")
    assert not any(record.forgotten for record in before)
    keys(tmp_path / "subjects").subjects.forget("ada")
    after = read(cluster, "people", reader)
    assert [record.value for record in after] == [None, b"about Bob", b"about none"]
    assert [record.forgotten for record in after] == [True, False, False]
    assert [record.position for record in after] == [record.position for record in before]
    assert [record.value for record in read(cluster, "people", reader, on_forgotten="skip")] == [
        b"about Bob",
        b"about none",
    ]
    assert read_arrow(cluster.address, "people", encryption=reader).column("value").to_pylist()[0] is None
    with pytest.raises(InvalidSettingError, match="on_forgotten"):
        read(cluster, "people", reader, on_forgotten="drop")


def test_a_subject_needs_keys_and_a_file(cluster: Cluster) -> None:
    with (
        Producer(cluster.address, audit=False) as producer,
        pytest.raises(
            (InvalidRequestError, TypeError), match=r"encryption|subject"
        ),  # TypeError of the compiled `send`
    ):
        producer.send("people", b"x", subject="ada")
    with (
        Producer(cluster.address, encryption=keys(), audit=False) as producer,
        pytest.raises(InvalidSettingError, match="subjects"),
    ):
        producer.send("people", b"x", subject="ada")


def test_retries_and_dead_letters_keep_the_subject(cluster: Cluster, tmp_path: Path) -> None:
    cluster.create_topic("orders", partitions=1)
    path = tmp_path / "subjects"
    with Producer(cluster.address, encryption=keys(path), audit=False) as producer:
        producer.send("orders", SECRET, key=b"k", headers={"a": b"1"}, subject="ada")
    tries: list[memq.Message] = []
    dead = threading.Event()

    def handle(message: memq.Message) -> None:
        tries.append(message)
        if len(tries) == 2:
            dead.set()
        raise ValueError("no")

    listener = memq.Listener(
        cluster.address, "orders", "billing", handle, retry_delays_s=(0.05,), encryption=keys(path), audit=False
    )
    with listener:
        listener.start()
        assert dead.wait(WAIT_S)
        with memq.DeadLetterQueue(cluster.address, "billing", encryption=keys(path)) as queue:
            while not (letters := queue.letters()):  # pytest's limit ends it
                threading.Event().wait(0.05)
    assert [each.value for each in tries] == [SECRET, SECRET]
    assert [(each.value, each.headers[0]) for each in letters] == [(SECRET, ("a", b"1"))]
    with pytest.raises(KeyMissingError):
        read(cluster, "billing.dead-letters", None)
    keys(path).subjects.forget("ada")
    with memq.DeadLetterQueue(cluster.address, "billing", encryption=keys(path)) as queue:
        (letter,) = queue.letters()
        assert letter.value is None
        assert letter.attempts == 2
    assert all(record.forgotten for record in read(cluster, "billing.retry", keys(path)))


# ---- commands --------------------------------------------------------------------------------


def test_the_commands_make_keys_send_read_and_forget(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, subjects, lines = tmp_path / "keys.json", tmp_path / "subjects", tmp_path / "lines"
    lines.write_bytes(SECRET + b"\n")
    common = ["-b", cluster.address, "--encryption", f"file:{file}", "--subjects", str(subjects)]
    read_all = ["consume", "letters", "-e", "--json", *common]
    assert main(["keys", "init", str(file)]) == 0
    assert main(["produce", "letters", str(lines), *common]) == 0
    assert main(["produce", "letters", str(lines), *common, "--subject", "ada"]) == 0
    assert main(["keys", "rotate", str(file), "--id", "second"]) == 0
    assert main(["produce", "letters", str(lines), *common]) == 0
    capfd.readouterr()
    assert main(read_all) == 0
    assert capfd.readouterr().out.count(SECRET.decode()) == 3
    assert main(["forget", "ada", *common[2:]]) == 0
    assert main(["forget", "ada", *common[2:]]) == 3
    capfd.readouterr()
    assert main(read_all) == 0
    out = capfd.readouterr().out
    assert out.count(SECRET.decode()) == 2
    assert "memq-forgotten" in out
    assert main(["consume", "letters", "-e", "-b", cluster.address]) != 0
    assert "memq-forgotten" not in capfd.readouterr().out
    assert main(["keys", "list", str(file), "--json"]) == 0
    listed = capfd.readouterr().out
    assert "second" in listed
    assert b64encode(MASTER_KEY).decode() not in listed
    assert main(["forget", "ada"]) != 0
    assert "--encryption" in capfd.readouterr().err


def test_an_audit_is_exact_without_keys_also_of_forgotten_records(cluster: Cluster, tmp_path: Path) -> None:
    writer = keys(tmp_path / "subjects")
    with Producer(cluster.address, encryption=writer) as producer:
        for number in range(20):
            producer.send("audited", SECRET, subject=f"user-{number % 3}")
    for number in range(2):
        writer.subjects.forget(f"user-{number}")
    found = read(cluster, "audited", writer)
    assert [record.forgotten for record in found].count(True) == 14
    assert main(["audit", "audited", "-b", cluster.address]) == 0


# ---- readers that have no keys ---------------------------------------------------------------


def read_splits(reader: Any, splits: Any) -> list[Any]:
    return [rows for split in splits for rows in reader.read(split)]


def test_readers_of_spark_refuse_encrypted_blocks_also_if_they_skip_damage(cluster: Cluster, tmp_path: Path) -> None:
    source = pytest.importorskip("memq.spark.source")
    types = pytest.importorskip("pyspark.sql.types")
    fill(cluster, "to-spark", keys(), count=3)
    for key, body in cluster.store.objects.items():
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(body))
    options = {"topics": "to-spark", "brokers": cluster.address, "store": tmp_path.as_uri(), "columns": "value"}
    schema = types.StructType([types.StructField("value", types.BinaryType())])
    for policy in ("fail", "skip"):
        reader = source.MemqSource({**options, "onDamaged": policy}).reader(schema)
        splits = reader.partitions()
        with pytest.raises(KeyMissingError, match="k1"):
            read_splits(reader, splits)


def test_a_pop_group_gets_no_item_of_an_encrypted_block(cluster: Cluster) -> None:
    cluster.create_topic("tasks", partitions=1)
    fill(cluster, "tasks", keys(), count=1)
    assert main(["queue", "pop", "begin", "tasks", "workers", "--start", "beginning", "-b", cluster.address]) == 0
    with memq.Queue(cluster.address) as queue, pytest.raises(KeyMissingError, match="k1"):
        queue.dequeue("tasks@workers", wait=WAIT_S)
