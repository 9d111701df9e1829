"""Records, batches and topics in notebooks and pipelines: reprs, escaped HTML, and Arrow data with places."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from operator import methodcaller

import pytest

import memq
from memq.client.consumer.batch import SHOWN_RECORDS
from memq.runtime.html import CELL_CHARACTERS_MAX, cell_html, table_html
from memq.testing import Cluster

notebook_html = methodcaller("_repr_html_")  # as a notebook finds it
HOSTILE = b"<script>alert('&\"')</script>\x00\xff\x1b[31m\xe2\x80\xae"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def only_batch(cluster: Cluster, topic: str) -> memq.Batch:
    with memq.Consumer(cluster.address, topic, end="end") as consumer:
        (batch,) = consumer
    return batch


class Tags(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def test_a_batch_of_hostile_records_is_an_escaped_table(cluster: Cluster) -> None:
    with memq.Producer(cluster.address) as producer:
        for _ in range(SHOWN_RECORDS + 5):
            producer.send("clicks", HOSTILE, key=HOSTILE, headers=[("<b>", HOSTILE)], tag="<i>")
    batch = only_batch(cluster, "clicks")
    page = notebook_html(batch)
    shown = Tags(page)
    assert shown.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert page.count("<tr>") == SHOWN_RECORDS + 1
    assert "<script>alert('&\"')</script>" in shown.text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", page), "no control character"
    assert f"{len(batch)} records, the first {SHOWN_RECORDS} of them" in shown.text
    assert not batch.finished, "a notebook that shows a batch has not handled it"
    record = next(iter(batch))
    assert Tags(notebook_html(record)).tags <= shown.tags


def test_a_topic_is_a_table(cluster: Cluster) -> None:
    with memq.Admin(cluster.address) as admin:
        topic = admin.create_topic("clicks", partitions=2)
    text = Tags(notebook_html(topic)).text.split("\n")
    assert text[text.index("partitions") + 1] == "2"
    assert text[text.index("retention_ms") + 1] == "604800000"


def test_cells_are_cut() -> None:
    assert cell_html(b"x" * 1_000_000) == "x" * CELL_CHARACTERS_MAX + "…"
    assert (cell_html(None), cell_html(b"<")) == ("", "&lt;")
    assert table_html(("<a>",), [("<b>",)], "<c>").count("&lt;") == 3


def test_the_repr_of_a_record_is_short(cluster: Cluster) -> None:
    with memq.Producer(cluster.address) as producer:
        producer.send("clicks", b"v" * 100_000, key=b"k")
    record = next(iter(only_batch(cluster, "clicks")))
    assert len(repr(record)) < 400
    assert "(100,000 bytes)" in repr(record)
    assert "key=b'k'" in repr(record)
    assert f"offset={record.offset}" in repr(record)


def test_arrow_data_has_the_place_of_each_record(cluster: Cluster) -> None:
    with memq.Admin(cluster.address) as admin:
        admin.create_topic("clicks", partitions=2)
    with memq.Producer(cluster.address) as producer:
        for number in range(50):
            producer.send("clicks", str(number), partition=number % 2, tag="even" if number % 4 else "odd")
            if number % 7 == 0:
                producer.flush()
    with memq.Consumer(cluster.address, "clicks", end="end") as consumer:
        expected = {
            (each.partition, each.offset): (each.value, each.timestamp_ms) for batch in consumer for each in batch
        }
    done: list[tuple[int, int]] = []
    table = memq.read_arrow(cluster.address, "clicks", on_progress=lambda *counts: done.append(counts))
    rows = table.to_pylist()
    found = {
        (row["partition"], row["offset"]): (row["value"], round(row["timestamp"].timestamp() * 1_000)) for row in rows
    }
    assert found == expected
    assert len(rows) == 50
    assert done[-1] == (50, 50)
    assert done == sorted(done)
    tagged = memq.read_arrow(cluster.address, "clicks", tags="odd").to_pylist()
    assert {(row["partition"], row["offset"]): row["value"] for row in tagged} == {
        place: value for place, (value, _) in expected.items() if value is not None and int(value) % 4 == 0
    }
    place = memq.Position.at_offset(rows[9]["partition"], rows[9]["offset"])
    assert memq.read_record(cluster.address, "clicks", place).value == rows[9]["value"]


def test_a_reader_takes_batch_after_batch(cluster: Cluster) -> None:
    with memq.Producer(cluster.address) as producer:
        for number in range(6):
            producer.send("clicks", str(number))
            producer.flush()
    reader = memq.read_arrow_batches(cluster.address, "clicks")
    table = memq.read_arrow(cluster.address, "clicks")
    assert reader.schema == table.schema
    batches = list(reader)
    assert len(batches) > 1
    assert [value for batch in batches for value in batch["value"].to_pylist()] == table["value"].to_pylist()
    assert memq.read_arrow(cluster.address, "clicks", start="end").schema == table.schema


def test_clients_are_not_pickled(cluster: Cluster) -> None:
    says = r"this \w+ of memq can't be pickled or copied: (create it in the process that uses it|wait for its Ack)"
    with memq.Producer(cluster.address) as producer, memq.Admin(cluster.address) as admin:
        for client in (producer, admin, producer.send("clicks", "a")):
            for use in (pickle.dumps, copy.copy):
                with pytest.raises(TypeError, match=says):
                    use(client)


def test_all_public_names_exist() -> None:
    assert set(memq.__all__) <= set(dir(memq))
    for name in memq.__all__:
        assert getattr(memq, name).__doc__, name
