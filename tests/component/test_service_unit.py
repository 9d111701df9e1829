"""deploy/memq-broker.service is valid for systemd, and passes only options that memq has."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memq.cli.run import program
from memq.settings import OTHER_VARIABLES, PREFIX, RULES

UNIT = Path(__file__).parents[2] / "deploy" / "memq-broker.service"
LINES = [line for line in UNIT.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def values(key: str) -> list[str]:
    return [line.partition("=")[2] for line in LINES if line.startswith(f"{key}=")]


def test_every_line_is_a_section_or_a_setting() -> None:
    assert [line for line in LINES if not re.fullmatch(r"\[(Unit|Service|Install)\]|[A-Z][A-Za-z]+=.*", line)] == []


def test_the_command_is_one_of_memq() -> None:
    (command,) = values("ExecStart")
    _, name, *arguments = shlex.split(command)
    found = program.get_command(click.Context(program), name)
    assert found is not None
    found.make_context(name, arguments)  # a mistake in the options raises


def test_its_variables_are_settings() -> None:
    for variable in values("Environment"):
        name = variable.partition("=")[0].removeprefix(PREFIX)
        assert name.lower() in RULES or name in OTHER_VARIABLES, variable


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_systemd_takes_it(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/memq/bin/memq", sys.executable), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert complaints == []
