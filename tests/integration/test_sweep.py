"""`memq sweep` on a data folder, and on S3, Kafka and ZooKeeper while brokers run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import boto3

import memq
from memq.broker.data_folder import cluster_of
from memq.cli.run import run
from memq.format.key import object_key
from memq_localstack.s3 import BUCKET
from memq_localstack.servers import S3Server, Server
from tests.processes import broker_processes
from tests.servers import dev_server
from tests.unit.bare_cluster import indexed

OLD_S = 7_200


def swept(*arguments: str, code: int = 0) -> list[dict[str, object]]:
    """Run the sweep in a process of its own and return what it names."""
    command = [sys.executable, "-m", "memq", "sweep", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_data_folder_is_swept_by_the_only_process_that_uses_it(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address) as producer:
            producer.send("clicks", b"kept").result(timeout=60)
        assert run(["sweep", "--data", str(server.data)]) == 1, "the folder is in use"
        server.kill()
    (named,) = server.objects_of("clicks")
    unnamed = named.with_name(named.name[:-1] + "9")
    unnamed.write_bytes(b"stored, and never named")
    for file in (named, unnamed):
        os.utime(file, (file.stat().st_mtime - OLD_S,) * 2)
    arguments = ["--data", str(tmp_path / "data"), "--sweep-confirm-ms", "1s"]
    (dry,), (found,) = swept(*arguments, "--dry-run"), swept(*arguments)
    for each in (dry, found):
        assert (each["why"], each["size"], each["goes"]) == ("no pointer names it", 23, False)
        assert str(each["key"]).endswith(unnamed.name)
    while not found["goes"]:  # until the first pass is a second old
        assert unnamed.exists()
        (found,) = swept(*arguments)
    assert not unnamed.exists()
    assert named.exists()
    assert swept(*arguments) == []
    assert run(["sweep", "--data", str(tmp_path / "elsewhere")]) == 3, "the folder does not exist"


def test_objects_whose_records_no_batch_has_are_kept_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address) as producer:
            producer.send("clicks", b"kept").result(timeout=60)
        with memq.Admin(server.address) as admin:
            topic = admin.topic("clicks").topic
        server.kill()
    later = server.data / "objects" / object_key(cluster_of(server.data), "clicks", topic.id, 0, 1, 7, 1_000)
    later.parent.mkdir(parents=True)
    later.write_bytes(indexed(topic, 0, number=7))  # of a producer that no pointer names
    os.utime(later, (later.stat().st_mtime - OLD_S,) * 2)
    arguments = ["--data", str(server.data), "--sweep-confirm-ms", "1s"]
    for _ in range(2):
        (found,) = swept(*arguments)
        assert (found["kept"], found["new"], found["goes"]) == (True, False, False)
    assert (
        "1 object of"
        in subprocess.run(
            [sys.executable, "-m", "memq", "sweep", *arguments], capture_output=True, text=True, check=True, timeout=90
        ).stderr
    )
    assert run(["sweep", "--data", str(server.data), "--unproven", "--pending"]) == 2
    (found,) = swept(*arguments, "--unproven")
    while not found["goes"]:
        assert later.exists()
        (found,) = swept(*arguments, "--unproven")
    assert not later.exists()


def test_a_cluster_is_swept_while_its_brokers_run(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=1) as (broker,):
        with memq.Producer(broker.address, audit=False) as producer:  # a report may be a second old and not yet named
            for topic in ("clicks", "views"):
                producer.send(topic, b"kept").result(timeout=60)
        with memq.Admin(broker.address) as admin:
            admin.delete_topic("views")
        client = boto3.client("s3", endpoint_url=reads_s3.endpoint, region_name=reads_s3.region)
        listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{tmp_path.name}/memq/topics/")
        keys = {entry["Key"].split("/")[3]: entry["Key"] for entry in listed["Contents"]}
        orphan = keys["clicks"][:-1] + "9"
        client.put_object(Bucket=BUCKET, Key=orphan, Body=b"stored, and never named")
        client.close()
        config = ["--config", str(tmp_path / "memq.toml")]
        assert swept(*config) == [], "nothing is as old as an hour"
        config += ["--sweep-age-ms", "1s", "--sweep-confirm-ms", "1s"]
        while len(named := swept(*config, "--dry-run")) < 2:  # until both are a second old
            pass
        assert {str(each["why"]) for each in named} == {"no pointer names it", "its topic is gone"}
        assert {f"{tmp_path.name}/{each['key']}" for each in named} == {orphan, keys["views"]}
        assert not any(each["goes"] for each in (*named, *swept(*config))), "a dry run tells nobody what it found"
        assert {each["key"] for each in swept(*config, "--pending")} == {each["key"] for each in named}
        while not all(each["goes"] for each in named):
            named = swept(*config)
        assert swept(*config) == []
        with memq.Consumer(broker.address, ["clicks"], end="end", read="direct") as consumer:
            assert [value for batch in consumer for value in batch.values()] == [b"kept"]
        wrong = ["--coordinator", f"zookeeper://{zookeeper.address}/nobody/here"]
        assert swept(*config, *wrong, code=1) == [], "nobody knows a topic there: all would go"
