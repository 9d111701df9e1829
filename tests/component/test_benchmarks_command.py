"""`python -m benchmarks`: figures of complete rows are kept when another row fails or the user interrupts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.results import Figure, Options


def row(error: BaseException | None = None, value: float = 1.0) -> Any:
    """Return a module of the benchmarks with one figure, or one that fails."""

    def run(options: Options) -> list[Figure]:
        if error is not None:
            raise error
        return [Figure("row", "case", value, "s", bound=2.0)]

    return SimpleNamespace(run=run)


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    return tmp_path / "figures.json"


@pytest.mark.parametrize(
    ("rows", "code", "kept", "failed"),
    [
        ([row(), row(value=2.0)], 0, [1.0, 2.0], []),
        ([row(), row(value=3.0)], 1, [1.0, 3.0], []),
        ([row(RuntimeError("no java on PATH")), row()], 1, [1.0], ["start"]),
        ([row(), row(KeyboardInterrupt())], 1, [1.0], []),
    ],
)
def test_figures_of_complete_rows_are_kept(
    rows: list[Any], code: int, kept: list[float], failed: list[str], figures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in zip(("start", "memory"), rows, strict=True):
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    done = CliRunner().invoke(main, ["start", "memory", "--quick", "--json", str(figures)])
    assert done.exit_code == code, done.output
    document = json.loads(figures.read_text())
    assert [each["value"] for each in document["figures"]] == kept
    assert done.stdout.count("case") == len(kept)
    assert list(document["failed"]) == failed
    assert ("start failed: RuntimeError: no java on PATH" in done.stderr) == bool(failed)


def test_a_path_that_can_not_be_written_is_refused_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.start", row(AssertionError("a row ran")))
    done = CliRunner().invoke(main, ["start", "--json", str(tmp_path / "missing" / "figures.json")])
    assert (done.exit_code, "No such file or directory" in done.stderr, "start …" in done.stderr) == (1, True, False)
