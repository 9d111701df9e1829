"""Files and folders that memq creates are for their owner alone, also with a umask that hides nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import memq
from memq.broker.data_folder import DataFolder
from memq.errors import QueueError
from memq.runtime.private_files import FILE_MODE, FOLDER_MODE
from memq.runtime.sqlite_file import copy_database
from tests.memq_process import MemqProcess


class OpenBroker(MemqProcess):
    """`memq dev` with the umask 0."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "log")
        self.data = folder / "kept" / "data"

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        script = "import os, sys; from memq.cli import main; os.umask(0); sys.exit(main())"
        return ["-c", script, "dev", "--port", "0", "--http-port", "-1", "--data", str(self.data)]


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Give new files of this process all rights that their creator asks for."""
    old = os.umask(0)
    yield
    os.umask(old)


def open_to_others(root: Path) -> dict[str, str]:
    """Return the files and folders below `root` that others than the owner can open, with their modes."""
    found = {}
    for path in [root, *root.rglob("*")]:
        mode = path.stat().st_mode & 0o777
        if mode != (FOLDER_MODE if path.is_dir() else FILE_MODE):
            found[path.relative_to(root.parent).as_posix()] = oct(mode)
    return found


def test_a_broker_with_records_groups_and_a_spool_writes_nothing_that_others_can_open(tmp_path: Path) -> None:
    broker = OpenBroker(tmp_path)
    broker.launch()
    address = broker.wait_ready()
    try:
        with memq.Admin(address) as admin:
            admin.create_topic("clicks", settings={"ack1": "disk"})
        for acks in (1, "all"):
            with memq.Producer(address, acks=acks) as producer:
                producer.send("clicks", b"a").result(20)
        with memq.Consumer(address, "clicks", group="readers", start="beginning", end="end") as consumer:
            for batch in consumer:
                consumer.commit(batch)
        kept = {path.relative_to(broker.data).parts[0] for path in broker.data.rglob("*") if path.is_file()}
        assert {"objects", "spool", "queue.sqlite", "queue.sqlite-wal", "topics.sqlite", "audit.sqlite"} <= kept
        assert open_to_others(broker.data.parent) == {}
    finally:
        code = broker.stop()
    assert code == 0


@pytest.mark.usefixtures("no_umask")
def test_a_copied_database_is_for_its_owner(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path / "data", Random(1))
    folder.close()
    copy_database(folder.queue, tmp_path / "copy", "queue", QueueError)
    assert (tmp_path / "copy").stat().st_mode & 0o777 == FILE_MODE
