"""SIGTERM drains a real broker. With the store down it waits; a second SIGTERM ends it, and names its blocks."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import memq
from memq.errors import NotFoundError
from tests.servers import DevServer, dev_server

TIMEOUT_S = 60.0


def break_store(server: DevServer) -> None:
    """Take the store away: where the folder of objects was, a file is now."""
    objects = server.data / "objects"
    objects.rename(server.data / "objects-away")
    objects.write_bytes(b"")


def mend_store(server: DevServer) -> None:
    """Bring the store back."""
    objects = server.data / "objects"
    objects.unlink()
    (server.data / "objects-away").rename(objects)


def wait_for_log(server: DevServer, words: str) -> None:
    """Wait until the server's log has `words`: the log is followed, not polled by a clock."""
    with server.log.open() as log:
        seen = ""
        while words not in seen:
            line = log.readline()
            if line:
                seen += line
            else:
                assert server.process.poll() is None, f"ended without saying '{words}':\n{server.log.read_text()}"


def test_a_clean_stop_loses_nothing_that_was_acked_at_level_one(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address, acks=1, linger_ms=0) as producer:
            deliveries = [producer.send("clicks", b"%d" % number) for number in range(5000)]
            for delivery in deliveries:
                delivery.result(timeout=TIMEOUT_S)
            server.signal()
        assert server.wait() == 0
        server.start()
        with memq.Consumer(server.address, ["clicks"], start="beginning", end="end") as consumer:
            values = [value for batch in consumer for value in batch.values()]
        assert values == [b"%d" % number for number in range(5000)]


def test_a_producer_rides_over_a_restart_without_an_error(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address, linger_ms=1, block_bytes=2048) as producer:
            for number in range(20_000):
                producer.send("clicks", b"%d" % number)
                if number == 10_000:
                    server.signal()
            assert server.wait() == 0
            server.start()
            producer.flush(timeout=TIMEOUT_S)
        with memq.Consumer(server.address, ["clicks"], start="beginning", end="end") as consumer:
            values = [value for batch in consumer for value in batch.values()]
        assert values == [b"%d" % number for number in range(20_000)]


def test_with_the_store_down_the_drain_waits_for_it(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address, acks=1) as producer:
            producer.send("clicks", b"first").result(timeout=TIMEOUT_S)
            break_store(server)
            producer.send("clicks", b"held").result(timeout=TIMEOUT_S)
            wait_for_log(server, "store-retry")
            server.signal()
            wait_for_log(server, "draining")
            assert server.process.poll() is None
            mend_store(server)
            assert server.wait() == 0
            server.start()
        with memq.Consumer(server.address, ["clicks"], start="beginning", end="end") as consumer:
            assert [value for batch in consumer for value in batch.values()] == [b"first", b"held"]


def test_a_second_signal_gives_up_and_names_what_was_held(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Producer(server.address, acks="all") as first:  # a batch of its own
            first.send("clicks", b"first").result(timeout=TIMEOUT_S)
        producer = memq.Producer(server.address, acks=1, delivery_timeout_ms=2000)
        break_store(server)
        producer.send("clicks", b"held").result(timeout=TIMEOUT_S)
        wait_for_log(server, "store-retry")
        server.signal()
        wait_for_log(server, "draining")
        server.signal(signal.SIGINT)
        assert server.wait() == 1
        assert "topic 'clicks' partition 0 batch 1" in server.log.read_text()
        assert "sequences 0 to 0, acks=one" in server.log.read_text()
        mend_store(server)
        server.start()
        producer.close()


def get(server: DevServer, path: str) -> tuple[int, str]:
    """Ask the HTTP port that the server named in its log."""
    line = next(line for line in server.log.read_text().splitlines() if "http-ready" in line)
    base = line.split("http://")[1].split("/")[0]
    try:
        with urllib.request.urlopen(f"http://{base}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_readiness_and_metrics(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data", http=True) as server:
        assert get(server, "/healthz") == (200, "alive\n")
        assert get(server, "/readyz") == (200, "ready\n")
        assert get(server, "/nothing")[0] == 404
        with memq.Producer(server.address, audit=False) as producer:
            producer.send("clicks", b"x").result(timeout=TIMEOUT_S)
        status, metrics = get(server, "/metrics")
        assert status == 200
        assert "memq_broker_received_records_total 1.0" in metrics
        assert 'memq_broker_ack_seconds_bucket{le="+Inf"} 1.0' in metrics
        assert "memq_broker_memory_leased_bytes" in metrics
        break_store(server)
        status, reason = get(server, "/readyz")
        assert status == 503
        assert "not ready" in reason
        assert get(server, "/healthz")[0] == 200
        mend_store(server)


def test_a_second_broker_on_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        second = DevServer(server.data)
        with pytest.raises(AssertionError, match=f"pid {server.process.pid}"):
            second.start()
        assert second.wait() == 1


def test_a_topic_deleted_and_made_again_starts_empty(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server, memq.Producer(server.address) as producer:
        producer.send("clicks", b"old").result(timeout=TIMEOUT_S)
        with memq.Admin(server.address) as admin:
            admin.delete_topic("clicks")
            admin.create_topic("clicks")
        with memq.Producer(server.address) as other:
            other.send("clicks", b"new").result(timeout=TIMEOUT_S)
        with memq.Consumer(server.address, ["clicks"], start="beginning", end="end") as consumer:
            assert [value for batch in consumer for value in batch.values()] == [b"new"]
        with pytest.raises(NotFoundError, match="does not exist any more"):
            producer.send("clicks", b"for the old topic").result(timeout=TIMEOUT_S)
        producer.send("clicks", b"for the new one").result(timeout=TIMEOUT_S)


def test_the_identity_of_the_folder_survives(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as server:
        identity = json.loads((server.data / "cluster.json").read_text())
        server.signal()
        assert server.wait() == 0
        moved = server.data.rename(tmp_path / "moved")
    with dev_server(moved):
        assert json.loads((moved / "cluster.json").read_text()) == identity
