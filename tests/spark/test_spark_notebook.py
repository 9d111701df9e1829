"""The notebook example runs from its first cell to its last in the test's session."""

from __future__ import annotations

import os
import runpy

import pytest
from pyspark.sql import SparkSession

from tests.demos import EXAMPLES


def test_every_cell_runs_and_says_what_it_did(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_LOCAL_IP"):
        monkeypatch.setenv(name, os.environ[name])  # the example's own end with it
    names = runpy.run_path(str(EXAMPLES / "spark_notebook.py"), run_name="__main__")
    assert names["spark"] is spark
    said = capsys.readouterr().out
    assert "read: customer 6: 1,428 orders, " in said
    assert "micro-batches, equal to the batch: True" in said
    assert "compact: 10,000 records of 7 customers in files" in said
    assert "audit: all that was sent is there, once" in said
