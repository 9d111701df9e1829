"""The dashboard over real HTTP: requests of its pages, access, and headers for browsers."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import memq
from memq.audit.dashboard.poller import shown
from memq.audit.dashboard.server import CONNECTIONS_MAX, Dashboard
from memq.audit.dashboard.stream import TAILS_MAX
from memq.audit.finding import Finding, Kind
from memq.errors import InvalidRequestError, InvalidSettingError
from memq.runtime.network import is_loopback
from memq.settings import DashboardSettings
from memq.testing import Cluster
from tests.dashboards import Served, WrittenAudit, events, lines, served
from tests.tls import server_context

ASSETS_BYTES_MAX = 100_000
FORBIDDEN = r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
FORBIDDEN_IN_HTML = r"<script>|<style|\sstyle=|\son\w+="
NOBODY = "127.0.0.1:1"  # nothing listens there
UNREAD_BYTES = 32 << 20  # more than the sockets of a connection hold
JSON = {"Content-Type": "application/json"}
FINDING = Finding(id="f", kind=Kind.LOST, topic="t", partition=0, records=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.create_topic("clicks")
        with memq.Producer(cluster.address) as producer:
            for number in range(100):
                tag = "even" if number % 2 == 0 else "odd"
                producer.send(
                    "clicks",
                    f"value {number}",
                    key=f"key-{number % 10}",
                    headers={"n": str(number)},
                    tag=tag,
                    timestamp_ms=1_000 + number,
                )
            producer.send("clicks", b"\xff\x00", key=b"\xfe")
            producer.flush(60)
        yield cluster


@pytest.fixture(scope="module")
def pages(cluster: Cluster) -> Iterator[Served]:
    with served(cluster.address, dashboard_contents=True) as pages:
        yield pages


def wait_for(pages: Served, kind: str, key: str) -> dict[str, object]:
    """Return the first value of a kind and key that the stream tells."""
    with events(pages.url, "/api/events") as stream:
        for _, report in stream:
            for found_kind, found_key, value in report["values"]:
                if (found_kind, found_key) == (kind, key):
                    return dict(value)
    raise AssertionError("the stream ended")


# ---- what pages ask for ------------------------------------------------------------------------------


def test_the_stream_tells_topics_brokers_and_what_is_unknown(pages: Served) -> None:
    topic = wait_for(pages, "topic", "clicks")
    assert (topic["partitions"], topic["lost"], topic["lag_records"]) == (1, None, None)
    broker = wait_for(pages, "broker", "broker-1")
    assert broker["governs"]
    assert (broker["ring_batches"], broker["breakers"]) == (0, [])
    assert int(str(broker["memory_bytes_max"])) > 0
    assert wait_for(pages, "about", "")["audited"] is False


def test_reconnected_page_gets_the_changes_and_after_another_run_everything(pages: Served) -> None:
    wait_for(pages, "topic", "clicks")
    with events(pages.url, "/api/events") as stream:
        last_id, report = next(stream)
    assert report["whole"]
    pages.call(lambda: pages.dashboard.feed.board.put("finding", "f", shown(FINDING)))
    with events(pages.url, "/api/events", last_id) as stream:
        _, report = next(stream)
        assert not report["whole"]
        assert ["finding", "f"] in [each[:2] for each in report["values"]]
    with events(pages.url, "/api/events", "other-run-5") as stream:
        assert next(stream)[1]["whole"]
    pages.call(lambda: pages.dashboard.feed.board.put("finding", "f", None))


def test_a_topic_has_owners_settings_and_columns_of_time(pages: Served) -> None:
    page = pages.json("/api/topics/clicks?span=360")
    assert page["partitions"][0]["owner"] == "broker-1"
    assert page["settings"]["delivery_timeout_ms"] == 120_000
    assert len(page["history"]["words"]) == 72


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/topics/missing", 404, "topic 'missing' does not exist"),
        ("/api/topics/clicks?span=7", 400, "span = 7 is none of 60, 360, 1440 minutes"),
        ("/api/search?topic=missing", 404, "does not exist"),
        ("/api/search?topic=clicks&first_ms=-1", 400, "first_ms = '-1' is no number"),
        ("/api/search?topic=clicks&first_ms=9999999999999999", 400, "first_ms = 9999999999999999 is no time"),
        ("/api/search", 400, "name"),
        ("/api/search?topic=clicks&tags=A%20|", 400, "tags has a single '|' at character 3"),
        ("/api/search?topic=clicks&where=n%20>", 400, "where can't be read at its end"),
        ("/api/tail?topic=missing", 404, "does not exist"),
        ("/api/object?key=memq/none", 404, "no store of the cluster holds the object"),
        ("/api/object", 400, "the name of an object has 1 to"),
    ],
)
def test_wrong_requests_to_the_dashboard_are_answered_with_the_fault(
    pages: Served, path: str, status: int, words: str
) -> None:
    answer, body = pages.ask(path)
    assert answer.status == status, body
    assert words in json.loads(body)["error"]


def test_search_by_key_tag_and_time(pages: Served) -> None:
    found = pages.json("/api/search?topic=clicks&key=key-3&tags=odd&first_ms=1010&end_ms=1060")
    assert [record["value"] for record in found["records"]] == [f"value {number}" for number in (13, 23, 33, 43, 53)]
    assert found["complete"]
    (strange,) = pages.json("/api/search?topic=clicks&key=0xfe")["records"]
    assert (strange["key"], strange["value"], strange["value_bytes"]) == ("0xfe", "0xff00", 2)


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ({"tags": "odd", "where": "n > 90"}, [91, 93, 95, 97, 99]),
        ({"where": "n BETWEEN 3 AND 4"}, [3, 4]),
        ({"tags": "none"}, []),
        ({"tags": "odd || even", "where": "n IN (7, 8)", "key": "key-8"}, [8]),
    ],
)
def test_search_by_tags_and_a_condition_on_headers(pages: Served, asked: dict[str, str], numbers: list[int]) -> None:
    found = pages.json(f"/api/search?{urlencode({'topic': 'clicks', **asked})}")
    assert [record["value"] for record in found["records"]] == [f"value {number}" for number in numbers]
    assert (found["complete"], found["searched"]) == (True, 101)


def test_a_condition_on_headers_is_refused_where_headers_are_masked(cluster: Cluster) -> None:
    with served(cluster.address) as pages:
        answer, body = pages.ask("/api/search?topic=clicks&where=n%20%3D%207")
        assert answer.status == 403
        assert "needs their contents" in json.loads(body)["error"]
        with lines(pages.url, "/api/tail?topic=clicks&where=n%20%3D%207") as stream:
            assert "event: failed" in list(stream)
        assert len(pages.json("/api/search?topic=clicks&tags=odd")["records"]) == 50


def test_contents_are_masked_unless_allowed(cluster: Cluster) -> None:
    with served(cluster.address) as pages:
        record = pages.json("/api/search?topic=clicks&key=key-3")["records"][0]
        assert (record["key"], record["value"], record["headers"]) == (None, None, None)
        assert (record["key_bytes"], record["value_bytes"], record["tag"]) == (5, 7, "odd")
        key = next(iter(cluster.store.objects))
        assert pages.json(f"/api/block?key={key}&block=0")["records"][0]["value"] is None


def test_an_object_is_checked_block_by_block_down_to_its_records(pages: Served, cluster: Cluster) -> None:
    key = next(iter(cluster.store.objects))
    page = pages.json(f"/api/object?key={key}")
    assert page["key"] == key
    assert page["blocks"][0]["topic"] == "clicks"
    assert not page["blocks"][0]["error"]
    block = pages.json(f"/api/block?key={key}&block=0")
    assert block["records"][0]["value"] == "value 0"
    assert pages.ask(f"/api/block?key={key}&block=99")[0].status == 404


def test_a_damaged_block_is_named(cluster: Cluster) -> None:
    with memq.Producer(cluster.address) as producer:
        producer.send("broken", b"x" * 100)
        producer.flush(60)
    cluster.damage(memq.Position(0, cluster.records("broken")[0].position.pointer_offset, 0), "broken")
    key = next(key for key in cluster.store.objects if "/broken/" in key)
    with served(cluster.address, dashboard_contents=True) as pages:
        (block,) = pages.json(f"/api/object?key={key}")["blocks"]
        assert block["error"]
        assert pages.json(f"/api/block?key={key}&block=0")["error"]
        found = pages.json("/api/search?topic=broken")
        assert (found["records"], found["complete"]) == ([], False)
        assert found["why"] == "records in damaged blocks: 1"


def named(topic_id: str, **of_it: Any) -> Finding:
    place = {"topic": "broken", "topic_id": topic_id, "partition": 0, "minute": 0, "producer": 1, "kind": "corrupt"}
    return Finding(**{"id": "f", "stage": "object", "offset": 0} | place | of_it)  # type: ignore[arg-type]


def test_a_finding_is_verified_by_what_lies_in_the_store_now(cluster: Cluster) -> None:
    cluster.create_topic("checked", partitions=1)
    with memq.Producer(cluster.address) as producer:
        ack = producer.send("checked", b"x" * 100).result(60)
    place = memq.Position(0, cluster.records("checked")[0].position.pointer_offset, 0)
    with memq.Admin(cluster.address) as admin:
        topic_id = admin.topic("checked").topic.id
    about = {"topic": "checked", "producer": ack.producer_id, "records": 1, "ranges": ((0, 1),)}
    found = {
        "here": named(topic_id, offset=place.pointer_offset, **about),
        "gone": named(topic_id, offset=1_000, **about),
        "other": named("00" * 16, offset=place.pointer_offset, **about),
        "nowhere": named(topic_id, id="nowhere", offset=-1, **about),
    }
    with served(cluster.address, WrittenAudit(named=found)) as pages:
        report = pages.json("/api/findings/here/verify")
        assert (report["sound"], report["held"], report["damaged"]) == (True, 1, 0)
        assert report["says"].endswith(
            "every block is sound; sound blocks hold 1 of the 1 records that the finding names"
        )
        cluster.damage(place, "checked")
        report = pages.json("/api/findings/here/verify")
        assert (report["sound"], report["held"], report["damaged"]) == (False, 0, 1)
        assert report["blocks"][0]["named"]
        assert report["blocks"][0]["cause"]
        assert not pages.json("/api/findings/gone/verify")["object"]
        for name, words in (
            ("other", "is not that of finding"),
            ("nowhere", "no pointer has its records"),
            ("none", "no finding"),
        ):
            answer, body = pages.ask(f"/api/findings/{name}/verify")
            assert answer.status == 404
            assert words in json.loads(body)["error"]


def test_findings_are_exported_as_evidence(cluster: Cluster) -> None:
    found = {"f": named("00" * 16, topic="clicks", producer=7, records=3, ranges=((4, 6), (9, 10)))}
    with served(cluster.address, WrittenAudit(named=found)) as pages:
        (report,) = pages.json("/api/findings")
        assert (report["producer"], report["ranges"]) == ("0000000000000007", [[4, 6], [9, 10]])
        answer, body = pages.ask("/api/findings?format=csv")
        assert answer.headers["Content-Disposition"] == 'attachment; filename="findings.csv"'
        (row,) = csv.DictReader(io.StringIO(body.decode()))
        assert (row["id"], row["producer"], row["ranges"]) == ("f", "0000000000000007", "4-5 9-9")
        assert pages.ask("/api/findings?format=xml")[0].status == 400
    with served(cluster.address) as pages:
        assert pages.json("/api/findings?format=json") == []


def test_the_tail_shows_what_comes_within_its_rate(pages: Served, cluster: Cluster) -> None:
    cluster.create_topic("river")
    shown, passed = 0, 0
    with memq.Producer(cluster.address) as producer, lines(pages.url, "/api/tail?topic=river&rate=5") as stream:
        for line in stream:  # it begins at the end as it is when it has connected: send until something comes
            if line.startswith(":"):
                producer.send_many("river", ["drop"] * 100)
                producer.flush(60)
            elif line.startswith("data: "):
                part = json.loads(line.removeprefix("data: "))
                assert len(part["records"]) <= 5
                assert all(record["value"] == "drop" for record in part["records"])
                shown, passed = shown + len(part["records"]), passed + part["passed"]
                if shown and passed:
                    break


def test_the_tail_shows_only_what_its_filter_wants(pages: Served, cluster: Cluster) -> None:
    cluster.create_topic("brook")
    asked = urlencode({"topic": "brook", "rate": 50, "tags": "A", "where": "n < 2"})
    seen, sent = list[str](), 0
    with memq.Producer(cluster.address) as producer, lines(pages.url, f"/api/tail?{asked}") as stream:
        for line in stream:
            if line.startswith(":"):  # as above
                for number in range(4):
                    producer.send("brook", f"{sent} {number}", tag="AB"[number % 2], headers={"n": str(number)})
                producer.flush(60)
                sent += 1
            elif line.startswith("data: "):
                part = json.loads(line.removeprefix("data: "))
                assert part["passed"] == 0, "others are not counted"
                seen += [record["value"].split()[1] for record in part["records"]]
                break
    assert set(seen) == {"0"}


def test_a_tail_with_a_malformed_filter_names_the_mistake(pages: Served) -> None:
    with lines(pages.url, "/api/tail?topic=clicks&tags=A%20|") as stream:
        text = "\n".join(stream)
    assert "event: failed" in text
    assert "tags has a single '|' at character 3" in text


def test_there_is_a_bound_on_streams(pages: Served) -> None:
    pages.dashboard.feed.tails.held += TAILS_MAX
    try:
        answer, body = pages.ask("/api/tail?topic=clicks")
    finally:
        pages.dashboard.feed.tails.held -= TAILS_MAX
    assert answer.status == 503
    assert "tails are open" in json.loads(body)["error"]


def test_a_cluster_that_does_not_answer_is_said_and_no_number_is_shown() -> None:
    with served(NOBODY) as pages, events(pages.url, "/api/events") as stream:
        troubles = (value["trouble"] for _, report in stream for kind, _, value in report["values"] if kind == "about")
        assert "127.0.0.1:1" in next(filter(None, troubles))


# ---- who may ask -------------------------------------------------------------------------------------


def test_findings_are_read_only_unless_allowed(cluster: Cluster) -> None:
    with served(cluster.address, WrittenAudit(found={"f": FINDING})) as pages:
        answer, body = pages.ask("/api/findings/f/acknowledge", method="POST", headers=JSON)
        assert answer.status == 403
        assert json.loads(body)["hint"] == "set dashboard_acknowledge"


def test_an_acknowledgement_comes_from_a_page_of_ours_and_has_a_name(cluster: Cluster) -> None:
    with served(cluster.address, WrittenAudit(found={"f": FINDING}), dashboard_acknowledge=True) as pages:
        path = "/api/findings/f/acknowledge"
        for foreign in (
            {},
            {"Content-Type": "text/plain"},
            {**JSON, "Origin": "http://evil.example"},
            {**JSON, "Sec-Fetch-Site": "cross-site"},
        ):
            assert pages.ask(path, method="POST", headers=foreign)[0].status == 403
        assert pages.ask(path, method="GET")[0].status == 405
        assert pages.ask("/api/findings/none/acknowledge", method="POST", headers=JSON)[0].status == 404
        assert pages.ask(path, method="POST", headers={**JSON, "Origin": pages.url.rstrip("/")})[0].status == 200
        assert wait_for(pages, "finding", "f")["acknowledged_by"] == "anonymous"


def test_a_foreign_host_name_is_refused(pages: Served) -> None:
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", ""):
        assert pages.ask("/", headers={"Host": host})[0].status in (400, 421)
    for host in ("localhost:1234", "127.0.0.1", "[::1]:99"):
        assert pages.ask("/", headers={"Host": host})[0].status == 200


def test_every_answer_is_closed_to_others(pages: Served) -> None:
    for path in ("/", "/assets/app.js", "/api/topics/missing", "/none", "/assets/..%2fview.py"):
        answer, _ = pages.ask(path, headers={"Origin": "http://evil.example"})
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in answer.headers


def chosen(**settings: str) -> DashboardSettings:
    return DashboardSettings(**settings)  # type: ignore[arg-type]  # none of those that are no text


def test_beyond_loopback_it_wants_tls_and_a_token(tmp_path: Path) -> None:
    for settings in (
        {"dashboard_host": "0.0.0.0"},
        {"dashboard_host": "192.0.2.1", "dashboard_tls_cert": "cert.pem", "dashboard_tls_key": "key.pem"},
        {"dashboard_host": "::", "dashboard_token_file": "token"},
    ):
        with pytest.raises(InvalidSettingError, match="would be reached at"):
            Dashboard(NOBODY, chosen(**settings))
    short = tmp_path / "token"
    short.write_text("abc\n")
    for settings, words in (
        ({"dashboard_token_file": str(short)}, "has 3 characters"),
        ({"dashboard_token_file": str(tmp_path / "none")}, "can't read"),
        ({"dashboard_tls_cert": str(short)}, "can't load"),
    ):
        with pytest.raises(InvalidSettingError, match=words):
            Dashboard(NOBODY, chosen(**settings))
    assert [is_loopback(host) for host in ("localhost", "127.0.0.9", "::1", "0.0.0.0", "example.org")] == [True] * 3 + [
        False
    ] * 2


def test_a_token_is_asked_for_and_tls_is_spoken(cluster: Cluster, tmp_path: Path) -> None:
    _, authority = server_context(tmp_path, "127.0.0.1")
    token = tmp_path / "token"
    token.write_text("a-token-of-the-test\n")
    cert = str(tmp_path / "server-127.0.0.1.pem")
    with served(cluster.address, dashboard_tls_cert=cert, dashboard_token_file=str(token)) as pages:
        assert pages.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(authority))
        answer, _ = pages.ask("/", tls=trusting)
        assert (answer.status, answer.headers["WWW-Authenticate"][:5]) == (401, "Basic")
        older = ssl.create_default_context(cafile=str(authority))
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):  # an alert, or an end: the server closes after it
            pages.ask("/", tls=older)
        for given, status in (("ada:a-token-of-the-test", 200), ("ada:wrong", 401), ("a-token-of-the-test", 401)):
            basic = base64.b64encode(given.encode()).decode()
            answer, _ = pages.ask("/", headers={"Authorization": f"Basic {basic}"}, tls=trusting)
            assert answer.status == status, given
        for given, status in (("Bearer a-token-of-the-test", 200), ("Bearer é", 401), ("Basic %%%", 401), ("x", 401)):
            headers = {"Authorization": given.encode("latin-1").decode("latin-1")}
            assert pages.ask("/", headers=headers, tls=trusting)[0].status == status, given


def test_a_browser_that_reads_nothing_does_not_keep_its_connection_at_the_stop(cluster: Cluster) -> None:
    with socket.socket() as browser, served(cluster.address) as pages:
        pages.call(lambda: pages.dashboard.feed.board.put("unread", "", {"text": "." * UNREAD_BYTES}))
        host, port = pages.url.removeprefix("http://").rstrip("/").split(":")
        browser.settimeout(60)
        browser.connect((host, int(port)))
        browser.sendall(f"GET /api/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        while not browser.recv(4096).endswith(b"...."):
            pass


def test_half_requests_do_not_keep_a_browser_out(cluster: Cluster) -> None:
    with ExitStack() as stack:
        pages = stack.enter_context(served(cluster.address))
        host, port = pages.url.removeprefix("http://").rstrip("/").split(":")
        for _ in range(CONNECTIONS_MAX + 20):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            stranger.sendall(b"GET / HTTP/1.1\r\nX")
        for _ in range(3):
            assert pages.ask("/")[0].status == 200


def test_a_taken_port_is_an_error(pages: Served) -> None:
    port = int(pages.url.rstrip("/").rsplit(":", 1)[1])
    with pytest.raises(InvalidRequestError, match="another process listens there"), served(NOBODY, dashboard_port=port):
        pass


# ---- the files ---------------------------------------------------------------------------------------


def test_the_pages_are_small_and_ask_nobody_else() -> None:
    assets = [file for file in files("memq.audit.dashboard").joinpath("assets").iterdir() if file.is_file()]
    assert sum(len(file.read_bytes()) for file in assets) <= ASSETS_BYTES_MAX
    for file in assets:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(FORBIDDEN, text), file.name
        assert not re.search(FORBIDDEN_IN_HTML, text) or not file.name.endswith(".html"), file.name


def test_the_files_are_part_of_the_package() -> None:
    import tomllib

    root = Path(memq.__file__).resolve().parents[1]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["memq"]
    packed = {path for pattern in patterns for path in (root / "memq").glob(pattern)}
    assert set((root / "memq/audit/dashboard/assets").iterdir()) <= packed
