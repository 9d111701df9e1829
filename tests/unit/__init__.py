"""Tests of one part each, without processes and servers."""
