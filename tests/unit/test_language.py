"""The lint of language: each rule finds its word; code and quotations are exempt."""

from __future__ import annotations

import ast

import pytest

from tests import language


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("the consumer is told of it", "notified"),
        ("it looks at the log", "reads"),
        ("the group stands at 7", "replaces"),
        ("Beside other work", "next to"),
        ("it begins anew", "again"),
        ("reading goes on", "continues"),
        ("gone for good", "permanently"),
        ("whoever asks waits", "actor"),
        ("It stops. What was left waits.", "noun"),
        ("Who asks waits.", "noun"),
    ],
)
def test_an_old_word_is_named_with_another(line: str, advice: str) -> None:
    assert any(advice in fault for fault in language.faults(line))


@pytest.mark.parametrize(
    "line", ["`stood` is code", 'the text "goes on" is quoted', "What is a batch?", "a standalone"]
)
def test_code_quotations_and_questions_are_none(line: str) -> None:
    assert not list(language.faults(line))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("w " * 25 + "w.", [26]),
        ("w " * 25 + ".", []),
        ("w " * 13 + "\n" + "w " * 13, [26]),  # a paragraph
        ("w " * 13 + "\n\n" + "w " * 13, []),
        ("w " * 13 + "\n- " + "w " * 13, []),
        ("w " * 13 + "ends. " + "Then " * 13, []),
        ("w " * 13 + "ends; then " + "w " * 13, [28]),
        ("| " + "w " * 13 + "ends; then " + "w " * 13 + "|", []),  # items of a cell
        ("| " + "w " * 26 + "|", [26]),
        ("w " * 13 + "\n# " + "w " * 26, []),
        ("w " * 25 + "`code of many words` " * 9 + "[link](https://x.org)", [26]),
    ],
)
def test_a_long_sentence_is_found_in_paragraphs_items_and_cells(text: str, words: list[int]) -> None:
    lines = [("README.md", number, line) for number, line in enumerate(text.splitlines(), 1)]
    found = list(language.long_sentences(lines))
    assert len(found) == len(words)
    assert all(f"sentence of {count} words" in fault for count, fault in zip(words, found, strict=True))


def test_two_pages_are_no_paragraph() -> None:
    assert not list(language.long_sentences([("README.md", 1, "w " * 13), ("docs/a.md", 1, "w " * 13)]))


def test_docstrings_of_commands_and_inner_names() -> None:
    text = '"""Top."""\n@group.command("x")\ndef f(): "Run."\nclass _A:\n    def g(self): "Inner."\n'
    found = [(line, lines[0], public, command) for line, lines, public, command in language.docstrings(ast.parse(text))]
    assert sorted(found) == [(1, "Top.", True, False), (3, "Run.", True, True), (5, "Inner.", False, False)]


def test_help_texts_are_found() -> None:
    tree = ast.parse('option("--a", help="Goes on.", default=3)\nRule(doc="size")')
    assert sorted(language.helps(tree)) == [(1, "Goes on."), (2, "size")]


def test_messages_and_hints_of_errors_are_found() -> None:
    tree = ast.parse('raise NotFoundError(f"{name} goes on", hint="look at it")\nprint("goes on")')
    assert sorted(language.helps(tree)) == [(1, "look at it"), (1, "… goes on")]


def test_a_fault_fails_the_lint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(language, "pages", lambda: iter([("docs/x.md", 3, "it begins anew")]))
    monkeypatch.setattr(language, "code_faults", lambda: iter(()))
    monkeypatch.setattr(language, "OLD_LINES_MAX", 0)
    assert language.main() == 1
    said = capsys.readouterr().err
    assert "docs/x.md:3: 'anew': write again" in said
    assert "lines of code" in said
