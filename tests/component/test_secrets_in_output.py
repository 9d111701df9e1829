"""A secret of the configuration appears in no output: commands, errors, tracebacks, log lines, `repr`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from memq.cli.output import JsonLines, TextLines
from memq.cli.run import run
from memq.errors import InvalidSettingError, MemqError
from memq.redaction import redacted
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.settings import load_settings, read_section
from memq.storage_handlers.s3.settings import S3Settings, read_bucket

CANARY = "canary7f3a"
PEM = f"-----BEGIN PRIVATE KEY-----\\n{CANARY}\\n-----END PRIVATE KEY-----"
FILE = f"""
store = "s3://bucket?endpoint=http://user:{CANARY}@127.0.0.1:1"
audit_state = "postgresql://user:{CANARY}@127.0.0.1:1/audit"
queue = "kafka://user:{CANARY}@127.0.0.1:1"
coordinator = "zookeeper://user:{CANARY}@127.0.0.1:1/memq"
[s3]
access_key_id = "KEYID"
secret_access_key = "{CANARY}"
session_token = "{CANARY}"
[kafka]
"ssl.key.pem" = "{PEM}"
"ssl.key.password" = "{CANARY}"
"sasl.password" = "{CANARY}"
[zookeeper]
sasl_password = "{CANARY}"
tls_key_password = "{CANARY}"
"""
COMMANDS = [
    ["config"],
    ["config", "--show-origin"],
    ["config", "--json"],
    ["config", "--json", "--show-origin"],
    ["broker", "--port", "0", "--http-port", "-1"],
    ["auditor"],
    ["restore"],
    ["sweep"],
    ["verify"],
    ["inspect", "memq/x"],
    ["doctor"],
]


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMQ_BROKERS", "127.0.0.1:1")
    monkeypatch.setenv("MEMQ_METADATA_TIMEOUT_MS", "200")
    (tmp_path / "memq.toml").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_shows_a_secret(
    command: list[str],
    debug: str,
    configured: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MEMQ_DEBUG", debug)
    run(command)
    output = capsys.readouterr()
    assert output.out + output.err
    assert CANARY not in output.out + output.err


def test_settings_do_not_show_secrets(configured: Path) -> None:
    settings = load_settings({}, {}, folder=configured)
    shown = [settings, settings.parts(), settings.auditor(), read_section("s3", settings.sections["s3"], S3Settings)]
    for each in shown:
        assert CANARY not in repr(each) + str(each)
        assert "***" in repr(each)


@pytest.mark.parametrize(
    "text",
    [
        f"can't reach http://user:{CANARY}@host:9000/path: refused",
        f"'s3://a-bucket-with-a-long-name/prefix?endpoint=http://user:{CANARY}' is no URL",
        f"https://{CANARY}@host",
        f"at s3://b?secret_access_key={CANARY}&region=x",
        f"key -----BEGIN RSA PRIVATE KEY-----\n{CANARY}\n-----END RSA PRIVATE KEY----- end",
        f"cut -----BEGIN PRIVATE KEY-----\n{CANARY}",
    ],
)
def test_a_text_is_shown_without_its_secret(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert CANARY in text
    assert CANARY not in redacted(text)
    error = MemqError(text, hint=text)
    assert CANARY not in f"{error!r} {error} {error.hint} {error.__notes__}"
    with caplog.at_level(logging.INFO, "memq"):
        EventLog(SystemClock()).info("test", text)
        try:
            raise ValueError(text)
        except ValueError as cause:
            EventLog(SystemClock()).error("test", text, cause)
    for record in caplog.records:
        assert CANARY not in TextLines().format(record) + JsonLines().format(record)


@pytest.mark.parametrize(
    "text",
    [
        "can't reach http://127.0.0.1:9000: refused",
        "queue kafka://one:9092,two:9092",
        "at zookeeper://one:2181/memq",
        "write http(s)://HOST:PORT",
        "at s3://bucket/prefix?endpoint=http://[::1]:9000&region=us-east-1",
        "store 'http://host:80'",
        "'kafka://a:b' does not name a Kafka",
    ],
)
def test_addresses_are_shown_as_they_are(text: str) -> None:
    assert redacted(text) == text


def test_a_refused_endpoint_does_not_show_its_password() -> None:
    with pytest.raises(InvalidSettingError) as found:
        read_bucket(f"s3://bucket?endpoint=http://user:{CANARY}{'x' * 200}@127.0.0.1:1", {})
    assert CANARY not in str(found.value)
