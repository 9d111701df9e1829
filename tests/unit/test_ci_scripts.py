"""The scripts that start the CI on machines that lack something: what is installed, and which Python is taken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
LACKS = "#!/bin/sh\nexit 1\n"
WHOLE = "#!/bin/sh\nexit 0\n"
MAKE = "#!/bin/sh\necho make $*\n"


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


def with_apt(machine: Machine, user: int) -> None:
    """A Debian: `apt-get install` brings a Python that is whole, and make."""
    machine.has("id", f"#!/bin/sh\necho {user}\n")
    machine.has("new-python3", WHOLE)
    machine.has("new-make", MAKE)
    install = "".join(
        f'/bin/cp "{machine.folder}/new-{name}" "{machine.folder}/{name}"\n' for name in ("python3", "make")
    )
    machine.has("apt-get", f'#!/bin/sh\necho "apt-get $* as $DEBIAN_FRONTEND"\n[ "$1" = update ] && exit\n{install}')


@pytest.mark.parametrize("lacking", ["python3", "ensurepip", "make"])
def test_root_on_debian_gets_what_is_lacking(machine: Machine, lacking: str) -> None:
    with_apt(machine, user=0)
    if lacking != "python3":
        machine.has("python3", WHOLE if lacking == "make" else LACKS)
    if lacking != "make":
        machine.has("make", MAKE)
    done = machine.run("run")
    assert done.stdout.splitlines() == [
        "apt-get update -qq as noninteractive",
        "apt-get install -y -qq --no-install-recommends python3-venv make as noninteractive",
        "make check",
    ], done.stderr


def test_nothing_is_installed_where_nothing_is_lacking_or_nobody_may(machine: Machine) -> None:
    with_apt(machine, user=1000)
    machine.has("python3", LACKS)
    machine.has("make", MAKE)
    assert machine.run("run").stdout == "make check\n"
    with_apt(machine, user=0)
    machine.has("python3", WHOLE)
    assert machine.run("run").stdout == "make check\n"


def test_a_python_without_ensurepip_does_not_hide_one_that_has_it(machine: Machine, tmp_path: Path) -> None:
    lacks = f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\nexec {sys.executable} "$@"\n'
    machine.has("python3", lacks)
    whole = f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\necho "whole $*"\nexit 9\n'
    machine.has("python3.12", whole)
    venv = tmp_path / "venv"
    done = machine.run("venv", str(venv), "dev")
    assert done.returncode == 9
    assert done.stdout.splitlines()[-1] == f"whole -m venv --clear {venv}"
