"""A command that used librdkafka ends, whatever the library's destructors and threads wait for."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress

RECV_S_MAX = 5.0  # other threads of a client that is destroyed may keep its connections
SCRIPT = """
import atexit, sys, threading
import confluent_kafka
from memq.cli import main
from memq.runtime.process import keep_to_end

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


# The C library calls `getchar` when the interpreter has ended: there the process waits for the end of its input.
LATE_ANSWER = """
import ctypes, sys
from confluent_kafka.admin import AdminClient
from memq.runtime.process import keep_for_ever

client = AdminClient({"bootstrap.servers": sys.argv[1]})
client.delete_consumer_groups(["group"], request_timeout=2.0)
keep_for_ever(client)
del client
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.getchar, None, None)
"""


def test_a_late_answer_to_a_client_that_was_kept_does_not_end_the_process_by_a_signal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as kafka:
        command = [sys.executable, "-c", LATE_ANSWER, f"127.0.0.1:{kafka.getsockname()[1]}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            connection, _ = kafka.accept()
            connection.settimeout(RECV_S_MAX)
            with connection, suppress(TimeoutError):  # it answers nothing, and ends with the client, or here
                while connection.recv(4096):
                    pass
            process.communicate(timeout=60)
    assert process.returncode == 0
