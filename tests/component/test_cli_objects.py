"""`memq inspect` and `memq verify` on intact objects, and on objects with known damage."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from awscrt.checksums import crc32c

import memq
from memq.audit.checks.object_check import ObjectVerdict, check_file
from memq.broker.data_folder import DataFolder
from memq.cli.run import run
from memq.cli.store import verify as verify_module
from memq.cli.store.object_files import FoundObject
from memq.cli.store.verify import READS_MAX, verdict_of
from memq.errors import CorruptDataError, StoreError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import parse_header
from memq.format.key import (
    compaction_manifest_key,
    kind_without_batches,
    large_object_key,
    manifest_key,
    manifest_part_key,
    object_key,
    staged_object_key,
    sweep_list_key,
)
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.packed_file import SweepList, encode_sweep_list
from memq.format.state_log.snapshot import SavedState, encode_snapshot
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.runtime import Runtime
from memq.testing import Cluster

TOPIC = ObjectTopic("clicks", "ab" * 16)


@dataclass(frozen=True)
class Made:
    """An object with two blocks, and where the second one starts."""

    path: Path
    data: bytes
    second: int


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Write an object with two blocks of three and two records."""
    return written(tmp_path / "object", TOPIC)


def written(path: Path, topic: ObjectTopic) -> Made:
    blocks = [_block(0, [b"a", b"", None]), _block(3, [b"\xff", b"e" * 100])]
    entries, at = [], 0
    for block in blocks:
        entries.append(BlockEntry.from_header(parse_header(block), at))
        at += len(block)
    batch = BatchEntry(0, at, 1_738_310_400_000, 7, 5, 0, 2, 1, 3)
    meta = ObjectMeta(cluster="memq", broker="broker-1", topics=(topic,), created_ms=1_738_310_400_000)
    data = b"".join(blocks) + encode_index(meta, [batch], entries, at)
    path.write_bytes(data)
    return Made(path, data, len(blocks[0]))


def _block(first: int, values: list[bytes | None]) -> bytes:
    builder = BlockBuilder()
    for value in values:
        builder.append(value, key=b"k", timestamp_ms=1_738_310_400_000, headers=[("trace", b"1")], tag="web")
    sealed = builder.seal(producer_id=5, first_sequence=first, scope=1, now_ms=1_738_310_400_000, codec="none")
    return bytes(sealed.data)


def test_inspect(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(made.path)]) == 0
    out = capsys.readouterr().out
    assert "1 batch, 2 blocks, 5 records" in out
    assert "topic clicks" in out
    assert "0000000000000005" in out


def test_inspect_json(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", made.path.as_uri(), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["cluster"], shown["records"], shown["bytes"]) == ("memq", 5, len(made.data))
    [batch] = shown["batches"]
    assert (batch["topic"], batch["partition"], batch["epoch"], batch["batch_sequence"]) == ("clicks", 1, 3, 7)
    assert [block["offset"] for block in batch["blocks"]] == [0, made.second]


def test_inspect_records(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(made.path), "--records"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["sequence"] for record in records] == [0, 1, 2, 3, 4]
    assert [record.get("value") for record in records] == ["a", "", None, None, "e" * 100]
    assert records[3]["value_base64"] == "/w=="
    assert records[0]["headers"] == [["trace", "1"]]


def test_inspect_of_the_records_of_a_folder_leaves_out_those_of_memqs_own_topics(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are the input of produce: reports to the audit would become records of the user's topic."""
    reports = written(made.path.parent / "reports", ObjectTopic("_memq_audit", "cd" * 16))
    assert run(["inspect", str(made.path.parent), "--records"]) == 0
    streams = capsys.readouterr()
    assert [json.loads(line)["sequence"] for line in streams.out.splitlines()] == [0, 1, 2, 3, 4]
    assert "5 records of memq's own topics not shown" in streams.err
    assert run(["inspect", str(reports.path), "--records"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_inspect_of_a_file_that_is_no_object_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"no object of memq, and longer than an index and a trailer, which are at the end of one\n" * 2)
    assert run(["inspect", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"memq: error: {path}: object of 174 bytes ends with"), error
    assert "it is no object of memq, or its end is damaged" in error
    assert f"'memq verify {path}'" in error


def test_inspect_shows_a_spool_segment_and_its_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((Path(__file__).parents[1] / "golden" / "segment.spool").read_bytes())
    path = tmp_path / "00.spool"
    path.write_bytes(data)
    assert run(["inspect", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["blocks"]), shown["damages"], shown["torn_bytes"]) == (2, [], 0)
    assert run(["inspect", str(path), "--records"]) == 0
    whole = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(whole) == sum(block["count"] for block in shown["blocks"])
    second = shown["blocks"][1]
    data[second["offset"] + second["length"] - 1] ^= 1
    path.write_bytes(data)
    assert run(["inspect", str(tmp_path)]) == 0
    assert "damaged" in capsys.readouterr().out
    assert run(["inspect", str(path), "--records"]) == 1
    streams = capsys.readouterr()
    assert [json.loads(line) for line in streams.out.splitlines()] == whole[: shown["blocks"][0]["count"]]
    assert "1 byte range can't be read" in streams.err


def test_inspect_of_a_folder_shows_each_object(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.path.parent
    assert run(["inspect", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{made.path}: ")
    assert run(["inspect", str(folder), "--records"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    (folder / "zebra").write_bytes(b"no object")
    assert run(["inspect", str(folder), "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["records"] == 5
    assert "zebra: " in err
    assert err.endswith(f"memq: error: 1 object below '{folder}' can't be read ({CorruptDataError.default_hint})\n")


def test_inspect_of_a_folder_passes_over_files_without_batches(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound folder with the list of a sweep, or with manifests, was called unreadable."""
    folder = made.path.parent
    keys = [
        sweep_list_key("memq", "memq/shared/", 1, b"list", kept=False),
        sweep_list_key("memq", "memq/shared/", 1, b"list", kept=True),
        manifest_key("memq", "writer", 7),
        compaction_manifest_key("memq", "clicks", "ab" * 16, 1, 2),
        manifest_part_key("memq", "clicks", "ab" * 16, 3, 4),
    ]
    for key in keys:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(b"not an object of batches" * 9)
    for options, lines in (([], 1), (["--json"], 1), (["--records"], 5)):
        assert run(["inspect", str(folder), *options]) == 0
        out, err = capsys.readouterr()
        assert (len(out.splitlines()), err.count("5 files without batches"), err.count("\n")) == (lines, 1, 1), err
    for key, kind in zip(keys, ["sweep", "sweep", "staged batch", "compacted batches", "manifest"], strict=True):
        assert run(["inspect", str(folder / key)]) == 1
        assert f"{kind}, which has no batches" in capsys.readouterr().err
    for key in (
        object_key("memq", "sweep", "ab" * 16, 1, 2, 3, 4),
        large_object_key("memq", "manifests", "ab" * 16, 3, 4),
        staged_object_key("memq", "commits", 3, 4),
    ):
        assert kind_without_batches(key) == ""


def test_verify_what_holds(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(made.path)]) == 0
    assert "1 object, " in capsys.readouterr().out
    assert run(["verify", str(made.path.parent), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"objects": 1, "blocks": 2, "records": 5, "damaged": 0, "findings": []}


def test_verify_reads_each_file_that_brokers_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broker that had run for a while failed the check of its folder: verify did not know state logs' snapshots."""
    saved = SavedState(offset=8, epoch=1, number=3, machines={"groups": b"state"})
    files = {
        "state-part": encode_snapshot(saved, "memq/state/_memq_state/00000000/00000/0000000001-0000000000000008")[1][0],
        "sweep-list": encode_sweep_list(
            SweepList(cluster="memq", prefix="memq/topics/", since_ms=1, kept=False, objects=())
        ),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert run(["verify", str(tmp_path), "--json"]) == 0, capsys.readouterr().out
    for name, data in files.items():
        (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run(["verify", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["damaged"] == len(files)


@pytest.mark.parametrize("part", ["first block", "second block", "index", "trailer", "cut"])
def test_verify_finds_damage_and_reads_the_rest(made: Made, capsys: pytest.CaptureFixture[str], part: str) -> None:
    at = {"first block": 80, "second block": made.second + 80, "index": -200, "trailer": -20, "cut": 0}[part]
    data = bytearray(made.data)
    data[at] ^= 1 if at else 0
    made.path.write_bytes(data[:-1] if part == "cut" else data)
    assert run(["verify", str(made.path), "--json"]) == 1
    captured = capsys.readouterr()
    shown = json.loads(captured.out)
    assert shown["damaged"] == 1
    assert shown["findings"][0]["error"] == "corrupt-data"
    assert shown["blocks"] == (1 if "block" in part else 2)
    assert captured.err.startswith("memq: error: 1 of 1 objects damaged")


def test_verify_names_an_object_that_was_removed_after_it_was_listed(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention of a running broker removes objects: the command ended there, and checked no other one."""
    gone = made.path.with_name("gone")
    for path in (gone, made.path.with_name("second")):
        path.write_bytes(made.data)

    def checked(name: str, data: memoryview) -> ObjectVerdict:
        gone.unlink(missing_ok=True)
        return check_file(name, data)

    made.path.rename(made.path.with_name("first"))
    monkeypatch.setattr(verify_module, "check_file", checked)
    assert run(["verify", str(made.path.parent), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"objects": 2, "blocks": 4, "records": 10, "damaged": 0, "findings": []}
    assert captured.err.endswith(f"{gone} was removed after it was listed, and is not checked\n")
    assert run(["verify", str(gone)]) == 3


def test_verify_of_a_folder_of_other_files_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("not of memq" * 20)
    assert run(["verify", str(tmp_path)]) == 1
    assert (
        "no file has a sound block of memq: if the files are no objects, name a data folder" in capsys.readouterr().err
    )


def test_verify_of_a_folder_without_files_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped folder must not pass as checked; a data folder without objects has a queue to check."""
    for target in ("wrong", "data"):
        (tmp_path / target / "objects").mkdir(parents=True)
    assert run(["verify", str(tmp_path / "wrong")]) == 3
    assert capsys.readouterr().err.endswith(
        f"no file is below '{tmp_path / 'wrong'}' (name an object, or a folder with some)\n"
    )
    DataFolder.open(tmp_path / "data", random.Random()).close()
    asyncio.run(SqliteQueue(tmp_path / "data" / "queue.sqlite", Runtime().clock).close())
    assert run(["verify", str(tmp_path / "data")]) == 0


def test_verify_finds_a_block_that_the_index_does_not_name(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """The block is whole, its checksum too; only the index tells that it is another one."""
    data = bytearray(made.data)
    data[made.second + 28 : made.second + 32] = b"\x09\x00\x00\x00"  # the scope
    end = made.second + parse_header(data, made.second).length
    data[made.second + 4 : made.second + 8] = crc32c(bytes(data[made.second + 8 : end])).to_bytes(4, "little")
    made.path.write_bytes(data)
    assert run(["verify", str(made.path)]) == 1
    assert "is not the block that the index names" in capsys.readouterr().out


def test_records_of_a_damaged_object(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(made.data)
    data[80] ^= 1
    made.path.write_bytes(data)
    assert run(["inspect", str(made.path), "--records"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["sequence"] for line in captured.out.splitlines()] == [3, 4]
    assert "at 0: block 0000000000000005:0+3 has checksum" in captured.err


def test_of_a_data_folder_the_objects_are_verified(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.path.parent / "memq-data"
    (folder / "objects" / "memq").mkdir(parents=True)
    (folder / "cluster.json").write_text("{}")
    (folder / "objects" / "memq" / "one").write_bytes(made.data)
    assert run(["verify", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["objects"], report["blocks"]) == (1, 2)
    [finding] = report["findings"]
    assert "the queue is missing or empty" in finding["text"]


def test_verify_finds_a_header_that_hides_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = bytearray(_block(0, [b"a"]))
    block[64:72] = bytes(8)  # no tags: readers of one would pass it over
    block[4:8] = crc32c(bytes(block[8:])).to_bytes(4, "little")
    entry = BlockEntry.from_header(parse_header(block), 0)
    batch = BatchEntry(0, len(block), 1_738_310_400_000, 7, 1, 0, 1, 1, 3)
    meta = ObjectMeta(cluster="memq", broker="broker-1", topics=(TOPIC,), created_ms=1_738_310_400_000)
    path = tmp_path / "object"
    path.write_bytes(bytes(block) + encode_index(meta, [batch], [entry], len(block)))
    assert run(["verify", str(path)]) == 1
    assert "tag 'web' is not in tag bits" in capsys.readouterr().out


def test_verify_says_that_it_needs_the_store_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            producer.send("clicks", b"v").result(20)
        assert run(["verify", "clicks", "-b", cluster.address]) == 4
    said = capsys.readouterr().err
    assert (said.count("\n"), "memq verify reads the store itself: give it keys" in said) == (1, True), said


def test_an_object_that_reads_differently_each_time_is_not_called_damaged(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits flip on the way: only two equal reads prove damage."""
    whole, counts = made.path.read_bytes(), itertools.count()

    def read(differing: int) -> memoryview:
        number = next(counts)
        data = bytearray(whole)
        if number < differing:
            data[len(data) // 2 + number] ^= 1
        return memoryview(data)

    one = FoundObject("it", partial(read, READS_MAX))
    with pytest.raises(StoreError, match=f"it was read {READS_MAX} times, and no two reads agree"):
        verdict_of(one)
    counts = itertools.count()
    assert not verdict_of(FoundObject("it", partial(read, READS_MAX - 1))).findings
