"""Help by command, options under headings, completion scripts, and topics by pattern."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import memq
from memq.cli import main
from memq.cli.option_groups import GROUPS, OTHERS, heading_of
from memq.cli.options import shown_value
from memq.cli.run import program
from memq.testing import Cluster


@pytest.mark.parametrize("command", [["produce"], ["topic"], ["topic", "list"], ["dev"]])
def test_help_of_a_command_is_that_of_its_option(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *command]) == 0
    helped = capsys.readouterr().out
    assert helped.startswith(f"Usage: memq {' '.join(command)} ")
    assert main([*command, "--help"]) == 0
    assert capsys.readouterr().out == helped


@pytest.mark.parametrize("name", ["dev", "broker"])
def test_each_option_has_one_heading(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = program.get_command(click.Context(program), name)
    assert command is not None
    headings = {part.name: heading_of(part.name or "") for part in command.params}
    assert {option for option, heading in headings.items() if heading == OTHERS} == {"config", "profile"}
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:-1] for line in lines if line[:-1] in GROUPS] == [
        each for each in GROUPS if each in headings.values()
    ]
    for part in command.params:
        assert sum(line.strip().split(" ")[0] == part.opts[-1] for line in lines) == 1, part.opts


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("capacity_bytes_s", 0, "0"),
        ("staged_age_ms", 168 * 3_600_000, "7d"),
        ("spool_bytes_max", 1 << 30, "1GiB"),
        ("prefetch_bytes_max", 65_536, "64KiB"),
        ("linger_ms", 5, "5ms"),
    ],
)
def test_defaults_are_short(name: str, value: int, text: str) -> None:
    assert shown_value(name, value) == text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_MEMQ_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_with_the_script(tmp_path: Path) -> None:
    program_file = tmp_path / "memq"
    program_file.write_text(f'#!/bin/sh\nexec {sys.executable} -m memq "$@"\n')
    program_file.chmod(0o700)
    script = 'eval "$("$0" completion bash)"; COMP_WORDS=("$0" topic de); COMP_CWORD=2; _memq_completion "$0"; '
    done = subprocess.run(
        ["bash", "-c", script + 'echo "${COMPREPLY[@]}"', str(program_file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["delete", "describe"], done.stderr


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster() as cluster:
        monkeypatch.setenv("MEMQ_BROKERS", cluster.address)
        with memq.Producer(cluster.address) as producer:
            for topic in ("logs-a", "logs-b", "other"):
                producer.send_many(topic, [f"{topic} 1", f"{topic} 2"])
        yield cluster


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["logs-*"], ["logs-a 1", "logs-a 2", "logs-b 1", "logs-b 2"]),
        (["logs-?", "other", "logs-a"], ["logs-a 1", "logs-a 2", "logs-b 1", "logs-b 2", "other 1", "other 2"]),
        (["logs-a", "other", "-o", "-1"], ["logs-a 2", "other 2"]),
        (["logs-*", "-p", "0"], ["logs-a 1", "logs-a 2", "logs-b 1", "logs-b 2"]),
        (["*", "-G", "group"], ["logs-a 1", "logs-a 2", "logs-b 1", "logs-b 2", "other 1", "other 2"]),
        (["logs-a", "-o", "16777217"], ["logs-a 2"]),
        (["logs-a", "logs-b", "-o", "latest"], []),
    ],
)
def test_topics_by_name_and_pattern(
    cluster: Cluster, arguments: list[str], lines: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["consume", *arguments, "-e"]) == 0
    assert sorted(capfdbinary.readouterr().out.decode().splitlines()) == lines
