"""The example reader, which knows the published format and nothing of memq, agrees with memq."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from memq.cli.records.record_text import encode_record
from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.columns import open_block
from memq.format.blocks.header import Buffer
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index, open_object
from tests.golden.make import FOLDER
from tests.unit.blocks import Record, any_records, build, codecs, damaged, repair, seal
from tests.unit.tables import ROOT

EXAMPLE = ROOT / "examples" / "read_object.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_object", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


def memq_reads(data: bytes) -> list[dict[str, Any]]:
    """The records of an object as memq reads them, in the example's JSON."""
    index = open_object(data)
    found = []
    for batch in index.batches:
        place: dict[str, object] = {"topic": index.meta.topics[batch.topic].name, "partition": batch.partition}
        for entry in index.blocks_of(batch):
            reader = open_block(data[entry.offset : entry.offset + entry.length])
            for n, (value, key, headers, time, tag) in enumerate(reader.records()):
                record = json.loads(encode_record(place, value, key, headers, time, tag))
                who = {"producer_id": f"{reader.header.producer_id:016x}", "sequence": reader.header.first_sequence + n}
                found.append({**record, **who})
    return found


def object_of(data: Buffer, count: int) -> bytes:
    """An object around one block, also when that is damaged."""
    entry = BlockEntry(0, 7, 100, 0, 0, len(data), count, 0, 0, 65_535, 0)
    meta = ObjectMeta(cluster="c", broker="b", topics=(ObjectTopic("t", "ab" * 16),), created_ms=5)
    return bytes(data) + encode_index(meta, [BatchEntry(0, len(data), 5, 0, count, 0, 1, 3, 1)], [entry], len(data))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # -I: neither the working directory nor memq next to it is on the path
    command = [sys.executable, "-I", EXAMPLE, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=60)


def test_the_golden_object_prints_as_memq_reads_it() -> None:
    done = run(FOLDER / "object.bin")
    assert (done.returncode, done.stderr) == (0, "")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records == memq_reads((FOLDER / "object.bin").read_bytes())
    assert len(records) == 15


def test_it_imports_nothing_of_memq() -> None:
    text = EXAMPLE.read_text()
    imported = [line for line in text.splitlines() if line.strip().startswith(("import ", "from "))]
    assert not [line for line in imported if "memq" in line or "awscrt" in line or "msgspec" in line]


@given(any_records, codecs)
def test_any_object_reads_the_same(rows: list[Record], codec: str) -> None:
    data = object_of(seal(build(rows), codec).data, len(rows))
    assert list(example.read_object(data)) == memq_reads(data)


@given(any_records, st.integers(0, 1 << 32).map(random.Random))
def test_damage_is_refused_by_both_or_read_the_same(rows: list[Record], dice: random.Random) -> None:
    block = damaged(seal(build(rows)).data, dice)
    assert example.crc32c(block) == crc32c(block)
    with pytest.raises((example.RefusedError, ValueError, example.struct.error)):
        list(example.read_object(object_of(block, len(rows))))
    repaired = object_of(repair(block), len(rows))
    try:
        expected = memq_reads(repaired)
    except (CorruptDataError, UnsupportedFormatError):
        return
    assert list(example.read_object(repaired)) == expected


def test_it_says_what_is_wrong(tmp_path: Path) -> None:
    data = (FOLDER / "object.bin").read_bytes()
    for name, content, text in (
        ("cut", data[:-1], "does not end as an object"),
        ("short", b"", "too short"),
        ("index", data[:-40] + b"????????" + data[-32:], "the index is damaged"),
        ("block", data[:100] + b"?" + data[101:], "block at 0: the checksum is wrong"),
    ):
        (tmp_path / name).write_bytes(content)
        done = run(tmp_path / name)
        assert (done.returncode, done.stdout) == (1, "")
        assert text in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert run(tmp_path / "nowhere").returncode == 1
    assert run().returncode == 2


def test_without_lz4_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = object_of((FOLDER / "block-lz4.bin").read_bytes(), 6)
    assert len(list(example.read_object(packed))) == 6
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(example.RefusedError, match="pip install lz4"):
        list(example.read_object(packed))
