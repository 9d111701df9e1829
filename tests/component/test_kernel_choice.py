"""Which code runs the hot loops: compiled or Python, by the installation and by MEMQ_NATIVE; memq works with both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from memq import kernel
from memq.limits import VERSION
from tests.without_kernel import FILES

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "native" / "src" / "lib.rs"
# What pip would install, as far as the choice can see it; `{abi}` is the one that memq wants.
SOUND = f"""
ABI, VERSION = {kernel.ABI}, '{VERSION}'
scan_blocks = lay_out = latencies = fill = Rows = OpenRows = Lane = SenderBase = print
"""
SHOW = """
import logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from memq import kernel
on = [part for part in kernel.PARTS if kernel.compiled_module(part)]
print(kernel.description(), on, sep="|")
"""
# No file of this name is found, whatever is installed: as on a machine that has only memq.
HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path, target=None):
        if name == "memq_native":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
ROUND_TRIP = """
import shutil
assert shutil.which("cargo") is None and shutil.which("cc") is None
import memq
from memq import kernel
from memq.testing import Cluster

values = [b"%d" % n for n in range(5_000)]
with Cluster() as cluster:
    with memq.Producer(cluster.address) as producer:
        producer.send_many("clicks", values)
        producer.send("clicks", b"last", key=b"user-1", timestamp_ms=1).result(timeout=30)
    with memq.Consumer(cluster.address, "clicks", start="beginning", end="end") as consumer:
        assert [bytes(record.value) for batch in consumer for record in batch] == [*values, b"last"]
print(kernel.description())
"""


def python(script: str, native: str | None = None, *folders: Path, **environment: str) -> list[str]:
    """Run a script with this MEMQ_NATIVE; return its lines. Modules in `folders` win over installed ones."""
    paths = [*map(str, folders), str(ROOT)]
    variables = {name: value for name, value in os.environ.items() if name != kernel.VARIABLE}
    variables |= {"PYTHONPATH": os.pathsep.join(paths), **environment}
    if native is not None:
        variables[kernel.VARIABLE] = native
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def installed(folder: Path, text: str) -> Path:
    """Put a module memq_native with this text into a folder."""
    (folder / "memq_native.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("native", "on", "text"),
    [
        (None, ["broker", "producer"], f"compiled (memq-native {VERSION}: broker, producer)"),
        ("", ["broker", "producer"], f"compiled (memq-native {VERSION}: broker, producer)"),
        ("1", ["broker", "producer"], f"compiled (memq-native {VERSION}: broker, producer)"),
        ("producer, broker", ["broker", "producer"], f"compiled (memq-native {VERSION}: broker, producer)"),
        ("broker", ["broker"], f"compiled (memq-native {VERSION}: broker), the rest in Python (MEMQ_NATIVE=broker)"),
        ("0", [], "Python (MEMQ_NATIVE=0)"),
        ("off", [], "Python (MEMQ_NATIVE=off)"),
    ],
)
def test_the_variable_leaves_parts_on(tmp_path: Path, native: str | None, on: list[str], text: str) -> None:
    assert python(SHOW, native, installed(tmp_path, SOUND)) == [f"{text}|{on}"]


def test_an_interpreter_that_runs_without_its_lock_does_not_import_the_module(tmp_path: Path) -> None:
    """The import would switch the lock on for the whole program, or compiled code would run without it."""
    without_lock = "import sys; sys._is_gil_enabled = lambda: False\n"
    sound = installed(tmp_path, "raise SystemExit(3)")
    text = "Python (this interpreter runs without its lock (GIL), which memq-native needs)"
    assert python(without_lock + SHOW, None, sound) == [f"{text}|[]"]
    assert python(without_lock + SHOW, "0", sound) == ["Python (MEMQ_NATIVE=0)|[]"]


def test_a_module_that_is_switched_off_is_not_imported(tmp_path: Path) -> None:
    """Else a compiled module that crashes could not be switched off."""
    assert python(SHOW, "0", installed(tmp_path, "raise SystemExit(3)")) == ["Python (MEMQ_NATIVE=0)|[]"]


def test_unknown_parts_are_logged_with_the_known_ones_and_end_no_program(tmp_path: Path) -> None:
    warned, shown = python(SHOW, "brokre,producer", installed(tmp_path, SOUND))
    assert warned.startswith("kernel-unknown-parts: ")
    assert "brokre; known parts: broker, producer" in warned
    assert shown.endswith("|['producer']")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"ABI = {kernel.ABI + 1}\nVERSION = '9.9.9'",
            f"memq-native 9.9.9 has ABI {kernel.ABI + 1}, memq {VERSION} needs {kernel.ABI}",
        ),
        ("", "memq-native has no version: its installation is not complete"),
        (f"ABI = {kernel.ABI}", "memq-native has no version: its installation is not complete"),
        ("raise ValueError('half')", "memq-native can't be imported: ValueError: half"),
        ("raise ImportError('invalid ELF header')", "memq-native can't be imported: invalid ELF header"),
        ("raise OSError('no such library')", "memq-native can't be imported: no such library"),
        ("import no_such_part", "memq-native can't be imported: No module named 'no_such_part'"),
        ("raise SystemError('no exception set')", "memq-native can't be imported: SystemError: no exception set"),
        ("def (", "memq-native can't be imported: SyntaxError: invalid syntax (memq_native.py, line 1)"),
    ],
)
def test_a_module_that_can_not_be_used_is_logged_once(tmp_path: Path, text: str, reason: str) -> None:
    assert python(SHOW, None, installed(tmp_path, text)) == [
        f"kernel-unusable: {reason}; memq runs in Python",
        f"Python ({reason})|[]",
    ]


def test_doctor_says_which_code_runs_and_warns_of_an_unusable_module(tmp_path: Path) -> None:
    doctor = "from memq.cli import main; import sys; sys.argv = ['memq', 'doctor', '-b', '127.0.0.1:1']; main()"
    doctor = doctor.replace("main()", "print() if main() else None")  # without a broker it ends with 1

    def line(text: str, native: str | None = None) -> str:
        shown = python(doctor, native, installed(tmp_path, text), PYTHONDONTWRITEBYTECODE="1")
        return next(line for line in shown if "kernel: " in line)

    assert line(SOUND) == f"ok       kernel: compiled (memq-native {VERSION}: broker, producer)"
    assert line(SOUND, "0") == "ok       kernel: Python (MEMQ_NATIVE=0)"
    assert line("raise ImportError('bad')").startswith(
        "warning  kernel: Python (memq-native can't be imported: bad) (pip "
    )
    assert "known parts: broker, producer (set MEMQ_NATIVE to 0, to 1 or to known parts" in line(SOUND, "brokre")
    assert line("import os, signal; os.kill(os.getpid(), signal.SIGBUS)") == (
        "failed   kernel: the import of memq-native ends the process by SIGBUS "
        "(pip install 'memq[native]' again, or set MEMQ_NATIVE=0)"
    ), "as a truncated file does"


def test_memq_alone_works_without_compiler_and_without_the_module() -> None:
    shown = python(HIDE + ROUND_TRIP, None, PATH="")
    assert shown == ["Python (memq-native is not installed)"]


def test_an_import_of_memq_alone_imports_no_compiled_module(tmp_path: Path) -> None:
    script = "import sys, memq, memq.cli.run; print('memq_native' in sys.modules)"
    assert python(script, None, installed(tmp_path, SOUND)) == ["False"]


def test_the_distributions_have_one_version_and_one_abi() -> None:
    crate = tomllib.loads((ROOT / "native" / "Cargo.toml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    native = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text())["project"]
    assert crate["package"]["version"] == VERSION
    assert project["optional-dependencies"]["native"] == [f"memq-native=={VERSION}"]
    assert native["dynamic"] == ["version"]  # maturin takes it from Cargo.toml
    assert native["requires-python"] == project["requires-python"]
    abi = re.search(r"^const ABI: u32 = (\d+);", LIB.read_text(), re.MULTILINE)
    assert abi is not None
    assert int(abi[1]) == kernel.ABI


def test_each_crate_has_an_exact_version() -> None:
    """There is no lock file, so a range would give other code at each build."""
    crate = tomllib.loads((ROOT / "native" / "Cargo.toml").read_text())
    found = {
        name: spec if isinstance(spec, str) else spec["version"]
        for table in ("dependencies", "build-dependencies", "dev-dependencies")
        for name, spec in crate.get(table, {}).items()
    }
    assert found
    assert not {name: version for name, version in found.items() if not re.fullmatch(r"=\d+\.\d+\.\d+", version)}


def test_the_tests_that_run_without_the_kernel_too_exist() -> None:
    assert not [name for name in FILES if not (ROOT / name).is_file()]
