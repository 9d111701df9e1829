"""The data source `memq` of PySpark: creates readers and writers from options.

Every process of Spark imports this file, also for other data sources. So it imports pyarrow and the client only when
it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
except ModuleNotFoundError as error:
    text = "the data source memq needs PySpark 4.2 or later (pip install 'memq[spark]')"
    raise ModuleNotFoundError(text, name=error.name) from error

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class MemqSource(DataSource):
    """Reads and writes topics; `docs/spark.md` has the options."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "memq"

    def schema(self) -> str:
        """Return the DDL of the configured columns. Raises: as `read_options`, whose table has all options."""
        from memq.spark.options import read_options, table_ddl

        options = read_options(self.options)
        return table_ddl(options.columns, options.schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a batch reader. Raises: as `read_options` and `fields_at`."""
        from memq.spark.options import fields_at, read_options
        from memq.spark.read.batch_reader import MemqReader

        options = read_options(self.options, "batch")
        fields_at(schema.names, options.columns, options.schema)
        return MemqReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - PySpark's name
        """Return a streaming reader. Raises: as `read_options` and `fields_at`."""
        from memq.spark.options import fields_at, read_options
        from memq.spark.stream_reader import MemqStreamReader

        options = read_options(self.options, "streaming")
        fields_at(schema.names, options.columns, options.schema)
        return MemqStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer that appends a data frame. Raises: as `write_options` and `check_columns`."""
        from memq.spark.write import MemqWriter, write_options

        return MemqWriter(write_options(self.options, streams=False), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - as above
        """Return a writer that appends micro-batches. Raises: as `write_options` and `check_columns`."""
        from memq.spark.write import MemqStreamWriter, write_options

        return MemqStreamWriter(write_options(self.options, streams=True), schema, overwrite=overwrite)
