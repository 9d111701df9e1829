"""`memq queue` and `memq worker` as real processes against a real broker: exit codes, kills, signals, mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import memq
from tests.servers import DevServer, dev_server
from tests.shell import WAIT_S, Shell, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with dev_server(tmp_path_factory.mktemp("queues") / "data") as server:
        yield server


def worker(shell: Shell, queue: str, script: str, *options: str) -> subprocess.Popen[str]:
    return shell.start("worker", queue, *options, "--", "sh", "-c", script)


def queues(shell: Shell) -> dict[str, dict[str, object]]:
    done = shell.run("queue", "list", "--json")
    assert done.returncode == 0, done
    return {each["queue"]: each for each in json.loads(done.stdout)}


@pytest.fixture
def shell(tmp_path: Path, server: DevServer) -> Shell:
    return Shell(tmp_path, server.address)


def test_items_are_enqueued_listed_printed_and_cancelled(shell: Shell) -> None:
    assert shell.run("queue", "dequeue", "mails").returncode == 3
    done = shell.run("queue", "enqueue", "mails", "--priority", "1", "-H", "to=ann", text="a\nb\n")
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)
    (late,) = shell.run("queue", "enqueue", "mails", "later", "--deliver-after", "1h").stdout.split()
    assert json.loads(shell.run("queue", "enqueue", "mails", "--whole", "--json", text="c\nd\n").stdout)["id"]
    (row,) = [each for each in queues(shell).values() if each["queue"] == "mails"]
    assert (row["ready"], row["leased"], row["delayed"], row["dead"]) == (3, 0, 1, 0)
    shown = shell.run("queue", "describe", "mails").stdout
    assert "delayed" in shown
    assert json.loads(shell.run("queue", "describe", "mails", "--json").stdout) == row
    assert ["mails", "3", "0", "1", "0"] in [
        line.split()[:5] for line in shell.run("queue", "list").stdout.splitlines()
    ]
    kept = json.loads(shell.run("queue", "dequeue", "mails", "--json", "--no-ack").stdout)
    assert (kept["value"], kept["headers"], kept["attempt"], kept["lease_s"]) == ("a", [["to", "ann"]], 1, 60.0)
    assert shell.run("queue", "dequeue", "mails", "other", "-c", "9", "--wait", "5s").stdout == "b\nc\nd\n\n"
    done = shell.run("queue", "cancel", late, kept["id"], "--json")
    assert (done.returncode, json.loads(done.stdout)) == (1, {late: "cancelled", kept["id"]: "leased"})
    done = shell.run("queue", "cancel", late)
    assert (done.returncode, done.stdout.split()[-1]) == (0, "cancelled"), "it was so before"


def test_the_exit_code_of_a_program_is_its_answer(shell: Shell) -> None:
    shell.run("queue", "enqueue", "codes", "-H", "shop-id=7", "0", "75", "65", "3", "term")
    script = (
        'value=$(cat); echo "$value $ITEM_ATTEMPT $ITEM_QUEUE $ITEM_METADATA_SHOP_ID $ITEM_NOTE" >> "$WRITTEN"; '
        'echo "no $value" >&2; [ "$ITEM_ATTEMPT" = 2 ] && exit 0; [ "$value" = term ] && kill $$; exit "$value"'
    )
    process = worker(shell, "codes", script, "--delays", "100ms", "--concurrency", "2")
    until(lambda: len(shell.lines) == 8)
    until(lambda: queues(shell)["codes"]["leased"] == 0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "4 done, 3 retried, 1 dead, 0 lost, 0 returned" in said
    assert sorted(shell.lines) == [
        "0 1 codes 7 ",
        "3 1 codes 7 ",
        "3 2 codes 7 exit code 3: no 3",
        "65 1 codes 7 ",
        "75 1 codes 7 ",
        "75 2 codes 7 no 75",
        "term 1 codes 7 ",
        "term 2 codes 7 signal SIGTERM: no term",
    ]
    assert queues(shell)["codes"]["dead"] == 1


def test_items_of_a_killed_worker_come_again_and_a_signal_drains(shell: Shell) -> None:
    shell.run("queue", "enqueue", "jobs", "--lease", "2s", text="".join(f"{number}\n" for number in range(12)))
    script = (
        'value=$(cat); echo "$value $ITEM_ATTEMPT" >> "$WRITTEN"; [ "$value $ITEM_ATTEMPT" = "3 1" ] && sleep 5; true'
    )
    victim = worker(shell, "jobs", script)
    until(lambda: "3 1" in shell.lines)
    victim.kill()
    victim.communicate()
    other = worker(shell, "jobs", script, "--concurrency", "2")
    until(lambda: "jobs" not in queues(shell))
    other.send_signal(signal.SIGTERM)
    _, said = other.communicate(timeout=WAIT_S)
    assert (other.returncode, "0 lost" in said) == (0, True), said
    seen = Counter(line.split()[0] for line in shell.lines)
    assert set(seen) == {str(number) for number in range(12)}
    twice = {value for value, count in seen.items() if count > 1}
    assert "3" in twice
    assert len(twice) <= 4, "what the victim had leased"


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("worker", "jobs", "--", "no-such-program"), 2, "no-such-program"),
        (("worker", "jobs"), 2, "COMMAND"),
        (("worker", "--", "true"), 2, "QUEUE"),
        (("worker", "a/b/c", "--", "true"), 2, "a/b/c"),
        (("worker", "jobs", "--delays", "8d", "--", "true"), 2, "--delays '8d'"),
        (("worker", "jobs", "--delays", "", "--", "true"), 2, "retry_delays_s"),
        (("worker", "jobs", "--timeout", "0s", "--", "true"), 2, "--timeout '0s'"),
        (("queue", "describe", "nothing"), 3, "nothing"),
        (("queue", "enqueue", "a/b/c", "x"), 2, "a/b/c"),
        (("queue", "enqueue", "jobs", "x", "--priority", "10"), 2, "--priority"),
        (("queue", "enqueue", "jobs", "x", "--lease", "1ms"), 2, "lease"),
        (("queue", "enqueue", "jobs", "x", "--ttl", "400d"), 2, "--ttl"),
        (("queue", "enqueue", "jobs", "x", "-H", "none"), 2, "NAME=VALUE"),
        (("queue", "enqueue", "jobs", "x", "--whole"), 2, "--whole"),
        (("queue", "dequeue", "a/b/c"), 2, "a/b/c"),
        (("queue", "dequeue", "jobs", "--wait", "soon"), 2, "--wait"),
        (("queue", "cancel", "nonsense"), 1, "no id of a queue item"),
        (("queue", "redrive"), 2, "redrive"),
    ],
)
def test_a_mistake_gets_one_line(shell: Shell, arguments: tuple[str, ...], code: int, word: str) -> None:
    done = shell.run(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("memq: error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert word in done.stderr


def test_an_item_of_the_library_is_one_of_the_command(shell: Shell) -> None:
    with memq.Queue(shell.address) as queue:
        id_ = queue.enqueue("shared", b"\xff", metadata={"none": None})
    found = json.loads(shell.run("queue", "dequeue", "shared", "--json").stdout)
    assert (found["id"], found["value_base64"], found["headers"]) == (id_, "/w==", [["none", None]])


def test_records_of_a_topic_are_items_of_a_pop_group(shell: Shell) -> None:
    done = shell.run("queue", "pop", "begin", "orders", "billing")
    assert (done.returncode, "topic 'orders'" in done.stderr) == (3, True), done
    assert shell.run("topic", "create", "orders", "--partitions", "2").returncode == 0
    assert shell.run("produce", "orders", text="a\nb\nc\nd\n").returncode == 0
    done = shell.run("queue", "pop", "begin", "orders", "billing", "--lease", "20s", "--attempts", "1")
    assert (done.returncode, done.stdout) == (0, "orders@billing\n"), done
    first = json.loads(shell.run("queue", "dequeue", "orders@billing", "--wait", "10s", "--json").stdout)
    assert (first["topic"], first["attempt"], first["lease_s"]) == ("orders", 1, 20.0)
    script = 'value=$(cat); echo "$value $ITEM_TOPIC $ITEM_POSITION" >> "$WRITTEN"; [ "$value" = c ] && exit 65; true'
    working = worker(shell, "orders@billing", script)
    until(lambda: _lag(shell) == 0)
    working.send_signal(signal.SIGTERM)
    working.communicate(timeout=WAIT_S)
    assert all(line.split()[1] == "orders" and line.split()[2].count(":") == 2 for line in shell.lines)
    values = sorted([*[line.split()[0] for line in shell.lines], first["value"]])
    assert values == ["a", "b", "c", "d"]
    dead = 0 if first["value"] == "c" else 1
    assert queues(shell).get("orders@billing", {"dead": 0})["dead"] == dead
    assert "orders@billing" in shell.run("queue", "pop", "list").stdout
    assert shell.run("queue", "pop", "delete", "orders@billing", "--yes").returncode == 0
    assert json.loads(shell.run("queue", "pop", "list", "--json").stdout) == []
    assert shell.run("queue", "dequeue", "orders@billing").returncode == 3


def _lag(shell: Shell) -> int:
    (group,) = json.loads(shell.run("queue", "pop", "list", "--json").stdout)
    return int(group["lag_records"])


def test_the_audit_of_a_queue_is_clean_until_an_object_is_gone(shell: Shell, server: DevServer) -> None:
    done = shell.run("queue", "enqueue", "audited", "--lease", "1h", text="a\nb\nc\n")
    assert done.returncode == 0, done
    assert shell.run("queue", "dequeue", "audited").stdout == "a\n"
    assert shell.run("queue", "dequeue", "audited", "--no-ack").stdout == "b\n"
    done = shell.run("queue", "audit", "audited")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "verdict: clean: queue 'audited', 3 items: 1 waiting, 1 leased, 1 acked\n" in done.stdout
    assert shell.run("queue", "audit", "no/such/name").returncode == 2
    found = json.loads(shell.run("queue", "audit", "audited", "--json").stdout)
    assert (found["verdict"], found["items"]["acked"]) == ("clean", 1)
    for path in server.data.rglob("held/*/*/*/*"):
        if b"queue 5 3600000 " in path.read_bytes():
            path.unlink()
    done = shell.run("queue", "audit")
    assert done.returncode == 1
    assert "verdict: lost: all queues" in done.stdout
    assert "missing payload" in done.stdout
    assert ":1 and 1 more of its block: the store has no object" in done.stdout
