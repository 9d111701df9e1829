"""Tests of one part each: no broker, no process, no server (`conftest.py` refuses them)."""
