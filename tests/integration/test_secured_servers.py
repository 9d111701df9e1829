"""Brokers that reach Kafka and ZooKeeper by mutual TLS, with certificates of `memq certs`, and log in to both."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from confluent_kafka.admin import AclOperation, ResourceType

import memq
from memq.errors import DeniedError, MemqError, UnreachableError
from memq.governor.zookeeper import session
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq_localstack.ports import HOST
from tests.certificates import Certificates
from tests.integration.kafka import kafka_queue
from tests.integration.secured_kafka import Secured, encrypted, secured_kafka
from tests.integration.secured_zookeeper import PASSWORD, SecuredZookeeper, secured_zookeeper
from tests.memq_process import run_command
from tests.processes import BrokerProcess

PREFIX = "memq."
CONNECT_MS, SESSION_MS = 3_000, 1_000
BOUND_S = 20.0  # for an error; it is due after CONNECT_MS
PAUSE_S = 0.05  # between two calls of a coordinator that is not connected
RETURN_S = 60.0  # for the return of a session
Section = dict[str, str | bool]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_kafka(tmp_path_factory.mktemp("secured"), []) as server:
        server.add("memq")
        server.allow(
            "memq",
            {
                (ResourceType.TOPIC, PREFIX): [AclOperation.ALL],
                (ResourceType.GROUP, PREFIX): [AclOperation.DESCRIBE],
            },
        )
        yield server


@pytest.fixture(scope="module")
def zookeeper(kafka: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredZookeeper]:
    with secured_zookeeper(tmp_path_factory.mktemp("zookeeper"), kafka.certificates) as server:
        yield server


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Another authority, with the same name."""
    return Certificates(tmp_path_factory.mktemp("foreign"))


def coordinator(server: SecuredZookeeper, section: Section, path: str = "/memq") -> ZookeeperCoordinator:
    settings = ZookeeperSettings(session_timeout_ms=SESSION_MS, connect_timeout_ms=CONNECT_MS, **section)  # type: ignore[arg-type]
    return ZookeeperCoordinator(ZookeeperAddress(server.server.address, path), settings, Runtime(), "secured")


async def refused(server: SecuredZookeeper, section: Section, path: str = "/memq") -> MemqError:
    """Return the error of a start."""
    one, began_s = coordinator(server, section, path), SystemClock().monotonic()
    try:
        async with asyncio.timeout(BOUND_S):
            await one.topics()
    except MemqError as error:
        assert SystemClock().monotonic() - began_s < BOUND_S
        return error
    finally:
        await one.close()
    raise AssertionError("the coordinator let it in")


# ---- ZooKeeper -----------------------------------------------------------------------------------


def test_wrong_certificates_and_passwords_are_named_by_zookeeper(
    kafka: Secured, zookeeper: SecuredZookeeper, foreign: Certificates
) -> None:
    """All at the same time: each waits for the time of a start."""
    known, mine = kafka.certificates, kafka.mine
    stranger = replace(foreign.issue("broker-1"), ca_file=mine.ca_file)
    cases: dict[str, tuple[Tls, str, str]] = {
        "authority": (replace(mine, ca_file=foreign.trusted.ca_file), "is not trusted.*issuer", "tls_ca_file"),
        "foreign": (stranger, "refuses the certificate of this broker", "memq certs show"),
        "expired": (known.issue_expired("late"), "refuses the certificate of this broker", "memq certs show"),
        "none": (known.trusted, "refuses the certificate of this broker", "tls_cert_file"),
    }

    async def work() -> None:
        first = coordinator(zookeeper, zookeeper.section(mine))
        try:
            assert list(await first.topics()) == []
        finally:
            await first.close()
        sections = [zookeeper.section(tls) for tls, _, _ in cases.values()]
        errors = await asyncio.gather(*(refused(zookeeper, section) for section in sections))
        for (what, (_, said, cure)), error in zip(cases.items(), errors, strict=True):
            assert isinstance(error, DeniedError), (what, error)
            assert re.search(said, str(error)), (what, error)
            assert cure in error.hint, (what, error.hint)
        guessed = zookeeper.section(known.issue("guest"), "guessed")
        denied = await refused(zookeeper, guessed)
        assert isinstance(denied, DeniedError)
        assert "denies access to node /memq" in str(denied)
        assert "check auth" in denied.hint

    asyncio.run(work())


def test_a_session_is_not_denied_for_an_outage_and_returns_after_refused_logins(
    kafka: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZooKeeper starts without its logins, refuses three clients of the broker, and takes the next one."""
    monkeypatch.setattr(session, "RETRY_DELAY_S_MAX", 0.25)
    with secured_zookeeper(tmp_path / "own", kafka.certificates) as own:

        async def work() -> None:
            one = coordinator(own, own.section(kafka.mine))
            try:
                assert list(await one.topics()) == []
                await asyncio.to_thread(own.restart, logins=False)
                async with asyncio.timeout(RETURN_S):
                    while own.refused < 3:
                        assert isinstance(await outage(one), UnreachableError)
                error = await outage(one)
                assert isinstance(error, UnreachableError)
                assert "check auth" in error.hint
                await asyncio.to_thread(own.restart, logins=True)
                async with asyncio.timeout(RETURN_S):
                    while (error := await outage(one)) is not None:
                        assert not isinstance(error, DeniedError)
            finally:
                await one.close()

        asyncio.run(work())


async def outage(one: ZookeeperCoordinator) -> MemqError | None:
    await asyncio.to_thread(Event().wait, PAUSE_S)
    try:
        await one.current_topic("clicks")
    except MemqError as error:
        return error
    return None


# ---- expired certificates of servers -------------------------------------------------------------


@contextmanager
def expired_server(tls: Tls) -> Iterator[str]:
    """Listen with an expired certificate; no handshake succeeds, so the protocol does not matter."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # until the listener is shut down
                while True:
                    plain, _ = listener.accept()
                    plain.settimeout(BOUND_S)
                    with suppress(OSError), context.wrap_socket(plain, server_side=True) as connected:
                        connected.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"{HOST}:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(BOUND_S)


def test_an_expired_certificate_of_a_server_is_named(kafka: Secured, zookeeper: SecuredZookeeper) -> None:
    async def work(address: str) -> None:
        settings = ZookeeperSettings(connect_timeout_ms=CONNECT_MS, **zookeeper.section(kafka.mine))  # type: ignore[arg-type]
        one = ZookeeperCoordinator(ZookeeperAddress(address, "/memq"), settings, Runtime(), "secured")
        with pytest.raises(DeniedError, match="certificate has expired") as of_zookeeper:
            async with asyncio.timeout(BOUND_S):
                await one.topics()
        assert "memq certs issue NAME --host HOST --replace" in of_zookeeper.value.hint
        await one.close()
        queue = kafka_queue(address, prefix=PREFIX, request_timeout_ms=int(BOUND_S * 1_000), **kafka.section("memq"))
        with pytest.raises(DeniedError, match="certificate verify failed") as of_kafka:
            async with asyncio.timeout(2 * BOUND_S):
                await queue.check()
        assert "has expired" in of_kafka.value.hint
        assert "memq certs issue NAME --host HOST --replace" in of_kafka.value.hint
        await queue.close()

    with expired_server(kafka.certificates.issue_expired("old", HOST)) as address:
        asyncio.run(work(address))


# ---- brokers -------------------------------------------------------------------------------------


def config_file(
    folder: Path, kafka: Secured, zookeeper: SecuredZookeeper, *, tls: Tls | None = None, password: str = PASSWORD
) -> Path:
    """Write the settings of a broker; its certificate, and its password at ZooKeeper, may be other ones."""
    sections: dict[str, dict[str, str | int | bool]] = {
        "kafka": {
            "prefix": PREFIX,
            **kafka.section("memq", **{"sasl.mechanism": "SCRAM-SHA-256"}),
            **(encrypted(tls) if tls is not None else {}),
        },
        "zookeeper": {
            "connect_timeout_ms": CONNECT_MS,
            "session_timeout_ms": 2_000,
            **zookeeper.section(tls or kafka.mine, password),
        },
    }
    lines = [
        f'store = "file:{folder}/objects"',
        f'queue = "kafka://{kafka.server.address}"',
        f'coordinator = "zookeeper://{zookeeper.server.address}/brokers"',
    ]
    for name, section in sections.items():
        lines += [f"[{name}]", *(f'"{key}" = {json.dumps(value)}' for key, value in section.items())]
    config = folder / "memq.toml"
    config.write_text("\n".join(lines))
    return config


def test_a_broker_serves_with_scram_and_digest_over_mutual_tls(
    kafka: Secured, zookeeper: SecuredZookeeper, tmp_path: Path
) -> None:
    config = config_file(tmp_path, kafka, zookeeper)
    broker = BrokerProcess(config, "b1")
    try:
        broker.start()
        with memq.Producer(broker.address) as producer:
            producer.send("clicks", b"v").result(BOUND_S)
        with memq.Consumer(broker.address, ["clicks"], start="beginning", end="end") as consumer:
            assert [record.value for batch in consumer for record in batch] == [b"v"]
        others = tmp_path / "others"
        others.mkdir()
        wrong = config_file(others, kafka, zookeeper, tls=kafka.certificates.issue("guest-2"), password="guessed")
        started = run_command("broker", "--config", str(wrong), "--port", "0", "--http-port", "-1")
        assert started.returncode == 4, started.stderr
        assert "denies access to node /brokers" in started.stderr
    finally:
        broker.close()
