"""Golden files: old files stay readable, and new files have the same bytes."""

from __future__ import annotations

import pytest

from memq.audit.checks.object_check import check_file
from memq.errors import CorruptDataError
from memq.format.blocks.columns import BlockReader, open_block
from memq.format.compaction_manifest import decode_compaction_manifest, decode_manifest_part
from memq.format.key import run_key
from memq.format.object import open_object
from memq.format.pointer import decode_pointer
from memq.format.report import decode_report
from memq.format.spool import decode_segment
from memq.format.state_log.entry import decode_state_entry
from memq.format.state_log.held_run import HELD_ROWS
from memq.format.state_log.queue_run import QUEUE_ROWS
from memq.format.state_log.run import open_run
from memq.format.state_log.snapshot import decode_part, decode_snapshot, encode_snapshot
from tests.golden.make import (
    FOLDER,
    full_builder,
    make,
    make_compaction_manifest,
    make_manifest_part,
    make_pointers,
    make_reports,
    make_run_holds,
    make_run_items,
    make_saved_state,
    make_state_entries,
    seal,
)

MADE = make()
COMPACTION = ("manifest-part.bin", "compaction-manifest.bin")
RUN = "held-run.bin"
PACKED = (
    "block-zstd.bin",
    "block-lz4.bin",
    RUN,
    *COMPACTION,
)  # their bytes depend on the version of the codec's library


@pytest.mark.parametrize("name", [name for name in MADE if name not in PACKED])
def test_the_same_bytes_are_written_today(name: str) -> None:
    assert (FOLDER / name).read_bytes() == MADE[name]


@pytest.mark.parametrize("name", ["block-none.bin", "block-zstd.bin", "block-lz4.bin"])
def test_blocks_of_every_codec_hold_the_same_records(name: str) -> None:
    expected = BlockReader(seal(full_builder(), "none", 42, 100).data)
    reader = open_block((FOLDER / name).read_bytes())
    assert list(reader.records()) == list(expected.records())
    assert reader.header.scope == expected.header.scope
    assert len(list(reader.records())) == 6


def test_the_object_holds_its_blocks() -> None:
    data = (FOLDER / "object.bin").read_bytes()
    index = open_object(data)
    assert [batch.records for batch in index.batches] == [9, 6]
    for entry in index.blocks:
        assert open_block(data[entry.offset : entry.offset + entry.length]).count == entry.count


def test_the_segment_holds_its_blocks() -> None:
    data = (FOLDER / "segment.spool").read_bytes()
    content = decode_segment(data)
    assert (content.damages, content.torn_bytes) == ([], 0)
    assert [(entry.partition, entry.queue_offset, entry.header.first_sequence) for entry in content.entries] == [
        (3, 17, 100),
        (3, 17, 106),
    ]
    assert [open_block(data[entry.start : entry.end]).count for entry in content.entries] == [6, 3]


def test_the_files_of_a_compacted_part_read_as_they_were_meant() -> None:
    assert decode_manifest_part((FOLDER / "manifest-part.bin").read_bytes()) == make_manifest_part()
    assert decode_compaction_manifest((FOLDER / "compaction-manifest.bin").read_bytes()) == make_compaction_manifest()


@pytest.mark.parametrize("name", make_state_entries())
def test_entries_of_a_state_log_read_as_they_were_meant(name: str) -> None:
    assert decode_state_entry((FOLDER / name).read_bytes()) == make_state_entries()[name]


def test_the_snapshot_of_a_state_log_reads_as_it_was_meant() -> None:
    named, _ = encode_snapshot(make_saved_state(), "key")
    piece = decode_part((FOLDER / "state-snapshot-part.bin").read_bytes())
    assert decode_snapshot(named, [piece]) == make_saved_state()


def test_a_run_of_held_blocks_reads_as_it_was_meant() -> None:
    assert open_run(HELD_ROWS, (FOLDER / RUN).read_bytes()) == make_run_holds()


def test_a_run_of_queue_items_reads_as_it_was_meant() -> None:
    data = (FOLDER / "queue-run.bin").read_bytes()
    assert open_run(QUEUE_ROWS, data) == make_run_items()
    assert check_file(run_key("memq", "_memq_state", "ab" * 16, 3, 77), memoryview(data)).findings == []
    with pytest.raises(CorruptDataError, match="kind 7"):
        open_run(HELD_ROWS, data)


@pytest.mark.parametrize("name", make_pointers())
def test_pointers_read_as_they_were_meant(name: str) -> None:
    assert decode_pointer((FOLDER / name).read_bytes()) == make_pointers()[name]


@pytest.mark.parametrize("name", make_reports())
def test_reports_read_as_they_were_meant(name: str) -> None:
    assert decode_report((FOLDER / name).read_bytes()) == make_reports()[name]
