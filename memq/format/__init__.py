"""Bytes and values: block, object, key and pointer, as docs/formats.md has them.

Pure: no I/O, no clock.
"""
