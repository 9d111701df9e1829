"""Names that users of Kafka write: the error has memq's word, which exists, wherever they write it."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.cli import main
from memq.errors import InvalidSettingError, UnknownSettingError
from memq.kafka_words import KAFKA_METHODS, KAFKA_WORDS, kafka_hint
from memq.settings import RULES, load_settings
from memq.topic import TopicSettings, parse_settings

HERE = "127.0.0.1:1"
ANY: Any = memq  # without the types that would say the same


def test_each_word_of_the_hints_is_one_of_memq() -> None:
    words = dict.fromkeys((*RULES, *TopicSettings.__struct_fields__, "timeout"))
    for client in (memq.Producer, memq.Consumer, memq.Admin.create_topic):
        words |= dict.fromkeys(inspect.signature(client).parameters)
    named = 0
    for hint in KAFKA_WORDS.values():
        for found in re.findall(r"memq's words? (?:is|are) (\w+)|(\w+_\w+)", hint):
            assert (found[0] or found[1]) in words, hint
            named += 1
    assert named > len(KAFKA_WORDS) / 2


def test_dots_dashes_and_capitals_do_not_matter() -> None:
    for name in ("bootstrap.servers", "--bootstrap-servers", "bootstrap_servers", "BOOTSTRAP_SERVERS"):
        assert "memq's word is brokers" in kafka_hint(name)
    assert kafka_hint("linger_ms") == "", "memq has the same word"


@pytest.mark.parametrize(
    ("call", "said", "hint"),
    [
        (lambda: ANY.Producer(bootstrap_servers=HERE), "Producer() has no argument 'bootstrap_servers'", "brokers"),
        (lambda: ANY.aio.Producer(HERE, ack="all"), "Producer() has no argument 'ack'", "word is acks: 0, 1 or all"),
        (lambda: ANY.Producer(HERE, key_serializer=str), "has no argument 'key_serializer'", "encode before send"),
        (lambda: ANY.Consumer(HERE, "t", group_id="g"), "Consumer() has no argument 'group_id'", "word is group"),
        (lambda: ANY.Consumer(HERE, "t", auto_offset_reset="earliest"), "'auto_offset_reset'", "word is start"),
        (lambda: ANY.Admin(bootstrap_servers=HERE), "Admin() has no argument 'bootstrap_servers'", "word is brokers"),
        (
            lambda: ANY.Admin.create_topic(None, "t", replication_factor=3),
            "create_topic() has no argument 'replication_factor'",
            "no replicas",
        ),
        (
            lambda: ANY.Admin.create_topic(None, "t", retention_ms=5),
            "create_topic() has no argument 'retention_ms'",
            "write settings={'retention_ms': …}",
        ),
        (
            lambda: ANY.aio.Admin.alter_topic(None, "t", batch_age_ms_max=5),
            "alter_topic() has no argument 'batch_age_ms_max'",
            "write settings={'batch_age_ms_max': …}",
        ),
        (lambda: ANY.Admin.alter_topic(None, "t", config={}), "alter_topic() has no argument 'config'", "settings"),
        (lambda: parse_settings({"cleanup.policy": "compact"}, TopicSettings()), "'cleanup.policy'", "retention_bytes"),
        (lambda: load_settings({}, {"MEMQ_BOOTSTRAP_SERVERS": HERE}), "MEMQ_BOOTSTRAP_SERVERS", "word is brokers"),
    ],
)
def test_a_name_of_kafka_gets_the_word_of_memq(call: Callable[[], object], said: str, hint: str) -> None:
    with pytest.raises(UnknownSettingError, match=re.escape(said)) as refused:
        call()
    assert hint in refused.value.hint


def test_a_mapping_of_settings_as_that_of_confluent_kafka_gets_a_hint_for_each_name() -> None:
    for client in (ANY.Producer, ANY.Consumer):
        with pytest.raises(InvalidSettingError, match="are arguments, not a mapping") as refused:
            client({"bootstrap.servers": HERE, "group.id": "g", "linger.ms": 5})
        assert "bootstrap.servers: memq's word is brokers" in refused.value.hint
        assert "group.id: memq's word is group" in refused.value.hint


def test_values_of_kafka_get_the_value_of_memq() -> None:
    for make in (lambda: ANY.Producer(HERE, acks=-1), lambda: load_settings({"acks": "-1"}, {})):
        with pytest.raises(InvalidSettingError, match="acks") as refused:
            make()
        assert refused.value.hint == "the -1 of Kafka is all"
    for name in ("retention_ms", "retention_bytes"):
        with pytest.raises(InvalidSettingError, match=f"{name} = -1 is outside 0 to") as refused:
            parse_settings({name: -1}, TopicSettings())
        assert refused.value.hint == "0 keeps all records"


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (["topic", "create", "t", "--replication-factor", "3"], "memq keeps no replicas"),
        (["topic", "create", "t", "--set", "cleanup.policy=compact"], "retention_ms and retention_bytes"),
        (["topic", "create", "t", "--set", "retention_ms=forever"], "or 0 to keep all records"),
        (["topic", "create", "t", "--config", "retention.ms=5"], "as --set KEY=VALUE"),
        (["topic", "create", "--topic", "t"], "write its name after the command"),
        (["topic", "alter", "t", "--partitions", "4"], "write_partitions_max"),
        (["topic", "create", "t", "--retention-ms", "7d"], "write it as --set retention_ms=VALUE"),
        (["topic", "alter", "t", "--batch-age-ms-max=5"], "write it as --set batch_age_ms_max=VALUE"),
        (["topic", "create", "t", "--retention-hours", "7"], "memq's word is retention_ms"),
        (["topic", "create", "t", "--partition", "7"], "did you mean '--partitions'?"),
        (["topic", "create", "t", "-p", "7"], "did you mean --partitions or --profile?"),
        (["topic", "--list"], "that is a command: memq topic list"),
        (["topic", "--all"], "see memq topic --help"),
        (["group", "--describe", "--group", "g"], "that is a command: memq group describe"),
        (["group", "--reset-offsets"], "that is a command: memq group reset"),
        (["topic", "list", "--bootstrap-server", HERE], "memq's word is brokers"),
        (["consume", "t", "--group-id", "g"], "did you mean '--group'?"),
        (["consume", "t", "--from-beginning"], "-o"),
        (["consume", "t", "--max-messages", "5"], "-c of memq consume"),
        (["consume", "t", "-g", "g"], "did you mean -G?"),
        (["consume", "t", "-x"], "see memq consume --help"),
        (["produce", "t", "--producer-property", "acks=all"], "each setting has an option of its own"),
        (["produce", "-t", "t"], "write its name after the command"),
        (["-L"], "memq topic list"),
        (["-P", "-t", "t"], "memq produce TOPIC"),
        (["--verbose"], "options follow the command"),
    ],
)
def test_options_of_kafka_and_kcat_get_those_of_memq(
    call: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(call) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_each_method_of_kafkas_clients_has_a_word_that_is_one_of_memq() -> None:
    clients = (memq.Producer, memq.Consumer, memq.Admin)
    words = dict.fromkeys(name for client in clients for name in (*dir(client), *inspect.signature(client).parameters))
    for name, hint in KAFKA_METHODS.items():
        assert not any(hasattr(client, name) for client in clients), name
        for word in re.findall(r"memq's words? (?:is|are) (?:\w+\.)?(\w+)", hint):
            assert word in words, hint


@pytest.mark.parametrize(
    ("client", "method", "hint"),
    [
        (lambda: memq.Consumer(HERE, "t"), "getone", "hint: memq's word is poll"),
        (lambda: memq.Consumer(HERE, "t"), "subscribe", "hint: memq's word is topics"),
        (lambda: memq.Admin(HERE), "list_topics", "hint: memq's word is topics"),
    ],
)
def test_a_method_of_kafkas_clients_gets_the_word_of_memq(client: Callable[[], Any], method: str, hint: str) -> None:
    with client() if method == "list_topics" else contextlib.closing(client()) as opened:
        with pytest.raises(AttributeError, match=f"has no attribute '{method}'") as refused:
            getattr(opened, method)
        assert [note for note in refused.value.__notes__ if note.startswith(hint)]
        with pytest.raises(AttributeError, match="has no attribute 'sned'") as refused:
            _ = opened.sned
        assert not hasattr(refused.value, "__notes__"), "Python itself may suggest a near name"


def test_a_wrong_argument_of_send_names_the_producer() -> None:
    with contextlib.closing(ANY.Producer(HERE)) as producer, pytest.raises(TypeError, match="on_delivery") as refused:
        producer.send("t", b"v", on_delivery=print)
    assert "PythonSender" not in str(refused.value)
