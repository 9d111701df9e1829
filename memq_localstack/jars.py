"""The jars of Kafka and ZooKeeper: pinned by SHA-256 in `jars.txt`, fetched once, kept in the user's cache.

They come from Maven Central through jgo, a Maven client in pure Python: neither Maven nor Java is needed for it. A
pinned list needs no resolution: each jar is one download, and what is not the pinned bytes is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from memq_localstack.errors import LocalstackError

FETCHES_IN_FLIGHT_MAX = 4
FETCH_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Jar:
    """One pinned jar."""

    coordinate: str  # group:artifact:version
    sha256: str

    @property
    def name(self) -> str:
        """The file's name."""
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"


def cache_folder() -> Path:
    """Return where jars are kept: memq-localstack in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memq-localstack"


def pinned(server: str) -> list[Jar]:
    """Return the jars of a server (`kafka`, `zookeeper`), as `jars.txt` has them."""
    lines = files("memq_localstack").joinpath("jars.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return [Jar(coordinate, sha256) for name, coordinate, sha256 in rows if name == server]


def class_path(server: str) -> str:
    """Return the class path of a server; its jars are fetched when the cache lacks them.

    Raises:
        LocalstackError: they can't be fetched.
    """
    jars = pinned(server)
    digest = hashlib.sha256("".join(jar.sha256 for jar in jars).encode()).hexdigest()
    folder = cache_folder() / f"{server}-{digest[:12]}"  # other pins, another folder
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder.with_suffix(".lock")):
            if not folder.exists():
                _fetch(server, jars, folder)
    return f"{folder}/*"


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process of the machine in; the others wait, and find the work done."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(server: str, jars: list[Jar], folder: Path) -> None:
    """Fetch all jars into a new folder that takes its name when it is whole."""
    print(f"memq-localstack: fetching {len(jars)} jars of {server} into {folder}, once", file=sys.stderr, flush=True)
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    with ThreadPoolExecutor(FETCHES_IN_FLIGHT_MAX) as pool:
        list(pool.map(lambda jar: _fetch_one(jar, draft), jars))
    shutil.rmtree(draft / "maven")
    draft.rename(folder)


def _fetch_one(jar: Jar, draft: Path) -> None:
    """Fetch one jar and check that it is the pinned one."""
    try:
        from jgo.maven import MavenContext
    except ImportError as error:
        raise LocalstackError("the package jgo is not installed", hint="pip install 'memq[localstack]'") from error
    group, artifact, version = jar.coordinate.split(":")
    context = MavenContext(repo_cache=draft / "maven", timeout=FETCH_TIMEOUT_S)
    try:
        found = context.project(group, artifact).at_version(version).artifact().resolve()
    except Exception as error:
        raise LocalstackError(
            f"{jar.coordinate} can't be fetched from Maven Central: {error}",
            hint="check the network; behind a proxy set HTTPS_PROXY",
        ) from error
    if hashlib.sha256(found.read_bytes()).hexdigest() != jar.sha256:
        raise LocalstackError(
            f"{jar.coordinate} is not the pinned file: another SHA-256", hint="report it; do not use it"
        )
    found.rename(draft / jar.name)
