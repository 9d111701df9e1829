"""The command line's frame: help without click, one line per mistake, exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import memq
from memq.cli import main
from memq.cli.commands import COMMANDS, PIPE_CLOSED, help_text
from memq.cli.output import count_text, one_line, print_pairs, print_table, size_text, time_text
from memq.cli.run import EXIT_CODES, exit_code_of, program, run
from memq.errors import (
    AuditStateError,
    CorruptDataError,
    DeniedError,
    InvalidSettingError,
    NotFoundError,
    QueueError,
    StoreError,
    TimedOutError,
    UnreachableError,
)
from memq.testing import Cluster


def said(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


def without_notice(err: str) -> str:
    """Return stderr without the line of a command that looks for a broker for over a second."""
    first, _, rest = err.partition("\n")
    return rest if first.startswith("memq: no broker answers yet; trying ") else err


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test where no settings file lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def test_every_command_of_the_table_is_there() -> None:
    for name, (module, attribute, text) in COMMANDS.items():
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), name
        assert command.name == name
        assert command.help, name
        assert text in help_text()


def test_every_option_says_what_it_does() -> None:
    context = click.Context(program)
    for name in COMMANDS:
        command = program.get_command(context, name)
        assert command is not None
        commands = [command, *getattr(command, "commands", {}).values()]
        for one in commands:
            silent = [part.name for part in one.params if isinstance(part, click.Option) and not part.help]
            assert not silent, f"memq {name}: options without help: {silent}"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "produce" in said(capsys)[0]
    assert main(["--version"]) == 0
    assert said(capsys)[0].startswith("memq ")
    assert main(["-V"]) == 0, "as in kcat"
    assert said(capsys)[0].startswith("memq ")


def test_help_does_not_import_what_it_does_not_need() -> None:
    script = "import sys; from memq.cli import main; main(['--help']); print(*sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    loaded = shown.splitlines()[-1].split()
    assert not {"click", "asyncio", "msgspec", "uvloop", "awscrt", "zstandard", "dataclasses", "inspect"} & set(loaded)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config"]])
def test_a_reader_that_has_gone_is_no_fault(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "memq", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, "")


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = said(capsys)
    assert out == ""
    assert "Usage: memq" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["confg"], 2, ["no command 'confg' (did you mean 'config'?)\n"]),
        (["xyz"], 2, ["no command 'xyz' (known are dev, ", ", config, completion)\n"]),
        (["config", "all"], 2, ["got unexpected extra argument (all) (see memq config --help)\n"]),
        (["config", "--jsn"], 2, ["'--jsn' (did you mean '--json'?)"]),
        (["config", "--xyz"], 2, ["'--xyz' (see memq config --help)"]),
        (["-b", "127.0.0.1:9876", "topic", "list"], 2, ["'-b' (options follow the command: memq COMMAND -b …)"]),
        (
            ["topic", "create", "t", "--partitions", "two"],
            2,
            ["'--partitions': 'two' is not a whole number (see memq t"],
        ),
        (
            ["verify", "nosuch", "-b", "127.0.0.1:1"],
            5,
            ["127.0.0.1:1", "(no file or folder 'nosuch' is here"],
        ),
        (["topic", "descibe"], 2, ["'descibe' (did you mean 'describe'?)"]),
        (["produce", "a/b/c"], 2, ["topic name 'a/b/c'"]),
        (["consume", "clicks", "-o", "bananas"], 2, ["bad start 'bananas'"]),
        (["consume", "clicks", "-o", "@soon"], 2, ["bad time '@soon' (write"]),
        (["consume", "clicks", "--tags", "A | B"], 2, ["tags has a single '|' at character 3"]),
        (["consume", "clicks", "--where", "a >"], 2, ["where can't be read at its end; expected is"]),
        (["topic", "count", "clicks", "0:1:0", "1:9:0"], 2, ["0:1:0 and 1:9:0 are not two positions of one partition"]),
        (["topic", "count", "clicks", "0:9:0", "0:1:0"], 2, ["the lower one first"]),
        (["consume", "clicks", "-f", "%q"], 2, ["unknown letter '%q'"]),
        (["consume", "clicks", "-b", "http://127.0.0.1:9876"], 2, ["bad address 'http://127.0.0.1:9876'"]),
        (["consume", "clicks", "-b", "127.0.0.1:port"], 2, ["bad port 'port'"]),
        (["consume", "clicks", "-b", "here:1 there:1"], 2, ["bad address 'here:1 there:1'", "commas between them"]),
        (["consume", "clicks", "-b", "127.0.0.1:9876", "--prefetch-bytes-max", "1"], 2, ["--prefetch-bytes-max"]),
        (["dev", "--port", "99999"], 2, ["from --port is not within 0 to 65535"]),
        (["dev", "--port", "x"], 2, ["can't be read (write it as a whole number)"]),
        (["dev", "--advertise", "here"], 2, ["'here' from --advertise is no HOST:PORT"]),
        (["dev", "--log-level", "loud"], 2, ["is not one of debug, info, warning, error (choose"]),
        (["config", "--config", "missing.toml"], 2, ["missing.toml", "--config"]),
        (["config", "--profile", "x"], 2, ["profile 'x'"]),
        (["inspect", "missing"], 3, ["no file or folder 'missing'"]),
        (["inspect", "gs://bucket/key"], 1, ["no store for 'gs'"]),
        (["inspect", "s3://bucket/key?endpont=http://x"], 2, ["'endpont'", "did you mean 'endpoint'?"]),
        (["inspect", "."], 3, ["no file is below '.'"]),
        (["verify"], 2, ["URI"]),
        (
            ["import", "kafka", "t", "--into", "t", "--from", "not there"],
            2,
            ["'kafka://not there' does not name a Kafka"],
        ),
        (["import", "kafka", "t", "--into", "t", "--from", "kafka://a:x"], 2, ["'kafka://a:x' does not name a Kafka"]),
    ],
)
def test_a_mistake_gets_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: list[str]
) -> None:
    assert run(arguments) == code
    out, err = said(capsys)
    err = without_notice(err)
    assert out == ""
    assert err.startswith("memq: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_a_fault_of_memq_is_one_line_and_a_traceback_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(program, "get_command", lambda context, name: click.Command(name, callback=fail))
    assert run(["config"]) == 1
    err = said(capsys)[1]
    assert err.count("\n") == 1
    assert r"ZeroDivisionError: division\nby zero" in err
    monkeypatch.setenv("MEMQ_DEBUG", "1")
    assert run(["config"]) == 1
    assert "Traceback" in said(capsys)[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("x"), 3),
        (DeniedError("x"), 4),
        (UnreachableError("x"), 5),
        (StoreError("x"), 5),
        (QueueError("x"), 5),
        (AuditStateError("x"), 5),
        (TimedOutError("x"), 6),
        (TimeoutError("x"), 6),
        (ConnectionRefusedError(), 5),
        (InvalidSettingError("x"), 2),
        (CorruptDataError("x"), 1),
        (PermissionError(13, "denied", "f"), 4),
        (RuntimeError("x"), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_no_exit_code_is_hidden_by_a_wider_class() -> None:
    for at, (kind, code) in enumerate(EXIT_CODES):
        assert next(found for wide, found in EXIT_CODES if issubclass(kind, wide)) == code, f"{kind} at {at}"


@pytest.mark.parametrize("name", ["doctor", "config", "dev"])
@pytest.mark.parametrize(
    ("text", "fault", "hint"),
    [
        (
            '[s3]\nendpiont = "http://h"',
            "unknown setting 'endpiont' in [s3] from",
            "did you mean 'endpoint'?",
        ),
        ('[kafka]\nprefxi = "p."', "unknown setting 'prefxi' in [kafka] from memq.toml", "did you mean 'prefix'?"),
        ('[kafka]\nacks = "1"', "setting 'acks' in [kafka] from memq.toml can't be set", ""),
        ('[source]\nprefxi = "p."', "unknown setting 'prefxi' in [source] from memq.toml", "did you mean 'prefix'?"),
        (
            "[zookeeper]\nsesion_timeout_ms = 5",
            "unknown setting 'sesion_timeout_ms' in",
            "session_timeout_ms",
        ),
        (
            '[clients]\ndefault = "fast"',
            "[clients] = 'fast' begins with no mode",
            "soft 10MiB/s",
        ),
        ('[kafak]\nprefix = "p."', "unknown section [kafak] in memq.toml", "did you mean '[kafka]'?"),
        (
            "[broker]\nport = 1",
            "unknown section [broker] in memq.toml",
            "settings of brokers and clients have no section",
        ),
        ("[orders]\nx = 1", "unknown section [orders] in memq.toml", "known are [s3], [kafka], [zookeeper]"),
    ],
)
def test_a_mistake_in_a_section_is_named_before_anything_starts(
    name: str, text: str, fault: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("memq.toml").write_text(text)
    options = {"doctor": ["-b", "127.0.0.1:1"], "dev": ["--data", "memq.toml"], "config": []}  # where dev can't start
    assert run([name, *options[name]]) == (1 if name == "doctor" else 2)
    output = "".join(said(capsys))
    assert fault in output
    assert hint in output
    assert not Path("memq-data").exists()


def test_doctor_names_the_file_of_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    Path("memq.toml").write_text('\ufeff[s3]\nregion = "eu-1"', encoding="utf-8")  # with the mark that Notepad writes
    run(["doctor", "-b", "127.0.0.1:1"])
    assert "settings: from --brokers, memq.toml\n" in said(capsys)[0]


def test_a_full_limit_on_open_files_is_named() -> None:
    script = 'ulimit -n 11; exec "$0" -m memq topic list -b 127.0.0.1:1'
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, check=False, timeout=60)
    assert "Too many open files" in done.stderr
    assert "(ulimit -n)" in done.stderr
    assert (done.returncode, without_notice(done.stderr).count("\n")) == (5, 1)


def test_a_line_that_is_too_large_is_named_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [b"x" * 1000] * 3000  # more than one chunk of the input
    lines[2500] = b"y" * 1_100_000
    Path("lines").write_bytes(b"\n".join(lines))
    with Cluster() as cluster:
        assert run(["produce", "clicks", "lines", "-b", cluster.address]) == 1
    err = said(capsys)[1]
    assert "record 2501 of the input: record of 1100000 bytes is over record_bytes_max = 1048576 of 'clicks'" in err
    assert "2,500 records before it acked" in err
    assert "memq topic alter clicks --set record_bytes_max=SIZE" in err


def test_a_producer_says_that_delayed_records_are_held_also_without_acks(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lines").write_bytes(b"a\nb\n")
    with Cluster() as cluster:
        ask = ["produce", "clicks", "lines", "--deliver-after", "1h", "--acks", "0", "-b", cluster.address]
        assert run(ask) == 0
    assert "2 records, 2 B: 2 held until they are due" in said(capsys)[1]


@pytest.mark.parametrize("options", [[], ["-K", ":"], ["-p", "0"], ["-H", "a=b"]])
def test_the_first_of_several_lines_that_are_too_large_is_named(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest line was named, with the size of the first one."""
    Path("lines").write_bytes(b"\n".join([b"k:a", b"k:" + b"x" * 1500, b"k:" + b"y" * 2000, b"k:b"]))
    with Cluster() as cluster, memq.Admin(cluster.address) as admin:
        admin.create_topic("clicks", settings={"record_bytes_max": 1000})
        assert run(["produce", "clicks", "lines", "-b", cluster.address, *options]) == 1
        err = said(capsys)[1]
        assert "record 2 of the input: record of 150" in err
        assert "1 record before it acked" in err
        assert len(cluster.records("clicks")) == 1


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ('{"value":"' + "x" * 1_100_000 + '"}', "record of 1100000 bytes is over record_bytes_max = 1048576"),
        ('{"value":"x","timestamp_ms":1e3}', "field 'timestamp_ms' is 1000.0, not whole milliseconds"),
        ('{"value":"x","timestamp_ms":9007199254740993}', "timestamp 9007199254740993 ms is outside -2^53 to 2^53"),
        ('{"value":"x","headers":[["' + "n" * 65_536 + '","x"]]}', "name has 65536 bytes, 65535 are allowed"),
    ],
    ids=["size", "field", "time", "header"],
)
def test_a_line_of_json_that_is_no_record_is_named_by_its_number(
    record: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lines").write_text(f'{{"value":"a"}}\n\n{record}\n{{"value":"c"}}\n')
    with Cluster() as cluster:
        assert run(["produce", "clicks", "lines", "--input", "json", "-b", cluster.address]) == 1
    assert f"memq: error: record 2 of the input: {fault}" in said(capsys)[1]


def test_a_closed_pipe_ends_quietly() -> None:
    script = "import sys; from memq.cli import main; sys.exit(main(['config', '--show-origin']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


@pytest.mark.parametrize(
    "module", ["memq.runtime.process", "memq.cli.run", "memq.cli.output", "memq.cli.cluster.doctor"]
)
def test_an_interrupt_while_the_command_line_is_imported_is_quiet(module: str) -> None:
    script = """
import sys
from memq.cli import main
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[2]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.exit(main())
"""
    command = [sys.executable, "-c", script, "config", module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


FULL = "make room on the disk that the output goes to, and run the command again"


def test_records_are_not_consumed_into_a_closed_stdout() -> None:
    """It printed nothing, committed all, and ended with code 0."""
    command = ["sh", "-c", 'exec "$0" -m memq consume t -b 127.0.0.1:1 -G g -e >&-', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "stdout is closed" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [("/", 2, "name a file, not a folder"), ("/no/such/file", 3, "check the path")],
)
def test_an_input_that_can_not_be_opened_has_a_hint(
    file: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster() as cluster:
        assert run(["produce", "t", file, "-b", cluster.address]) == code
    assert f"({said})" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["lines", "json"])
def test_an_empty_key_of_all_records_is_null_when_asked(form: str, tmp_path: Path) -> None:
    """With -k '' -Z the key was empty."""
    (tmp_path / "in").write_text('{"value": "v"}\n')
    with Cluster() as cluster:
        for flags in ([], ["-Z"]):
            ask = ["produce", "t", str(tmp_path / "in"), "-b", cluster.address, "--input", form, "-k", "", *flags]
            assert run(ask) == 0
        assert sorted(record.key is None for record in cluster.records("t")) == [False, True]


@pytest.mark.parametrize("arguments", [["--help"], ["config"]])
@pytest.mark.parametrize(
    ("where", "code", "said"),
    [("<&- >&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 1, f"memq: error: no space left on device ({FULL})\n")],
)
def test_streams_that_are_closed_or_full(arguments: list[str], where: str, code: int, said: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m memq "$@" {where}', sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["trace", "t"], 2),
        (["trace", "t", "0:0"], 2),
        (["trace", "t", "--producer", "f" * 17, "--seq", "1"], 2),
        (["trace", "t", "--producer", "1", "--seq", "-1"], 2),
        (["consume", "t", "-o", f"0:{'9' * 20}:0"], 2),
        (["consume", "t", "-b", ""], 2),
        (["consume", "t", "-b", "host:\u00b2"], 2),
        (["consume", "t", "-b", "a..b"], 5),
        (["lag", "--serve", "host:99999"], 2),
        (["auditor", "metrics", "--serve", "host:99999"], 2),
        (["inspect", ""], 3),
        (["auditor", "show", "--audit-state", "sqlite:nowhere.sqlite"], 3),
        (["auditor", "show", "--audit-state", "sqlite:."], 1),
        (["dev", "--data", ""], 2),
        (["sweep", "--data", "nowhere"], 3),
        (["sweep", "--data", "nowhere", "--pending"], 3),
        (["sweep", "--data", "."], 1),
        (["restore", "--data", "nowhere"], 3),
        (["restore", "--data", "."], 1),
        (["inspect", "./nowhere"], 3),
        (["verify", "./nowhere"], 3),
        (["verify", "/dev/zero"], 1),
    ],
)
def test_mistakes_of_one_word_are_one_line(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == code
    out, err = said(capsys)
    assert "internal error" not in err
    assert "Traceback" not in err
    assert (out, without_notice(err).count("\n")) == ("", 1) or arguments[0] == "verify", "damage is data"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "no record is named"),
        (["0:0:0", "-k", "user"], "the record is named twice"),
        (["0:0:0", "--producer", "1", "--seq", "1"], "the record is named twice"),
        (["--seq", "1"], "--producer and --seq name a record together"),
    ],
)
def test_trace_says_how_a_record_is_named(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "t", *arguments]) == 2
    assert said(capsys)[1] == f"memq: error: {fault} (give its position, --key, or --producer and --seq)\n"


def test_an_interrupted_import_says_how_far_it_came() -> None:
    command = [sys.executable, "-m", "memq", "import", "kafka", "t", "--into", "t", "--from", "127.0.0.1:1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "asking Kafka" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "interrupted: 0 records read; the next run continues\n"
        assert process.wait() == 130


def test_config_shows_origins(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMQ_PORT", "1234")
    assert run(["config", "--show-origin"]) == 0
    line = next(line for line in said(capsys)[0].splitlines() if line.startswith("port "))
    assert line.split() == ["port", "1234", "MEMQ_PORT"]
    assert run(["config", "--json", "--show-origin"]) == 0
    assert '"port":{"value":1234,"origin":"MEMQ_PORT"}' in said(capsys)[0]


def test_tables_and_texts(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "count"), [("a\nb", 1_000), ("c", 2)])
    assert said(capsys)[0] == "name  count\na\\nb  1,000\nc         2\n"
    print_table(("name", "count"), [])
    assert said(capsys)[0] == "name  count\n"
    print_pairs([("a", None), ("bcd", True)])
    assert said(capsys)[0] == "a    -\nbcd  true\n"
    assert one_line("a\x1b[1m\n") == r"a\x1b[1m\n"
    assert [size_text(count) for count in (0, 1023, 1 << 20, 5 << 40)] == ["0 B", "1023 B", "1.0 MiB", "5.0 TiB"]
    assert [count_text(1, "block"), count_text(2_000, "block")] == ["1 block", "2,000 blocks"]
    assert time_text(1_738_310_400_123) == "2025-01-31T08:00:00.123Z"
    assert [time_text(None), time_text(1 << 62)] == ["-", str(1 << 62)]
