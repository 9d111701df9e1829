"""docs/spark.md: every snippet runs in order; every option is in a snippet and in the table.

`python -m tests.spark.test_spark_docs` writes the table.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from fastavro import parse_schema, schemaless_writer
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from memq.spark.options import COLUMNS, DESCRIPTIONS, SPELLING
from tests.servers import DevServer
from tests.spark.streams import NOT_STARTED, STARTS
from tests.spark.topics import make_topic, numbers, send

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
TABLE = "| option | what it is |\n|---|---|\n"


def table() -> str:
    """Return the table of options."""
    rows = sorted((SPELLING[name], text) for name, text in DESCRIPTIONS.items())
    return TABLE + "".join(f"| `{name}` | {text} |\n" for name, text in rows)


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_each_option_is_in_the_table_and_in_a_snippet() -> None:
    page, code = PAGE.read_text(encoding="utf-8"), "\n".join(snippets())
    assert page.endswith(table()), "run python -m tests.spark.test_spark_docs"
    missing = [name for name in SPELLING.values() if f"{name}=" not in code]
    assert not missing
    assert all(f"`{name}`" in page for name in COLUMNS)


def test_each_snippet_runs(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    fill(broker)
    (cluster,) = {path.parts[-3] for path in (broker.data / "objects").glob("*/topics/clicks")}
    (tmp_path / "memq.toml").write_text('[profile.reports.s3]\nregion = "eu-central-1"\n')
    real = {
        "127.0.0.1:9876": broker.address,
        "CLUSTER": cluster,
        "/srv/memq.toml": str(tmp_path / "memq.toml"),
        "/srv/memq/": f"{broker.data}/",
        "/srv/out": str(tmp_path),
    }
    names: dict[str, object] = {}
    for snippet in snippets():
        for shown, meant in real.items():
            snippet = snippet.replace(shown, meant)
        run(snippet, names)
    assert names["spark"] is spark
    assert spark.read.parquet(str(tmp_path / "clicks")).count() == 200


def run(snippet: str, names: dict[str, object]) -> None:
    """Run a snippet; a stream that Spark's Python was too slow for is started again."""
    for start in range(STARTS):
        try:
            exec(compile(snippet, str(PAGE), "exec"), names)
            return
        except StreamingQueryException as error:
            if NOT_STARTED not in str(error) or start + 1 == STARTS:
                raise


def fill(broker: DevServer) -> None:
    for topic in ("clicks", "orders", "readings"):
        make_topic(broker.address, topic)
    send(broker.address, "clicks", numbers(0, 200), tag="web")
    send(broker.address, "orders", [b'{"id": %d, "price": 1.5}' % number for number in range(100)])
    schema = parse_schema({"type": "record", "name": "Reading", "fields": [{"name": "celsius", "type": "double"}]})
    stream = io.BytesIO()
    schemaless_writer(stream, schema, {"celsius": 21.5})
    send(broker.address, "readings", [stream.getvalue()])


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition(TABLE)[0] + table(), encoding="utf-8")
