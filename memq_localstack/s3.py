"""Starts an S3 server: SeaweedFS, all its parts in one process, or versitygw on a folder."""

from __future__ import annotations

import hashlib
import hmac
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from memq_localstack import LocalstackError
from memq_localstack.launch import Launch
from memq_localstack.ports import HOST

REGION = "us-east-1"
BUCKET = "memq"  # made unless others are asked for
VOLUME_MIB = 1024
ALL_RIGHTS = ("Admin", "Read", "Write", "List", "Tagging")
ENCRYPTION_KEY = "6d656d71" * 8  # for tests of server-side encryption; it protects nothing
EMPTY = hashlib.sha256(b"").hexdigest()


def signed_headers(
    method: str, host: str, path: str, *, access_key: str, secret_key: str, region: str, now: datetime
) -> dict[str, str]:
    """Return the headers of a request for `path` (no query, nothing to escape) at the moment `now`, in UTC.

    Source: AWS Signature Version 4, "create a signed AWS API request".
    """
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    headers = {"host": host, "x-amz-content-sha256": EMPTY, "x-amz-date": moment}
    names = ";".join(headers)
    listed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = hashlib.sha256(f"{method}\n{path}\n\n{listed}\n{names}\n{EMPTY}".encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in (moment[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{request}".encode(), "sha256").hex()
    credential = f"Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "authorization": f"AWS4-HMAC-SHA256 {credential}"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who may do what: `rights` are SeaweedFS's: `Read`, `Write` (put and delete), `List`, `Admin`, `Read:BUCKET`."""

    name: str
    access_key: str
    secret_key: str
    rights: tuple[str, ...] = ALL_RIGHTS


ADMIN = Identity("admin", "memq-localstack", "memq-localstack-secret")


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for, of either server."""

    folder: Path
    identities: Sequence[Identity]
    certificate: tuple[Path, Path] | None  # files of a certificate and its key, for HTTPS
    arguments: Sequence[str]  # the server's own

    @property
    def data(self) -> Path:
        """The folder of the data, made when it is not there."""
        folder = self.folder / "data"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def details(self, server: str) -> dict[str, str]:
        """Return what a handle has to know."""
        first = self.identities[0]
        scheme = "https" if self.certificate else "http"
        return {"server": server, "scheme": scheme, "access_key": first.access_key, "secret_key": first.secret_key}


def seaweedfs(order: Order, ports: list[int]) -> Launch:
    """Write who may do what, and say how to start SeaweedFS."""
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = ports
    identities = order.folder / "identities.json"
    command = [
        find_weed(), "-logtostderr=true", "server", f"-dir={order.data}", f"-ip={HOST}", f"-ip.bind={HOST}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
        "-master.peers=none",  # one master: no election, ready in 2 s instead of 7
        "-master.telemetry=false",  # else it calls home
        f"-master.volumeSizeLimitMB={VOLUME_MIB}", "-volume.max=0",  # as many volumes as the disk has room for
        "-s3", f"-s3.config={identities}", "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip
    grpc = {"master": master_grpc, "volume": volume_grpc, "filer": filer_grpc, "s3": s3_grpc}
    command += [f"-{part}.port.grpc={port}" for part, port in grpc.items()]
    if order.certificate:
        command += [f"-s3.cert.file={order.certificate[0]}", f"-s3.key.file={order.certificate[1]}"]
    sockets = [f"{part}-grpc-{port}" for part, port in grpc.items()] + [f"filer-{filer}", f"s3-{s3}"]
    identities.write_text(json.dumps({"identities": list(map(_as_seaweedfs, order.identities))}), encoding="utf-8")
    return Launch(
        kind="s3",
        command=(*command, *order.arguments),
        address=f"{HOST}:{s3}",
        ports=tuple(ports),
        ready=("added volume server", "Start Seaweed S3 API Server"),
        environment={"WEED_S3_SSE_KEK": ENCRYPTION_KEY},
        stop_signal=signal.SIGKILL,  # its own way out takes 25 s of waiting; what it wrote is the system's already
        leftovers=tuple(f"/tmp/seaweedfs-{name}.sock" for name in sockets),  # noqa: S108 - that is where it puts them
        details=order.details("seaweedfs"),
    )


def versitygw(order: Order, ports: list[int]) -> Launch:
    """Say how to start versitygw: buckets are folders, objects files, and one identity may do everything."""
    program = shutil.which("versitygw")
    if not program:
        raise LocalstackError("no versitygw on PATH", hint="take SeaweedFS, or install it with Go")
    if len(order.identities) != 1:
        raise LocalstackError(f"versitygw knows one identity here, not {len(order.identities)}", hint="take SeaweedFS")
    address = f"{HOST}:{ports[0]}"
    command = [program, "--port", address, "--region", REGION, "--quiet", "--keep-alive"]
    if order.certificate:
        command += ["--cert", str(order.certificate[0]), "--key", str(order.certificate[1])]
    details = order.details("versitygw")
    return Launch(
        kind="s3",
        command=(*command, *order.arguments, "posix", str(order.data)),
        address=address,
        ports=tuple(ports),
        ready=(),
        environment={"ROOT_ACCESS_KEY": details["access_key"], "ROOT_SECRET_KEY": details["secret_key"]},
        details=details,
    )


# name: how it is started, and on how many ports
LAUNCHES: dict[str, tuple[Callable[[Order, list[int]], Launch], int]] = {
    "seaweedfs": (seaweedfs, 8),
    "versitygw": (versitygw, 1),
}


def preferred() -> str:
    """Return the server that people get: versitygw, twice as fast, where it is on PATH; SeaweedFS comes by pip."""
    return "versitygw" if shutil.which("versitygw") else "seaweedfs"


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
