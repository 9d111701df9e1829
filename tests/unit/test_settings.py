"""Settings: layers, units, origins, refusals."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import InvalidNameError, InvalidSettingError, MemqError, UnknownSettingError
from memq.settings import (
    DEFAULTS,
    RULES,
    BrokerSettings,
    ClientSettings,
    config_folder,
    load_settings,
    parse_size,
    parse_time_ms,
    parse_value,
    read_section,
    section_setting,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "memq.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty working folder; the user's own configuration lies in another one."""
    made = tmp_path / "work"
    made.mkdir()
    return made


def env(folder: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(folder.parent / "home"), **{f"MEMQ_{name}": value for name, value in variables.items()}}


def test_defaults_are_those_of_the_dataclasses(folder: Path) -> None:
    settings = load_settings({}, env(folder), folder=folder)
    assert settings.broker() == BrokerSettings()
    assert settings.client() == ClientSettings()
    assert set(settings.origins.values()) == {"default"}


def test_every_default_is_within_its_own_rule() -> None:
    for name, value in DEFAULTS.items():
        assert parse_value(name, value) == value


def test_no_name_means_two_things() -> None:
    assert not {part.name for part in fields(BrokerSettings)} & {part.name for part in fields(ClientSettings)}


def test_every_setting_says_what_it_is() -> None:
    assert all(len(rule.doc) > 10 for rule in RULES.values())


def test_layers_win_in_order(folder: Path) -> None:
    path = write(folder, 'port = 1\nhost = "file"\ncluster = "file"\nlog_level = "debug"\n[profile.x]\nhost = "p"\n')
    settings = load_settings({"port": 4, "data": None}, env(folder, HOST="env", PROFILE="x", PORT="3"), folder=folder)
    broker = settings.broker()
    assert (broker.port, broker.host, broker.cluster, broker.log_level) == (4, "env", "file", "debug")
    assert settings.origins["port"] == "--port"
    assert settings.origins["host"] == "MEMQ_HOST"
    assert settings.origins["cluster"] == str(path)
    assert settings.origins["data"] == "default"


def test_a_profile_wins_over_plain_keys(folder: Path) -> None:
    path = write(folder, 'brokers = "a:1"\ncodec = "lz4"\n[profile.prod]\nbrokers = "b:2"\n')
    plain = load_settings({}, env(folder), folder=folder)
    chosen = load_settings({}, env(folder), folder=folder, profile="prod")
    assert plain.client().brokers == "a:1"
    assert (chosen.client().brokers, chosen.client().codec) == ("b:2", "lz4")
    assert chosen.origins["brokers"] == f"{path} [profile.prod]"


def test_the_first_file_that_exists_is_the_only_one(folder: Path) -> None:
    home = config_folder(env(folder))
    home.mkdir(parents=True)
    write(home, "port = 1\nhttp_port = 1\n")
    assert load_settings({}, env(folder), folder=folder).broker().port == 1
    write(folder, "port = 2\n")
    assert load_settings({}, env(folder), folder=folder).broker().http_port == BrokerSettings().http_port
    named = folder / "named.toml"
    named.write_text("port = 3\n")
    assert load_settings({}, env(folder), folder=folder, config=named).broker().port == 3
    assert load_settings({}, env(folder, CONFIG=str(named)), folder=folder).broker().port == 3


@pytest.mark.parametrize(
    ("text", "hint"),
    [("prot = 1", "did you mean 'port'?"), ("[profile.a]\nmemory_byte_max = 1", "did you mean 'memory_bytes_max'?")],
)
def test_an_unknown_key_is_refused_with_the_nearest(folder: Path, text: str, hint: str) -> None:
    write(folder, text)
    with pytest.raises(UnknownSettingError) as caught:
        load_settings({}, env(folder), folder=folder)
    assert caught.value.hint == hint
    assert "memq.toml" in str(caught.value)


def test_an_unknown_variable_is_refused(folder: Path) -> None:
    with pytest.raises(UnknownSettingError, match="MEMQ_PROT") as caught:
        load_settings({}, env(folder, PROT="1"), folder=folder)
    assert "MEMQ_PORT" in caught.value.hint


@pytest.mark.parametrize("service", ["", "BROKER_", "DASHBOARD_", "KAFKA_", "A_1_"])
def test_service_variables_of_kubernetes_are_ignored(folder: Path, service: str) -> None:
    links = {"PORT": "tcp://10.0.0.1:9876", "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "9876"}
    links |= {"SERVICE_PORT_HTTP": "9877", "PORT_9876_TCP_ADDR": "10.0.0.1", "PORT_9876_TCP_PORT": "9876"}
    settings = load_settings({}, env(folder, **{service + name: links[name] for name in links}), folder=folder)
    assert settings.broker() == BrokerSettings()
    assert not settings.sections


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = [", "not TOML"),
        ("port = 70000", "65535"),
        ("port = true", "'True'"),
        ('memory_bytes_max = "64 parsecs"', "64 parsecs"),
        ('acks = "2"', "0, 1, all"),
        ('auto_create_topics = "maybe"', "maybe"),
        ("profile = 3", "not a table"),
        ("host = {a = 1}", "is no text"),
        ("zone = 1.5", "is no text"),
        ('advertise = "here:99999"', "is no HOST:PORT"),
        ('data = ""', "is empty"),
        ('host = ""', "is empty"),
    ],
)
def test_bad_values_are_refused(folder: Path, text: str, said: str) -> None:
    write(folder, text)
    with pytest.raises(InvalidSettingError, match=said):
        load_settings({}, env(folder), folder=folder)


def test_names_keep_their_grammar() -> None:
    with pytest.raises(InvalidNameError):
        parse_value("cluster", "../x")


def test_files_and_profiles_that_are_not_there(folder: Path) -> None:
    with pytest.raises(InvalidSettingError, match=r"missing\.toml"):
        load_settings({}, env(folder), config=folder / "missing.toml")
    with pytest.raises(InvalidSettingError, match="profile 'x'"):
        load_settings({}, env(folder), folder=folder, profile="x")
    write(folder, "[profile.prod]\n")
    with pytest.raises(InvalidSettingError, match="profile 'prd'") as caught:
        load_settings({}, env(folder), folder=folder, profile="prd")
    assert caught.value.hint == "did you mean 'prod'?"
    write(folder, "port = 1\n")
    with pytest.raises(InvalidSettingError, match="profile 'prod'") as caught:
        load_settings({}, env(folder), folder=folder, profile="prod")
    assert caught.value.hint == "it has none: write a table [profile.prod]"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        ("2kib", 2048),
        ("0.3B", None),
        ("x", None),
        ("1e9", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "time_ms"), [("5s", 5_000), ("1.5h", 5_400_000), ("250ms", 250), ("2 d", 172_800_000), ("5", None)]
)
def test_times(text: str, time_ms: int | None) -> None:
    assert parse_time_ms(text) == time_ms


def test_the_unit_is_in_the_name() -> None:
    assert parse_value("linger_ms", "2s") == 2_000
    assert parse_value("memory_bytes_max", "1GiB") == 1 << 30
    with pytest.raises(InvalidSettingError):
        parse_value("partitions", "1KiB")


@given(st.sampled_from(sorted(RULES)), st.text(max_size=30))
def test_any_text_is_a_value_or_an_error_of_memq(name: str, text: str) -> None:
    try:
        value = parse_value(name, text)
    except MemqError:
        return
    assert type(value) is type(DEFAULTS[name])


def test_configuration_folders() -> None:
    assert config_folder({"HOME": "/h"}, "linux") == Path("/h/.config/memq")
    assert config_folder({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "linux") == Path("/x/memq")
    assert config_folder({"HOME": "/h"}, "darwin") == Path("/h/Library/Application Support/memq")
    assert config_folder({"USERPROFILE": "/u", "APPDATA": "/a"}, "win32") == Path("/a/memq")


def test_an_account_without_a_home_has_the_defaults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id that has no account
    assert config_folder({}, "linux") == Path("/.config/memq")
    assert config_folder({"XDG_CONFIG_HOME": "/x"}, "linux") == Path("/x/memq")
    assert load_settings({}, {}, folder=folder).broker() == BrokerSettings()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The settings of a part of a cluster."""

    timeout_ms: int = section_setting(1_000, "how long it waits", 1)
    name: str = section_setting("x", "what it is called")


def test_a_section_is_handed_on_layer_by_layer_and_read_by_its_own_table(folder: Path) -> None:
    write(
        folder,
        """
        store = "s3://bucket/prefix"
        [zookeeper]
        timeout_ms = "2s"
        name = "plain"
        [kafka]
        "sasl.username" = "me"
        [profile.west.zookeeper]
        name = "west"
        """,
    )
    parts = load_settings({}, env(folder, ZOOKEEPER_TIMEOUT_MS="3s"), profile="west", folder=folder).parts()
    assert parts.store == "s3://bucket/prefix"
    assert parts.section("s3") == {}
    assert parts.section("kafka")["sasl.username"][0] == "me"
    assert read_section("zookeeper", parts.section("zookeeper"), Part) == Part(timeout_ms=3_000, name="west")
    assert parts.section("zookeeper")["timeout_ms"][1] == "MEMQ_ZOOKEEPER_TIMEOUT_MS"


def test_a_section_refuses_what_it_does_not_know_and_must_be_a_table(folder: Path) -> None:
    write(folder, "[zookeeper]\ntimeuot_ms = 1")
    parts = load_settings({}, env(folder), folder=folder).parts()
    with pytest.raises(UnknownSettingError, match=r"'timeuot_ms' in \[zookeeper\]") as caught:
        read_section("zookeeper", parts.section("zookeeper"), Part)
    assert caught.value.hint == "did you mean 'timeout_ms'?"
    for misspelt, meant in (("TSL_CERT_FILE", "TLS_CERT_FILE"), ("KAFAK_PREFIX", "KAFKA_PREFIX"), ("PROT", "PORT")):
        with pytest.raises(UnknownSettingError, match=f"unknown variable MEMQ_{misspelt}") as caught:
            load_settings({}, env(folder, **{misspelt: "x"}), folder=folder)
        assert caught.value.hint == f"did you mean MEMQ_{meant}?"
    write(folder, "zookeeper = 1")
    with pytest.raises(InvalidSettingError, match="is not a table"):
        load_settings({}, env(folder), folder=folder)
