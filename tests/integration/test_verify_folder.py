"""`memq verify` of a data folder and of a topic compares every pointer with its object; without objects none starts."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.servers import DevServer, dev_server

BATCHES = 4


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """A folder with objects of topics, shared and staged ones, and a server that can run on it."""
    with dev_server(tmp_path_factory.mktemp("verify") / "data") as server:
        with memq.Admin(server.address) as admin:
            admin.create_topic("shared", settings={"shared_objects": True})
        with memq.Producer(server.address) as producer:
            for number in range(BATCHES):
                for topic in ("clicks", "views", "shared"):
                    producer.send(topic, b"%d of %s" % (number, topic.encode())).result(timeout=60)
        asyncio.run(stage(server))
        server.stop()
        yield server


async def stage(server: DevServer) -> None:
    """Commit a batch that a writer staged, whose manifest lies among the objects."""
    store = FilesystemHandler(server.data / "objects", server.data / "tmp")
    async with StagedCommits(server.address, "job") as commits:
        topics = await commits.topics(["clicks"])
        writer = StagedWriter(commits.cluster, topics, store, "job")
        await writer.add("clicks", b"staged")
        await commits.commit(0, await writer.finish(), store, timeout_s=60)
    await store.close()


def verify(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "memq", "verify", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def objects_of(data: Path, topic: str) -> list[Path]:
    return sorted(path for path in (data / "objects").glob(f"*/topics/{topic}/**/*") if path.is_file())


def test_verify_of_a_sound_folder_finds_nothing(filled: DevServer) -> None:
    code, report = verify(str(filled.data))
    assert (code, report["findings"]) == (0, [])
    assert report["pointers"] >= 3 * BATCHES + 1


def delete_one(data: Path) -> tuple[Path, str]:
    path = objects_of(data, "clicks")[1]
    path.unlink()
    return path, "the object is missing"


def swap_batches(data: Path) -> tuple[Path, str]:
    one, two = objects_of(data, "clicks")[:2]
    body = one.read_bytes()
    two.chmod(0o600)
    two.write_bytes(body)
    return two, "pointer says batch sequence"


def swap_topics(data: Path) -> tuple[Path, str]:
    one, two = objects_of(data, "clicks")[0], objects_of(data, "views")[0]
    one.chmod(0o600)
    one.write_bytes(two.read_bytes())
    return one, "scope"


def cut(data: Path) -> tuple[Path, str]:
    path = objects_of(data, "views")[0]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-5])
    return path, "index: "


def delete_shared(data: Path) -> tuple[Path, str]:
    path = min(path for path in (data / "objects").glob("*/shared/**/*") if path.is_file())
    path.unlink()
    return path, "the object is missing"


def delete_staged(data: Path) -> tuple[Path, str]:
    (path,) = [path for path in (data / "objects").glob("*/staged/job/objects/**/*") if path.is_file()]
    path.unlink()
    return path, "the object is missing"


def delete_row(data: Path) -> tuple[Path, str]:
    with closing(sqlite3.connect(data / "queue.sqlite")) as queue:
        (number,) = queue.execute("SELECT min(id) + 1 FROM entries").fetchone()
        queue.execute("DELETE FROM entries WHERE id = ?", (number,))
        queue.commit()
    return data, "the queue has lost the pointers at offsets 1 to 1"


def rename_cluster(data: Path) -> tuple[Path, str]:
    """A cluster.json of another folder."""
    identity = json.loads((data / "cluster.json").read_text())
    (data / "cluster.json").write_text(json.dumps({**identity, "id": "other"}))
    return objects_of(data, "clicks")[0], "is of cluster"


FAULTS = (
    delete_one,
    swap_batches,
    swap_topics,
    cut,
    delete_shared,
    delete_staged,
    delete_row,
    rename_cluster,
)


@pytest.mark.parametrize("inject", FAULTS, ids=lambda inject: inject.__name__)
def test_verify_names_each_damage_of_a_folder(
    filled: DevServer, tmp_path: Path, inject: Callable[[Path], tuple[Path, str]]
) -> None:
    data = tmp_path / "copy"
    shutil.copytree(filled.data, data)
    path, text = inject(data)
    code, report = verify(str(data))
    assert code == 1
    found = [each for each in report["findings"] if text in each["text"]]
    assert found, report["findings"]
    assert inject is delete_row or str(path) in {each["object"] for each in found}


def refused(data: Path) -> str:
    """Start `memq dev` on a folder that it must refuse; return what it says."""
    command = [sys.executable, "-m", "memq", "dev", "--data", str(data), "--port", "0", "--http-port", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    return done.stderr


@pytest.mark.parametrize("how", ["missing", "empty", "cluster missing"])
def test_a_folder_that_lost_its_objects_does_not_start_and_does_not_hold(
    filled: DevServer, tmp_path: Path, how: str
) -> None:
    data = tmp_path / "copy"
    shutil.copytree(filled.data, data)
    for path in [data / "objects"] if how != "cluster missing" else [*(data / "objects").iterdir()]:
        shutil.rmtree(path)
    if how == "empty":
        (data / "objects").mkdir()
    before = (data / "queue.sqlite").read_bytes()
    code, report = verify(str(data))
    assert code == 1
    assert len([each for each in report["findings"] if "the object is missing" in each["text"]]) == report["pointers"]
    said = refused(data)
    assert "has no objects of cluster" in said
    assert "memq verify" in said
    assert (data / "queue.sqlite").read_bytes() == before
    if how != "missing":
        return
    shutil.copytree(filled.data / "objects", data / "objects", dirs_exist_ok=True)
    with dev_server(data) as server, memq.Consumer(server.address, ["views"], end="end") as consumer:
        assert sum(len(batch.values()) for batch in consumer) == BATCHES


def test_a_new_folder_and_one_whose_topics_are_empty_start_without_objects(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data", "--no-audit") as server:
        with memq.Admin(server.address) as admin:
            admin.create_topic("clicks")
        with memq.Producer(server.address, audit=False) as producer:
            producer.send("clicks", b"x").result(timeout=60)
        with memq.Admin(server.address) as admin:
            admin.delete_topic("clicks")
        server.stop()
        shutil.rmtree(server.data / "objects")
        server.start()


def test_a_topic_is_verified_by_its_pointers(filled: DevServer, tmp_path: Path) -> None:
    data = tmp_path / "copy"
    shutil.copytree(filled.data, data)
    with dev_server(data) as server:
        code, report = verify("clicks", "-b", server.address)
        assert (code, report["pointers"], report["findings"]) == (0, BATCHES + 1, [])
        gone, _ = delete_one(data)
        swapped, _ = swap_batches(data)
        code, report = verify("clicks", "-b", server.address)
        assert code == 1
        damaged = {each["object"] for each in report["findings"]}
        assert damaged == {str(path.relative_to(data / "objects")) for path in (gone, swapped)}
        shutil.rmtree(data / "objects" / next((data / "objects").iterdir()).name)
        code, report = verify("views", "-b", server.address)
        assert (code, len(report["findings"])) == (1, BATCHES)
