"""docs/cli.md says what the command line does: settings, commands, exit codes and kcat's letters are read back."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from memq.cli.commands import COMMANDS, INTERRUPTED, PIPE_CLOSED
from memq.cli.options import shown_default
from memq.cli.run import EXIT_CODES, program
from memq.settings import OWNERS, RULES, rules_of

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def rows(head: str) -> list[list[str]]:
    """Return the cells of the table whose head starts with `head`."""
    lines = iter(TEXT.splitlines())
    for line in lines:
        if line.startswith(f"| {head} |"):
            break
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in iter(lambda: next(lines, ""), "")]
    return [[cell.strip() for cell in row] for row in found[1:]]


def letters_of(name: str) -> set[str]:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    return {letter for part in command.params for letter in part.opts if not letter.startswith("--")}


def test_settings() -> None:
    wanted = []
    for owner in OWNERS:
        for name in rules_of(owner):
            rule = RULES[name]
            choices = f" ({', '.join(rule.choices)})" if rule.choices else ""
            wanted.append([f"`{name}`", shown_default(name), rule.doc + choices])
    assert rows("setting") == wanted


def test_commands() -> None:
    assert [row[0].split()[1].strip("`") for row in rows("command")] == list(COMMANDS)


def test_exit_codes() -> None:
    assert {int(row[0]) for row in rows("exit code")} == {0, 1, INTERRUPTED, PIPE_CLOSED} | {
        code for _, code in EXIT_CODES
    }


@pytest.mark.parametrize(
    ("letter", "commands"),
    [
        *[(letter, ("produce", "consume")) for letter in ("-b", "-p", "-K", "-D", "-Z")],
        *[(letter, ("produce",)) for letter in ("-k", "-H", "-z")],
        *[(letter, ("consume",)) for letter in ("-o", "-c", "-e", "-f", "-G")],
    ],
)
def test_letters_are_kcats(letter: str, commands: tuple[str, ...]) -> None:
    ours = [row[1] for row in rows("kcat") if re.search(rf"(^|`|\s){letter}\b", row[0])]
    assert any(letter in cell or cell == "the same" for cell in ours), f"{letter} is not in the table"
    for name in commands:
        assert letter in letters_of(name), f"memq {name} has no {letter}"
