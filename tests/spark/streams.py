"""Streaming queries run to their end; one whose Python did not start in time is started again.

Spark gives the Python process that asks a source for offsets 10 s to start and connect, fixed, and ends the query else.
On a machine with much other work that is not enough, and nothing was read by then.
"""

from __future__ import annotations

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

END_S = 400
STARTS = 6
NOT_STARTED = "Python worker failed"


def run_to_end(writer: DataStreamWriter, path: str | None = None) -> StreamingQuery:
    """Start a query with AvailableNow and wait for its end. Raises: StreamingQueryException."""
    for start in range(STARTS):
        query = writer.trigger(availableNow=True).start(path)
        try:
            assert query.awaitTermination(END_S), "the stream did not end"
            return query
        except StreamingQueryException as error:
            if NOT_STARTED not in str(error) or start + 1 == STARTS:
                raise
        finally:
            query.stop()
    raise AssertionError("not reached: the last start returns or raises")
