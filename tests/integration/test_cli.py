"""The command line against a real `memq dev` on a folder: what newcomers type, and their mistakes."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from memq import Admin
from tests.component.test_cli_run import without_notice
from tests.memq_process import BrokerServer
from tests.servers import DevServer, dev_server

Memq = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """Run one broker for the module; at the end it must drain without an error."""
    with dev_server(tmp_path_factory.mktemp("cli") / "data") as server:
        yield server
        code, said = server.stop(), server.log.read_text()
    assert code == 0, said
    assert "error" not in said, said


@pytest.fixture(scope="module")
def folder(server: DevServer) -> Path:
    """Return the data folder of the module's broker."""
    return server.data


@pytest.fixture(scope="module")
def address(server: DevServer) -> str:
    """Return where the module's broker listens."""
    return server.address


@pytest.fixture
def memq(address: str, tmp_path: Path) -> Memq:
    """Return a function that runs `memq ARGUMENTS…` as a process of its own, in an empty folder."""

    def run(*arguments: str, stdin: str | bytes = b"", broker: str = address) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "MEMQ_BROKERS": broker, "HOME": str(tmp_path), "PYTHONUTF8": "1"}
        environment.pop("MEMQ_DEBUG", None)
        given = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            [sys.executable, "-m", "memq", *arguments],
            input=given,
            capture_output=True,
            timeout=60,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )

    return run


def check_mistake(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (done.returncode, done.stdout) == (code, ""), done
    error = without_notice(done.stderr)
    assert error.startswith("memq: error: "), done.stderr
    assert error.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_lines_go_in_and_come_out(memq: Memq) -> None:
    done = memq("produce", "lines", stdin="a\n\nc")
    assert (done.returncode, done.stdout) == (0, ""), done
    assert "3 records, 2 B: 3 acked (acks=all)" in done.stderr
    assert memq("consume", "lines", "-e").stdout == "a\n\nc\n"
    assert memq("consume", "lines", "-e", "-c", "2").stdout == "a\n\n"


def test_all_of_a_record_goes_through_json_and_back(memq: Memq) -> None:
    sent = [
        {"timestamp_ms": 5, "key": "k", "headers": [["a", "1"], ["b", None]], "tag": "web", "value": "ü"},
        {"timestamp_ms": 6, "key_base64": "/w==", "value": None},
        {"timestamp_ms": 7, "value_base64": "/w=="},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in sent)
    assert memq("produce", "first", "--input", "json", stdin=lines).returncode == 0
    once = memq("consume", "first", "-e", "--json").stdout
    assert memq("produce", "second", "--input", "json", stdin=once).returncode == 0
    twice = [json.loads(line) for line in memq("consume", "second", "-e", "--json").stdout.splitlines()]
    place = ("topic", "partition", "offset", "position")
    assert [{name: value for name, value in record.items() if name not in place} for record in twice] == sent
    assert {record["topic"] for record in twice} == {"second"}


def test_a_line_that_is_no_record_says_how_many_before_it_are_stored(memq: Memq) -> None:
    done = memq("produce", "broken", "--input", "json", stdin='{"value": "a"}\n{"value": "b"}\nnonsense\n')
    check_mistake(done, 1, "record 3", "2 records before it acked: the whole input would send them again")
    assert memq("consume", "broken", "-e").stdout == "a\nb\n"


def test_lines_get_a_tag(memq: Memq) -> None:
    assert memq("produce", "tagged", "--tag", "paid", stdin="a\nb\n").returncode == 0
    assert memq("produce", "tagged", "--tag", "open", "-H", "h=1", stdin="c\n").returncode == 0
    lines = '{"value": "d", "tag": "paid"}\n{"value": "e"}\n'
    assert memq("produce", "tagged", "--tag", "open", "--input", "json", stdin=lines).returncode == 0
    assert memq("consume", "tagged", "-e", "--tags", "paid").stdout == "a\nb\nd\n"
    assert memq("consume", "tagged", "-e", "--tags", "open").stdout == "c\ne\n"


def test_a_filter_that_nothing_matches_says_how_many_records_were_read(memq: Memq) -> None:
    line = '{"value": "a", "tag": "paid", "headers": [["amount", "5"]]}\n'
    assert memq("produce", "filtered", "--input", "json", stdin=line * 3).returncode == 0
    for wanted in (
        ("--tags", "piad"),
        ("--tags", "paid && open"),
        ("--where", "amount > 5"),
        ("--where", "Amount = 5"),
    ):
        done = memq("consume", "filtered", "-e", *wanted)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "memq: 3 records read, none matches the filter\n")
    done = memq("consume", "filtered", "-e", "--tags", "paid")
    assert (done.stdout, done.stderr) == ("a\n" * 3, "")
    assert memq("consume", "filtered", "-e", "-o", "end", "--tags", "piad").stderr == "", "nothing was read"


def test_kcats_letters(memq: Memq) -> None:
    summary = memq("produce", "kcat", "-K", ":", "-D", ";", "-Z", "-H", "h=1", "--json", stdin="a:1;b:;c")
    assert json.loads(summary.stdout)["acked"] == 3
    shown = memq("consume", "kcat", "-e", "-Z", "-f", r"%t %p %k=%s %h\n").stdout
    assert shown == "kcat 0 a=1 h=1\nkcat 0 b=NULL h=1\nkcat 0 NULL=c h=1\n"
    assert memq("consume", "kcat", "-e", "-K", "/", "-D", "|").stdout == "a/1|b/|/c|"
    assert memq("consume", "kcat", "-e", "-o", "-2", "-D", " ").stdout == " c "
    assert memq("consume", "kcat", "-e", "-o", "end").stdout == ""
    assert memq("consume", "kcat", "-e", "-o", "@-1h", "-f", "%k,").stdout == "a,b,,"


def test_a_group_continues_at_its_position(memq: Memq) -> None:
    memq("produce", "grouped", stdin="1\n2\n")
    assert memq("consume", "grouped", "-e", "-G", "readers").stdout == "1\n2\n"
    memq("produce", "grouped", stdin="3\n")
    assert memq("consume", "grouped", "-e", "-G", "readers", "-o", "stored").stdout == "3\n"
    assert memq("consume", "grouped", "-e", "-G", "others").stdout == "1\n2\n3\n"


def test_one_partition(memq: Memq) -> None:
    assert memq("topic", "create", "parts", "--partitions", "3").returncode == 0
    for partition in range(3):
        memq("produce", "parts", "-p", str(partition), stdin=f"v{partition}\n")
    assert memq("consume", "parts", "-e", "-p", "1").stdout == "v1\n"
    assert sorted(memq("consume", "parts", "-e").stdout.split()) == ["v0", "v1", "v2"]
    check_mistake(memq("produce", "parts", "-p", "3", stdin="x"), 3, "partition 3")


def test_files(memq: Memq, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name}\n")
    assert memq("produce", "files", "one", "two").returncode == 0
    assert memq("consume", "files", "-e").stdout == "one\ntwo\n"
    check_mistake(memq("produce", "files", "one", "three"), 3, "three")
    assert memq("consume", "files", "-e").stdout == "one\ntwo\n", "nothing is sent before every file is open"


def test_objects_are_verified_by_folder_and_by_topic(memq: Memq, folder: Path) -> None:
    memq("produce", "held", stdin="x\ny\n")
    assert json.loads(memq("verify", str(folder), "--json").stdout)["damaged"] == 0
    assert memq("verify", "held").stdout == "1 object, 2 records, 1 pointer: all hold\n"
    [path] = [found for found in (folder / "objects").glob("*/topics/held/**/*") if found.is_file()]
    data = bytearray(path.read_bytes())
    data[72] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    for target in (str(path), "held"):
        shown = memq("verify", target, "--json")
        assert shown.returncode == 1
        [finding] = json.loads(shown.stdout)["findings"]
        assert finding["error"] == "corrupt-data"
        assert "checksum" in finding["text"]
    path.unlink()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["consume", "nowhere", "-e"], 3, ["nowhere"]),
        (["consume", "a b"], 2, ["'a b'", "A-Z"]),
        (["produce", ".."], 2, ["'..'"]),
        (["produce", "x" * 250], 2, ["250", "249"]),
        (["produce", "t", "--acks", "2"], 2, ["acks", "0, 1, all"]),
        (["produce", "t", "-z", "gzip"], 2, ["gzip", "zstd"]),
        (["produce", "t", "-H", "x"], 2, ["NAME=VALUE"]),
        (["produce", "t", "-D", ""], 2, ["delimiter"]),
        (["consume", "t", "-o", "middle"], 2, ["middle", "beginning"]),
        (["consume", "t", "-o", "stored"], 2, ["-G"]),
        (["consume", "t", "-f", "%x"], 2, ["%x"]),
        (["consume", "t", "--json", "-f", "%s"], 2, ["exclude"]),
        (["consume", "t", "-G", "g", "-p", "1"], 2, ["exclude"]),
        (["topic", "describe", "nowhere"], 3, ["nowhere"]),
        (["topic", "create", "t", "--set", "limit_mode=Hard"], 2, ["'Hard'", "off, observe, soft, hard"]),
        (["group", "describe", "nobody"], 3, ["group 'nobody' does not exist"]),
    ],
)
def test_mistakes(memq: Memq, arguments: list[str], code: int, words: list[str]) -> None:
    check_mistake(memq(*arguments, stdin="x\n"), code, *words)


def test_bad_input(memq: Memq) -> None:
    check_mistake(
        memq("produce", "t", "--input", "json", stdin='{"value":"a"}\n{"valeu":"b"}\n'),
        1,
        "record 2",
        "did you mean 'value'",
    )


@pytest.mark.parametrize("command", [["produce", "t", "--metadata-timeout-ms", "300ms"], ["topic", "list"], ["lag"]])
def test_command_without_a_broker_names_the_address(memq: Memq, command: list[str]) -> None:
    check_mistake(memq(*command, stdin="x", broker="127.0.0.1:1"), 5, "127.0.0.1:1")


def test_ctrl_c_says_what_was_done(memq: Memq, address: str) -> None:
    memq("produce", "waiting", stdin="a\n")
    command = [sys.executable, "-m", "memq"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(
            [*command, "consume", "waiting", "-b", address], stdout=pipe, stderr=pipe, text=True
        ) as consumer,
        subprocess.Popen(
            [*command, "produce", "waiting", "-b", address], stdin=pipe, stderr=pipe, text=True
        ) as producer,
    ):
        assert consumer.stdout is not None
        assert producer.stdin is not None
        producer.stdin.write("b\n")
        producer.stdin.flush()
        assert [consumer.stdout.readline(), consumer.stdout.readline()] == ["a\n", "b\n"]
        for process, said in (
            (consumer, "interrupted: 2 records printed"),
            (producer, "interrupted: 1 record sent, 1 of"),
        ):
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.read().startswith(said)
            assert process.wait(timeout=30) == 130


@pytest.mark.parametrize(
    ("away", "back", "line"),
    [
        (DevServer.kill, DevServer.start, "memq: no broker answers: can't reach {}: .*; trying again \\(for .*"),
        (DevServer.pause, DevServer.resume, "memq: broker {} has not answered since 20[0-9T:-]+Z \\([A-Za-z]+\\)\n"),
    ],
    ids=["killed", "hangs"],
)
def test_clients_that_wait_for_a_broker_say_so_and_continue(
    tmp_path: Path, away: Callable[[DevServer], object], back: Callable[[DevServer], object], line: str
) -> None:
    pipe = subprocess.PIPE
    with dev_server(tmp_path / "data") as server, ExitStack() as stack:
        with Admin(server.address) as admin:
            admin.create_topic("t")

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "memq", *arguments, "-b", server.address]
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            stack.callback(process.kill)
            return process

        consumer, producer = start("consume", "t", "-c", "2"), start("produce", "t")
        assert producer.stdin is not None
        assert consumer.stdout is not None
        producer.stdin.write("a\n")
        producer.stdin.flush()
        assert consumer.stdout.readline() == "a\n"
        away(server)
        producer.stdin.write("b\n")
        producer.stdin.flush()
        for process in (consumer, producer):
            assert process.stderr is not None
            said = process.stderr.readline()
            assert re.match(line.format(server.address), said), said
        back(server)
        producer.stdin.close()
        assert consumer.stdout.readline() == "b\n"
        assert [process.wait(timeout=30) for process in (consumer, producer)] == [0, 0]


def test_a_second_broker_on_the_same_folder_is_refused(server: DevServer) -> None:
    command = [sys.executable, *DevServer(server.data).command()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("", 1), done.stderr
    assert done.stderr.startswith("memq: error: ")
    assert done.stderr.count("\n") == 1
    assert server.process.poll() is None, "the first one runs on"


def test_audit(memq: Memq) -> None:
    memq("produce", "audited", stdin="a\nb\n")
    done = memq("audit", "audited", "--json")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["verdict"] == "clean"
    check_mistake(memq("audit", "nowhere"), 3, "nowhere")


def test_topics_and_groups(memq: Memq) -> None:
    done = memq("topic", "create", "life", "--partitions", "2", "--set", "batch_bytes_max=1MiB", "--json")
    made = json.loads(done.stdout)
    assert (len(made["partitions"]), made["settings"]["batch_bytes_max"]) == (2, 1 << 20)
    check_mistake(memq("topic", "create", "life"), 1, "life")
    assert memq("topic", "create", "life", "--exist-ok").returncode == 0
    assert "life" in [topic["name"] for topic in json.loads(memq("topic", "list", "--json").stdout)]
    check_mistake(memq("topic", "alter", "life", "--set", "batch_bytes=1"), 2, "did you mean 'batch_bytes_max'?")
    check_mistake(memq("topic", "alter", "life", "--set", "ring_slots=1"), 2, "ring_slots = 1")
    assert memq("topic", "alter", "life", "--set", "retention_ms=1h").returncode == 0
    described = json.loads(memq("topic", "describe", "life", "--json").stdout)
    assert described["settings"]["retention_ms"] == 3_600_000

    memq("produce", "life", stdin="1\n2\n3\n")
    memq("consume", "life", "-e", "-G", "living")
    assert "living" in json.loads(memq("group", "list", "--json").stdout)
    memq("produce", "life", stdin="4\n")
    assert sum(part["lag_records"] for part in json.loads(memq("lag", "living", "--json").stdout)[0]["partitions"]) == 1
    assert "living" in memq("lag").stdout
    before = memq("group", "describe", "living").stdout
    assert memq("group", "reset", "living", "life", "--to", "beginning", "--dry-run").returncode == 0
    assert memq("group", "describe", "living").stdout.split("lag")[0] == before.split("lag")[0]
    assert memq("group", "reset", "living", "life", "--to", "beginning").returncode == 0
    assert sorted(memq("consume", "life", "-e", "-G", "living").stdout.split()) == ["1", "2", "3", "4"]
    assert memq("group", "delete", "living", "--yes").returncode == 0
    check_mistake(memq("group", "describe", "living"), 3, "living")
    assert memq("topic", "delete", "life", "--yes").returncode == 0
    check_mistake(memq("topic", "describe", "life"), 3, "life")


def test_a_sweep_that_has_nothing_pending_says_so(memq: Memq, folder: Path) -> None:
    done = memq("sweep", "--pending", "--data", str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no object waits for a later pass\n"), done


def test_doctor_and_bench(memq: Memq) -> None:
    looked = json.loads(memq("doctor", "--json").stdout)
    checked = {"memq", "packages", "kernel", "settings", "data folder", "open files", "broker"}
    assert {one["what"] for one in looked} >= checked
    assert not [one for one in looked if one["state"] == "failed"]
    done = memq("doctor", broker="127.0.0.1:1")
    assert done.returncode == 1
    assert "failed" in done.stdout
    rates = json.loads(memq("bench", "-n", "2500", "-s", "100", "--json").stdout)
    assert (rates["records"], rates["consumed"]) == (2_500, 2_500)
    assert rates["kernel"] == next(one["text"] for one in looked if one["what"] == "kernel")
    assert rates["topic"] not in memq("topic", "list").stdout


def test_values_of_bench_compress_to_half_not_to_a_tenth(memq: Memq, folder: Path) -> None:
    """Values that repeat within a block made the figures for 100 B three times too high."""

    def stored() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    before = stored()
    done = memq("bench", "-n", "50000", "-s", "100", "--keep", "--json")
    assert stored() - before > 0.4 * 50_000 * 100, done
    assert memq("topic", "delete", json.loads(done.stdout)["topic"], "--yes").returncode == 0


def test_a_plan_without_changes_says_so(memq: Memq) -> None:
    done = memq("governor", "plan")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "the governor plans no moves\n")


def test_limits_of_clients_are_set_and_shown(tmp_path: Path) -> None:
    config = tmp_path / "memq.toml"
    config.write_text('[clients]\nloader = "hard 10MiB/s 500/s"\n')
    command = [sys.executable, "-m", "memq", "broker", "clients", "broker-1", "--json", "-b"]
    with dev_server(tmp_path / "data", "--config", str(config)) as server:
        shown = subprocess.run([*command, server.address], capture_output=True, text=True, check=True, timeout=60)
    assert [
        (each["client"], each["mode"], each["bytes_s"], each["requests_s"]) for each in json.loads(shown.stdout)
    ] == [
        ("default", "off", 0, 0),
        ("loader", "hard", 10 << 20, 500),
    ]


@pytest.mark.parametrize(
    ("options", "host"),
    [
        (
            ["--host", "0.0.0.0", "--insecure"],
            platform.node(),
        ),  # elsewhere 0.0.0.0 is the client
        (["--host", "0.0.0.0", "--insecure", "--advertise", "here:0"], "here"),
        (["--host", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_clients_of_a_cluster_get_an_address_that_they_can_use(tmp_path: Path, options: list[str], host: str) -> None:
    broker = AnyInterface(tmp_path, options)
    try:
        broker.launch()
        assert broker.wait_ready() == f"{host}:{broker.port}"
        with Admin(broker.address) as admin:
            assert [each.address for each in admin.brokers()] == [f"{host}:{broker.port}"]
        assert broker.stop() == 0
    finally:
        broker.close()


class AnyInterface(BrokerServer):
    """`memq broker` on files alone."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        super().__init__(folder / "log")
        parts = ["--store", f"file:{folder}/objects", "--queue", f"sqlite:{folder}/queue.sqlite"]
        self._options = [*parts, "--coordinator", f"standalone:{folder}/topics.sqlite", *options]

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return ["-m", "memq", "broker", "--http-port", "-1", "--port", str(self.port), *self._options]
