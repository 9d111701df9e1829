"""The scripts that start the CI on bare machines: installed packages, and the chosen Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
LACKS = "#!/bin/sh\nexit 1\n"
WHOLE = "#!/bin/sh\nexit 0\n"
MAKE = "#!/bin/sh\necho make $* with $MEMQ_REQUIRE_SERVERS\n"


class Machine:
    """A PATH with nothing on it but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        for tool in ("dirname", "bash", "sh", "touch", "rm"):
            (self.folder / tool).symlink_to(shutil.which(tool) or tool)

    def has(self, name: str, script: str) -> None:
        """Put a command there."""
        path = self.folder / name
        path.write_text(script)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of the CI's scripts on this machine."""
        command = [shutil.which("bash") or "bash", str(CI / script), *arguments]
        return subprocess.run(
            command, env={"PATH": str(self.folder)}, capture_output=True, text=True, check=False, cwd=self.folder
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


PROGRAMS = {"python3": "python3-venv", "make": "make", "promtool": "prometheus", "chromium": "chromium"}


def with_apt(machine: Machine, user: int) -> None:
    """A Debian, on which apt-get says what it is asked for, and brings nothing."""
    machine.has("id", f"#!/bin/sh\necho {user}\n")
    machine.has("apt-get", '#!/bin/sh\necho "apt-get $* as $DEBIAN_FRONTEND"\n')


@pytest.mark.parametrize("lacking", PROGRAMS)
def test_root_on_debian_gets_what_is_lacking(machine: Machine, lacking: str) -> None:
    with_apt(machine, user=0)
    for name in PROGRAMS:
        if name != lacking:
            machine.has(name, WHOLE)
    done = machine.run("tools")
    assert done.stdout.splitlines() == [
        "apt-get update -qq as noninteractive",
        f"apt-get install -y -qq --no-install-recommends {PROGRAMS[lacking]} as noninteractive",
    ], done.stderr


def test_tools_are_installed_with_sudo_for_other_users(machine: Machine) -> None:
    with_apt(machine, user=1000)
    machine.has("sudo", '#!/bin/sh\n[ "$2" = true ] || echo "sudo $*"\n')
    for name in PROGRAMS:
        if name != "promtool":
            machine.has(name, WHOLE)
    assert machine.run("tools").stdout.splitlines() == [
        "sudo -n DEBIAN_FRONTEND=noninteractive apt-get update -qq",
        "sudo -n DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus",
    ]


def test_an_apt_that_fails_stops_nothing_and_is_reported(machine: Machine) -> None:
    machine.has("id", "#!/bin/sh\necho 0\n")
    machine.has("apt-get", LACKS)
    done = machine.run("tools")
    assert done.returncode == 0
    assert "could not install python3-venv make prometheus" in done.stderr


def test_a_python_that_is_not_whole_is_lacking(machine: Machine) -> None:
    with_apt(machine, user=0)
    for name in PROGRAMS:
        machine.has(name, LACKS if name == "python3" else WHOLE)
    assert "--no-install-recommends python3-venv as" in machine.run("tools").stdout


def test_nothing_is_installed_where_nothing_is_lacking_or_nobody_may(machine: Machine) -> None:
    with_apt(machine, user=1000)
    assert machine.run("tools").stdout == ""
    with_apt(machine, user=0)
    for name in PROGRAMS:
        machine.has(name, WHOLE)
    assert machine.run("tools").stdout == ""


def test_the_ci_completes_the_machine_and_skips_nothing(machine: Machine) -> None:
    with_apt(machine, user=0)
    for name in PROGRAMS:
        machine.has(name, WHOLE)
    machine.has("make", MAKE)
    assert machine.run("run").stdout == "make check with 1\n"


def test_a_python_without_ensurepip_does_not_hide_one_that_has_it(machine: Machine, tmp_path: Path) -> None:
    lacks = f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    machine.has("python3", lacks)
    whole = f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\necho "whole $*"\nexit 9\n'
    machine.has("python3.12", whole)
    venv = tmp_path / "venv"
    done = machine.run("venv", str(venv), "dev")
    assert done.returncode == 9
    assert done.stdout.splitlines()[-1] == f"whole -m venv --clear {venv}"
