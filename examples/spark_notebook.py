# %% [markdown]
"""Spark on memq, cell by cell: write orders, read them, follow them, compact them, audit them.

Editors and Jupyter (by jupytext) run what is between two `# %%` as a cell, `python examples/spark_notebook.py` all of
them. It needs `pip install 'memq[spark,localstack]'`.
"""

# %% A broker on a fresh folder, and Spark on this machine
import atexit
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from demo import broker
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession, functions
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import memq
from memq.spark.pipelines.__main__ import pipelines
from memq.spark.pipelines.topic_files import location_of_text, read_files
from memq_localstack.java import spark_environment

ended = ExitStack()
atexit.register(ended.close)
folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="memq-notebook-")))
address = ended.enter_context(broker(folder / "broker"))
with memq.Admin(address) as admin:
    admin.create_topic("orders", partitions=2)

os.environ.update(spark_environment(folder))
builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", "2")
spark = builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").getOrCreate()
print(f"Spark {spark.version}, memq at {address}")

# %% Write: a batch of JSON values, keyed by customer, once under its name and number, however often this cell runs
orders = spark.range(10_000).selectExpr("id", "id % 7 AS customer", "id % 100 + 0.25D AS price")
rows = orders.selectExpr("to_json(struct(*)) AS value", "cast(customer AS STRING) AS key")
target = {"brokers": address, "topic": "orders", "writer": "notebook", "batchId": "1"}
for _ in range(2):
    rows.write.format("memq").mode("append").options(**target).save()
print("write: the batch was written twice, and is there once")

# %% Read: values decoded into columns, by tasks that read the objects themselves
source = {"brokers": address, "topics": "orders", "schema": "id BIGINT, customer BIGINT, price DOUBLE"}
read = spark.read.format("memq").options(**source).load()
sums = [functions.count("*").alias("orders"), functions.sum("price").alias("turnover")]
by_customer = read.groupBy("customer").agg(*sums).orderBy("customer").collect()
for row in by_customer:
    print(f"read: customer {row.customer}: {row.orders:,} orders, {row.turnover:,.2f}")

# %% Stream: the same sums in micro-batches, to the end of what is there now
stream = spark.readStream.format("memq").options(**source, maxRecordsPerTrigger="4000").load()
running = stream.groupBy("customer").agg(*sums).writeStream.outputMode("complete")
running = running.format("memory").queryName("turnover").option("checkpointLocation", str(folder / "checkpoint"))


def run_to_end(writer: DataStreamWriter, starts: int = 6) -> StreamingQuery:
    """Run a query to its end; Spark gives a stream's Python 10 s to start, which a busy machine exceeds."""
    query = writer.trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        if "Python worker failed" not in str(error) or starts == 1:
            raise
        return run_to_end(writer, starts - 1)  # nothing was read by then
    return query


query = run_to_end(running)
followed = spark.table("turnover").orderBy("customer").collect()
micro_batches = sum(1 for progress in query.recentProgress if progress["numInputRows"])
print(f"stream: {micro_batches} micro-batches, equal to the batch: {followed == by_customer}")

# %% Compact: Parquet files by date and hour, under a manifest; pipelines run in the session that is there
files = str(folder / "files")
pipelines.main(["compact", "orders", "-b", address, "--unsettled", "--to", files], standalone_mode=False)
compacted = read_files(spark, location_of_text(files))
print(f"compact: {compacted.count():,} records of {compacted.select('key').distinct().count()} customers in files")

# %% Audit: what was sent, and what of it is there
wrong = pipelines.main(["audit", "orders", "-b", address], standalone_mode=False)
print(f"audit: {'something is wrong' if wrong else 'all that was sent is there, once'}")

# %% The end of broker and folder; Spark ends with Python
ended.close()
