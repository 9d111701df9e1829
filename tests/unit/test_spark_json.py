"""JSON values as columns: one row for each value, and faulty values named one by one."""

from __future__ import annotations

import json
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import InvalidSettingError
from memq.spark.read.arrow_rows import DecodedColumns, json_decoder

FIELDS = [
    pyarrow.field("a", pyarrow.int32()),
    pyarrow.field("s", pyarrow.string()),
    pyarrow.field("t", pyarrow.timestamp("us", "UTC")),
    pyarrow.field("d", pyarrow.date32()),
    pyarrow.field("l", pyarrow.list_(pyarrow.struct([pyarrow.field("x", pyarrow.float64())]))),
]


def decode(values: pyarrow.Array) -> DecodedColumns:
    return json_decoder(FIELDS)(values)


def columns(values: list[bytes | None]) -> tuple[list[list[Any]], tuple[int, ...]]:
    decoded = decode(pyarrow.array(values, pyarrow.binary()))
    return [column.to_pylist() for column in decoded.columns], decoded.malformed


def test_fields_come_as_their_types() -> None:
    found, malformed = columns(
        [
            b'{"a": 1, "s": "x", "other": [1], "t": "2026-01-01T05:00:00+01:00", "d": "2026-01-02", "l": [{"x": 2}]}',
            b'{\n"t":\n"2026-01-01 05:00:00.25"}',
            None,
            b"null",
            b"{}",
        ]
    )
    assert malformed == ()
    assert found[0] == [1, None, None, None, None]
    assert found[1] == ["x", None, None, None, None]
    assert [str(time) for time in found[2][:2]] == ["2026-01-01 04:00:00+00:00", "2026-01-01 05:00:00.250000+00:00"]
    assert str(found[3][0]) == "2026-01-02"
    assert found[4] == [[{"x": 2.0}], None, None, None, None]


@pytest.mark.parametrize(
    "value",
    [
        b"", b" ", b"no", b"5", b"[]", b"{}{}", b'{}}\n{"v":{}', b'{"a": 1.5}', b'{"a": "1"}', b'{"a": 3000000000}',
        b'{"a": 1, "a": 2}', b'{"t": "noon"}', b'{"d": "2026-13-01"}', b"\xff", b'{"s": "', b"},{",
    ],
)  # fmt: skip
def test_values_outside_the_schema_are_named_and_alone(value: bytes) -> None:
    around: list[bytes | None] = [b'{"a": %d}' % number for number in range(5)]
    found, malformed = columns([*around[:2], value, *around[2:], value])
    assert malformed == (2, 6)
    assert found[0] == [0, 1, None, 2, 3, 4, None]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=20), st.integers(0, 9).map(lambda n: b'{"a":%d}' % n))))
def test_any_bytes_give_a_row_each(values: list[bytes | None]) -> None:
    found, malformed = columns(values)
    assert all(len(column) == len(values) for column in found)
    for number, value in enumerate(values):
        if value is None or number in malformed:
            assert found[0][number] is None
        else:
            document = json.loads(value)
            assert found[0][number] == (document or {}).get("a")


def test_a_slice_is_decoded_as_what_it_shows() -> None:
    values = pyarrow.array([b'{"a":%d}' % number for number in range(10)], pyarrow.binary())
    assert decode(values.slice(3, 4)).columns[0].to_pylist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (pyarrow.binary(), "f"),
        (pyarrow.list_(pyarrow.date32()), "f"),
        (pyarrow.struct([pyarrow.field("at", pyarrow.date32())]), "f.at"),
        (pyarrow.timestamp("us"), "f"),
    ],
)
def test_types_that_json_does_not_hold_are_refused(kind: pyarrow.DataType, field: str) -> None:
    with pytest.raises(InvalidSettingError, match=f"'{field}'"):
        json_decoder([pyarrow.field("f", kind)])
