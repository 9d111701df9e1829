"""`memq listen` and `memq dlq` as real processes against a real broker: exit codes, kills, signals, mistakes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import memq
from memq.client.listener.open_records import NO_ANSWER
from tests.servers import DevServer, dev_server
from tests.shell import WAIT_S, Shell, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    with dev_server(tmp_path_factory.mktemp("listen") / "data") as server:
        yield server


def listen(shell: Shell, topic: str, script: str, *options: str) -> subprocess.Popen[str]:
    return shell.start("listen", topic, "-G", f"{topic}-group", *options, "--", "sh", "-c", script)


def letters(shell: Shell, topic: str) -> list[dict[str, object]]:
    done = shell.run("dlq", "list", f"{topic}-group", "--json")
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def shell(tmp_path: Path, server: DevServer) -> Shell:
    return Shell(tmp_path, server.address)


def send(address: str, topic: str, *values: str, partitions: int = 1, key: str | None = None) -> None:
    with memq.Admin(address) as admin:
        admin.create_topic(topic, partitions=partitions, exist_ok=True)
    with memq.Producer(address) as producer:
        for value in values:
            producer.send(topic, value, key=key, headers={"shop-id": "7"}, tag="new")


def stop(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
    process.send_signal(number)
    _, said = process.communicate(timeout=WAIT_S)
    return process.returncode, said


def test_the_exit_code_of_a_program_is_its_answer(shell: Shell) -> None:
    send(shell.address, "codes", "0", "75", "65", "79", "3", "term")
    script = (
        'value=$(cat); echo "$value $RECORD_ATTEMPT $RECORD_TAG $RECORD_HEADER_SHOP_ID $RECORD_ERROR" >> "$WRITTEN"; '
        'echo "no $value" >&2; [ "$value" = term ] && kill $$; [ "$RECORD_ATTEMPT" = 2 ] && exit 0; exit "$value"'
    )
    process = listen(shell, "codes", script, "--delays", "100ms", "--concurrency", "2")
    until(lambda: len(shell.lines) == 9 and len(letters(shell, "codes")) == 3)
    code, said = stop(process)
    assert code == 130
    assert "3 done, 3 retried, 2 dead, 1 parked" in said
    assert sorted(shell.lines) == [
        "0 1 new 7 ",
        "3 1 new 7 ",
        "3 2 new 7 exit code 3: no 3",
        "65 1 new 7 ",
        "75 1 new 7 ",
        "75 2 new 7 no 75",
        "79 1 new 7 ",
        "term 1 new 7 ",
        "term 2 new 7 signal SIGTERM: no term",
    ]
    found = {
        letter["value"]: (letter["state"], letter["attempts"], letter["cause"]) for letter in letters(shell, "codes")
    }
    assert found == {
        "65": ("dead", 1, "no 65"),
        "79": ("parked", 1, "no 79"),
        "term": ("dead", 2, "signal SIGTERM: no term"),
    }


def test_letters_are_listed_shown_sent_back_and_purged(shell: Shell) -> None:
    send(shell.address, "letters", "a", "b", "c")
    failing = listen(shell, "letters", "exit 65", "--concurrency", "1")
    until(lambda: shell.run("dlq", "list", "letters-group").returncode == 0 and len(letters(shell, "letters")) == 3)
    stop(failing)
    done = shell.run("dlq", "list")
    assert ["letters-group", "3"] in [line.split() for line in done.stdout.splitlines()]
    first, *others = letters(shell, "letters")
    shown = shell.run("dlq", "show", "letters-group", str(first["position"]))
    assert "exit code 65" in shown.stdout
    assert shell.run("dlq", "show", "letters-group", str(first["position"]), "--value").stdout == first["value"]
    done = shell.run("dlq", "redrive", "letters-group", "-c", "1")
    assert (done.returncode, done.stderr) == (0, "1 letter sent back\n")
    assert [letter["value"] for letter in letters(shell, "letters")] == [letter["value"] for letter in others]
    handling = listen(shell, "letters", 'echo "$(cat) $RECORD_ATTEMPT" >> "$WRITTEN"')
    until(lambda: shell.lines == [f"{first['value']} 1"])
    stop(handling)
    done = shell.run("dlq", "purge", "letters-group", "--yes")
    assert (done.returncode, done.stderr) == (0, "2 letters dropped\n")
    assert letters(shell, "letters") == []
    assert shell.run("dlq", "redrive", "letters-group").stderr == "0 letters sent back\n"


def test_killed_listeners_lose_no_record_no_retry_and_no_dead_letter(shell: Shell) -> None:
    values = [str(number) for number in range(60)]
    send(shell.address, "killed", *values, partitions=2)
    # A tenth fails in the first attempt; another tenth always.
    script = (
        'value=$(cat); echo "$value $RECORD_ATTEMPT" >> "$WRITTEN"; '
        'case "$value" in *3) [ "$RECORD_ATTEMPT" -gt 1 ];; *7) echo "never $value" >&2; exit 1;; esac'
    )
    options = ("--delays", "200ms,200ms", "--concurrency", "4")
    draw = random.Random(7)
    dead = {value for value in values if value.endswith("7")}
    processes = [listen(shell, "killed", script, *options) for _ in range(2)]
    for _ in range(4):
        seen = len(shell.lines)
        until(lambda: len(shell.lines) >= min(seen + 8, 60))  # noqa: B023 - it is called before the next round
        victim = draw.choice(processes)
        victim.kill()
        victim.communicate()
        processes[processes.index(victim)] = listen(shell, "killed", script, *options)
    until(
        lambda: {str(letter["value"]) for letter in letters(shell, "killed")} >= dead,
        lambda: (letters(shell, "killed"), shell.lines),
    )
    handled = Counter(line.split()[0] for line in shell.lines)
    # A try that a kill ended counts (ADR 48), perhaps before its program has written its line.
    again = [value for value in values if value[-1] in "37"]
    until(
        lambda: {line.split()[0] for line in shell.lines if line[-1] in "23"} >= set(again),
        lambda: shell.lines,
    )
    for process in processes:
        assert stop(process)[0] == 130
    assert handled.keys() >= set(values)
    for letter in letters(shell, "killed"):
        causes = [f"exit code 1: never {letter['value']}"] if letter["value"] in dead else []
        assert letter["attempts"] == 3
        assert letter["cause"] in (*causes, NO_ANSWER), letter
    for group in ("killed-group", "killed-group.retry"):
        described = json.loads(shell.run("group", "describe", group, "--json").stdout)
        assert sum(part["lag_records"] for part in described["partitions"]) == 0, described


def test_an_interrupt_lets_running_programs_finish_and_commits_what_they_did(shell: Shell) -> None:
    send(shell.address, "drained", "slow", "next")
    gate = shell.folder / "gate"
    os.mkfifo(gate)
    script = f'value=$(cat); echo "began $value" >> "$WRITTEN"; read line < {gate}; echo "ended $value" >> "$WRITTEN"'
    process = listen(shell, "drained", script)
    until(lambda: shell.lines == ["began slow"])
    process.send_signal(signal.SIGTERM)
    with gate.open("w") as opened:
        opened.write("go\n")
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
    assert shell.lines == ["began slow", "ended slow"]
    assert "1 done" in said
    again = listen(shell, "drained", 'echo "again $(cat)" >> "$WRITTEN"')
    until(lambda: len(shell.lines) == 3)
    stop(again)
    assert shell.lines[2] == "again next"


def test_a_program_that_takes_too_long_is_killed_with_all_that_it_started(shell: Shell) -> None:
    send(shell.address, "late", "x")
    script = 'echo $$ >> "$WRITTEN"; sleep 600 & echo $! >> "$WRITTEN"; wait'
    process = listen(shell, "late", script, "--timeout", "300ms", "--delays", "")
    until(lambda: len(shell.lines) >= 2 and letters(shell, "late"))
    stop(process)
    assert letters(shell, "late")[0]["cause"] == "no answer after 0.3 s"
    for pid in map(int, shell.lines):
        until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())  # noqa: B023


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("listen", "t", "-G", "g", "--", "no-such-program"), 2, "no-such-program"),
        (("listen", "t", "-G", "g"), 2, "COMMAND"),
        (("listen", "t", "--", "true"), 2, "--group"),
        (("listen", "nowhere", "-G", "g", "--", "true"), 3, "nowhere"),
        (("listen", "t", "-G", "g", "--delays", "1,2", "--", "true"), 2, "--delays '1'"),
        (("listen", "t", "-G", "g", "--delays", "8d", "--", "true"), 2, "--delays '8d'"),
        (("listen", "t", "-G", "g", "--timeout", "0s", "--", "true"), 2, "--timeout '0s'"),
        (("listen", "t", "-G", "g", "--drain", "soon", "--", "true"), 2, "--drain 'soon'"),
        (("listen", "t", "-G", "g", "--when-failing", "park", "--", "true"), 2, "--ordered"),
        (("listen", "t", "-G", "g", "--where", "a >", "--", "true"), 2, "a >"),
        (("listen", "t", "-G", "g" * 240, "--", "true"), 2, "too long"),
        (("dlq", "list", "no-group"), 3, "no-group"),
        (("dlq", "show", "no-group", "0:1:0"), 3, "no-group"),
        (("dlq", "show", "no-group", "x"), 2, "0:17:3"),
        (("dlq", "redrive", "no-group"), 3, "no-group"),
        (("dlq", "purge", "no-group", "--yes"), 3, "no-group"),
        (("dlq", "redrive", "_memq"), 2, "_memq"),
    ],
)
def test_a_mistake_gets_one_line(shell: Shell, arguments: tuple[str, ...], code: int, word: str) -> None:
    done = shell.run(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("memq: error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert word in done.stderr
