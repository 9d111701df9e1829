"""A record that ends the process of its handler, each time: real processes against a broker of the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memq
from memq.testing import Cluster

TRIES = 3
DEADLY = 5  # of the records 0 to 11
# Handles records, and ends without a word at the deadly one. Each call is a line of the file.
PROGRAM = """
import os, sys
import memq

address, written, ordered, drain, deadly = sys.argv[1:]

def handle(message):
    number = int(message.value)
    with open(written, "a") as lines:
        lines.write(f"{number} {message.attempt} {message.error}\\n")
    if str(number) == deadly:
        os._exit(7)
    if number == 11:
        listener.stop()

listener = memq.Listener(
    address, "orders", "billing", handle, concurrency=4, ordered=ordered == "1", retry_delays_s=[0.05] * 2,
    commit_interval_ms=60_000, session_timeout_ms=600, audit=False, drain_s=float(drain),
    when_failing="dead-letter",
)
with listener:
    listener.run()
"""


def run(cluster: Cluster, written: Path, *, ordered: bool) -> int:
    command = [sys.executable, "-c", PROGRAM, cluster.address, str(written), str(int(ordered)), "20", str(DEADLY)]
    return subprocess.run(command, timeout=60, check=False).returncode


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ordered", [True, False])
def test_a_record_that_ends_its_process_is_a_dead_letter_after_its_tries(tmp_path: Path, ordered: bool) -> None:
    written = tmp_path / "written"
    with Cluster() as cluster:
        cluster.create_topic("orders")
        with memq.Producer(cluster.address, audit=False) as producer:
            for number in range(12):
                producer.send("orders", str(number), key=f"key {number % 3}")
        codes = [run(cluster, written, ordered=ordered) for _ in range(TRIES + 2)]
        with memq.DeadLetterQueue(cluster.address, "billing") as letters:
            found = [(letter.value, letter.attempts, letter.cause) for letter in letters.letters()]
    lines = [line.split(" ", 2) for line in written.read_text().splitlines()]
    assert codes == [7] * (TRIES + 1) + [0]
    assert found == [(str(DEADLY).encode(), TRIES, "the process of its handler ended without an answer")]
    assert {int(number) for number, _, _ in lines} == set(range(12)), "all others were handled"
    deadly = [(int(attempt), error.strip()) for number, attempt, error in lines if int(number) == DEADLY]
    assert deadly[-1] == (TRIES, "the process of its handler ended without an answer"), deadly
    assert len(deadly) == TRIES + 1, "the first process had an earlier record at its position"
