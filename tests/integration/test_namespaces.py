"""Names with a namespace on files and SQLite: every command takes them, and a lost queue is restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memq
from tests.memq_process import run_command
from tests.servers import DevServer
from tests.shell import until

TOPIC, GROUP = "billing/invoices", "billing/reports"


def refuse(message: memq.Message) -> None:
    raise ValueError(f"attempt {message.attempt}")


@pytest.fixture
def filled(tmp_path: Path) -> DevServer:
    """A stopped `memq dev` on whose folder two topics with similar names were filled, one was read with retries."""
    server = DevServer(tmp_path / "data")
    server.start()
    try:
        with memq.Producer(server.address) as producer:
            for number in range(4):
                producer.send(TOPIC, f"{number}", key=f"{number}")
            producer.send("billing.invoices", b"other")
        with memq.Listener(server.address, TOPIC, GROUP, refuse, retry_delays_s=[0.05]) as listener:
            listener.start()
            until(lambda: listener.stats().dead_letters == 4)
        assert TOPIC in run_command("group", "describe", GROUP, "-b", server.address).stdout
        check(server)
        assert server.stop() == 0
    finally:
        server.close()
    return server


def check(server: DevServer) -> None:
    """Ask about the topic as an operator does."""

    def command(*arguments: str) -> str:
        done = run_command(*arguments, "-b", server.address)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout

    names = {each["name"] for each in json.loads(command("topic", "list", "--json"))}
    assert {TOPIC, "billing.invoices", f"{GROUP}.retry", f"{GROUP}.dead-letters"} <= names
    assert "1 sound block, from the store" in command("audit", TOPIC)
    assert "4 records" in command("verify", TOPIC)
    first = json.loads(command("consume", TOPIC, "--exit", "--json").splitlines()[0])
    assert "billing/-/invoices" in command("trace", TOPIC, first["position"])
    assert sorted(command("consume", TOPIC, "--exit").split()) == ["0", "1", "2", "3"]
    assert command("consume", "billing.invoices", "--exit").split() == ["other"]
    assert "4" in command("dlq", "list")
    assert len(command("dlq", "list", GROUP, "--json").splitlines()) == 4


def test_a_lost_queue_is_restored_with_namespaces(filled: DevServer) -> None:
    for file in filled.data.glob("queue.sqlite*"):
        file.unlink()
    restored = run_command("restore", "--data", str(filled.data), "--json")
    assert restored.returncode == 0, restored.stderr
    found = {each["topic"]: each for each in json.loads(restored.stdout)}
    assert (found[TOPIC]["records"], found[TOPIC]["findings"]) == (4, [])
    assert found["billing.invoices"]["records"] == 1
    assert run_command("verify", str(filled.data)).returncode == 0
    filled.start()
    try:
        check(filled)
    finally:
        filled.close()
