"""The launcher: each real server works and survives kill -9, and the command reports it correctly."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.client import KazooClient

import memq
from memq.governor.zookeeper.settings import ZookeeperSettings, parse_url
from memq.notification.kafka.settings import kafka_settings
from memq.settings import load_settings, read_section
from memq.storage_handlers.s3.settings import read_bucket
from memq_localstack.launch import NotReadyError
from memq_localstack.ports import free_ports
from memq_localstack.servers import (
    ADMIN,
    Identity,
    LocalstackError,
    S3Server,
    Server,
    start_kafka,
    start_s3,
    start_zookeeper,
)

TIMEOUT_S = 120
READER = Identity("reader", "reader", "reader-secret", rights=("Read:memq", "List:memq"))
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def s3_client(server: S3Server, identity: Identity = ADMIN) -> boto3.client:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=identity.access_key,
        aws_secret_access_key=identity.secret_key,
    )


def test_s3_keeps_objects_and_rights(tmp_path: Path) -> None:
    with start_s3(tmp_path / "s3", identities=(ADMIN, READER)) as server:
        s3_client(server).put_object(Bucket="memq", Key="a/b", Body=b"kept")
        address, first = server.address, server.pid
        server.kill()
        assert not server.running
        server.restart()
        assert (server.address, server.running) == (address, True)
        assert server.pid != first
        reader = s3_client(server, READER)
        assert reader.get_object(Bucket="memq", Key="a/b")["Body"].read() == b"kept"
        with pytest.raises(ClientError, match="AccessDenied"):
            reader.delete_object(Bucket="memq", Key="a/b")
        for client in (reader._endpoint, s3_client(server)._endpoint):
            client.close()
    assert not server.running


def test_zookeeper_keeps_nodes(tmp_path: Path) -> None:
    with start_zookeeper(tmp_path / "zookeeper") as server:
        client = KazooClient(server.address)
        client.start()
        client.create("/kept", b"1")
        client.stop()
        server.kill()
        server.restart()
        client.start()
        assert client.get("/kept")[0] == b"1"
        client.stop()
        client.close()


def test_kafka_keeps_records(tmp_path: Path) -> None:
    with start_kafka(tmp_path / "kafka", settings={"message.max.bytes": "200000"}) as server:
        admin = AdminClient({"bootstrap.servers": server.address})
        for made in admin.create_topics([NewTopic("kept", 1, 1)]).values():
            made.result(TIMEOUT_S)
        producer = Producer({"bootstrap.servers": server.address, "acks": "all"})
        producer.produce("kept", b"1")
        assert producer.flush(TIMEOUT_S) == 0
        server.kill()
        server.restart()
        consumer = Consumer({"bootstrap.servers": server.address, "group.id": "g"})
        assert consumer.get_watermark_offsets(TopicPartition("kept", 0), timeout=TIMEOUT_S) == (0, 1)
        consumer.close()


def test_a_paused_server_is_silent_until_it_is_resumed(tmp_path: Path) -> None:
    with start_zookeeper(tmp_path) as server:
        host, port = server.address.split(":")
        server.pause()
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(b"ruok")
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(4)
            server.resume()
            connection.settimeout(TIMEOUT_S)
            assert connection.recv(4) == b"imok"
        server.pause()
    assert not server.running, "also a paused one is stopped"


def test_a_server_that_does_not_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"(?s)zookeeper at 127\.0\.0\.1:\d+ ended.*zoo\.cfg.*\"soon\""):
        start_zookeeper(tmp_path / "zookeeper", settings={"tickTime": "soon"})
    with pytest.raises(NotReadyError, match=r"(?s)kafka at 127\.0\.0\.1:\d+ ended.*Invalid value many for .*log\.ret"):
        start_kafka(tmp_path / "kafka", settings={"log.retention.bytes": "many"})


def test_a_chosen_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as other:
        port = other.getsockname()[1]
        with pytest.raises(NotReadyError, match=rf"(?s){port} ended.*already in use"):
            start_zookeeper(tmp_path, port)


def test_drawn_ports_are_drawn_again_when_another_was_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as other:
        taken, free = other.getsockname()[1], free_ports(1)[0]
        draws = iter([[taken], [free]])
        monkeypatch.setattr("memq_localstack.servers.free_ports", lambda _count: next(draws))
        with start_zookeeper(tmp_path) as server:
            assert server.address == f"127.0.0.1:{free}"


def test_two_servers_never_share_a_folder(tmp_path: Path) -> None:
    with start_zookeeper(tmp_path) as server:
        with pytest.raises(LocalstackError, match=f"runs on .* already, at {server.address}"):
            start_zookeeper(tmp_path)
        found = Server.load(tmp_path)
        assert found is not None
        assert (found.pid, found.running) == (server.pid, True)


@pytest.fixture
def localstack(tmp_path: Path) -> Command:
    """Return a function that runs `memq-localstack ARGUMENTS…` where neither Java nor any other program is on PATH."""
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memq_localstack", "--data", str(tmp_path / "state"), *arguments]
        return subprocess.run(
            command,
            cwd=Path(__file__).parents[2],
            env={**environment, "PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return run


def test_up_status_down_by_what_pip_brings(localstack: Command, tmp_path: Path) -> None:
    try:
        check_commands(localstack, tmp_path / "state")
    finally:
        done = localstack("down", "--purge")
    assert done.returncode == 0, done
    assert not (tmp_path / "state" / "kafka").exists()


def check_commands(localstack: Command, state: Path) -> None:
    names = ["s3", "zookeeper", "kafka", "broker-1", "broker-2"]
    done = localstack("up", "--brokers", "2")
    assert done.returncode == 0, done
    assert [line.split()[:2] for line in done.stdout.splitlines()[:5]] == [[name, "runs"] for name in names]
    assert done.stdout.count("ready after") == 5
    facts = json.loads(localstack("status", "--json").stdout)
    assert list(facts) == names
    check_settings(state, facts)
    check_brokers(facts)
    again = localstack("up", "--brokers", "2")
    assert again.stdout.count("runs already") == 5, again
    assert json.loads(localstack("status", "--json").stdout) == facts

    for name in ("zookeeper", "broker-2"):
        os.kill(facts[name]["pid"], signal.SIGKILL)
    done = localstack("status")
    assert done.returncode == 1, done
    assert re.findall(r"(?m)^(\S+) +dead +127", done.stdout) == ["zookeeper", "broker-2"], done
    assert "zookeeper is dead; its log" in done.stderr
    assert "PrepRequestProcessor" in done.stderr
    done = localstack("up", "zookeeper", "--brokers", "2")
    assert (done.returncode, done.stdout.count("ready after")) == (0, 2), done
    assert facts["zookeeper"]["address"] in done.stdout, "it comes back where clients look for it"

    done = localstack("down")
    assert re.findall(r"(?m)^(\S+) +stopped$", done.stdout) == names[::-1], done
    assert "nothing ran" in localstack("down").stdout
    assert localstack("status").stdout.startswith("nothing runs in")
    assert (state / "kafka" / "data" / "meta.properties").exists(), "the data stay"


def check_brokers(facts: dict[str, dict[str, str]]) -> None:
    """What goes in by one broker comes out by the other."""
    with memq.Producer(facts["broker-1"]["address"], acks="all") as producer:
        producer.send("clicks", b"one").result(TIMEOUT_S)
    with memq.Consumer(facts["broker-2"]["address"], ["clicks"], group="g", start="beginning", end="end") as consumer:
        assert [record.value for batch in consumer for record in batch] == [b"one"]


def check_settings(state: Path, facts: dict[str, dict[str, str]]) -> None:
    """`memq.toml` is what brokers read, and names the servers."""
    parts = load_settings({}, {}, config=state / "memq.toml").parts()
    bucket = read_bucket(parts.store, parts.section("s3"))
    assert (bucket.name, bucket.settings.endpoint) == ("memq", facts["s3"]["endpoint"])
    assert bucket.settings.secret_access_key == facts["s3"]["secret_key"]
    assert parse_url(parts.coordinator).hosts == facts["zookeeper"]["address"]
    read_section("zookeeper", parts.section("zookeeper"), ZookeeperSettings)
    assert parts.queue == f"kafka://{facts['kafka']['address']}"
    assert kafka_settings(parts.queue, parts.section("kafka")).replication_factor == 1
    assert (state / "memq.toml").stat().st_mode & 0o077 == 0, "the keys are the owner's"


def test_mistakes_are_reported(localstack: Command) -> None:
    done = localstack("up", "nats")
    assert done.returncode == 2
    assert "no server is called 'nats'; there are s3, zookeeper, kafka" in done.stderr
