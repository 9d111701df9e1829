"""Failed tests on real parts run again alone; all others fail the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.second_try import SECOND_TRIES_MAX, may_pass_alone, run_tests

PASSES_THE_SECOND_TIME = """
from pathlib import Path

def test_a_server_answers():
    was_here = Path(__file__).with_suffix(".ran")
    if not was_here.exists():
        was_here.touch()
        raise TimeoutError("no answer")
"""
ALWAYS_FAILS = """
def test_a_record_is_there():
    raise AssertionError("lost")
"""


def test_a_run_with_few_failures_on_real_parts_gets_a_second_try() -> None:
    assert may_pass_alone(["tests/integration/test_a.py::test_one", "tests/spark/test_b.py::test_two[x]"])
    assert not may_pass_alone([])
    assert not may_pass_alone(["tests/integration/test_a.py::test_one", "tests/unit/test_b.py::test_two"])
    assert not may_pass_alone(["tests/simulation/test_simulation.py::test_a_seed[1]"])
    assert not may_pass_alone([f"tests/chaos/test_run.py::test_{number}" for number in range(SECOND_TRIES_MAX + 1)])


@pytest.mark.parametrize(
    ("ring", "source", "code"),
    [
        ("integration", PASSES_THE_SECOND_TIME, 0),
        ("integration", ALWAYS_FAILS, 1),
        ("unit", PASSES_THE_SECOND_TIME, 1),
        ("integration", "import no_such_module", 2),
    ],
)
def test_a_run_ends_as_its_second_try(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ring: str, source: str, code: int
) -> None:
    folder = tmp_path / "tests" / ring
    folder.mkdir(parents=True)
    (folder / "test_part.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert run_tests(tmp_path, ["-p", "no:xdist", "-p", "no:randomly"]) == code
    output = capfd.readouterr().out
    assert ("passed alone" in output) == (ring == "integration" and code == 0)
    assert ("no answer" in output) == (source == PASSES_THE_SECOND_TIME), "the first failure is shown"
