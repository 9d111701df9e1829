"""Overload of a real broker: a store that hangs, thousands of clients, clients that do not read, no disk."""

from __future__ import annotations

import hashlib
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.errors import OutcomeUnknownError
from memq.limits import KIB, MIB
from memq.protocol.frames import HELLO_MAGIC, VERSIONS, Api, encode_frame
from memq.protocol.messages import Hello, ReadRequest, encode_message
from memq.runtime.network import parse_address
from tests.process_memory import peak_bytes, resident_bytes
from tests.servers import DevServer, dev_server
from tests.stalling import stalling_broker

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="memory and limits of processes are read as Linux has them"
)
TIMEOUT_S = 60.0
BUDGET = 64 * MIB
HELLO = encode_frame(
    Api.HELLO, 0, HELLO_MAGIC, encode_message(Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1]))
)


def value_of(producer: int, number: int, size: int) -> bytes:
    """A record that says who sent it; what follows can be distinguished from its start."""
    start = b"%d:%d:" % (producer, number)
    return start + hashlib.blake2b(start).digest() * (size // 64)


def send_all(producer: memq.Producer, number: int, records: int, size: int, errors: list[BaseException]) -> None:
    """Send records and wait until they are acked, in a thread of its own."""
    try:
        for record in range(records):
            producer.send("clicks", value_of(number, record, size))
        producer.flush(timeout=TIMEOUT_S)
    except BaseException as error:  # noqa: BLE001 - the test's thread reads it
        errors.append(error)


def read_all(address: str, topic: str, **settings: Any) -> list[bytes]:
    with memq.Consumer(address, [topic], start="beginning", end="end", **settings) as consumer:
        return [value or b"" for batch in consumer for value in batch.values()]


def test_with_the_store_stalled_memory_is_bounded_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """Ten times the budget is on its way; the broker stops reading, the producers block; then all of it is acked."""
    clients, size = 40, 64 * KIB
    records = 10 * BUDGET // (clients * size)
    errors: list[BaseException] = []
    with stalling_broker(tmp_path, BUDGET) as broker:
        with memq.Producer(broker.address) as warm:
            warm.send("first", b"seen").result(timeout=TIMEOUT_S)
        idle = broker.resident_bytes()
        broker.tell("shut")
        producers = [memq.Producer(broker.address, codec="none", pending_bytes_max=4 * MIB) for _ in range(clients)]
        threads = [
            threading.Thread(target=send_all, args=(producer, number, records, size, errors))
            for number, producer in enumerate(producers)
        ]
        for thread in threads:
            thread.start()
        broker.wait_for("starved")
        assert read_all(broker.address, "first") == [b"seen"], "consumers are served meanwhile"
        assert all(thread.is_alive() for thread in threads), "a producer was done before the store took anything"
        broker.tell("open")
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not errors
        for producer in producers:
            producer.close()
        seen = dict.fromkeys(range(clients), 0)
        for value in read_all(broker.address, "clicks"):
            number = int(value.split(b":", 1)[0])
            assert value == value_of(number, seen[number], size), "lost, doubled, changed or out of order"
            seen[number] += 1
        assert seen == dict.fromkeys(range(clients), records)
        grown = broker.peak_bytes() - idle
    assert grown <= 1.2 * BUDGET, f"{grown / MIB:.0f} MiB above idle with a budget of {BUDGET / MIB:.0f} MiB"


# ---- many clients, and clients that never read --------------------------------------------------


@pytest.fixture
def files() -> Iterator[int]:
    """Let this process, and those that it starts, open many files; return for how many idle clients they suffice."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 6_000 if hard == resource.RLIM_INFINITY else min(6_000, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield min(5_000, max(soft, wanted) - 300)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(address: str, *, hello: bool = True) -> socket.socket:
    """A bare client; with `hello` it has said so and got its answer."""
    client = socket.create_connection(parse_address(address), timeout=TIMEOUT_S)
    if hello:
        client.sendall(HELLO)
        assert client.recv(4096)[4] == Api.HELLO
    return client


def test_thousands_of_idle_clients_cost_little_and_hinder_nobody(
    tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files >= 1_000, "raise the limit on open files"
    monkeypatch.setenv("MEMQ_CONNECTIONS_PER_ADDRESS_MAX", "100000")  # all of them come from this machine
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address) as producer:
            producer.send("clicks", b"0").result(timeout=TIMEOUT_S)
            before = resident_bytes(server.process.pid)
            clients = [connect(server.address, hello=number % 2 == 0) for number in range(files)]
            for number in range(1, 200):
                producer.send("clicks", b"%d" % number).result(timeout=TIMEOUT_S)
            grown = resident_bytes(server.process.pid) - before
            for client in clients:
                client.close()
        assert read_all(server.address, "clicks") == [b"%d" % number for number in range(200)]
        assert grown <= files * 16 * KIB, f"{grown / files / KIB:.1f} KiB for each idle client"


def test_more_clients_than_files_are_turned_away_and_the_broker_continues(tmp_path: Path, files: int) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address) as producer:
            producer.send("clicks", b"before").result(timeout=TIMEOUT_S)
            _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, hard))
            clients = [connect(server.address, hello=False) for _ in range(300)]
            for client in clients:
                client.close()
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (hard, hard))
            producer.send("clicks", b"after").result(timeout=TIMEOUT_S)
        assert read_all(server.address, "clicks") == [b"before", b"after"]


def test_clients_that_never_read_cost_a_bounded_amount_and_others_are_served(tmp_path: Path) -> None:
    limits = ["--memory-bytes-max", "64MiB", "--frame-timeout-ms", "500ms"]
    with dev_server(tmp_path / "data", *limits) as server:
        with memq.Producer(server.address, codec="none", linger_ms=0) as producer:
            sent = [value_of(0, number, 500 * KIB) for number in range(40)]
            for value in sent:
                producer.send("clicks", value)
        objects = [path for path in (server.data / "objects").rglob("*") if path.is_file()]
        largest = max(objects, key=lambda path: path.stat().st_size)
        key, size = largest.relative_to(server.data / "objects").as_posix(), largest.stat().st_size
        idle = resident_bytes(server.process.pid)
        ask = ReadRequest(store="main", key=key, offset=0, length=min(size, 8 * MIB))
        deaf = [connect(server.address) for _ in range(6)]
        for client in deaf:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
            client.sendall(b"".join(encode_frame(Api.READ, 0, n, encode_message(ask)) for n in range(60)))
        assert read_all(server.address, "clicks", read="broker") == sent
        grown = peak_bytes(server.process.pid) - idle
        for client in deaf:
            client.close()
    assert grown <= 1.2 * BUDGET, f"{grown / MIB:.0f} MiB above idle with a budget of {BUDGET / MIB:.0f} MiB"


# ---- no disk ------------------------------------------------------------------------------------


def limit_file_size(server: DevServer, size: int) -> None:
    """Let no file of the server grow beyond `size`: its disk is full, as far as it can tell."""
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("left", [1, 100 * KIB], ids=["nothing can be written", "objects can't be written"])
def test_with_a_full_disk_producers_get_errors_and_with_room_again_all_is_well(left: int, tmp_path: Path) -> None:
    before, given_up, patient = (value_of(0, number, 300 * KIB) for number in range(3))
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address, codec="none", delivery_timeout_ms=1_500) as producer:
            producer.send("clicks", before).result(timeout=TIMEOUT_S)
            limit_file_size(server, left)
            delivery = producer.send("clicks", given_up)
            with pytest.raises(OutcomeUnknownError, match="topic 'clicks' partition 0"):
                delivery.result(timeout=TIMEOUT_S)
        assert server.process.poll() is None
        with memq.Producer(server.address, codec="none") as producer:
            delivery = producer.send("clicks", patient)
            limit_file_size(server, resource.RLIM_INFINITY)
            delivery.result(timeout=TIMEOUT_S)
        values = read_all(server.address, "clicks")
        assert [value for value in values if value != given_up] == [before, patient]
        assert values.count(given_up) <= 1, "its outcome was unknown: it may be there, once"
        server.signal()
        assert server.wait() == 0
        assert left == 1 or "store-retry: topic 'clicks' partition 0 batch" in server.log.read_text()
        server.start()
        assert read_all(server.address, "clicks") == values
