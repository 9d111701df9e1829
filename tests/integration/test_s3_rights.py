"""Rights on a bucket: the policies of `memq iam` on a real server, and named mistakes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from awscrt.checksums import crc32c

from memq.errors import DeniedError
from memq.storage_handlers.s3 import policies
from memq.storage_handlers.s3.handler import S3Handler
from memq_localstack.servers import ADMIN, Identity, S3Server, start_s3
from tests.s3_servers import BUCKET, S3Place
from tests.tls import server_context

HANG_S = 90
PREFIX = "logs"
ROLES = policies.ROLES
NARROW = "narrow"  # a broker without the rights to list and to delete
CLUSTER = "main"
BODY = b"bytes"


def key_of(role: str) -> Identity:
    return Identity(role, f"{role}-key", f"{role}-secret", ())


def statements_of(role: str) -> list[dict[str, Any]]:
    """Return the statements that `memq iam` prints for a role, for its user and this bucket."""
    policy = policies.policy_of("broker" if role == NARROW else role, BUCKET, f"{PREFIX}/", CLUSTER)
    user = {"AWS": f"arn:aws:iam::000000000000:user/{role}"}
    left_out = ("List", "Delete") if role == NARROW else ()
    given = [each for each in policy["Statement"] if each["Sid"] not in left_out]
    return [{**each, "Sid": f"{role}{each['Sid']}", "Principal": user} for each in given]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server where each role has what the page gives it, and nothing else."""
    identities = (ADMIN, *map(key_of, (*ROLES, NARROW)))
    with start_s3(tmp_path_factory.mktemp("s3"), buckets=(BUCKET,), identities=identities) as found:
        keys = {"aws_access_key_id": found.access_key, "aws_secret_access_key": found.secret_key}
        client = boto3.client("s3", endpoint_url=found.endpoint, region_name=found.region, **keys)
        policy = {
            "Version": "2012-10-17",
            "Statement": [each for role in (*ROLES, NARROW) for each in statements_of(role)],
        }
        client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))
        client.close()
        yield found


# ---- the policies ------------------------------------------------------------------------------

THERE = f"{CLUSTER}/topics/clicks/there"
CALLS: dict[str, Callable[[S3Handler, str], Awaitable[object]]] = {
    "put": lambda store, role: store.put(f"{CLUSTER}/topics/clicks/by/{role}", [BODY], crc32c(BODY)),
    "note": lambda store, role: store.put(f"{CLUSTER}/sweep/pending/{role}", [BODY], crc32c(BODY)),
    "stage": lambda store, role: store.put(f"{CLUSTER}/staged/writer/objects/{role}", [BODY], crc32c(BODY)),
    "get": lambda store, role: store.get_range(THERE, 0, len(BODY)),
    "list": lambda store, role: anext(store.list(f"{CLUSTER}/topics/clicks/"), None),
    "list all": lambda store, role: anext(store.list(), None),
    "delete": lambda store, role: store.delete(f"{CLUSTER}/topics/clicks/gone/{role}"),
    "delete another": lambda store, role: store.delete(f"other/gone/{role}"),
}
MAY = {
    "producer": ("stage",),
    "consumer": ("get",),
    "auditor": ("get", "list"),
    "spark": ("get", "list", "stage"),
    "broker": ("put", "note", "stage", "get", "list", "delete"),
    "operator": ("note", "get", "list", "delete"),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("data_path", ["obstore", "aiobotocore"])
def test_each_role_may_do_what_it_needs_and_nothing_else(server: S3Server, role: str, data_path: str) -> None:
    async def work() -> None:
        admin = S3Place(server.endpoint, server.access_key, server.secret_key).open(PREFIX)
        keys = key_of(role)
        store = S3Place(server.endpoint, keys.access_key, keys.secret_key).open(PREFIX, data_path=data_path)
        try:
            await admin.put(THERE, [BODY], crc32c(BODY))
            for name, call in CALLS.items():
                if name in MAY[role]:
                    await call(store, role)
                else:
                    with pytest.raises(DeniedError):
                        await call(store, role)
            if role == "broker":
                await store.check()
                await store.check(deletes=False)
                await store.check(deletes=False)  # the object that it leaves is in nobody's way
        finally:
            await store.close()
            await admin.close()

    asyncio.run(asyncio.wait_for(work(), HANG_S))


# ---- mistakes ----------------------------------------------------------------------------------


def settings_file(folder: Path, endpoint: str, bucket: str = BUCKET, **section: Any) -> Path:
    """Write the settings of a broker that is alone, with its store on a server."""
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in section.items())
    file = folder / "memq.toml"
    file.write_text(
        f"""
        store = "s3://{bucket}/{PREFIX}?endpoint={endpoint}"
        queue = "sqlite:{folder}/queue.sqlite"
        coordinator = "standalone:{folder}/topics.sqlite"
        port = 0
        http_port = -1
        [s3]
        {lines}
        """,
        encoding="utf-8",
    )
    return file


def both_say(file: Path, **environment: str) -> list[str]:
    """Return what `memq doctor` says of the store, and what a broker that starts says, each with its hint."""

    def memq(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "memq", *arguments, "--config", str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
            env={**os.environ, **environment},
        )

    looked = memq("doctor", "--json")
    assert looked.returncode == 1, looked.stderr
    (store,) = [one for one in json.loads(looked.stdout) if one["what"] == "store"]
    assert store["state"] == "failed"
    started = memq("broker")
    assert started.returncode not in (0, None)
    assert "memq: error:" in started.stderr, started.stderr
    return [f"{store['text']} ({store['hint']})", started.stderr]


BROKER = {"access_key_id": "broker-key", "secret_access_key": "broker-secret"}
NARROW_KEYS = {"access_key_id": f"{NARROW}-key", "secret_access_key": f"{NARROW}-secret"}
SHORT = {"deadline_ms": 2_000, "request_timeout_ms": 2_000}
# name: where it differs, and the cause and the fix that are to be named
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "endpoint": ({"endpoint": "http://127.0.0.1:1", **BROKER, **SHORT}, ["127.0.0.1:1", "check endpoint in [s3]"]),
    "bucket": ({"bucket": "elsewhere", **BROKER}, ["bucket 'elsewhere' at http"]),
    "key id": ({**BROKER, "access_key_id": "nobody"}, ["InvalidAccessKeyId", "check access_key_id in [s3]"]),
    "secret": ({**BROKER, "secret_access_key": "no"}, ["SignatureDoesNotMatch", "check secret_access_key in [s3]"]),
    "delete right": (NARROW_KEYS, ["2 of 4 rights", "s3:DeleteObject is missing", "policy for each role"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_doctor_and_start_name_the_cause_and_the_fix(name: str, server: S3Server, tmp_path: Path) -> None:
    report, words = MISTAKES[name]
    for said in both_say(settings_file(tmp_path, **{"endpoint": server.endpoint, **report})):
        for word in words:
            assert word in said, said


CLOCK = """
#define _GNU_SOURCE
#include <time.h>
#include <sys/syscall.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, id, at);
    if (!failed && id == CLOCK_REALTIME) at->tv_sec += 1200;
    return failed;
}
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler to set a clock")
@pytest.mark.parametrize("data_path", ["obstore", "aiobotocore"])
def test_a_clock_that_is_off_by_20_minutes_is_named(server: S3Server, tmp_path: Path, data_path: str) -> None:
    library = tmp_path / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=CLOCK, text=True, check=True)
    file = settings_file(tmp_path, server.endpoint, data_path=data_path, **BROKER)
    for said in both_say(file, LD_PRELOAD=str(library)):
        assert "RequestTimeTooSkewed" in said
        assert "set the clock of this machine" in said


def test_a_certificate_for_another_name_is_named(tmp_path: Path) -> None:
    _, authority = server_context(tmp_path, "another.test")
    pem = tmp_path / "server-another.test.pem"
    with start_s3(tmp_path / "s3", buckets=(), certificate=(pem, pem)) as server:
        report: dict[str, Any] = {"ca_file": str(authority), **SHORT, **BROKER}
        for said in both_say(settings_file(tmp_path, server.endpoint, **report)):
            assert "gives no answer" in said
            assert "name the host as its certificate does" in said
