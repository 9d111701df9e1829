"""A command that used librdkafka ends, whatever the library's destructors and threads wait for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, sys, threading
import confluent_kafka
from memq.cli import main
from memq.runtime.process_end import keep_to_end

class Waits:
    def __del__(self):
        threading.Event().wait()

def left():
    keep_to_end(Waits())

atexit.register(lambda: print("registered", flush=True))
threading.Thread(target=threading.Event().wait).start()
sys.argv = ["memq", *sys.argv[1:]]
import memq.cli.run as run
real = run.run
run.run = lambda arguments: (left(), print("unflushed", end=""), real(arguments))[-1]
sys.exit(main())
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_ends_with_its_code_and_all_that_it_said() -> None:
    done = run("config")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("unflushed")
    assert done.stdout.endswith("registered\n")


def test_a_command_that_failed_says_so() -> None:
    done = run("no-such-command")
    assert done.returncode == 2
    assert "no command 'no-such-command'" in done.stderr
