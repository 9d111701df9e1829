"""Users that log in with a password: right and wrong ones, changes, and `memq users`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import memq
from memq.broker.broker import Broker
from memq.broker.identity import guesses
from memq.broker.identity.networks import broker_networks
from memq.broker.ingest.connection import Connection
from memq.cli import run
from memq.errors import DeniedError, InvalidRequestError, InvalidSettingError, UnreachableError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import MIB
from memq.notification.memory import MemoryQueue
from memq.permissions import AccessRule
from memq.protocol.frames import HELLO_MAGIC, PREFIX, Api, encode_frame
from memq.protocol.messages import Hello, encode_message
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls, client_context
from memq.settings import BrokerSettings
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.memory import MemoryHandler
from tests.certificates import Certificates

HANG_S = 60
PASSWORD = "correct horse"
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


@asynccontextmanager
async def cluster(authority: Certificates, brokers: int = 1) -> AsyncIterator[list[Broker]]:
    """Run brokers with permissions; root is their superuser, by its certificate."""
    shared, queue, store = MemoryCluster(), MemoryQueue(CLOCK), MemoryHandler(CLOCK)
    started: list[Broker] = []
    try:
        for number in range(brokers):
            tls = authority.issue(f"broker-{number}", "127.0.0.1", again=True)
            files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
            section = {name: (value, "test") for name, value in {**files, "clients": "optional"}.items()}
            settings = BrokerSettings(
                port=0,
                http_port=-1,
                broker_id=f"b{number}",
                audit=False,
                permissions=True,
                superusers="root",
                broker_principals="broker-*",
            )
            runtime = Runtime(network=broker_networks(section, EventLog(CLOCK)).data)
            broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(shared))
            started.append(broker)
            await broker.start()
        yield started
    finally:
        for broker in started:
            await broker.close()


def bounded(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test within a time limit."""

    async def inside() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(inside())


def root(authority: Certificates, broker: Broker) -> memq.aio.Admin:
    return memq.aio.Admin(broker.address, tls=authority.issue("root", again=True))


def user(authority: Certificates, name: str, password: str) -> Tls:
    return Tls(ca_file=authority.trusted.ca_file, user=name, password=password)


async def allow_alice(authority: Certificates, brokers: list[Broker]) -> None:
    """Make the user alice, which may write to all topics, and wait until all brokers know it."""
    async with root(authority, brokers[0]) as admin:
        await admin.put_user("alice", PASSWORD)
        rules = [
            AccessRule(effect="allow", principal="alice", permission=permission, kind="topic", name="*")
            for permission in ("write", "create")
        ]
        await admin.change_permissions(add=rules)
    for broker in brokers:
        await broker.services.permissions.refresh()


async def send_one(broker: Broker, tls: Tls) -> memq.Ack:
    async with memq.aio.Producer(broker.address, tls=tls, audit=False, connect_timeout_ms=2_000) as producer:
        return await (await producer.send("clicks", b"v"))


async def send_until_refused(producer: memq.aio.Producer) -> None:
    while True:
        await (await producer.send("clicks", b"after"))


def test_a_password_gives_a_connection_its_principal(
    authority: Certificates, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    names: list[str] = []
    close = Connection.connection_lost

    def lost(connection: Connection, exc: Exception | None) -> None:
        names.append(connection.principal.name)
        close(connection, exc)

    monkeypatch.setattr(Connection, "connection_lost", lost)

    async def work() -> None:
        async with cluster(authority, 2) as brokers:
            await allow_alice(authority, brokers)
            for broker in brokers:
                await send_one(broker, user(authority, "alice", PASSWORD))
            for name, password in (("alice", "wrong"), ("nobody", PASSWORD), ("broker-0", PASSWORD)):
                with pytest.raises(DeniedError, match="user or password is wrong"):
                    await send_one(brokers[0], user(authority, name, password))

    bounded(work)
    assert names.count("alice") >= 2
    assert "login-refused: 127.0.0.1:" in caplog.text
    assert "no user 'nobody' with this password" in caplog.text
    assert PASSWORD not in caplog.text


def test_a_new_password_counts_and_ends_connections_of_the_former_one(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as brokers:
            await allow_alice(authority, brokers)
            tls = user(authority, "alice", PASSWORD)
            async with memq.aio.Producer(brokers[0].address, tls=tls, audit=False) as producer:
                await (await producer.send("clicks", b"before"))
                async with root(authority, brokers[0]) as admin:
                    await admin.put_user("alice", "another")
                with pytest.raises(DeniedError):
                    await send_until_refused(producer)
            await send_one(brokers[0], user(authority, "alice", "another"))
            async with root(authority, brokers[0]) as admin:
                assert await admin.users() == ["alice"]
                await admin.remove_user("alice")
                assert await admin.users() == []
            with pytest.raises(DeniedError):
                await send_one(brokers[0], user(authority, "alice", "another"))

    bounded(work)


def test_guesses_are_slowed_and_a_right_password_counts_again_later(
    authority: Certificates, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guesses, "OF_USER_AT_ADDRESS", (2, 1.0))

    async def work() -> None:
        async with cluster(authority) as (broker,):
            await allow_alice(authority, [broker])
            for _ in range(2):
                with pytest.raises(DeniedError, match="user or password is wrong"):
                    await send_one(broker, user(authority, "alice", "wrong"))
            started_s = CLOCK.monotonic()
            await send_one(broker, user(authority, "alice", PASSWORD))  # its client tries again
            assert CLOCK.monotonic() - started_s > 0.3
            await send_one(broker, user(authority, "alice", PASSWORD))

    bounded(work)
    assert "login-slowed: user 'alice': too many logins failed at address 127.0.0.1" in caplog.text


def test_a_user_that_strangers_guess_logs_in_later(authority: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "OF_USER", (1, 30.0))
    monkeypatch.setattr(guesses, "DELAY_S", 0.5)

    async def work() -> None:
        async with cluster(authority) as (broker,):
            await allow_alice(authority, [broker])
            with pytest.raises(DeniedError, match="user or password is wrong"):
                await send_one(broker, user(authority, "alice", "wrong"))
            times_s = [CLOCK.monotonic()]
            for _ in range(2):
                await send_one(broker, user(authority, "alice", PASSWORD))
                times_s.append(CLOCK.monotonic())
            assert times_s[1] - times_s[0] > 0.5, "the first login of this address was not delayed"

    bounded(work)


def test_names_and_passwords_that_do_not_fit_are_refused(authority: Certificates) -> None:
    async def work() -> None:
        async with cluster(authority) as (broker,), root(authority, broker) as admin:
            for name, password in (("", "p"), ("a*", "p"), ("a\n", "p"), ("alice", ""), ("broker-9", "p")):
                with pytest.raises(InvalidRequestError):
                    await admin.put_user(name, password)
            assert await admin.users() == []

    bounded(work)
    with pytest.raises(InvalidSettingError, match="go together"):
        Tls(user="alice")
    with pytest.raises(InvalidSettingError, match="password and password_file"):
        Tls(user="alice", password="a", password_file="b")
    assert "hidden" not in repr(Tls(user="alice", password="hidden"))


@pytest.mark.parametrize("then", [Api.WRITE, Api.READ, Api.AUTHENTICATE])
def test_a_login_gets_no_memory_for_large_frames(authority: Certificates, then: Api) -> None:
    async def work() -> None:
        async with cluster(authority) as (broker,):
            host, port = parse_address(broker.address)
            context = client_context(authority.trusted)
            reader, writer = await asyncio.open_connection(host, port, ssl=context)  # noqa: TID251 - raw bytes
            hello = Hello(least_version=1, greatest_version=1, scram="n,,n=alice,r=abc")
            writer.write(encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello)))
            writer.write(PREFIX.pack(4 * MIB, then, 0, 1, 0))
            answer = await reader.read()
            assert b"before the end of the login" in answer or b"bytes" in answer
            writer.close()

    bounded(work)


def test_a_password_never_goes_to_a_broker_without_tls(authority: Certificates) -> None:
    async def work() -> None:
        settings = BrokerSettings(port=0, http_port=-1, audit=False)
        stores = dict[str, StorageHandler](main=MemoryHandler(CLOCK))
        broker = Broker(settings, Runtime(), stores, MemoryQueue(CLOCK), MemoryCoordinator(MemoryCluster()))
        await broker.start()
        try:
            with pytest.raises(UnreachableError):
                await send_one(broker, user(authority, "alice", PASSWORD))
        finally:
            await broker.close()

    bounded(work)


def test_the_command_reads_passwords_from_files_and_the_environment(
    authority: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = authority.issue("root", again=True)
    for name in ("ca_file", "cert_file", "key_file"):
        monkeypatch.setenv(f"MEMQ_TLS_{name.upper()}", getattr(admin, name))
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")

    async def work() -> None:
        async with cluster(authority) as brokers:
            await allow_alice(authority, brokers)

            async def memq_users(*arguments: str) -> int:
                return await asyncio.to_thread(run.run, ["users", *arguments, "-b", brokers[0].address])

            assert await memq_users("add", "bob", "--password-file", str(password)) == run.OK
            monkeypatch.setenv("NEW_PASSWORD", "from the environment")
            assert await memq_users("add", "alice", "--password-env", "NEW_PASSWORD") == run.OK
            assert await memq_users("add", "alice", "--password-env", "NO_SUCH") != run.OK
            assert await memq_users("add", "bob", "--password-file", "/no/such") != run.OK
            assert await memq_users("list", "--json") == run.OK
            by_file = Tls(ca_file=admin.ca_file, user="alice", password_file=str(tmp_path / "other"))
            (tmp_path / "other").write_text("from the environment")
            await send_one(brokers[0], by_file)
            assert await memq_users("remove", "alice") == run.OK
            with pytest.raises(DeniedError):
                await send_one(brokers[0], by_file)

    bounded(work)
    printed = capsys.readouterr()
    assert '"alice"' in printed.out
    assert '"bob"' in printed.out
    assert PASSWORD not in printed.out + printed.err
