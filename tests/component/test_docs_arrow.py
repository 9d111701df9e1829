"""The snippets of docs/arrow.md run, one after the other, against a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memq
from memq.testing import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "arrow.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("needs", "shown"), [("pyarrow", "10\n"), ("polars", "shape: (2, 2)"), ("duckdb", "[(0, 5), (1, 5)]\n")]
)
def test_the_snippets_run(needs: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(needs)
    with Cluster() as cluster:
        with memq.Admin(cluster.address) as admin:
            admin.create_topic("clicks", partitions=2)
        with memq.Producer(cluster.address) as producer:
            for number in range(10):
                producer.send("clicks", str(number), partition=number % 2)
        (snippet,) = [each for each in SNIPPETS if f"import {needs}" in each] or SNIPPETS[:1]
        scope = {"BROKERS": cluster.address, "memq": memq}
        exec(compile(snippet, PAGE.name, "exec"), scope)  # the page's own code
    out = capsys.readouterr().out
    assert shown in out if needs != "pyarrow" else sum(map(int, out.split())) == 10


def test_the_page_names_every_column() -> None:
    arrow = pytest.importorskip("memq.format.blocks.arrow")
    for name in arrow.PLACED_SCHEMA.names:
        assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
