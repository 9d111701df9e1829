"""`memq inspect` and `memq verify` on folders that this user can't read, or can't write."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from memq.broker.broker import Broker
from memq.cli.run import run as run_command
from memq.cli.store import inspect, verify
from memq.client.producer.producer import AsyncProducer
from memq.compaction import reader
from tests.brokers import run
from tests.component.test_broker_folder import BATCHES, Folder, Prepare

NOBODY = 65534
SPAWN = multiprocessing.get_context("spawn")
IMPORTED = (inspect, verify, reader)  # before the user changes, who may not read the sources


@pytest.fixture(name="outside")
def folder_that_others_reach() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    outside = Path(tempfile.mkdtemp())
    outside.chmod(0o755)
    yield outside
    for parent, _, _ in os.walk(outside):
        Path(parent).chmod(0o755)
    shutil.rmtree(outside)


def run_as_another_user(arguments: list[str], pipe: Connection) -> None:
    os.environ["HOME"] = "/"  # whose settings it can read
    if os.getuid() == 0:
        os.setuid(NOBODY)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(arguments)
    pipe.send((code, out.getvalue(), err.getvalue()))


def without_rights(*arguments: str) -> tuple[int, str, str]:
    """Run a command as a user without rights of its own; return exit code, stdout and stderr."""
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=run_as_another_user, args=(list(arguments), child))
    process.start()
    child.close()
    code, out, err = parent.recv()
    process.join()
    return code, out, err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_that_can_not_be_read_is_denied_and_not_called_empty(command: str, outside: Path) -> None:
    hidden = outside / "objects" / "hidden"
    hidden.mkdir(parents=True)
    (hidden / "one").write_bytes(b"of another user")
    hidden.chmod(0o000)
    code, out, err = without_rights(command, str(outside / "objects"))
    assert (code, out) == (4, "")
    assert f"{hidden}: Permission denied" in err


@pytest.mark.parametrize("log_left", [False, True], ids=["closed", "killed"])
def test_a_data_folder_is_verified_without_the_right_to_write(
    outside: Path, monkeypatch: pytest.MonkeyPatch, log_left: bool
) -> None:
    """Of a broker that was killed, the log has pointers that the queue file lacks."""
    folder = Folder(outside, monkeypatch)
    copied = outside / "copied"

    async def life(broker: Broker, prepare: Prepare) -> None:
        async with AsyncProducer(broker.address, audit=False) as producer:
            for number in range(BATCHES):
                await (await producer.send("clicks", b"%d" % number))
        shutil.copytree(folder.path, copied)

    run(folder.serve(life))
    path = folder.path
    if log_left:
        path = copied
        (path / "queue.sqlite-shm").unlink()
    for parent, _, names in os.walk(path):  # memq gives them to their owner alone
        Path(parent).chmod(0o555)
        for name in names:
            (Path(parent) / name).chmod(0o444)
    files = sorted(os.listdir(path))
    code, out, err = without_rights("verify", str(path))
    assert (code, err) == (0, "")
    assert f"{BATCHES} pointers: all hold" in out
    assert sorted(os.listdir(path)) == files, "nothing is written there"
