"""TLS, logins and rights on a real Kafka: correct ones work, wrong ones are named."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

from memq.errors import DeniedError, MemqError
from memq.notification import Publication
from memq.runtime.clock import SystemClock
from tests.certificates import Certificates
from tests.contract.queues import HANG_S, STALE_MS, committed, part
from tests.integration.kafka import kafka_queue
from tests.integration.secured_kafka import Secured, encrypted, secured_kafka

ALL = [AclOperation.ALL]
MOST = [  # all but Write
    AclOperation.CREATE,
    AclOperation.READ,
    AclOperation.DELETE,
    AclOperation.ALTER,
    AclOperation.ALTER_CONFIGS,
    AclOperation.DESCRIBE_CONFIGS,
]
PREFIX = "memq."
ON_GROUPS = {(ResourceType.GROUP, PREFIX): [AclOperation.DESCRIBE]}
RIGHTS = {(ResourceType.TOPIC, PREFIX): ALL, **ON_GROUPS}
MIGRATING = {(ResourceType.TOPIC, PREFIX): ALL, (ResourceType.GROUP, PREFIX): ALL}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_kafka(tmp_path_factory.mktemp("secured"), ["memq", "migrating", "reader", "nobody"]) as kafka:
        kafka.allow("memq", RIGHTS)
        kafka.allow("migrating", MIGRATING)
        kafka.allow("reader", {(ResourceType.TOPIC, PREFIX): MOST, **ON_GROUPS})
        yield kafka


WRONG = {  # what is wrong: the user, other settings, whether the server's name is, what is said, and what to do
    "password": ("memq", {"sasl.password": "guessed"}, False, "invalid username or password", "check sasl"),
    "mechanism": ("memq", {"sasl.mechanism": "SCRAM-SHA-512"}, False, "unsupported sasl mechanism", "check sasl"),
    "name": ("memq", {}, True, "localhost.*certificate verify failed", "does not name the host"),
    "authority": ("memq", {"ssl.ca.location": ""}, False, "certificate verify failed", "ssl.ca.location"),
    "no certificate": (
        "memq",
        {"ssl.certificate.location": "", "ssl.key.location": ""},
        False,
        "alert",
        "memq certs show",
    ),
    "one right": (
        "reader",
        {},
        False,
        "1 rights are missing: Write on topics",
        "--operation Write .*--topic",
    ),
    "all rights": (
        "nobody",
        {},
        False,
        "Create on topics.*; Describe on groups",
        "--operation Create .*--topic 'memq.'",
    ),
}


def section_of(secured: Secured, what: str) -> dict[str, str]:
    user, others, _, _, _ = WRONG[what]
    found = secured.section(user, **others)
    return {name: value for name, value in found.items() if value}


def address_of(secured: Secured, what: str) -> str:
    return secured.mismatched if WRONG[what][2] else secured.server.address


@pytest.mark.parametrize("wrong", ["expired", "foreign"])
def test_a_refused_certificate_of_a_broker_is_named(secured: Secured, tmp_path: Path, wrong: str) -> None:
    mine = secured.mine
    if wrong == "expired":
        mine = secured.certificates.issue_expired("late")
    else:
        mine = replace(Certificates(tmp_path / "foreign").issue("broker-1"), ca_file=mine.ca_file)
    error = asyncio.run(check(secured.server.address, secured.section("memq", **encrypted(mine))))
    assert isinstance(error, DeniedError)
    assert "alert" in str(error)
    assert "memq certs show" in error.hint


async def check(address: str, section: dict[str, str]) -> MemqError | None:
    queue = kafka_queue(address, prefix=PREFIX, request_timeout_ms=20_000, **section)
    try:
        await queue.check()
    except MemqError as error:
        return error
    finally:
        await queue.close()
    return None


def test_the_queue_works_over_tls_with_a_login_and_few_rights(secured: Secured) -> None:
    async def work() -> None:
        queue = kafka_queue(secured.server.address, prefix=PREFIX, **secured.section("memq"))
        try:
            async with asyncio.timeout(HANG_S):
                await queue.check()
                await queue.create([part()], STALE_MS)
                offset = await queue.publish(Publication(part(), 0, 1, SystemClock().wall_ms(), b"pointer"))
                assert [entry.body for entry in await queue.read(part(), offset, 1 << 20)] == [b"pointer"]
                assert await queue.former.names() == []
                with pytest.raises(DeniedError, match="positions of group 'report'"):
                    await queue.former.store("report", {part(): committed(1)})
                await queue.trim(part(), 1)
                await queue.drop([part()])
        finally:
            await queue.close()

    asyncio.run(work())


def test_a_user_with_rights_on_groups_moves_those_of_an_earlier_release(secured: Secured) -> None:
    """A user without the right to remove them finds them, so that no group begins as a new one."""

    async def work() -> None:
        queue = kafka_queue(secured.server.address, prefix=PREFIX, **secured.section("migrating"))
        other = kafka_queue(secured.server.address, prefix=PREFIX, **secured.section("memq"))
        try:
            async with asyncio.timeout(HANG_S):
                await queue.create([part()], STALE_MS)
                await queue.former.store("billing", {part(): committed(1)})
                assert await other.former.names() == ["billing"]
                assert (await other.former.read("billing")).committed == {part(): committed(1)}
                with pytest.raises(DeniedError, match="deleting group 'billing'"):
                    await other.former.remove("billing")
                await queue.former.remove("billing")
                assert await other.former.names() == []
                await queue.drop([part()])
        finally:
            await queue.close()
            await other.close()

    asyncio.run(work())


@pytest.mark.parametrize("what", list(WRONG))
def test_wrong_security_setting_is_named_with_its_remedy(secured: Secured, what: str) -> None:
    _, _, _, said, cure = WRONG[what]

    async def work() -> None:
        with pytest.raises(DeniedError, match=f"(?s){said}") as caught:
            async with asyncio.timeout(HANG_S):
                raise await check(address_of(secured, what), section_of(secured, what)) or AssertionError("allowed")
        assert re.search(cure, caught.value.hint, re.DOTALL), caught.value.hint

    asyncio.run(work())


def config_file(folder: Path, secured: Secured, what: str) -> Path:
    config = folder / "memq.toml"
    lines = [f'"{name}" = {json.dumps(value)}' for name, value in section_of(secured, what).items()]
    config.write_text(
        "\n".join(
            [
                f'store = "file:{folder}/objects"',
                f'queue = "kafka://{address_of(secured, what)}"',
                f'coordinator = "standalone:{folder}/state/topics.sqlite"',
                "[kafka]",
                f'prefix = "{PREFIX}"',
                *lines,
            ]
        )
    )
    return config


@pytest.mark.parametrize("what", ["password", "name", "one right"])
def test_start_and_doctor_name_it(secured: Secured, tmp_path: Path, what: str) -> None:
    _, _, _, said, cure = WRONG[what]
    config = config_file(tmp_path, secured, what)
    looked = run("doctor", "--config", str(config), "--json")
    findings = {found["what"]: found for found in json.loads(looked.stdout)}
    assert (findings["store"]["state"], findings["coordinator"]["state"]) == ("ok", "ok")
    assert findings["queue"]["state"] == "failed"
    assert_said(findings["queue"]["text"], said)
    assert_said(findings["queue"]["hint"], cure)
    started = run("broker", "--config", str(config), "--port", "0", "--http-port", "-1")
    assert started.returncode == 4, started.stderr
    assert_said(started.stderr, said)
    assert_said(started.stderr, cure)


def assert_said(text: str, pattern: str) -> None:
    assert re.search(pattern, text, re.DOTALL), text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memq", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
