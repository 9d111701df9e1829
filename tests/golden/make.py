"""Makes the golden files: `python -m tests.golden.make` writes those that are not there, `--replace` all of them.

A file of a version that was released is never replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from memq.encryption.cipher import Cipher
from memq.encryption.records import encode_content, seal_content
from memq.format import subject_keys
from memq.format.blocks.builder import BlockBuilder, SealedBlock
from memq.format.blocks.envelope import SUBJECTS, begin_envelope, encode_envelope_head
from memq.format.blocks.header import scope_of
from memq.format.compaction_manifest import (
    CompactionManifest,
    LeftPart,
    ManifestEntry,
    ManifestPart,
    PartRef,
    encode_compaction_manifest,
    encode_manifest_part,
)
from memq.format.held_object import HeldBlock, HoldId, Target
from memq.format.key import large_object_key, manifest_part_key, object_key
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import (
    Adopted,
    Location,
    NamedProducer,
    Pointer,
    ProducerEnd,
    ProducerRanges,
    encode_pointer,
)
from memq.format.report import Begin, Report, ReportedDamage, ReportPart, ReportSpan, encode_report
from memq.format.spool import encode_entry, encode_head
from memq.format.state_log.entry import (
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    encode_state_entry,
)
from memq.format.state_log.held_run import HELD_ROWS, RunEntry
from memq.format.state_log.queue_run import QUEUE_ROWS, QueueRunEntry
from memq.format.state_log.run import RunWriter
from memq.format.state_log.snapshot import SavedState, encode_snapshot
from memq.topic import Totals

FOLDER = Path(__file__).parent
NOW_MS = 1_700_000_000_000
TOPIC_ID = "00112233445566778899aabbccddeeff"
MASTER_KEY, DATA_KEY, SUBJECT_KEY_BYTES = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
SUBJECT_KEY_ID = bytes(range(96, 112))


def full_builder() -> BlockBuilder:
    """Records that use every column, nulls and empties."""
    builder = BlockBuilder()
    builder.append(b"first")
    builder.append(b"second", b"key", [("trace", b"1"), ("trace", b""), ("none", None)], NOW_MS - 5, "web")
    builder.append(None, b"", [], NOW_MS + 9, "mobile")
    builder.append(b"", None, [("bytes", b"\xff\x00")], None, "web")
    builder.append(b"\xde\xad\xbe\xef" * 3, "clé".encode(), None, -1, None)
    builder.append(b"the same words again and " * 12)
    return builder


def plain_builder() -> BlockBuilder:
    """Values alone, and one time for all."""
    builder = BlockBuilder()
    builder.append_many([b"one", b"two", b"three"])
    return builder


def seal(builder: BlockBuilder, codec: str, producer_id: int, first_sequence: int) -> SealedBlock:
    """Seal for partition 3 of the topic."""
    return builder.seal(
        producer_id=producer_id,
        first_sequence=first_sequence,
        scope=scope_of(bytes.fromhex(TOPIC_ID), 3),
        now_ms=NOW_MS,
        codec=codec,
    )


def make_encrypted() -> bytes:
    """An encrypted block with a record of a subject; its keys and nonces are fixed."""
    builder = full_builder()
    content = encode_content(b"personal", [("name", b"Ada")])
    cipher = Cipher(SUBJECT_KEY_BYTES)
    value, headers = seal_content(cipher, bytes(range(12)), content, bytes.fromhex(TOPIC_ID), SUBJECT_KEY_ID)
    builder.append(value, b"key", headers)
    plain = seal(builder, "none", 42, 100)
    wrapped = bytes(range(1, 13)) + Cipher(MASTER_KEY).seal(bytes(range(1, 13)), DATA_KEY, b"mqK1golden")
    nonce = bytes(range(2, 14))
    begun = begin_envelope(
        plain, bytes.fromhex(TOPIC_ID), 3, encode_envelope_head(0, SUBJECTS, nonce, "golden", wrapped)
    )
    return bytes(begun.finish(Cipher(DATA_KEY).seal(nonce, begun.payload, begun.associated_data)).data)


def make_subject_keys() -> bytes:
    """The file with the key of the subject above, and with one that was forgotten."""
    wrapped = bytes(range(3, 15)) + Cipher(MASTER_KEY).seal(bytes(range(3, 15)), DATA_KEY, b"mqK1golden")
    key = bytes(range(4, 16)) + Cipher(DATA_KEY).seal(bytes(range(4, 16)), SUBJECT_KEY_BYTES, b"mqW1" + SUBJECT_KEY_ID)
    head = subject_keys.encode_head("golden", wrapped)
    slots = subject_keys.encode_slot(SUBJECT_KEY_ID, bytes(32), key), subject_keys.encode_forgotten(bytes(range(16)))
    return b"".join((head, *slots))


def make_object() -> bytes:
    """An object of two batches: a full and a plain block, then a full one of another producer."""
    blocks = [
        seal(full_builder(), "none", 0x0123456789ABCDEF, 0),
        seal(plain_builder(), "none", 0x0123456789ABCDEF, 6),
        seal(full_builder(), "none", 42, 1 << 40),
    ]
    body = b"".join(block.data for block in blocks)
    entries: list[BlockEntry] = []
    for block in blocks:
        entries.append(BlockEntry.from_header(block.header, sum(entry.length for entry in entries)))
    split = entries[2].offset
    batches = [
        BatchEntry(0, split, NOW_MS, 7, 9, 0, 2, 3, 2),
        BatchEntry(split, len(body) - split, NOW_MS + 1, 8, 6, 2, 1, 3, 2),
    ]
    meta = ObjectMeta(
        cluster="golden", broker="broker-1", topics=(ObjectTopic("clicks", TOPIC_ID),), created_ms=NOW_MS + 2
    )
    return body + encode_index(meta, batches, entries, len(body))


def make_pointer(kind: str, **fields: Any) -> Pointer:
    """A pointer of partition 3 of the topic."""
    return Pointer(kind=kind, cluster="golden", topic="clicks", topic_id=TOPIC_ID, partition=3, epoch=2, **fields)


def make_pointers() -> dict[str, Pointer]:
    """One pointer of each kind, and one with the ack level of a producer."""
    key = object_key("golden", "clicks", TOPIC_ID, 3, 2, 7, NOW_MS)
    data = make_pointer(
        "data",
        batch_sequence=7,
        locations=(Location(store="main", key=key, offset=0, length=1_000),),
        records=9,
        raw_bytes=900,
        stored_bytes=1_000,
        least_ms=-1,
        greatest_ms=NOW_MS + 9,
        totals=Totals(1_000, 64_000),
        adopted=(Adopted(offset=11, epoch=1, batch_sequence=3, records=5, bytes=600),),
        skip=(1,),
        producers=(ProducerRanges(42, ((0, 3), (5, 6))), ProducerRanges(0x0123456789ABCDEF, ((0, 9),))),
        slots=(0, 16_383),
        tag_bits=1 << 63 | 1,
        checksum=0xDEADBEEF,
        broker="broker-1",
        sealed_ms=NOW_MS,
    )
    named = (NamedProducer(producer=42, epoch=1, last_sequence=9, batch_id="job-7", last_seen_ms=NOW_MS),)
    ended = (ProducerEnd(producer=42, next_sequence=10, burned=((3, 4),)),)
    return {
        "pointer-data.json": data,
        "pointer-opened.json": make_pointer("opened", totals=Totals(1_000, 64_000), named=named),
        "pointer-closed.json": make_pointer("closed", totals=Totals(1_009, 65_000)),
        "pointer-ended.json": make_pointer("ended", ended=ended),
        "pointer-ended-acks.json": make_pointer("ended", ended=(replace(ended[0], acks=1),)),
    }


def make_segment() -> bytes:
    """A segment of the spool with two blocks of one partition."""
    data, seed = encode_head(0x5EED5EED, NOW_MS), 0x5EED5EED
    for number, builder in enumerate((full_builder(), plain_builder())):
        block = seal(builder, "none", 42, 100 + 6 * number).data
        data += encode_entry(seed, bytes.fromhex(TOPIC_ID), 3, 17, NOW_MS + number, len(block)) + block
    return data


def make_reports() -> dict[str, Report]:
    """What a producer and a consumer said, with every field of a report."""
    common: dict[str, Any] = {
        "since_ms": NOW_MS,
        "until_ms": NOW_MS + 5_000,
        "next_ms": NOW_MS + 35_000,
        "host": "web-1",
    }
    minute = NOW_MS // 60_000
    sent = ReportSpan(
        stage="sent", producer=42, minute=minute, ranges=((0, 9), (12, 13)), level=2, latency=((3, 9), (4, 1))
    )
    acked = ReportSpan(stage="acked", producer=42, minute=minute, ranges=((0, 9),), level=2, latency=((6, 9),))
    processed = ReportSpan(stage="processed", producer=42, minute=minute, ranges=((0, 3),), latency=((0, 3),))
    unread = ReportedDamage(object="c/x", block=1, offset=17, records=6, cause="checksum", producer=42, first=3, next=9)
    place: dict[str, Any] = {"topic": "clicks", "topic_id": TOPIC_ID, "partition": 3}
    read = ReportPart(
        **place,
        spans=(processed,),
        damages=(unread,),
        begins=(Begin(at="3:16:0", reason="stored"),),
        committed="3:18:0",
    )
    return {
        "report-producer.json": Report(
            client=1, kind="producer", number=0, parts=(ReportPart(**place, spans=(sent, acked)),), **common
        ),
        "report-consumer.json": Report(
            client=(1 << 64) - 1, kind="consumer", number=7, name="billing", last=True, parts=(read,), **common
        ),
    }


def make_manifest_part() -> ManifestPart:
    """A part with a pointer into a large object, and a damaged one."""
    large = Location(
        store="main",
        key=large_object_key("golden", "clicks", TOPIC_ID, 42, NOW_MS),
        offset=7,
        length=1_000,
        index=9_000,
    )
    moved = encode_pointer(replace(make_pointers()["pointer-data.json"], locations=(large,)))
    original = object_key("golden", "clicks", TOPIC_ID, 3, 2, 7, NOW_MS)
    return ManifestPart((ManifestEntry(17, NOW_MS, moved), ManifestEntry(19, NOW_MS + 1, b"\xff")), (original,))


def make_compaction_manifest() -> CompactionManifest:
    """The second manifest of a read partition: one part is left, and one that retention took."""
    name = ("golden", "clicks", TOPIC_ID)
    parts = [
        PartRef(
            key=manifest_part_key(*name, number, NOW_MS),
            first=first,
            next=next_,
            entries=2,
            bytes=1_000,
            greatest_ms=NOW_MS + 1,
            created_ms=NOW_MS + 2,
            objects=(large_object_key(*name, number, NOW_MS),),
        )
        for number, first, next_ in ((41, 3, 17), (42, 17, 20))
    ]
    return CompactionManifest(
        number=2,
        cluster="golden",
        topic="clicks",
        topic_id=TOPIC_ID,
        partition=3,
        next=20,
        parts=(parts[1],),
        left=(LeftPart(part=parts[0], since_ms=NOW_MS + 3),),
    )


def make_state_entries() -> dict[str, StateEntry]:
    """One entry of a state log of each kind, by file name."""
    decisions = (StateDecision("groups", b"\x00join"), StateDecision("délais", b""))
    named = StateSnapshot(
        17, 4, 2, 60, 0x01020304, 2, "memq/state/_memq_state/00112233/00001/0000000003-0000000000000017"
    )
    return {
        "state-opened.bin": StateEntry(3, 0, OpenedState(0x0102030405060708, "broker-1")),
        "state-decisions.bin": StateEntry(3, 0, StateDecisions(decisions)),
        "state-snapshot.bin": StateEntry(3, 1 << 40, named),
    }


def make_saved_state() -> SavedState:
    """The state of two machines."""
    return SavedState(17, 2, 4, {"groups": b"\x01\x02\x03", "délais": b""})


def make_run_holds() -> list[RunEntry]:
    """Holds of two targets in two objects, in the order of their due times."""
    clicks, orders = Target("clicks", TOPIC_ID, 3), Target("orders", TOPIC_ID[::-1], 0)
    return [
        RunEntry(HeldBlock(HoldId(42, 0), 1, NOW_MS, 0, 100), clicks, "golden/held/one"),
        RunEntry(HeldBlock(HoldId(43, 5), 9, NOW_MS, 100, 1_000), orders, "golden/held/one"),
        RunEntry(HeldBlock(HoldId(7, 0), 1, NOW_MS + 1, 0, 70_000), clicks, "golden/held/two"),
    ]


def make_run() -> bytes:
    """A run of two blocks."""
    writer, holds = RunWriter(HELD_ROWS), make_run_holds()
    writer.add(holds[:2])
    writer.add(holds[2:])
    return b"".join(writer.finish("key", 0, 1)[1])


def make_run_items() -> list[QueueRunEntry]:
    """Blocks of items of one queue in two objects, in the order of delivery."""
    jobs, terms = Target("jobs", "", 0), ("queue 5 30000 0 0 key=a", "queue 5 1000 3 0 key=a")
    return [
        QueueRunEntry(HeldBlock(HoldId(42, 0), 64, NOW_MS, 0, 100), jobs, "golden/held/one", terms[0], 7),
        QueueRunEntry(HeldBlock(HoldId(9, 0), 1_024, NOW_MS, 100, 1_000), jobs, "golden/held/one", terms[1], 8),
        QueueRunEntry(HeldBlock(HoldId(7, 0), 1, NOW_MS + 1, 0, 70_000), jobs, "golden/held/two", terms[0], 2),
    ]


def make_queue_run() -> bytes:
    """A run of two blocks."""
    writer, items = RunWriter(QUEUE_ROWS), make_run_items()
    writer.add(items[:2])
    writer.add(items[2:])
    return b"".join(writer.finish("key", 0, 0)[1])


def make() -> dict[str, bytes]:
    """Return every golden file by name."""
    files = {
        f"block-{codec}.bin": bytes(seal(full_builder(), codec, 42, 100).data) for codec in ("none", "zstd", "lz4")
    }
    files["block-plain.bin"] = bytes(seal(plain_builder(), "none", 42, 100).data)
    files["block-encrypted.bin"] = make_encrypted()
    files["subject-keys.bin"] = make_subject_keys()
    files["object.bin"] = make_object()
    files["segment.spool"] = make_segment()
    files["manifest-part.bin"] = encode_manifest_part(make_manifest_part())
    files["compaction-manifest.bin"] = encode_compaction_manifest(make_compaction_manifest())
    files |= {name: encode_state_entry(entry) for name, entry in make_state_entries().items()}
    (files["state-snapshot-part.bin"],) = encode_snapshot(make_saved_state(), "key")[1]
    files["held-run.bin"] = make_run()
    files["queue-run.bin"] = make_queue_run()
    files |= {name: encode_pointer(pointer) + b"\n" for name, pointer in make_pointers().items()}
    files |= {name: encode_report(report) + b"\n" for name, report in make_reports().items()}
    return files


def main(arguments: list[str]) -> None:
    """Write the files."""
    for name, content in make().items():
        path = FOLDER / name
        if not path.exists() or "--replace" in arguments:
            path.write_bytes(content)
            print(f"wrote {path.name}: {len(content)} bytes", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
