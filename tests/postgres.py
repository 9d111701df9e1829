"""A PostgreSQL for tests, by the package `pgserver`: one server for each process of tests, a schema for each test."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NUMBERS = itertools.count()


@functools.cache
def _server() -> Any:
    """Start the server; it ends with this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for a folder of the user's session, which containers lack
        if os.environ.get("MEMQ_REQUIRE_SERVERS") == "1" and sys.version_info < (3, 13):
            pgserver = importlib.import_module("pgserver")
        else:  # there is no wheel of it for a newer Python
            pgserver = pytest.importorskip("pgserver")
        return pgserver.get_server(tempfile.mkdtemp(prefix="memq-pg-"), cleanup_mode="delete")


@contextmanager
def postgres_url() -> Iterator[str]:
    """Give the URL of an empty schema; a machine without pgserver skips the test, unless servers are required."""
    import psycopg

    url = _server().get_uri()
    name = f"test_{next(_NUMBERS)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    yield f"{url}&options=-csearch_path%3D{name}" if "?" in url else f"{url}?options=-csearch_path%3D{name}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA {name} CASCADE")
