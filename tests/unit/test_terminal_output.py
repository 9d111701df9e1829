"""Records on a terminal: nothing in them controls it or reorders its text, unless that is asked for."""

from __future__ import annotations

import io
import json
import sys

import pytest

from memq.cli.output import json_text, write_records
from memq.cli.records.record_text import decode_record, encode_record

HOSTILE = "\x1b]0;title\x07a\rb\x9bc\u202ed\u2066e\x7f"
HARMLESS = "line\n\tGrüße, 日本, 👩\u200d💻"


class Output(io.TextIOWrapper):
    """Stdout that says whether it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def written(monkeypatch: pytest.MonkeyPatch, content: bytes, *, terminal: bool, raw: bool = False) -> bytes:
    stdout = Output(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    write_records(content, raw=raw)
    monkeypatch.undo()
    found = stdout.buffer
    assert isinstance(found, io.BytesIO)
    return found.getvalue()


def test_a_record_can_not_control_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = written(monkeypatch, HOSTILE.encode() + b"\xff\n", terminal=True)
    assert shown == rb"\x1b]0;title\x07a\rb\x9bc\u202ed\u2066e\x7f\xff" + b"\n"


def test_text_of_all_languages_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, HARMLESS.encode(), terminal=True).decode() == HARMLESS


@pytest.mark.parametrize(("terminal", "raw"), [(False, False), (True, True)])
def test_a_file_a_pipe_and_raw_get_the_bytes(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, raw: bool) -> None:
    content = HOSTILE.encode() + b"\xff\xfe\x00"
    assert written(monkeypatch, content, terminal=terminal, raw=raw) == content


def test_json_has_escapes_for_what_controls_a_terminal_and_means_the_same() -> None:
    text = json_text({HOSTILE: HARMLESS})
    assert not set(text) & set("\x1b\x07\r\x9b\u202e\u2066\x7f")
    assert json.loads(text) == {HOSTILE: HARMLESS}
    assert "Grüße, 日本" in text


def test_a_line_of_json_brings_the_same_record_back() -> None:
    line = encode_record({}, HOSTILE.encode(), HOSTILE.encode(), [(HOSTILE, HOSTILE.encode())], 5, HOSTILE)
    assert not set(line) & set("\x1b\x07\r\x9b\u202e\u2066\x7f")
    found = decode_record(line.encode())
    assert (found.value, found.key, found.tag) == (HOSTILE.encode(), HOSTILE.encode(), HOSTILE)
    assert found.headers == ((HOSTILE, HOSTILE.encode()),)
