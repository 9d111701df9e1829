"""A broker without settings: it runs, and its first line says where and how to give it settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memq.cli import main
from tests.memq_process import MemqProcess

pytestmark = pytest.mark.thorough


class Broker(MemqProcess):
    """`memq broker` in a folder of its own, with no settings of the user."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder / "log")
        self._folder = folder
        self._options = options

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        script = f"import os, sys; from memq.cli import main; os.chdir({str(self._folder)!r}); sys.exit(main())"
        return ["-c", script, "broker", "--port", "0", "--http-port", "-1", *self._options]

    def environment(self) -> dict[str, str]:
        """Return its environment: an empty home."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMQ_", "XDG_"))}
        return kept | {"HOME": str(self._folder)}


def first_line(folder: Path, *options: str) -> str:
    """Return the first line that a broker logs, after a start and a drain that succeeded."""
    broker = Broker(folder, *options)
    broker.start()
    assert broker.stop() == 0
    return broker.log.read_text().splitlines()[0]


def test_a_broker_without_settings_says_that_it_runs_alone_and_where(tmp_path: Path) -> None:
    line = first_line(tmp_path)
    assert " warning standalone: store, queue, coordinator not set: " in line
    assert f"runs alone, on {tmp_path}/memq-data; give --config FILE for a broker of a cluster, or run memq dev" in line
    assert (tmp_path / "memq-data" / "queue.sqlite").exists()


def test_a_broker_names_only_the_parts_that_are_not_set(tmp_path: Path) -> None:
    """A broker with the store of a cluster and a coordinator of its own is the worse mistake."""
    (tmp_path / "memq.toml").write_text('store = "file:kept/objects"\nqueue = "sqlite:kept/queue.sqlite"\n')
    assert "standalone: coordinator not set: " in first_line(tmp_path)


def test_a_broker_with_all_its_parts_says_nothing_of_it(tmp_path: Path) -> None:
    parts = ["--store", "file:kept/objects", "--queue", "sqlite:kept/queue.sqlite"]
    assert "standalone" not in first_line(tmp_path, *parts, "--coordinator", "standalone:kept/topics.sqlite")


def test_the_folder_of_a_broker_is_named_as_such_to_who_runs_memq_dev_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_line(tmp_path)
    assert main(["dev", "--data", f"{tmp_path}/memq-data", "--port", "0", "--http-port", "-1"]) == 1
    assert "if it never had one, memq broker made the folder" in capsys.readouterr().err
