"""`python -m tests.without_kernel [JOBS]`: tests of the compiled parts, once more in Python. `make check` runs it.

The whole suite runs with the kernel where it is installed. The compiled parts and those in Python share one
contract suite; this list has the tests of the code around them, by public behaviour. It takes 25 CPU-s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from memq import kernel

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "tests/component/test_block_identity.py",
    "tests/component/test_broker_connection.py",
    "tests/component/test_broker_memory.py",
    "tests/component/test_broker_proofs.py",
    "tests/component/test_broker_sharing.py",
    "tests/component/test_broker_spool.py",
    "tests/component/test_client_mistakes.py",
    "tests/component/test_direct_writer.py",
    "tests/component/test_named_producer.py",
    "tests/component/test_producer_sealing.py",
    "tests/component/test_producer_sync.py",
    "tests/component/test_producer_widening.py",
    "tests/component/test_read_object.py",
    "tests/component/test_topic_processor.py",
    "tests/unit/test_broker_batch.py",
    "tests/unit/test_broker_block_run.py",
    "tests/unit/test_broker_intake.py",
    "tests/unit/test_broker_storing.py",
    "tests/unit/test_connection_frames.py",
    "tests/unit/test_format_batch.py",
    "tests/unit/test_format_block.py",
    "tests/unit/test_format_golden.py",
    "tests/unit/test_producer_aio.py",
    "tests/unit/test_producer_buffer.py",
    "tests/unit/test_producer_calls.py",
    "tests/unit/test_producer_core.py",
    "tests/unit/test_producer_end.py",
    "tests/unit/test_producer_failures.py",
    "tests/unit/test_send_buffer.py",
    "tests/unit/test_staged_object.py",
)


def main() -> int:
    """Run the tests with the kernel switched off; return pytest's exit code."""
    if not any(kernel.compiled_module(part) for part in kernel.PARTS):
        print(f"no second run of the kernel's tests: the first one was {kernel.description()}")
        return 0
    jobs = sys.argv[1] if len(sys.argv) > 1 else "2"
    command = [sys.executable, "-m", "pytest", "-q", "-n", jobs, "--dist", "loadfile", "-m", "not thorough", *FILES]
    print(f"the tests of the kernel once more, with {kernel.VARIABLE}=0", flush=True)
    return subprocess.run(command, cwd=ROOT, env={**os.environ, kernel.VARIABLE: "0"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
