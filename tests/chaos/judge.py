"""The judge of a chaos run: reads journals, pointers and objects without memq.

`python -m tests.chaos.judge FOLDER` names every broken promise: one line per finding, then counts as JSON, and both in
`verdict.json`; 1 when there is a finding. It needs Kafka and the store of the run, whose addresses lie in `run.json`.

It checks that every acked record lies in a batch that a pointer names, intact, under the sequence and with the bytes
that its worker sent; that what was acked with `all` keeps its order; that what a group committed never goes back, and
its members got every acked record, none twice in committed batches; that the last reader got each record once; that
Spark's files and its copies have each acked record once. Workers report by lines `X` what they saw themselves.
"""

from __future__ import annotations

import collections
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from awscrt import checksums
from botocore.config import Config
from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.chaos.journal import COPIES, lines_of, parse_value, value_of
from tests.chaos.spark_rules import SparkRules, rows_of
from tests.chaos.verdict import Acks, SenderPartition, Sequences, Verdict

read_object: Any = importlib.import_module("examples.read_object")  # it needs nothing of memq

FETCHES_AT_ONCE = 8
FETCHES_AHEAD = 64
KAFKA_S = 60.0
KAFKA_TRIES = 120
LATE_READER = "reader"  # the worker that reads everything at the end


@dataclass
class Record:
    """One record of a batch, as the judge decoded it."""

    producer: str
    sequence: int
    value: bytes


class LogRules:
    """Checks what pointers name against what was acked."""

    def __init__(self, verdict: Verdict, acks: Acks, size: int) -> None:
        self._verdict = verdict
        self._acks = acks
        self._size = size
        self._found: dict[SenderPartition, Sequences] = collections.defaultdict(Sequences)
        self._by_number: dict[tuple[str, str], Sequences] = collections.defaultdict(Sequences)
        self._checksums: dict[tuple[SenderPartition, int], int] = {}
        self._late: dict[SenderPartition, list[int]] = collections.defaultdict(list)
        self._staged_at: dict[tuple[str, str, int], tuple[SenderPartition, int]] = {}  # where each record lies first

    def take(self, topic: str, partition: int, records: Iterable[Record]) -> None:
        """Take the records of one block, in the order of the log."""
        for record in records:
            self._verdict.counts["records stored"] += 1
            place = topic, partition, record.producer
            name, number = parse_value(record.value)
            if record.value != value_of(name, number, self._size):
                self._verdict.find(f"{place}: sequence {record.sequence} holds other bytes: {record.value[:40]!r}")
                continue
            if name.startswith("staged"):
                here = (place, record.sequence)
                if self._staged_at.setdefault((topic, name, number), here) == here:
                    if not self._by_number[topic, name].add(number):
                        self._verdict.counts["copies"] += 1  # of one identity: an own try that landed late
                else:
                    self._verdict.find(f"{place}: record {number} of {name} is there twice")
                continue
            if number != record.sequence:
                self._verdict.find(f"{place}: sequence {record.sequence} holds record {number} of {name}")
            self._note(place, name, number)

    def _note(self, place: SenderPartition, name: str, number: int) -> None:
        sequences = self._found[place]
        if not sequences.add(number):
            self._verdict.counts["copies"] += 1
            return
        if number < sequences.greatest and name not in self._acks.unordered:
            self._late[place].append(number)
        sequences.greatest = max(sequences.greatest, number)

    def finish(self) -> None:
        """Check that nothing acked is missing or out of order."""
        for place, ranges in self._acks.ranges.items():
            lost = [number for first, end in ranges for number in self._found[place].missing(first, end)]
            self._verdict.counts["records acked"] += sum(end - first for first, end in ranges)
            if lost:
                self._verdict.find(f"{place}: {len(lost)} acked records are lost, the first {lost[:5]}")
        for (topic, worker), ranges in self._acks.staged.items():
            found = self._by_number[topic, worker]
            lost = [number for first, end in ranges for number in found.missing(first, end)]
            self._verdict.counts["records acked"] += sum(end - first for first, end in ranges)
            if lost:
                self._verdict.find(f"{topic}: {len(lost)} committed records of {worker} are lost, first {lost[:5]}")
        for place, late in self._late.items():
            acked = [number for number in late if self._acks.covers(place, number)]
            self._verdict.counts["out of order, not acked"] += len(late) - len(acked)
            if acked:
                self._verdict.find(f"{place}: {len(acked)} acked records lie out of order, the first {acked[:5]}")


class GroupRules:
    """Checks what the members of one group got and committed, from all their journals."""

    def __init__(self, verdict: Verdict, name: str) -> None:
        self._verdict = verdict
        self._name = name
        self._got: dict[SenderPartition, Sequences] = collections.defaultdict(Sequences)
        self._commits: dict[tuple[str, int], list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]] = (
            collections.defaultdict(list)
        )
        self._open: dict[tuple[str, int, str], tuple[int, ...]] = {}

    def take(self, life: str, lines: Iterable[list[str]]) -> None:
        """Take the journal of one life of a member."""
        for words in lines:
            if words[0] == "D":
                place = words[1], int(words[2])
                self._open[(*place, words[4])] = position(words[3])
                for text in words[5:]:
                    worker, _, numbers = text.rpartition(":")
                    first, _, last = numbers.partition("-")
                    for number in range(int(first), int(last) + 1):
                        self._got[(*place, worker)].add(number)
                        self._verdict.counts[f"records delivered to {self._name}"] += 1
            elif words[0] == "C":
                place, after = (words[1], int(words[2])), words[3]
                before = self._open.get((*place, after))
                if before is None:
                    self._verdict.find(f"{life} committed {after} of {place} without having got it")
                    continue
                self._commits[place].append((int(words[4]), int(words[5]), before, position(after)))

    def finish(self, acks: Acks, at_end: bool) -> None:
        """Check that commits never go back, and that every acked record was delivered to a group that is at the end."""
        for place, commits in self._commits.items():
            commits.sort(key=lambda commit: commit[1])
            highest: tuple[int, ...] = ()
            settled = 0  # a commit that began before another one returned may be stored before or after it
            for begun, ended, before, after in commits:
                if begun > settled and highest and before < highest:
                    self._verdict.find(
                        f"group {self._name}, {place}: {before} to {after} was committed after {highest}: twice"
                    )
                if after >= highest:
                    highest, settled = after, ended
            self._verdict.counts["commits"] += len(commits)
        for (topic, partition, producer), ranges in acks.ranges.items() if at_end else ():
            worker = acks.workers[producer]
            lost = [n for first, end in ranges for n in self._got[topic, partition, worker].missing(first, end)]
            if lost:
                where = f"{topic} {partition}"
                self._verdict.find(
                    f"group {self._name} never got {len(lost)} acked records of {worker} in {where}: {lost[:5]}"
                )


def position(text: str) -> tuple[int, ...]:
    """Parse a position `read partition:pointer offset:record index`."""
    return tuple(map(int, text.split(":")))


def read_journals(folder: Path, verdict: Verdict) -> tuple[Acks, dict[str, GroupRules]]:
    """Read the journals of a run: what was promised, and what groups got."""
    acks, groups = Acks(), dict[str, GroupRules]()
    for path in sorted(folder.glob("*.journal")):
        worker, lines = path.name.split(".")[0], list(lines_of(path))
        if worker.startswith("ack1"):
            acks.unordered.add(worker)
        for words in lines:
            if words[0] == "X":
                verdict.find(f"{path.name}: {' '.join(words[1:])}")
            elif words[0] == "U":
                verdict.counts["blocks with unknown outcome"] += 1
            elif words[0] == "R":
                verdict.counts[f"calls tried again after {words[1]}"] += 1
            elif words[0] == "E":
                acks.ended.add(path.name)
            elif words[0] == "A":
                take_ack(acks, worker, words)
        if worker.startswith(("member", LATE_READER)):
            group = groups.setdefault(worker.split("-")[0], GroupRules(verdict, worker.split("-")[0]))
            group.take(path.name, lines)
            if worker.startswith(LATE_READER):
                check_once(verdict, path.name, lines)
    return acks, groups


def take_ack(acks: Acks, worker: str, words: list[str]) -> None:
    """Note one ack."""
    topic, partition, producer, first, records = words[1], int(words[2]), words[3], int(words[4]), int(words[5])
    if producer == "staged":
        acks.staged[topic, worker].append((first, first + records))
    elif not topic.startswith("churn"):
        acks.ranges[topic, partition, producer].append((first, first + records))
        acks.workers[producer] = worker


def check_once(verdict: Verdict, name: str, lines: Iterable[list[str]]) -> None:
    """The last reader gets each record once, each time that it begins."""
    seen: dict[SenderPartition, Sequences] = collections.defaultdict(Sequences)
    for words in lines:
        if words[0] == "N":
            seen.clear()
        for text in words[5:] if words[0] == "D" else ():
            worker, _, numbers = text.rpartition(":")
            first, _, last = numbers.partition("-")
            place = words[1], -1 if worker.startswith("staged") or words[1] == COPIES else int(words[2]), worker
            twice = [number for number in range(int(first), int(last) + 1) if not seen[place].add(number)]
            if twice:
                verdict.find(f"{name}: {place} delivered twice: {twice[:5]}")


def patiently(ask: Callable[[], tuple[int, int]], pause_s: float = 1.0) -> tuple[int, int]:
    """Ask Kafka until it answers: partitions change their leader long after the last fault."""
    pause = threading.Event()
    for _ in range(KAFKA_TRIES):
        try:
            return ask()
        except KafkaException:
            pause.wait(pause_s)
    return ask()


def pointers_of(bootstrap: str, kafka_topic: str) -> Iterator[dict[str, Any]]:
    """Yield the pointers of a Kafka topic up to its end, partition by partition, each in the order of its offsets."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "judge", "enable.auto.commit": False})
    try:
        for number in consumer.list_topics(kafka_topic, KAFKA_S).topics[kafka_topic].partitions:
            place = TopicPartition(kafka_topic, number)
            low, high = patiently(partial(consumer.get_watermark_offsets, place, KAFKA_S))
            assert 0 <= low <= high, f"Kafka answers {low} and {high} as the ends of {kafka_topic} {number}"
            consumer.assign([TopicPartition(kafka_topic, number, low)])
            while low < high:
                message = consumer.poll(KAFKA_S)
                assert message is not None, f"Kafka gave nothing of {kafka_topic} {number} from {low} on"
                if message.error():
                    continue
                offset, body = message.offset(), message.value()
                assert offset is not None, "a message without an offset"
                assert body is not None, "a pointer without a body"
                low = offset + 1
                yield json.loads(body)
    finally:
        consumer.close()


def fetched(
    pointers: Iterator[dict[str, Any]], fetch: Callable[[str], bytes]
) -> Iterator[tuple[dict[str, Any], dict[str, Future[bytes]]]]:
    """Yield data pointers in order, each with its objects by key; those of the next ones are fetched meanwhile."""
    ahead: collections.deque[tuple[dict[str, Any], dict[str, Future[bytes]]]] = collections.deque()
    with ThreadPoolExecutor(FETCHES_AT_ONCE) as pool:
        for pointer in pointers:
            if pointer["kind"] == "data":
                keys = [location["key"] for location in pointer["locations"]]
                ahead.append((pointer, {key: pool.submit(fetch, key) for key in keys}))
            if len(ahead) > FETCHES_AHEAD:
                yield ahead.popleft()
        yield from ahead


def blocks_of(pointer: dict[str, Any], fetch: Callable[[str], bytes]) -> Iterator[list[Record]]:
    """Yield the records of each block that a pointer names and does not skip. Raises: RefusedError, struct.error."""
    for location in pointer["locations"]:
        data = fetch(location["key"])
        meta, batches, blocks = read_object.read_index(data)
        for offset, _, _, sequence, _, first, count, partition, epoch, topic in batches:
            named = meta["topics"][topic]["name"] == pointer["topic"] and partition == pointer["partition"]
            if offset != location["offset"] or not named:
                continue
            staged = location["key"].split("/")[1] == "staged"
            if not staged and (sequence, epoch) != (pointer.get("batch_sequence", 0), pointer["epoch"]):
                raise read_object.RefusedError(f"{location['key']} holds batch {epoch}:{sequence}")
            for number, entry in enumerate(blocks[first : first + count]):
                if number in pointer.get("skip", ()):
                    continue
                block = data[entry[0] : entry[0] + entry[5]]
                yield [
                    Record(each["producer_id"], each["sequence"], (each.get("value") or "").encode())
                    for each in read_object.read_block(block)
                ]


def judge(folder: Path) -> Verdict:
    """Judge the run in `folder`."""
    read_object.crc32c = checksums.crc32c  # the table of the example takes 100 ns a byte
    run = json.loads((folder / "run.json").read_text())
    verdict = Verdict()
    acks, groups = read_journals(folder, verdict)
    rules, spark = LogRules(verdict, acks, run["size"]), SparkRules(verdict, run["size"])
    store = boto3.client(
        "s3", endpoint_url=run["endpoint"], region_name=run["region"], aws_access_key_id=run["access_key"],
        aws_secret_access_key=run["secret_key"],
        config=Config(s3={"addressing_style": "path"}, max_pool_connections=FETCHES_AT_ONCE),
    )  # fmt: skip

    def fetch(key: str) -> bytes:
        body: bytes = store.get_object(Bucket=run["bucket"], Key=f"{run['folder']}/{key}")["Body"].read()
        return body

    for kafka_topic in run["kafka_topics"]:
        for pointer, objects in fetched(pointers_of(run["bootstrap"], kafka_topic), fetch):
            verdict.counts["pointers"] += 1
            try:
                verdict.counts["objects"] += len(objects)
                found = {key: future.result() for key, future in objects.items()}
                for records in blocks_of(pointer, found.__getitem__):
                    if pointer["topic"] == COPIES:
                        for record in records:
                            spark.take_copy(record.value)
                    else:
                        rules.take(pointer["topic"], pointer["partition"], records)
            except Exception as error:  # noqa: BLE001 - whatever a batch fails with is a finding, and the next is read
                place = f"{pointer['topic']} {pointer['partition']}, epoch {pointer['epoch']}"
                verdict.find(f"{place}, batch {pointer.get('batch_sequence', 0)} does not read: {error!r}")
    rules.finish()
    for name, group in groups.items():
        group.finish(acks, at_end=name in run["at_end"])
    if "spark" in run["at_end"]:
        for row in rows_of(folder / "spark" / "sink"):
            spark.take_row(*row)
        spark.finish(acks, run["copied"])
    return verdict


def main() -> int:
    """Judge the run in the folder that is named."""
    folder = Path(sys.argv[1])
    verdict = judge(folder)
    for text in verdict.findings:
        print(f"FOUND {text}")
    print(json.dumps(dict(verdict.counts)))
    (folder / "verdict.json").write_text(json.dumps({"findings": verdict.findings, "counts": dict(verdict.counts)}))
    return 1 if verdict.findings else 0


if __name__ == "__main__":
    sys.exit(main())
