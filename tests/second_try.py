"""`python -m tests.second_try [JOBS]`: all tests; those on real parts that fail run a second time, alone.

Four workers share two cores with Kafka, ZooKeeper, S3 and Spark, so a time limit of a test may end while its server had
no turn. Such a test passes alone. Its first failure stays in the output, and the last lines name it. Tests that compute
only, such as simulated runs, get no second try: their failures are faults.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REAL_PARTS = ("tests/integration/", "tests/spark/", "tests/chaos/", "tests/component/")
SECOND_TRIES_MAX = 3  # more failures at once have another cause than a machine that was busy
FAILED = 1  # pytest's exit code for failed tests


def may_pass_alone(failed: Sequence[str]) -> bool:
    """Whether failed tests, by node id, get a second try."""
    return 0 < len(failed) <= SECOND_TRIES_MAX and all(each.startswith(REAL_PARTS) for each in failed)


def run_tests(root: Path, arguments: Sequence[str]) -> int:
    """Run the tests in `root` by pytest with `arguments`; return its exit code, or that of the second try."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={cache}"]
        code = subprocess.run([*command, *arguments, "tests"], cwd=root, check=False).returncode
        failed = _failed_of(Path(cache))
        if code != FAILED or not may_pass_alone(failed):
            return code
        print(f"second try, alone: {', '.join(failed)}", flush=True)
        code = subprocess.run([*command, *failed], cwd=root, check=False).returncode
        again = _failed_of(Path(cache)) if code else []
        for test in failed:
            print(f"failed with the others, {'and failed' if test in again else 'passed'} alone: {test}", flush=True)
        return code


def _failed_of(cache: Path) -> list[str]:
    """Return the tests, by node id, that pytest's cache records as failed."""
    record = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(record.read_text())) if record.exists() else []


def main() -> int:
    """Run all tests; return pytest's exit code."""
    jobs = sys.argv[1] if len(sys.argv) > 1 else "4"
    return run_tests(ROOT, ["-n", jobs, "--dist", "loadfile", "--durations=25"])


if __name__ == "__main__":
    sys.exit(main())
