"""Every command of the pages for operators runs unchanged on a cluster of real servers."""

from __future__ import annotations

import re
from pathlib import Path

from confluent_kafka.admin import AdminClient

from memq_localstack.s3 import BUCKET
from memq_localstack.servers import S3Server, Server, start_broker, start_s3
from tests.pages import ROOT, run_block

PAGES = ("operations", "spool", "retention", "recovery")  # in the order in which their commands run
TIMEOUT_S = 180
STOPPED = "memq restore"  # what begins so wants all brokers to be stopped, and the queue to be lost
PREFIX = "operations."


def blocks() -> list[str]:
    """Return the shell blocks of the pages, in their order."""
    text = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(block: str, folder: Path, brokers: list[Server], s3: S3Server) -> str:
    """Run a block as a person with keys for the store would paste it, and return what it printed."""
    variables = {
        "MEMQ_CONFIG": str(folder / "memq.toml"),
        "MEMQ_BROKERS": ",".join(broker.address for broker in brokers),
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
    }
    return run_block(block, folder, variables, TIMEOUT_S)


def lose_the_queue(kafka: Server) -> None:
    """Delete what Kafka holds of the cluster, and wait until it is gone."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    mine = [name for name in admin.list_topics(timeout=30).topics if name.startswith(PREFIX)]
    for deleted in admin.delete_topics(mine).values():
        deleted.result(60)
    while set(mine) & set(admin.list_topics(timeout=30).topics):
        pass


def test_every_command_of_the_pages_runs(tmp_path: Path, kafka: Server, zookeeper: Server) -> None:
    with start_s3(tmp_path / "s3") as s3:
        config = tmp_path / "memq.toml"
        config.write_text(
            f'store = "s3://{BUCKET}/operations?endpoint={s3.endpoint}&region={s3.region}"\n'
            f'queue = "kafka://{kafka.address}"\ncoordinator = "zookeeper://{zookeeper.address}/operations"\n'
            f'cluster = "operations"\n[kafka]\nprefix = "{PREFIX}"\nreplication_factor = 1\n'
            f'[s3]\naccess_key_id = "{s3.access_key}"\nsecret_access_key = "{s3.secret_key}"\n',
            encoding="utf-8",
        )
        names = ("broker-1", "broker-2")
        brokers = [start_broker(tmp_path / name, config, name) for name in names]
        try:
            running = [block for block in blocks() if not block.startswith(STOPPED)]
            said = "".join(run(block, tmp_path, brokers, s3) for block in running)
        finally:
            for broker in brokers:
                broker.stop()
        assert "one\ntwo\nthree\n" in said
        assert "verdict: clean" in said
        lose_the_queue(kafka)
        stopped = [block for block in blocks() if block.startswith(STOPPED)]
        assert any("orders" in run(block, tmp_path, brokers, s3) for block in stopped)
