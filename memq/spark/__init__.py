"""PySpark's side of memq: topics as data frames, read straight from the store.

`format("memq")` finds it by itself.
"""
