"""docs/formats.md and docs/pointer.schema.json match the code: their tables and bounds are compared."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given

from memq import limits
from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format import object as objects
from memq.format import packed_file, pointer, report, spool, subject_keys
from memq.format.blocks import envelope
from memq.format.blocks import header as block
from memq.format.blocks.columns import open_block
from memq.format.blocks.header import HEADER, BlockHeader
from memq.format.state_log import entry, snapshot
from memq.protocol import frames
from tests.golden.make import FOLDER
from tests.unit.blocks import Record, any_records, build, seal
from tests.unit.pointer_examples import pointers
from tests.unit.tables import ROOT, read_table, read_tables

PAGE = "formats.md"
TYPES = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i64": "q"}
LAYOUTS: dict[str, tuple[struct.Struct, tuple[str, ...]]] = {
    "Block header": (HEADER, ("magic", "checksum", "version", *BlockHeader._fields[1:])),
    "Envelope head": (
        envelope.HEAD,
        ("version", "codec", "flags", "key_id_length", "wrapped_key_length", "nonce"),
    ),
    "Head of a file of subjects": (
        subject_keys.HEAD,
        ("magic", "checksum", "version", "key_id_length", "wrapped_key_length"),
    ),
    "Slot of a subject": (subject_keys.SLOT, ("state", "checksum", "key_id", "subject", "wrapped")),
    "Trailer": (objects.TRAILER, ("index_offset", "object_length", "index_length", "version", "checksum", "magic")),
    "Index head": (
        objects.INDEX_HEAD,
        (
            "magic",
            "version",
            "codec",
            "zero",
            "meta_length",
            "batches",
            "blocks",
            "batch_entry_size",
            "block_entry_size",
        ),
    ),
    "Batch entry": (objects.BATCH_ENTRY, objects.BatchEntry._fields),
    "Block entry": (objects.BLOCK_ENTRY, objects.BlockEntry._fields),
    "Segment head": (spool.HEAD, ("magic", "checksum", "version", "seed", "created_ms")),
    "Segment entry": (
        spool.ENTRY,
        ("magic", "checksum", "topic_id", "partition", "length", "queue_offset", "appended_ms"),
    ),
    "Head of a packed file": (packed_file.HEAD, ("magic", "checksum", "version", "kind", "codec", "raw_length")),
    "Head of a state entry": (
        entry.HEAD,
        ("magic", "checksum", "version", "kind", "flags", "epoch", "number"),
    ),
    "Head of a snapshot": (snapshot.HEAD, ("magic", "version", "machines", "epoch", "offset", "number")),
    "Frame prefix": (frames.PREFIX, ("length", "api", "flags", "stream", "argument")),
}


def code_of(row: dict[str, str]) -> str:
    """The struct code of a row's type: bytes that are 0 are padding."""
    kind, size = row["type"], row["type"].split(" ")[0]
    return TYPES.get(kind) or (f"{size}x" if row["field"] == "zero" else f"{size}s")


@pytest.mark.parametrize("heading", LAYOUTS)
def test_a_table_of_bytes_is_the_struct_of_the_code(heading: str) -> None:
    layout, fields = LAYOUTS[heading]
    rows = read_table(PAGE, heading, "at")
    codes = [code_of(row) for row in rows]
    assert "".join(codes) == layout.format.strip("<").replace(" ", "")
    assert [int(row["at"]) for row in rows] == [struct.calcsize("<" + "".join(codes[:n])) for n in range(len(rows))]
    assert tuple(row["field"] for row in rows if not code_of(row).endswith("x")) == fields


@pytest.mark.parametrize("size", [16, 20, 24, 32, 48, 64, 72, 128])
def test_headings_name_the_sizes(size: int) -> None:
    text = (ROOT / "docs" / PAGE).read_text()
    found = re.findall(rf"^### (.*), (?:the last )?{size} bytes$", text, re.MULTILINE)
    assert found
    assert all(LAYOUTS[name][0].size == size for name in found)


def test_bounds_codecs_flags_and_apis_are_those_of_the_code() -> None:
    assert all(getattr(limits, row["bound"]) == int(row["value"]) for row in read_table(PAGE, "Bounds", "bound"))
    codecs = {row["codec"]: int(row["number"]) for row in read_table(PAGE, "Block header", "codec")}
    assert codecs == block.CODECS
    flags = {row["flag"]: int(row["bit"]) for row in read_table(PAGE, "Block header", "flag")}
    assert all(getattr(block, name) == bit for name, bit in flags.items())
    assert sum(flags.values()) == block.FLAGS_KNOWN
    kinds = {row["kind"]: int(row["number"]) for row in read_table(PAGE, "Head of a state entry", "number")}
    assert kinds == entry.KINDS
    apis = {row["api"]: int(row["number"]) for row in read_table(PAGE, "Frame prefix", "number")}
    assert apis == {api.name: int(api) for api in frames.Api}


def test_magics_are_those_of_the_code() -> None:
    magics = {
        heading: row["meaning"].strip("`").encode()
        for heading in (
            *("Block header", "Index head", "Trailer"),
            *("Segment head", "Segment entry", "Head of a packed file"),
            *("Head of a state entry", "Head of a snapshot", "Head of a file of subjects"),
        )
        for row in read_table(PAGE, heading, "at")
        if row["field"] == "magic"
    }
    assert magics == {
        "Block header": block.MAGIC,
        "Index head": objects.INDEX_MAGIC,
        "Trailer": objects.TRAILER_MAGIC,
        "Segment head": spool.MAGIC,
        "Segment entry": spool.ENTRY_MAGIC,
        "Head of a packed file": packed_file.MAGIC,
        "Head of a state entry": entry.MAGIC,
        "Head of a snapshot": snapshot.MAGIC,
        "Head of a file of subjects": subject_keys.MAGIC,
    }


# ---- the columns: a reader that knows nothing but the table ----------------------------------


class TableReader:
    """Finds the columns of raw bytes by the rows of the table."""

    def __init__(self, raw: bytes, header: BlockHeader) -> None:
        self.raw, self.header, self.at = raw, header, 0
        self.places: dict[str, int] = {}
        self.columns: dict[str, Any] = {}
        for row in read_table(PAGE, "Block columns", "column"):
            flags = [getattr(block, name) for name in row["when"].split(" or ") if name != "always"]
            if not flags or any(header.flags & flag for flag in flags):
                self.places[row["column"]] = self.at
                self.columns[row["column"]] = self.read(row["type"], row["cells"])

    def read(self, kind: str, cells: str) -> Any:
        if kind == "names":
            return [self.take(self.number("H")) for _ in range(self.number("H"))]
        if kind == "extensions":
            return self.take(self.number("I"))
        if kind == "bytes":
            lengths = self.columns[cells.removeprefix("sum of ")]
            return [self.take(0 if length == 0xFFFF_FFFF else length) for length in lengths]
        counts = {"n": self.header.count, "⌈n/8⌉": -(-self.header.count // 8), "1": 1}
        count = counts[cells] if cells in counts else self.columns["headers"][0]
        return struct.unpack(f"<{count}{TYPES[kind]}", self.take(count * struct.calcsize("<" + TYPES[kind])))

    def number(self, code: str) -> int:
        (found,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(found)

    def take(self, size: int) -> bytes:
        self.at += size
        assert self.at <= len(self.raw)
        return self.raw[self.at - size : self.at]


@given(any_records)
def test_the_table_of_columns_is_enough_to_read_a_block(rows: list[Record]) -> None:
    sealed = seal(build(rows))
    read = TableReader(bytes(sealed.data[72:]), sealed.header)
    assert read.at == sealed.header.raw_length
    reader = open_block(sealed.data)
    values, keys, *_ = zip(*reader.records(), strict=True)
    assert [value or b"" for value in values] == read.columns["value_bytes"]
    assert [key or b"" for key in keys] == read.columns.get("key_bytes", [b""] * len(rows))
    layout = reader.layout()._asdict()
    places = {name: at for name, at in read.places.items() if name in layout and name not in ("names", "headers")}
    assert places.items() <= layout.items()


# ---- the pointer -----------------------------------------------------------------------------

SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "pointer.schema.json").read_text())


def faults(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Hold a value against the parts of JSON Schema that the pointer's schema uses."""
    if "$ref" in schema:
        return faults(value, SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]], path)
    if "anyOf" in schema:
        return [] if any(not faults(value, one, path) for one in schema["anyOf"]) else [path]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    good = "type" not in schema or (
        isinstance(value, kinds[schema["type"]]) and (schema["type"] == "boolean") == isinstance(value, bool)
    )
    good = good and value in schema.get("enum", [value]) and schema.get("const", value) == value
    if good and isinstance(value, int):
        good = schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if good and isinstance(value, str):
        good = bool(re.search(schema.get("pattern", ""), value)) and len(value) <= schema.get("maxLength", len(value))
    if good and isinstance(value, list):
        good = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    found = [] if good else [path]
    if good and isinstance(value, list):
        found += [bad for n, item in enumerate(value) for bad in faults(item, schema["items"], f"{path}[{n}]")]
    if good and isinstance(value, dict):
        found += [f"{path}.{name}" for name in schema.get("required", ()) if name not in value]
        for name, item in value.items():
            found += faults(item, schema["properties"].get(name, {}), f"{path}.{name}")
    return found


@given(pointers())
def test_every_pointer_obeys_the_schema(written: pointer.Pointer) -> None:
    assert faults(json.loads(pointer.encode_pointer(written)), SCHEMA) == []


def test_the_schema_knows_exactly_the_fields_of_the_code() -> None:
    fields = set(pointer.Pointer.__struct_fields__) - {"extra"}
    assert set(SCHEMA["properties"]) == fields
    parts: dict[str, type[msgspec.Struct]] = {
        "location": pointer.Location,
        "adopted": pointer.Adopted,
        "producer": pointer.ProducerRanges,
        "ended": pointer.ProducerEnd,
        "named": pointer.NamedProducer,
    }
    for name, part in parts.items():
        assert set(SCHEMA["$defs"][name]["properties"]) == set(part.__struct_fields__)
    rows = read_table(PAGE, "Pointer", "field")
    assert {field for row in rows for field in row["field"].split(", ")} == fields


def test_the_defaults_of_the_schema_are_those_of_the_code() -> None:
    body = {"version": limits.FORMAT_VERSION, "kind": "opened", "cluster": "c", "topic": "t", "topic_id": "ab" * 16}
    body |= {"partition": 1, "epoch": 2}
    bare = pointer.decode_pointer(json.dumps(body).encode())
    defaults = {name: rule["default"] for name, rule in SCHEMA["properties"].items() if "default" in rule}
    assert set(defaults) | set(body) == set(SCHEMA["properties"])
    assert pointer.decode_pointer(json.dumps({**body, **defaults}).encode()) == bare


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("version", 9), ("kind", "x"), ("cluster", "a/b"), ("topic_id", "ab"), ("epoch", 1 << 32), ("epoch", True)),
        *(("records", 1 << 53), ("least_ms", -(1 << 53)), ("skip", [1 << 20]), ("slots", [1]), ("slots", [0, 65_536])),
        *(("tag_bits", "f"), ("tag_bits", 1), ("producers", [{"producer": "0" * 16}]), ("locations", [{"store": "s"}])),
        *(("requires", ["x"]), ("totals", {"records": -1}), ("producers_complete", 1), ("broker", "a b")),
    ],
)
def test_code_refuses_the_pointers_that_the_schema_refuses(field: str, value: Any) -> None:
    body = json.loads((FOLDER / "pointer-data.json").read_text())
    assert faults(body, SCHEMA) == []
    body[field] = value
    assert faults(body, SCHEMA)
    newer = field in ("version", "kind", "requires")
    with pytest.raises(UnsupportedFormatError if newer else CorruptDataError):
        pointer.decode_pointer(json.dumps(body).encode())


def test_the_meta_of_an_object_has_the_fields_of_the_page() -> None:
    tables = [rows for heading, rows in read_tables(PAGE) if heading.startswith("Index head") and "at" not in rows[0]]
    assert [[row["field"] for row in rows] for rows in tables] == [list(objects.ObjectMeta.__struct_fields__)]


def test_the_tables_of_reports_have_the_fields_of_the_code() -> None:
    of_headings = {
        "Report": report.Report,
        "Report: part": report.ReportPart,
        "Report: span": report.ReportSpan,
        "Report: damage": report.ReportedDamage,
        "Report: begin": report.Begin,
    }
    for heading, code in of_headings.items():
        fields = [field for row in read_table(PAGE, heading, "field") for field in row["field"].split(", ")]
        assert sorted(fields) == sorted(code.__struct_fields__), heading
    assert f"at most {report.REPORT_BYTES_MAX} bytes" in (ROOT / "docs" / PAGE).read_text()
