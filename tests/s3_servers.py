"""S3 servers for the tests, each a process of its own, and stores opened on them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3 import open_store
from memq.storage_handlers.s3.handler import S3Handler
from memq_localstack.servers import start_s3

BUCKET = "memq"
_folders = itertools.count()


@dataclass(frozen=True)
class S3Place:
    """Where a server is, the keys for it, and the settings of every store on it."""

    endpoint: str
    access_key_id: str = "memq"
    secret_access_key: str = "memq-secret"
    settings: dict[str, object] = field(default_factory=dict)

    def open(self, folder: str = "", bucket: str = BUCKET, **settings: object) -> S3Handler:
        """Open a store in a folder of the bucket, a new one when none is named."""
        folder = folder or f"{os.getpid()}-{next(_folders)}"
        keys = {"access_key_id": self.access_key_id, "secret_access_key": self.secret_access_key}
        section = {name: (value, "the test") for name, value in (keys | self.settings | settings).items()}
        return open_store(f"s3://{bucket}/{folder}?endpoint={self.endpoint}", Runtime(), section)


@contextmanager
def seaweedfs(folder: Path) -> Iterator[S3Place]:
    """Run SeaweedFS on a folder."""
    with start_s3(folder, buckets=(BUCKET,)) as server:
        yield S3Place(server.endpoint, server.access_key, server.secret_key)


@contextmanager
def moto() -> Iterator[S3Place]:
    """Run moto, an S3 server in Python, in a process of its own that ends with its standard input."""
    command = [sys.executable, "-m", "tests.s3_servers"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("ready: "), f"no ready line but {line!r}"
        yield S3Place(line.removeprefix("ready: ").strip())
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def serve_moto() -> None:
    """Serve a bucket until standard input ends."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "memq", "aws_secret_access_key": "memq-secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys).create_bucket(Bucket=BUCKET)
    print(f"ready: http://{host}:{port}", flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    serve_moto()
