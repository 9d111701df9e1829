"""Writes the settings with which brokers find the servers of a state folder: its `memq.toml`."""

from __future__ import annotations

from pathlib import Path

from memq_localstack.launch import Server
from memq_localstack.s3 import BUCKET
from memq_localstack.servers import S3Server

NAME = "memq.toml"


def write_settings(folder: Path) -> Path | None:
    """Write the file and return its path; None while one of the servers never was up.

    Only its owner may read it: it has the keys of the bucket.
    """
    s3, zookeeper, kafka = (
        S3Server.load(folder / "s3"),
        Server.load(folder / "zookeeper"),
        Server.load(folder / "kafka"),
    )
    if s3 is None or zookeeper is None or kafka is None:
        return None
    path = folder / NAME
    path.touch(mode=0o600)
    path.write_text(
        f"""# Written by memq-localstack; memq broker --config {path}
store = "s3://{BUCKET}?endpoint={s3.endpoint}&region={s3.region}"
queue = "kafka://{kafka.address}"
coordinator = "zookeeper://{zookeeper.address}/memq"

[s3]
access_key_id = "{s3.access_key}"
secret_access_key = "{s3.secret_key}"

[kafka]
replication_factor = 1

[zookeeper]
session_timeout_ms = 3000
""",
        encoding="utf-8",
    )
    return path
