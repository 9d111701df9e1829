"""Rows of queue.sqlite lost between two runs of `memq dev`: each is named, and no object is deleted."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.errors import CorruptDataError
from memq.format.pointer import decode_pointer
from tests.servers import DevServer, dev_server

BATCHES = 5
STARTS_MAX = 60


def batches(server: DevServer, count: int = BATCHES) -> None:
    """Send records, each an object of its own."""
    with memq.Producer(server.address, audit=False) as producer:
        for number in range(count):
            producer.send("clicks", b"%d" % number).result(timeout=60)


def rows(data: Path) -> list[tuple[int, str]]:
    """Return the rows of the topic's batches with the keys that they name, in order."""
    with closing(sqlite3.connect(data / "queue.sqlite")) as queue:
        read = queue.execute("SELECT id, body FROM entries").fetchall()
    found = [(number, decode_pointer(body)) for number, body in read if body.startswith(b"{")]  # others: state logs
    return sorted((number, each.locations[0].key) for number, each in found if each.kind == "data")


def delete_row(data: Path, number: int) -> None:
    with closing(sqlite3.connect(data / "queue.sqlite")) as queue:
        queue.execute("DELETE FROM entries WHERE id = ?", (number,))
        queue.commit()


def sweep(data: Path, *arguments: str) -> tuple[list[dict[str, Any]], str, int]:
    """Run `memq sweep` and return what it names, what it says, and its exit code."""
    command = [sys.executable, "-m", "memq", "sweep", "--json", "--data", str(data), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr, done.returncode


@pytest.mark.parametrize("lost", [0, 2, BATCHES - 1], ids=["first", "middle", "last"])
def test_an_object_whose_row_is_lost_between_two_starts_stays_and_is_named(tmp_path: Path, lost: int) -> None:
    with dev_server(tmp_path / "data", "--sweep-confirm-ms", "1s", "--sweep-age-ms", "1s") as server:
        batches(server)
        server.stop()
        number, key = rows(server.data)[lost]
        delete_row(server.data, number)
        before = server.objects_of("clicks")
        for _ in range(3):  # each start is a pass, and the second is more than a second later than the first
            server.start()
            server.stop()
        assert server.objects_of("clicks") == before
        log = server.log.read_text()
        assert "not-swept: topic 'clicks' partition 0: 1 pointers that the queue should have are missing" in log
        assert f"the queue has lost what may have named 1 objects of {before[lost].stat().st_size} bytes" in log
        assert key in log
        found, said, code = sweep(server.data, "--dry-run", "--sweep-age-ms", "1s")
        assert (found, code) == ([], 1)
        assert key in said


@pytest.mark.parametrize(
    "harm",
    ["DELETE FROM entries WHERE id = ?", "UPDATE entries SET time_ms = time_ms + 1 WHERE id = ?"],
    ids=["lost", "changed"],
)
def test_a_consumer_stops_before_a_pointer_whose_row_is_lost_or_changed_or_passes_over_it(
    tmp_path: Path, harm: str
) -> None:
    with dev_server(tmp_path / "data") as server:
        batches(server)
        server.stop()
        number, _ = rows(server.data)[2]
        with closing(sqlite3.connect(server.data / "queue.sqlite")) as queue, queue:
            queue.execute(harm, (number,))
        server.start()
        said = f"pointer at 0:{number & 0xFFFF}:0 of topic 'clicks': the queue has lost the pointer"
        with memq.Consumer(server.address, ["clicks"], end="end") as consumer:
            batches_of = iter(consumer)
            assert [value for _ in range(2) for value in next(batches_of).values()] == [b"0", b"1"]
            with pytest.raises(CorruptDataError, match=said):
                next(batches_of)
        with memq.Consumer(server.address, ["clicks"], end="end", on_damaged="skip") as consumer:
            assert [value for batch in consumer for value in batch.values()] == [b"0", b"1", b"3", b"4"]
        batches(server, 1)
        assert "the queue has lost the pointer" in server.log.read_text(), "its owner names it, and goes on"


def test_a_queue_that_was_put_back_to_an_older_copy_keeps_the_objects_that_it_does_not_know(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data", "--sweep-confirm-ms", "1s") as server:
        batches(server)
        server.stop()
        shutil.copy(server.data / "queue.sqlite", tmp_path / "copy")
        server.start()
        batches(server)
        server.stop()
        shutil.copy(tmp_path / "copy", server.data / "queue.sqlite")
        for _ in range(3):
            server.start()
            server.stop()
        assert len(server.objects_of("clicks")) == 2 * BATCHES
        assert f"the queue has lost what may have named {BATCHES} objects" in server.log.read_text()


def test_orphan_waits_is_listed_kept_released_and_deleted(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data", "--sweep-confirm-ms", "1s") as server:
        batches(server)
        server.stop()
        named = server.objects_of("clicks")
        orphan = named[0].with_name(named[0].name[:-1] + "9")
        orphan.write_bytes(b"stored, and never named")
        key = str(orphan.relative_to(server.data / "objects"))
        server.start()
        assert orphan.exists(), "what a start finds first it does not delete"
        assert "sweep-pending: 1 objects of 23 bytes wait" in server.log.read_text()
        assert key in server.log.read_text()
        (found,), _, code = sweep(server.data, "--pending")
        assert (found["key"], found["kept"], code) == (key, False, 0)
        assert sweep(server.data, "--keep", key)[2] == 0
        for _ in range(3):
            server.stop()
            server.start()
        assert orphan.exists()
        (found,), _, _ = sweep(server.data, "--pending")
        assert (found["key"], found["kept"]) == (key, True)
        assert sweep(server.data, "--keep", "nothing/of/this/name")[2] == 1
        assert sweep(server.data, "--release", "all")[2] == 0
        starts = 0
        while orphan.exists():
            server.stop()
            server.start()
            starts += 1
            assert starts < STARTS_MAX
        assert starts > 1, "one pass finds it, and another one confirms it"
        assert "1 unnamed objects (23 bytes) of an earlier run" in server.log.read_text()
        assert server.objects_of("clicks") == named
