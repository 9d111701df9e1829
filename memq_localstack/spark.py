"""What PySpark is told by the environment so that it runs on one machine: a Java, a Python, the loopback."""

from __future__ import annotations

import sys
from pathlib import Path

from memq_localstack.java import java_home

# PySpark names its own sources first, in a zip, which Python compiles anew at each start: 1.05 s in place of 0.35.
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
