"""Bad input to a real broker: illegal names, too large records, a read-only folder, damage."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

import memq
from memq.errors import CorruptDataError, InvalidNameError, MemqError, NotFoundError, TooLargeError
from memq.limits import BLOCK_HEADER_BYTES
from tests.servers import DevServer, dev_server

TIMEOUT_S = 60.0
NAMES = [
    "..",
    ".",
    "/",
    "a/b/c",
    "../../etc/passwd",
    "a\x00b",
    "x" * 10_000,
    "сliсks",
    "cli\u200bcks",
    "",
    " ",
    "_memq",
    "_memq-x",
]
SHOWN = [ascii(name)[:20] for name in NAMES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with dev_server(tmp_path_factory.mktemp("hostile") / "data") as running:
        yield running


def run_memq(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `memq ARGUMENTS…` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "memq", *arguments],
        input="a record",
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **environment},
    )


def check_one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """A mistake is reported in one line with what is wrong, never by a traceback."""
    said = done.stderr.strip()
    assert done.returncode == code, said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
    for word in words:
        assert word in said
    assert len(said) < 600


@pytest.mark.parametrize("name", NAMES, ids=SHOWN)
def test_illegal_names_are_refused_by_the_library(server: DevServer, name: str) -> None:
    with memq.Producer(server.address) as producer, pytest.raises(InvalidNameError) as caught:
        producer.send(name, b"x").result(timeout=TIMEOUT_S)
    assert len(str(caught.value)) < 300
    with memq.Admin(server.address) as admin:
        for work in (admin.create_topic, admin.topic, admin.delete_topic):
            with pytest.raises((InvalidNameError, NotFoundError)):
                work(name)
        assert name not in [topic.name for topic in admin.topics()]
    with pytest.raises(MemqError), memq.Consumer(server.address, [name], group="g", end="end") as consumer:
        consumer.poll(timeout=TIMEOUT_S)
    with pytest.raises(MemqError), memq.Consumer(server.address, ["clicks"], group=name or "..") as consumer:
        consumer.poll(timeout=TIMEOUT_S)


@pytest.mark.parametrize("name", [name for name in NAMES if "\x00" not in name], ids=ascii)
@pytest.mark.parametrize("command", [["produce"], ["topic", "create"]], ids=" ".join)
def test_illegal_names_are_refused_by_the_command_line(
    server: DevServer, name: str, command: list[str], tmp_path: Path
) -> None:
    done = run_memq(*command, "--", name, folder=tmp_path, MEMQ_BROKERS=server.address)
    check_one_line(done, 2, "topic name")


def test_no_name_makes_a_file_outside_of_its_folder(server: DevServer) -> None:
    outside = {path.name for path in server.data.parent.iterdir()} - {server.data.name, server.log.name}
    assert outside == set()


def test_a_record_over_the_limit_is_refused_and_the_next_one_goes(server: DevServer) -> None:
    with memq.Admin(server.address) as admin:
        admin.create_topic("small", settings={"record_bytes_max": 1_000})
    with memq.Producer(server.address) as producer:
        producer.send("small", bytes(900)).result(timeout=TIMEOUT_S)
        with pytest.raises(TooLargeError, match=r"1001|1000"):
            producer.send("small", bytes(1_001)).result(timeout=TIMEOUT_S)
        with pytest.raises(TooLargeError):
            producer.send("clicks", bytes(17 << 20)).result(timeout=TIMEOUT_S)
        producer.send("small", b"next").result(timeout=TIMEOUT_S)
    with memq.Consumer(server.address, ["small"], start="beginning", end="end") as consumer:
        assert [len(value or b"") for batch in consumer for value in batch.values()] == [900, 4]


def test_a_settings_file_with_an_unknown_key_is_refused_with_a_guess(tmp_path: Path) -> None:
    (tmp_path / "memq.toml").write_text('memory_byte_max = "64MiB"\n')
    done = run_memq("dev", "--data", str(tmp_path / "data"), folder=tmp_path)
    check_one_line(done, 2, "memory_byte_max", "did you mean 'memory_bytes_max'?")
    assert not (tmp_path / "data").exists()


# ---- a folder that may not be written ------------------------------------------------------------

# Imported first: who is nobody may not read where Python lies on every machine.
PLACES = ("--port", "0", "--http-port", "-1", "--dashboard-port", "-1")
AS_NOBODY = """
import os, sys
import memq.broker.dev, memq.cli.cluster.dev, memq.cli.run, memq.cli.output, memq.settings
import uvloop, encodings.idna, importlib.util
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(memq.cli.run.run(sys.argv[1:]))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder whose parents everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("made", [False, True], ids=["not made yet", "made before"])
def test_a_data_folder_that_may_not_be_written_is_one_line_and_denied(open_folder: Path, made: bool) -> None:
    data = open_folder / "data"
    if made:
        with dev_server(data) as server:
            server.signal()
            server.wait()
        for path in [data, *data.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
    open_folder.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, "dev", *PLACES, "--data", str(data)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=open_folder,
            env={**os.environ, "HOME": str(open_folder)},
        )
    finally:
        for path in [open_folder, *(each for each in open_folder.rglob("*") if each.is_dir())]:
            path.chmod(0o755)
    check_one_line(done, 4, str(data))
    assert done.stdout == ""


# ---- damaged objects ------------------------------------------------------------------------------


def three_objects(server: DevServer, topic: str) -> list[Path]:
    """Write three batches of two records; return their files in order."""
    known: set[Path] = set()
    files: list[Path] = []
    with memq.Producer(server.address, codec="none") as producer:
        for number in range(3):
            producer.send_many(topic, [b"%d-a" % number, b"%d-b" % number])
            producer.flush(timeout=TIMEOUT_S)
            folder = server.data / "objects"
            (new,) = {path for path in folder.rglob("*") if path.is_file() and f"/{topic}/" in str(path)} - known
            known.add(new)
            files.append(new)
    return files


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[BLOCK_HEADER_BYTES + 9] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(50)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [flip, cut, empty, remove]


@pytest.mark.parametrize("read", ["direct", "broker"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_object_fails_or_is_skipped_or_goes_to_the_dead_letters(
    damage: Callable[[Path], None],
    read: Literal["direct", "broker"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "memq.client.consumer.fetch.fetch_scheduler.MISSING_S", 2.0
    )  # 30 s, which tests on virtual time wait for
    topic = "clicks"
    with dev_server(tmp_path / "data") as server:
        files = three_objects(server, topic)
        server.signal()
        assert server.wait() == 0
        server.start()  # so that nothing is read from memory
        damage(files[1])
        key = files[1].relative_to(server.data / "objects").as_posix()

        with memq.Consumer(server.address, [topic], start="beginning", end="end", read=read) as consumer:
            seen = []
            with pytest.raises(CorruptDataError, match=key):
                seen += [value for batch in consumer for value in batch.values()]

        policies: tuple[Literal["skip", "dead-letter"], ...] = ("skip", "dead-letter")
        for policy in policies:
            with memq.Consumer(
                server.address, [topic], start="beginning", end="end", read=read, on_damaged=policy
            ) as consumer:
                batches = [(batch.values(), batch.damaged) for batch in consumer]
            assert [value for values, _ in batches for value in values] == [b"0-a", b"0-b", b"2-a", b"2-b"]
            damaged = [found for _, founds in batches for found in founds]
            assert [found.object_key for found in damaged] == [key]
            assert [found.records for found in damaged] == [2]

        with memq.Consumer(server.address, [topic + ".dlq"], start="beginning", end="end") as consumer:
            (letter,) = [record for batch in consumer for record in batch]
        assert dict(letter.headers)["memq-object"] == key.encode()
        assert server.process.poll() is None
